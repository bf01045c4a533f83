"""Decoders of 2021 and 2022 with LayerNorm and plain MLPs: GPT-J, GPT-Neo, GPT-NeoX, BLOOM, OPT and Falcon."""

from __future__ import annotations

from typing import Any

from twostroke.core.documents import is_integer
from twostroke.core.errors import ConfigError
from twostroke.core.families.llama import write_llama_like
from twostroke.core.families.reader import ACTIVATION_NAMES, Reader, activation
from twostroke.core.spec import Departures, ModelSpec, RopeSpec


def _plain(family: str, r: Reader, n_layers: int, width: int, heads: int, **values: Any) -> ModelSpec:
    """What the four share: LayerNorm, as many key heads as query heads, a plain MLP with biases."""
    if heads < 1 or width % heads:
        raise ConfigError(f"config.json: the number of attention heads, {heads}, must divide the model's width, {width}.")
    common: dict[str, Any] = {
        "norm": "layernorm",
        "norm_eps": r.number("layer_norm_epsilon", 1e-5),
        "mlp": "gelu",
        "mlp_bias": True,
        "attn_out_bias": True,
        "bos_token_id": r.token_id("bos_token_id", 50256),
        "eos_token_ids": r.token_ids("eos_token_id", 50256),
    }
    shape: dict[str, Any] = {"n_heads": heads, "n_kv_heads": heads, "head_dim": width // heads}
    return ModelSpec(
        family=family, vocab_size=r.integer("vocab_size"), n_layers=n_layers, d_model=width, **(shape | common | values)
    )


def parse_gptj(config: dict[str, Any]) -> ModelSpec:
    """Parallel attention and MLP under one norm, ``rotary_dim`` dimensions turned, a bias on the head, none in attention."""
    r = Reader(config)
    width, heads = r.integer("n_embd"), r.integer("n_head")
    turned = r.integer("rotary_dim", 64)
    return _plain(
        "gptj", r, r.integer("n_layer"), width, heads,
        d_ff=r.integer("n_inner", 4 * width), max_positions=r.integer("n_positions", 2048),
        positions="rope", rope=RopeSpec(), activation=activation(config.get("activation_function", "gelu_new")),
        attn_out_bias=False, tied_embeddings=r.flag("tie_word_embeddings", False), dropout=r.number("attn_pdrop", 0.0),
        departures=Departures(
            parallel_block=True, norms_per_block=1, head_bias=True, rotary_dim=None if heads * turned == width else turned
        ),
    )  # fmt: skip


def _local_layers(config: dict[str, Any], n_layers: int) -> tuple[int, ...]:
    """Layers that ``attention_types`` ([[["global", "local"], 12]]) makes local; every other one where the key is missing."""
    types = config.get("attention_types")
    if types is None:
        return tuple(range(1, n_layers, 2))
    kinds: list[Any] = []
    for item in types if isinstance(types, list) else [types]:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], list) or not is_integer(item[1]):
            raise ConfigError(f"config.json: attention_types={types!r:.100} must list [[kinds], repetitions].")
        if len(kinds) + len(item[0]) * item[1] > n_layers:  # before it is written out: both numbers are the file's
            break
        kinds += item[0] * item[1]
    if len(kinds) != n_layers or not all(kind in ("global", "local") for kind in kinds):
        raise ConfigError(f"config.json: attention_types must name global or local for each of {n_layers} layers.")
    return tuple(i for i, kind in enumerate(kinds) if kind == "local")


def parse_gpt_neo(config: dict[str, Any]) -> ModelSpec:
    """Windows of ``window_size`` keys in local layers; attention unscaled and biased only on the way out."""
    r = Reader(config)
    width, n_layers = r.integer("hidden_size"), r.layer_count("num_layers", "num_hidden_layers")
    return _plain(
        "gpt_neo", r, n_layers, width, r.first_integer("num_heads", "num_attention_heads"),
        d_ff=r.integer("intermediate_size", 4 * width), max_positions=r.integer("max_position_embeddings", 2048),
        positions="learned", activation=activation(config.get("activation_function", "gelu_new")),
        tied_embeddings=r.flag("tie_word_embeddings", True), dropout=r.number("attention_dropout", 0.0),
        sliding_window=r.integer("window_size", 256), sliding_window_layers=_local_layers(config, n_layers),
        departures=Departures(attention_scale=1.0),
    )  # fmt: skip


def write_gpt_neo(spec: ModelSpec) -> dict[str, Any]:
    local = ["global" if spec.window_of_layer(i) is None else "local" for i in range(spec.n_layers)]
    return {
        "vocab_size": spec.vocab_size,
        "num_layers": spec.n_layers,
        "hidden_size": spec.d_model,
        "num_heads": spec.n_heads,
        "intermediate_size": spec.d_ff,
        "max_position_embeddings": spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": ACTIVATION_NAMES[spec.activation],
        "window_size": spec.sliding_window,
        "attention_types": [[local, 1]],
        "attention_layers": local,
        **dict.fromkeys(("attention_dropout", "resid_dropout", "embed_dropout"), spec.dropout),
        "tie_word_embeddings": spec.tied_embeddings,
    }


