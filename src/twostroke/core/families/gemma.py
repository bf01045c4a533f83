"""Gemma 1 to 4: offset norm weights, gated GELU, a scaled embedding; from the second on windows in most layers and norms after
each branch too; in the fourth attention of two shapes and experts beside a dense MLP."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.llama import Defaults, llama_like, windowed_layers, write_llama_like, write_windows
from twostroke.core.families.reader import Reader
from twostroke.core.spec import Departures, GlobalAttention, ModelSpec, MoeSpec, RopeSpec


def _language_model(config: dict[str, Any], parse: Callable[[dict[str, Any]], ModelSpec]) -> ModelSpec:
    """The model of ``text_config``; vision and audio towers are left out, and ``notes`` say so."""
    family, text = config["model_type"], Reader(config).object("text_config")
    if not text:
        raise ConfigError(f"config.json has no 'text_config', which model_type={family!r} needs.")
    towers = [name for name in ("vision", "audio") if config.get(f"{name}_config")]
    notes = tuple(f"the {name} tower and its projection are left out" for name in towers)
    return parse(text).with_(family=family, notes=notes)


def _every_gemma(width: int, **more: Any) -> Departures:
    """What all releases share: norm weights stored less 1, an embedding scaled by √E."""
    return Departures(norm_offset=True, embedding_scale=math.sqrt(max(1, width)), **more)


def parse_gemma(config: dict[str, Any]) -> ModelSpec:
    """Gemma 1. Its configs say gelu and mean the tanh form, as the release does."""
    r = Reader(config)
    return llama_like(
        "gemma", {"head_dim": 256} | config | {"hidden_act": "gelu_pytorch_tanh"},
        Defaults(max_positions=8192, n_kv_heads=16, bos=2, eos=1),
        tied_embeddings=r.flag("tie_word_embeddings", True), departures=_every_gemma(r.integer("hidden_size")),
    )  # fmt: skip


def write_gemma(spec: ModelSpec) -> dict[str, Any]:
    name = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
    return write_llama_like(spec) | name | {"attention_bias": spec.qkv_bias}


def _windowed_gemma(
    family: str,
    config: dict[str, Any],
    period: int,
    caps: tuple[float | None, float | None],
    away: dict[str, Any],
    **extra: Any,
) -> ModelSpec:
    """Gemma 2 and 3: every ``period``-th layer sees all keys unless ``layer_types`` says. ``caps`` of scores and of logits
    stand for missing keys; a null means none."""
    r = Reader(config)
    r.must_be("use_bidirectional_attention", False)
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    # A present key with null or 0 means that there is no cap.
    attention_cap, logit_cap = (
        (r.number(name, 0.0) or None) if name in config else usual for name, usual in zip(names, caps, strict=True)
    )
    scalar = r.number("query_pre_attn_scalar", 256.0)
    if not scalar > 0:
        raise ConfigError(f"config.json: query_pre_attn_scalar={scalar!r} must be positive.")
    bias = r.flag("attention_bias", False)
    departures = _every_gemma(
        r.integer("hidden_size"), norms_per_block=4, attention_scale=scalar**-0.5, attention_cap=attention_cap,
        logit_cap=logit_cap, **away,
    )  # fmt: skip
    return llama_like(
        family, config | {"hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh")},
        Defaults(max_positions=8192 if family == "gemma2" else 131_072, n_kv_heads=4, bos=2, eos=1),
        tied_embeddings=r.flag("tie_word_embeddings", True), qkv_bias=bias, attn_out_bias=bias,
        sliding_window=r.integer("sliding_window", 4096),
        sliding_window_layers=windowed_layers(r, r.layer_count("num_hidden_layers"), period),
        departures=departures, **extra,
    )  # fmt: skip


def parse_gemma2(config: dict[str, Any]) -> ModelSpec:
    """Gemma 2: a window in every other layer, scores and logits capped."""
    return _windowed_gemma("gemma2", {"head_dim": 256} | config, 2, (50.0, 30.0), {})


def parse_gemma3_text(config: dict[str, Any]) -> ModelSpec:
    """Gemma 3: a window in five of six layers, which have rotary positions of their own, QK-norm. Published configs leave out
    sizes that are transformers' defaults."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208}
    config = sizes | config
    r = Reader(config)
    period = r.integer("sliding_window_pattern", 6)
    if period < 1:
        raise ConfigError(f"config.json: sliding_window_pattern={period} must be at least 1.")
    rope = r.rope(1e6, "full_attention")
    local = {"rope_theta": r.number("rope_local_base_freq", 1e4), "rope_parameters": config.get("rope_parameters")}
    own = Reader(local).rope(1e4, "sliding_attention")
    return _windowed_gemma(
        "gemma3_text", config, period, (None, None), {"windowed_rope": None if own == rope else own}, qk_norm=True, rope=rope
    )


