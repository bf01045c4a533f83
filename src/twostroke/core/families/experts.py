"""Mixtures of experts on the attention of Llama: Mixtral, Qwen2- and Qwen3-MoE, OLMoE, Granite 3 MoE, GLM-4.5, gpt-oss and
MiniMax-M2."""

from __future__ import annotations

from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.dense import granite_like, write_granite
from twostroke.core.families.llama import Defaults, kinds_of_layers, llama_like, other_layers, write_llama_like
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


def _moe_of(spec: ModelSpec) -> MoeSpec:
    if spec.moe is None:
        raise ConfigError(f"family={spec.family!r} has experts, and this model has none.")
    return spec.moe


def write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe_of(spec)
    return write_llama_like(spec) | {
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.d_expert,
        "sliding_window": spec.sliding_window,
    }


COUNTED = ("num_local_experts", "num_experts")
"""transformers 5 writes the first where 4 wrote the second."""


def _sparse_layers(config: dict[str, Any]) -> tuple[int, ...] | None:
    """Layers with experts, None for all: each ``decoder_sparse_step``-th that ``mlp_only_layers`` does not list."""
    r = Reader(config)
    n_layers, step = r.layer_count("num_hidden_layers"), max(1, r.integer("decoder_sparse_step", 1))
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers={dense!r:.100} must be a list of layers.")
    listed = set(dense)
    sparse = tuple(i for i in range(n_layers) if (i + 1) % step == 0 and i not in listed)
    return None if len(sparse) == n_layers else sparse


def prediction_layers_left_out(n_layers: int) -> tuple[str, ...]:
    """The note on multi-token-prediction layers, which the count leaves out; none where there are none."""
    return (f"{n_layers} multi-token-prediction layer(s) are left out",) if n_layers else ()


def parse_qwen3_moe(config: dict[str, Any]) -> ModelSpec:
    """Experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not list; Qwen3's QK-norm."""
    r = Reader(config)
    r.must_be("use_sliding_window", False)
    bias = r.flag("attention_bias", False)
    moe = MoeSpec(
        n_experts=r.first_integer(*COUNTED, default=128),
        top_k=r.integer("num_experts_per_tok", 8),
        d_expert=r.integer("moe_intermediate_size", 768),
        layers=_sparse_layers(config),
        normalised=r.flag("norm_topk_prob", False),
    )
    defaults = Defaults(max_positions=32_768, n_kv_heads=4)
    return llama_like("qwen3_moe", config, defaults, r.rope(), moe=moe, qk_norm=True, qkv_bias=bias, attn_out_bias=bias)


def parse_qwen2_moe(config: dict[str, Any]) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-57B-A14B: routed experts beside a shared one, which a gate of one number a token weighs."""
    r = Reader(config)
    r.must_be("use_sliding_window", False)
    moe = MoeSpec(
        n_experts=r.first_integer(*COUNTED, default=60),
        top_k=r.integer("num_experts_per_tok", 4),
        d_expert=r.integer("moe_intermediate_size", 1408),
        n_shared_experts=1,
        d_shared=r.integer("shared_expert_intermediate_size", 5632),
        layers=_sparse_layers(config),
        shared_gate=True,
        normalised=r.flag("norm_topk_prob", False),
    )
    defaults = Defaults(max_positions=32_768, n_kv_heads=16)
    return llama_like("qwen2_moe", config, defaults, moe=moe, qkv_bias=r.flag("qkv_bias", True))


def write_qwen_moe(spec: ModelSpec) -> dict[str, Any]:
    """Of both, which read what the other adds as nothing."""
    moe = _moe_of(spec)
    dense = [] if moe.layers is None else list(other_layers(spec.n_layers, moe.layers))
    return write_llama_like(spec) | {
        "num_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_expert,
        "norm_topk_prob": moe.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        **(
            {"shared_expert_intermediate_size": moe.d_shared, "qkv_bias": spec.qkv_bias}
            if spec.family == "qwen2_moe"
            else {"attention_bias": spec.qkv_bias}
        ),
    }


def parse_olmoe(config: dict[str, Any]) -> ModelSpec:
    """Experts in every layer, shares that need not sum to 1, QK-norm over all heads together."""
    r = Reader(config)
    r.must_be("clip_qkv", None)
    bias = r.flag("attention_bias", False)
    moe = MoeSpec(
        n_experts=r.first_integer(*COUNTED, default=64),
        top_k=r.integer("num_experts_per_tok", 8),
        d_expert=r.integer("intermediate_size", 2048),
        normalised=r.flag("norm_topk_prob", False),
    )
    return llama_like(
        "olmoe", config, Defaults(max_positions=4096, eos=50_279), moe=moe, qkv_bias=bias, attn_out_bias=bias, qk_norm=True,
        norm_eps=r.number("rms_norm_eps", 1e-5), departures=Departures(qk_norm_over_heads=True),
    )  # fmt: skip


def write_olmoe(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe_of(spec)
    return write_llama_like(spec) | {
        "num_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.d_expert,
        "norm_topk_prob": moe.normalised,
        "attention_bias": spec.qkv_bias,
    }


def parse_granitemoe(config: dict[str, Any]) -> ModelSpec:
    """Granite's multipliers, experts in every layer."""
    r = Reader(config)
    moe = MoeSpec(r.integer("num_local_experts", 8), r.integer("num_experts_per_tok", 2), r.integer("intermediate_size"))
    return granite_like("granitemoe", config, moe=moe)


