"""Gemma 1 to 4: offset norm weights, gated GELU, a scaled embedding; from the second on windows in most layers and norms after
each branch too; in the fourth attention of two shapes and experts beside a dense MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.llama import Defaults, llama_like
from twostroke.core.families.reader import Reader
from twostroke.core.spec import Departures, GlobalAttention, ModelSpec, MoeSpec, RopeSpec

_EVERY_GEMMA = ("a scaled embedding", "offset norm weights")


def _language_model(config: dict[str, Any], parse: Callable[[dict[str, Any]], ModelSpec]) -> ModelSpec:
    """The model of ``text_config``; vision and audio towers are left out, and ``notes`` say so."""
    family, text = config["model_type"], Reader(config).object("text_config")
    if not text:
        raise ConfigError(f"config.json has no 'text_config', which model_type={family!r} needs.")
    towers = [name for name in ("vision", "audio") if config.get(f"{name}_config")]
    notes = tuple(f"the {name} tower and its projection are left out" for name in towers)
    return parse(text).with_(family=family, notes=notes)


def parse_gemma(config: dict[str, Any]) -> ModelSpec:
    """Gemma 1. Its configs say gelu and mean the tanh form, as the release does."""
    r = Reader(config)
    return llama_like(
        "gemma", {"head_dim": 256} | config | {"hidden_act": "gelu_pytorch_tanh"}, Defaults(max_positions=8192, bos=2, eos=1),
        tied_embeddings=r.flag("tie_word_embeddings", True), departures=Departures(without_parameters=_EVERY_GEMMA),
    )  # fmt: skip


def _windowed_gemma(family: str, config: dict[str, Any], period: int, sizes: dict[str, Any], **extra: Any) -> ModelSpec:
    """Gemma 2 and 3: every ``period``-th layer sees all keys unless ``layer_types`` says; ``sizes`` stand for missing keys."""
    config = sizes | config
    r = Reader(config)
    n_layers = r.layer_count("num_hidden_layers")
    if config.get("layer_types") is None:
        windowed = tuple(i for i in range(n_layers) if (i + 1) % period)
    else:
        windowed = r.layers_of_kind("layer_types", "sliding_attention", n_layers, ("sliding_attention", "full_attention"))
    caps = ("final_logit_softcapping", "attn_logit_softcapping")
    capped = ("logit soft-capping",) if any(config.get(key) for key in caps) else ()
    bias = r.flag("attention_bias", False)
    return llama_like(
        family, config | {"hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh")},
        Defaults(max_positions=8192 if family == "gemma2" else 131_072, bos=2, eos=1),
        tied_embeddings=r.flag("tie_word_embeddings", True), qkv_bias=bias, attn_out_bias=bias,
        sliding_window=r.integer("sliding_window", 4096), sliding_window_layers=windowed,
        departures=Departures(norms_per_block=4, without_parameters=capped + _EVERY_GEMMA), **extra,
    )  # fmt: skip


def parse_gemma2(config: dict[str, Any]) -> ModelSpec:
    """Gemma 2: a window in every other layer."""
    return _windowed_gemma("gemma2", config, 2, {"head_dim": 256})


def parse_gemma3_text(config: dict[str, Any]) -> ModelSpec:
    """Gemma 3: a window in five of six layers, QK-norm. Published configs leave out sizes that are transformers' defaults."""
    period = Reader(config).integer("sliding_window_pattern", 6)
    if period < 1:
        raise ConfigError(f"config.json: sliding_window_pattern={period} must be at least 1.")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208}
    return _windowed_gemma("gemma3_text", config, period, sizes, qk_norm=True, rope=RopeSpec(scaling="by_layer"))


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
    capped = ("logit soft-capping",) if config.get("final_logit_softcapping") else ()
    return llama_like(
        "gemma4_text", config | {"hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh")},
        Defaults(max_positions=131_072, bos=2, eos=1), RopeSpec(scaling="by_layer"),
        moe=moe, qk_norm=True, tied_embeddings=r.flag("tie_word_embeddings", True),
        sliding_window=r.integer("sliding_window", 512), sliding_window_layers=windowed, global_attention=global_attention,
        departures=Departures(
            norms_per_block=7 if moe else 4, layer_scale=True, without_parameters=(*capped, "a scaled embedding")
        ),
    )  # fmt: skip
