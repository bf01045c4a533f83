"""Gemma 4: layers with a window and layers without, of different attention shapes; experts beside a dense MLP."""

from __future__ import annotations

from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.llama import Defaults, llama_like
from twostroke.core.families.reader import Reader
from twostroke.core.spec import Departures, GlobalAttention, ModelSpec, MoeSpec, RopeSpec


def parse_gemma4(config: dict[str, Any]) -> ModelSpec:
    """The language model of ``text_config``; vision and audio towers are left out, and ``notes`` say so."""
    text = Reader(config).object("text_config")
    if not text:
        raise ConfigError("config.json has no 'text_config', which model_type='gemma4' needs.")
    towers = [name for name in ("vision", "audio") if config.get(f"{name}_config")]
    notes = tuple(f"the {name} tower and its projection are left out" for name in towers)
    return parse_gemma4_text(text).with_(family="gemma4", notes=notes)


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