def write_granitemoe(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe_of(spec)
    return write_granite(spec) | {
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.d_expert,
    }


def routing_keys(moe: MoeSpec) -> dict[str, Any]:
    """The keys of DeepSeek's experts, which GLM's configs have too."""
    return {
        "n_routed_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_expert,
        "n_shared_experts": moe.n_shared_experts,
        "norm_topk_prob": moe.normalised,
        "routed_scaling_factor": moe.share_scale,
        "n_group": moe.n_groups,
        "topk_group": moe.top_groups,
        "num_nextn_predict_layers": 0,
    }


def parse_glm4_moe(config: dict[str, Any]) -> ModelSpec:
    """GLM-4.5: DeepSeek-V3's experts and routing on grouped-query attention, half of each head turned."""
    r = Reader(config)
    n_layers, dense = r.layer_count("num_hidden_layers"), max(0, r.integer("first_k_dense_replace", 1))
    width, heads = r.integer("hidden_size"), r.integer("num_attention_heads")
    head_dim = r.integer("head_dim", width // max(1, heads))
    moe = MoeSpec(
        n_experts=r.integer("n_routed_experts", 128),
        top_k=r.integer("num_experts_per_tok", 8),
        d_expert=r.integer("moe_intermediate_size", 1408),
        n_shared_experts=r.integer("n_shared_experts", 1),
        d_shared=r.integer("moe_intermediate_size", 1408),
        layers=tuple(range(dense, n_layers)),
        correction_bias=True,
        scores="sigmoid",
        normalised=r.flag("norm_topk_prob", True),
        share_scale=r.number("routed_scaling_factor", 1.0),
        n_groups=r.integer("n_group", 1),
        top_groups=r.integer("topk_group", 1),
    )
    left_out = r.integer("num_nextn_predict_layers", 0)
    return llama_like(
        "glm4_moe", config, Defaults(max_positions=131_072, n_kv_heads=8), moe=moe, qk_norm=r.flag("use_qk_norm", False),
        qkv_bias=r.flag("attention_bias", False), norm_eps=r.number("rms_norm_eps", 1e-5),
        departures=Departures(rotary_dim=r.rotary_dim(head_dim, 0.5)), notes=prediction_layers_left_out(left_out),
    )  # fmt: skip


def write_glm4_moe(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe_of(spec)
    return (
        write_llama_like(spec)
        | routing_keys(moe)
        | {
            "first_k_dense_replace": 0 if moe.layers is None else spec.n_layers - len(moe.layers),
            "use_qk_norm": spec.qk_norm,
            "attention_bias": spec.qkv_bias,
            "partial_rotary_factor": spec.rotary_dim / spec.head_dim,
        }
    )


_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Where a config.json has none."""


def parse_gpt_oss(config: dict[str, Any]) -> ModelSpec:
    """Biases everywhere, one learned sink a head, windows in every other layer (gpt-oss model card, August 2025)."""
    r = Reader(config)
    n_layers = r.layer_count("num_hidden_layers")
    if config.get("layer_types") is None:
        windowed = tuple(range(0, n_layers, 2))
    else:
        windowed = r.layers_of_kind("layer_types", "sliding_attention", n_layers, ("sliding_attention", "full_attention"))
    bias = r.flag("attention_bias", True)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        r = Reader(config | {"rope_scaling": _GPT_OSS_ROPE})
    rope = r.rope(150_000.0)
    moe = MoeSpec(
        n_experts=r.integer("num_local_experts", 128),
        top_k=r.integer("num_experts_per_tok", r.integer("experts_per_token", 4)),
        d_expert=r.integer("intermediate_size"),
        router_bias=True,
        expert_bias=True,
    )
    r.must_be("swiglu_alpha", 1.702)
    r.must_be("swiglu_limit", 7.0)
    return llama_like(
        "gpt_oss", {"head_dim": 64} | config, Defaults(max_positions=131_072, n_kv_heads=8), rope,
        moe=moe, activation="clamped_swish", qkv_bias=bias, attn_out_bias=bias, norm_eps=r.number("rms_norm_eps", 1e-5),
        sliding_window=r.integer("sliding_window", 128), sliding_window_layers=windowed,
        departures=Departures(attention_sinks=True),
    )  # fmt: skip


def write_gpt_oss(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe_of(spec)
    return write_llama_like(spec) | {
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.d_expert,
        "attention_bias": spec.qkv_bias,
        "sliding_window": spec.sliding_window,
        "layer_types": kinds_of_layers(spec),
    }


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
        scores="sigmoid",
    )
    normed = r.flag("use_qk_norm", True)
    left_out = r.integer("num_mtp_modules", 0) if r.flag("use_mtp", False) else 0
    return llama_like(
        "minimax_m2", config, Defaults(max_positions=196_608, n_kv_heads=8, bos=200_034, eos=200_020), r.rope(5e6),
        moe=moe, qk_norm=normed,
        departures=Departures(rotary_dim=r.rotary_dim(Reader(config).integer("head_dim")), qk_norm_over_heads=normed),
        notes=prediction_layers_left_out(left_out),
    )  # fmt: skip


def write_minimax_m2(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe_of(spec)
    return write_llama_like(spec) | {
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.d_expert,
        "use_routing_bias": moe.correction_bias,
        "use_qk_norm": spec.qk_norm,
        "qk_norm_type": "per_layer",
        "scoring_func": moe.scores,
        "rotary_dim": spec.rotary_dim,
    }