def write_windowed_gemma(spec: ModelSpec) -> dict[str, Any]:
    away = spec.departures
    own = away.windowed_rope or spec.rope
    ropes = {"rope_local_base_freq": own.theta} if spec.family == "gemma3_text" else {}
    windows = write_windows(spec)
    if spec.family == "gemma2":
        del windows["rope_parameters"]
    scalar = spec.attention_scale**-2
    return (
        write_gemma(spec)
        | windows
        | ropes
        | {
            "query_pre_attn_scalar": round(scalar)
            if abs(scalar - round(scalar)) < 1e-9 * scalar
            else scalar,  # transformers: whole
            "attn_logit_softcapping": away.attention_cap,
            "final_logit_softcapping": away.logit_cap,
        }
    )


def parse_gemma3(config: dict[str, Any]) -> ModelSpec:
    """The language model of a Gemma 3 that also sees."""
    return _language_model(config, parse_gemma3_text)


def parse_gemma4(config: dict[str, Any]) -> ModelSpec:
    """The language model of a Gemma 4 that also sees or hears."""
    return _language_model(config, parse_gemma4_text)


def parse_gemma4_text(config: dict[str, Any]) -> ModelSpec:
    """Layers without a window have ``global_head_dim``; with ``attention_k_eq_v`` also ``num_global_key_value_heads``, and no
    value projection. The dense MLP runs in every layer beside the experts, as a shared expert does."""
    r = Reader(config)
    n_layers = r.layer_count("num_hidden_layers")
    for key, value in (("hidden_size_per_layer_input", 0), ("num_kv_shared_layers", 0), ("use_double_wide_mlp", False)):
        r.must_be(key, value)
    windowed = r.layers_of_kind("layer_types", "sliding_attention", n_layers, ("sliding_attention", "full_attention"))
    same = r.flag("attention_k_eq_v", False)
    global_attention = GlobalAttention(
        n_kv_heads=r.integer("num_global_key_value_heads" if same else "num_key_value_heads"),
        head_dim=r.integer("global_head_dim", r.integer("head_dim")),
        keys_are_values=same,
    )
    moe = None
    if r.flag("enable_moe_block", False):
        moe = MoeSpec(
            n_experts=r.integer("num_experts"),
            top_k=r.integer("top_k_experts"),
            d_expert=r.integer("moe_intermediate_size"),
            n_shared_experts=1,
            d_shared=r.integer("intermediate_size"),
            router_scales=True,
        )
    return llama_like(
        "gemma4_text", config | {"hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh")},
        Defaults(max_positions=131_072, bos=2, eos=1), RopeSpec(scaling="by_layer"),
        moe=moe, qk_norm=True, tied_embeddings=r.flag("tie_word_embeddings", True),
        sliding_window=r.integer("sliding_window", 512), sliding_window_layers=windowed, global_attention=global_attention,
        departures=Departures(
            norms_per_block=7 if moe else 4, layer_scale=True, embedding_scale=math.sqrt(max(1, r.integer("hidden_size"))),
            logit_cap=r.number("final_logit_softcapping", 0.0) or None,
        ),
    )  # fmt: skip
