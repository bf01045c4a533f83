"""Mixtures of experts on the attention of Llama: Mixtral, Qwen3-MoE, gpt-oss and MiniMax-M2."""

from __future__ import annotations

from typing import Any

from twostroke.core.families.llama import Defaults, llama_like
from twostroke.core.families.reader import Reader
from twostroke.core.spec import Departures, ModelSpec, MoeSpec


def parse_mixtral(config: dict[str, Any]) -> ModelSpec:
    """Every layer has experts of ``intermediate_size``; defaults of transformers' MixtralConfig."""
    r = Reader(config)
    moe = MoeSpec(r.integer("num_local_experts", 8), r.integer("num_experts_per_tok", 2), r.integer("intermediate_size"))
    defaults = Defaults(max_positions=131_072, n_kv_heads=8, bos=1, eos=2)
    window = r.optional_integer("sliding_window")
    rope = r.rope(default_theta=1e6)
    return llama_like(
        "mixtral", config | {"rms_norm_eps": r.number("rms_norm_eps", 1e-5)}, defaults, rope, moe=moe, sliding_window=window
    )


def parse_qwen3_moe(config: dict[str, Any]) -> ModelSpec:
    """Experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not list; Qwen3's QK-norm."""
    r = Reader(config)
    r.must_be("use_sliding_window", False)
    n_layers, step = r.layer_count("num_hidden_layers"), max(1, r.integer("decoder_sparse_step", 1))
    dense = config.get("mlp_only_layers") or []
    sparse = tuple(i for i in range(n_layers) if (i + 1) % step == 0 and not (isinstance(dense, list) and i in dense))
    bias = r.flag("attention_bias", False)
    moe = MoeSpec(
        n_experts=r.integer("num_experts", 128),
        top_k=r.integer("num_experts_per_tok", 8),
        d_expert=r.integer("moe_intermediate_size", 768),
        layers=None if len(sparse) == n_layers else sparse,
    )
    defaults = Defaults(max_positions=32_768, n_kv_heads=4)
    return llama_like("qwen3_moe", config, defaults, r.rope(), moe=moe, qk_norm=True, qkv_bias=bias, attn_out_bias=bias)


def parse_gpt_oss(config: dict[str, Any]) -> ModelSpec:
    """Biases everywhere, one learned sink a head, windows in every other layer (gpt-oss model card, August 2025)."""
    r = Reader(config)
    n_layers = r.layer_count("num_hidden_layers")
    if config.get("layer_types") is None:
        windowed = tuple(range(0, n_layers, 2))
    else:
        windowed = r.layers_of_kind("layer_types", "sliding_attention", n_layers, ("sliding_attention", "full_attention"))
    bias = r.flag("attention_bias", True)
    moe = MoeSpec(
        n_experts=r.integer("num_local_experts", 128),
        top_k=r.integer("num_experts_per_tok", r.integer("experts_per_token", 4)),
        d_expert=r.integer("intermediate_size"),
        router_bias=True,
        expert_bias=True,
    )
    return llama_like(
        "gpt_oss", {"head_dim": 64} | config, Defaults(max_positions=131_072, n_kv_heads=8), r.rope(150_000.0),
        moe=moe, qkv_bias=bias, attn_out_bias=bias, norm_eps=r.number("rms_norm_eps", 1e-5),
        sliding_window=r.integer("sliding_window", 128), sliding_window_layers=windowed,
        departures=Departures(attention_sinks=True, without_parameters=("clamped SwiGLU",)),
    )  # fmt: skip


def parse_minimax_m2(config: dict[str, Any]) -> ModelSpec:
    """Sigmoid routing with a correction bias, QK-norm over all heads together, half of each head turned."""
    r = Reader(config)
    config = {"head_dim": 128} | config
    r.must_be("qk_norm_type", "per_layer")
    r.must_be("shared_intermediate_size", 0)
    moe = MoeSpec(
        n_experts=r.integer("num_local_experts", 256),
        top_k=r.integer("num_experts_per_tok", 8),
        d_expert=r.integer("intermediate_size"),
        correction_bias=r.flag("use_routing_bias", True),
    )
    normed = r.flag("use_qk_norm", True)
    left_out = r.integer("num_mtp_modules", 0) if r.flag("use_mtp", False) else 0
    return llama_like(
        "minimax_m2", config, Defaults(max_positions=196_608, n_kv_heads=8, bos=200_034, eos=200_020), r.rope(5e6),
        moe=moe, qk_norm=normed,
        departures=Departures(rotary_dim=r.rotary_dim(Reader(config).integer("head_dim")), qk_norm_over_heads=normed),
        notes=(f"{left_out} multi-token-prediction modules are left out",) if left_out else (),
    )  # fmt: skip