def parse_gpt_neox(config: dict[str, Any]) -> ModelSpec:
    """GPT-NeoX-20B and Pythia: attention and MLP side by side under a norm each, a quarter of each head turned."""
    r = Reader(config)
    width, heads = r.integer("hidden_size"), r.integer("num_attention_heads")
    bias = r.flag("attention_bias", True)
    share = r.number("rotary_pct", 0.25)
    return _plain(
        "gpt_neox", r, r.integer("num_hidden_layers"), width, heads,
        d_ff=r.integer("intermediate_size"), max_positions=r.integer("max_position_embeddings", 2048),
        positions="rope", rope=r.rope(r.number("rotary_emb_base", 10_000.0)), norm_eps=r.number("layer_norm_eps", 1e-5),
        activation=activation(config.get("hidden_act", "gelu")), qkv_bias=bias, attn_out_bias=bias,
        tied_embeddings=r.flag("tie_word_embeddings", False), dropout=r.number("attention_dropout", 0.0),
        bos_token_id=r.token_id("bos_token_id", 0), eos_token_ids=r.token_ids("eos_token_id", 2),
        departures=Departures(
            parallel_block=r.flag("use_parallel_residual", True), rotary_dim=r.rotary_dim(width // max(1, heads), share)
        ),
    )  # fmt: skip


def write_gpt_neox(spec: ModelSpec) -> dict[str, Any]:
    return write_llama_like(spec) | {
        "layer_norm_eps": spec.norm_eps,
        "attention_bias": spec.qkv_bias,
        "use_parallel_residual": spec.departures.parallel_block,
        "hidden_act": ACTIVATION_NAMES[spec.activation],
        "rotary_pct": spec.rotary_dim / spec.head_dim,
        "rotary_emb_base": spec.rope.theta,
        "hidden_dropout": 0.0,
    }


def parse_falcon(config: dict[str, Any]) -> ModelSpec:
    """Falcon 40B and 180B (``new_decoder_architecture``): attention and MLP side by side under a norm each, groups of queries.
    Falcon-7B and Falcon2-11B store one norm under another name and are not read."""
    r = Reader(config)
    for key, value in (("new_decoder_architecture", True), ("alibi", False), ("num_ln_in_parallel_attn", 2)):
        r.must_be(key, value)
    if not r.flag("new_decoder_architecture", False):
        raise ConfigError("config.json: only new_decoder_architecture=true (Falcon 40B and 180B) is read for falcon.")
    width, heads, bias = r.integer("hidden_size"), r.integer("num_attention_heads"), r.flag("bias", False)
    return _plain(
        "falcon", r, r.layer_count("num_hidden_layers"), width, heads,
        n_kv_heads=r.integer("num_kv_heads", heads), d_ff=r.integer("ffn_hidden_size", 4 * width),
        max_positions=r.integer("max_position_embeddings", 2048), positions="rope", rope=r.rope(),
        activation=activation(config.get("activation", "gelu")), qkv_bias=bias, attn_out_bias=bias, mlp_bias=bias,
        tied_embeddings=r.flag("tie_word_embeddings", True), dropout=r.number("attention_dropout", 0.0),
        bos_token_id=r.token_id("bos_token_id", 11), eos_token_ids=r.token_ids("eos_token_id", 11),
        departures=Departures(parallel_block=True),
    )  # fmt: skip


def write_falcon(spec: ModelSpec) -> dict[str, Any]:
    shared = {key: value for key, value in write_llama_like(spec).items() if key != "head_dim"}
    return shared | {
        "new_decoder_architecture": True,
        "num_kv_heads": spec.n_kv_heads,
        "ffn_hidden_size": spec.d_ff,
        "layer_norm_epsilon": spec.norm_eps,
        "activation": ACTIVATION_NAMES[spec.activation],
        "bias": spec.qkv_bias,
        "alibi": False,
        "hidden_dropout": 0.0,
    }


def parse_bloom(config: dict[str, Any]) -> ModelSpec:
    """ALiBi positions, a norm on the embedding, an MLP of four times the width. ``seq_length`` is the trained length; ALiBi has
    no longest position."""
    r = Reader(config)
    width = r.first_integer("n_embed", "hidden_size")
    after = ("residuals after the norm",) if r.flag("apply_residual_connection_post_layernorm", False) else ()
    return _plain(
        "bloom", r, r.first_integer("n_layer", "num_hidden_layers"), width, r.first_integer("n_head", "num_attention_heads"),
        d_ff=4 * width, max_positions=r.integer("seq_length", 2048), positions="alibi", activation="gelu_tanh", qkv_bias=True,
        tied_embeddings=r.flag("tie_word_embeddings", True), dropout=r.number("attention_dropout", 0.0),
        bos_token_id=r.token_id("bos_token_id", 1), eos_token_ids=r.token_ids("eos_token_id", 2),
        departures=Departures(embedding_norm=True, without_parameters=after),
    )  # fmt: skip


def parse_opt(config: dict[str, Any]) -> ModelSpec:
    """Learned positions that start at row 2. OPT-350m norms after each branch, so it has no final norm, and embeds in
    ``word_embed_proj_dim`` dimensions."""
    r = Reader(config)
    r.must_be("layer_norm_elementwise_affine", True)
    width, bias = r.integer("hidden_size"), r.flag("enable_bias", True)
    before = r.flag("do_layer_norm_before", True)
    embedding = r.integer("word_embed_proj_dim", width)
    return _plain(
        "opt", r, r.integer("num_hidden_layers"), width, r.integer("num_attention_heads"),
        d_ff=r.integer("ffn_dim"), max_positions=r.integer("max_position_embeddings", 2048), positions="learned",
        activation=activation(config.get("activation_function", "relu")),
        qkv_bias=bias, attn_out_bias=bias, mlp_bias=bias, norm_eps=1e-5,
        tied_embeddings=r.flag("tie_word_embeddings", True), dropout=r.number("attention_dropout", 0.0),
        bos_token_id=r.token_id("bos_token_id", 2), eos_token_ids=r.token_ids("eos_token_id", 2),
        departures=Departures(
            extra_positions=2, embedding_dim=None if embedding == width else embedding,
            final_norm=before and not r.flag("_remove_final_layer_norm", False),
            without_parameters=() if before else ("norms after each branch",),
        ),
    )  # fmt: skip
