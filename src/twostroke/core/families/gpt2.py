"""GPT-2 and GPTBigCode, its multi-query relative (SantaCoder, StarCoder)."""

from __future__ import annotations

from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.reader import ACTIVATION_NAMES, Reader, activation
from twostroke.core.spec import ModelSpec


def parse_gpt2(config: dict[str, Any]) -> ModelSpec:
    """LayerNorm, learned positions, a plain MLP, biases everywhere."""
    r = Reader(config)
    width, heads = r.integer("n_embd"), r.integer("n_head")
    if heads < 1 or width % heads:
        raise ConfigError(f"config.json: n_head={heads} must divide n_embd={width}.")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if config.get(key):
            raise ConfigError(f"config.json: {key}=true is not supported for gpt2.")
    if not r.flag("scale_attn_weights", True):
        raise ConfigError("config.json: scale_attn_weights=false is not supported for gpt2.")
    rates = {r.number(key, 0.1) for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")}
    if len(rates) > 1:
        raise ConfigError(f"config.json: attn_pdrop, resid_pdrop and embd_pdrop must be equal here, found {sorted(rates)}.")
    return ModelSpec(
        family="gpt2",
        vocab_size=r.integer("vocab_size"),
        n_layers=r.integer("n_layer"),
        d_model=width,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=width // heads,
        d_ff=r.integer("n_inner", 4 * width),
        max_positions=r.integer("n_positions", 1024),
        norm="layernorm",
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        mlp="gelu",
        activation=activation(config.get("activation_function", "gelu_new")),
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
        tied_embeddings=r.flag("tie_word_embeddings", True),
        dropout=rates.pop(),
        bos_token_id=r.token_id("bos_token_id", 50256),
        eos_token_ids=r.token_ids("eos_token_id", 50256),
    )


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "n_layer": spec.n_layers,
        "n_embd": spec.d_model,
        "n_head": spec.n_heads,
        "n_inner": spec.d_ff,
        "n_positions": spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": ACTIVATION_NAMES[spec.activation],
        "attn_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "tie_word_embeddings": spec.tied_embeddings,
    }


def parse_gpt_bigcode(config: dict[str, Any]) -> ModelSpec:
    """GPT-2 with one key and value head for all queries, unless ``multi_query`` is false."""
    r = Reader(config)
    spec = parse_gpt2(config | {"activation_function": config.get("activation_function", "gelu_pytorch_tanh")})
    heads = 1 if r.flag("multi_query", True) else spec.n_heads
    return spec.with_(family="gpt_bigcode", n_kv_heads=heads)


def write_gpt_bigcode(spec: ModelSpec) -> dict[str, Any]:
    named = {"gelu_tanh": "gelu_pytorch_tanh"}.get(spec.activation, ACTIVATION_NAMES[spec.activation])
    return write_gpt2(spec) | {"multi_query": spec.n_kv_heads == 1, "activation_function": named}
