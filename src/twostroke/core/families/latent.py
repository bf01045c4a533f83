"""Latent attention with shared and routed experts: DeepSeek-V2, DeepSeek-V3 (and R1), Kimi K2, GLM-5."""

from __future__ import annotations

import math
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.experts import prediction_layers_left_out, routing_keys
from twostroke.core.families.llama import Defaults, llama_like, write_llama_like
from twostroke.core.families.reader import Reader
from twostroke.core.spec import Departures, IndexerSpec, MlaSpec, ModelSpec, MoeSpec


def _latent(
    family: str,
    config: dict[str, Any],
    defaults: Defaults,
    first_dense: int = 3,
    correction_bias: bool = True,
    groups: tuple[int, int] = (1, 1),
    q_lora_rank: int | None = 1536,
    **extra: Any,
) -> ModelSpec:
    """For what the config lacks: ``groups`` of experts, and those of them that a token's are chosen from; ``q_lora_rank``."""
    r = Reader(config)
    n_layers = r.layer_count("num_hidden_layers")
    dense, step = r.integer("first_k_dense_replace", first_dense), r.integer("moe_layer_freq", 1)
    if dense < 0 or step < 1:
        raise ConfigError(
            f"config.json: first_k_dense_replace={dense} must be at least 0 and moe_layer_freq={step} at least 1."
        )
    mla = MlaSpec(
        q_lora_rank=r.optional_integer("q_lora_rank") if "q_lora_rank" in config else q_lora_rank,
        kv_lora_rank=r.integer("kv_lora_rank", 512),
        qk_nope_dim=r.integer("qk_nope_head_dim", 128),
        qk_rope_dim=r.integer("qk_rope_head_dim", 64),
        v_dim=r.integer("v_head_dim", 128),
    )
    width = r.integer("moe_intermediate_size", 2048 if correction_bias else 1407)
    greedy = not correction_bias and config.get("topk_method", "greedy") == "greedy"
    n_groups, top_groups = (1, 1) if greedy else (r.integer("n_group", groups[0]), r.integer("topk_group", groups[1]))
    moe = MoeSpec(
        n_experts=r.integer("n_routed_experts", 256 if correction_bias else 64),
        top_k=r.integer("num_experts_per_tok", 8 if correction_bias else 6),
        d_expert=width,
        n_shared_experts=r.integer("n_shared_experts", 1 if correction_bias else 2),
        d_shared=width,
        layers=tuple(i for i in range(n_layers) if i >= dense and i % step == 0),
        correction_bias=correction_bias,
        scores="sigmoid" if correction_bias else "softmax",
        normalised=r.flag("norm_topk_prob", correction_bias),
        share_scale=r.number("routed_scaling_factor", 2.5 if correction_bias else 1.0),
        n_groups=n_groups,
        top_groups=top_groups,
    )
    heads, bias = r.integer("num_attention_heads"), r.flag("attention_bias", False)
    left_out = r.integer("num_nextn_predict_layers", 0)
    # num_key_value_heads repeats the query heads, and head_dim is another number in each release: both follow from the rest.
    shape = {"num_key_value_heads": heads, "head_dim": mla.qk_nope_dim + mla.qk_rope_dim}
    departures = Departures(
        rotary_dim=mla.qk_rope_dim, neighbours_turn=r.flag("rope_interleave", True), attention_scale=_yarn_scale(r, mla)
    )
    return llama_like(
        family, config | shape, defaults, r.rope(), mla=mla, moe=moe, qkv_bias=bias, attn_out_bias=bias, departures=departures,
        notes=prediction_layers_left_out(left_out),
        **extra,
    )  # fmt: skip


def _yarn_scale(r: Reader, mla: MlaSpec) -> float | None:
    """Of the scores under yarn with ``mscale_all_dim`` m: (0.1·m·ln(factor) + 1)²/√D; None: 1/√D."""
    scaling = Reader(r.object("rope_parameters") or r.object("rope_scaling"))
    factor, m = scaling.number("factor", 1.0), scaling.number("mscale_all_dim", 0.0)
    if not m or factor <= 1:
        return None
    return (0.1 * m * math.log(factor) + 1.0) ** 2 / math.sqrt(mla.qk_nope_dim + mla.qk_rope_dim)


def write_latent(spec: ModelSpec) -> dict[str, Any]:
    moe, mla = spec.moe, spec.mla
    if moe is None or mla is None:
        raise ConfigError(f"family={spec.family!r} has experts and latent attention, and this model lacks one of them.")
    config = write_llama_like(spec) | routing_keys(moe)
    del config["partial_rotary_factor"], config["rope_parameters"]["partial_rotary_factor"]
    if spec.departures.attention_scale is not None:
        grown = math.sqrt(spec.departures.attention_scale * math.sqrt(spec.head_dim))
        for key in ("rope_parameters", "rope_scaling"):
            config[key] = config[key] | {"mscale_all_dim": (grown - 1.0) / (0.1 * math.log(spec.rope.factor))}
    grouped = "group_limited_greedy" if moe.n_groups > 1 else "greedy"
    return config | {
        "head_dim": mla.qk_rope_dim,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_dim,
        "qk_rope_head_dim": mla.qk_rope_dim,
        "v_head_dim": mla.v_dim,
        "first_k_dense_replace": 0 if moe.layers is None else spec.n_layers - len(moe.layers),
        "moe_layer_freq": 1,
        "attention_bias": spec.qkv_bias,
        "rope_interleave": spec.departures.neighbours_turn,
        "topk_method": "noaux_tc" if moe.correction_bias else grouped,
        "scoring_func": moe.scores,
    }


def parse_deepseek_v2(config: dict[str, Any]) -> ModelSpec:
    """arXiv 2405.04434: no correction bias; the Lite model does not compress its queries."""
    return _latent("deepseek_v2", config, Defaults(max_positions=2048, bos=1, eos=2), first_dense=0, correction_bias=False)


def parse_deepseek_v3(config: dict[str, Any]) -> ModelSpec:
    """arXiv 2412.19437: 671 billion parameters without the multi-token-prediction layer, which adds 14 billion on disk."""
    return _latent("deepseek_v3", config, Defaults(max_positions=4096, bos=0, eos=1), groups=(8, 4))


def parse_kimi_k2(config: dict[str, Any]) -> ModelSpec:
    """DeepSeek-V3's layer with 384 experts, 64 heads and one dense layer (arXiv 2507.20534, table 2)."""
    return _latent("kimi_k2", config, Defaults(max_positions=131_072, bos=163_584, eos=163_585), first_dense=1)


def parse_glm_moe_dsa(config: dict[str, Any]) -> ModelSpec:
    """DeepSeek-V3's layer with an indexer that picks the keys attention reads (DeepSeek-V3.2's sparse attention)."""
    r = Reader(config)
    for key in ("indexer_types", "mlp_layer_types", "index_topk_pattern"):
        r.must_be(key, None)
    indexer = IndexerSpec(r.integer("index_n_heads", 32), r.integer("index_head_dim", 128), r.integer("index_topk", 2048))
    return _latent("glm_moe_dsa", config, Defaults(max_positions=202_752, bos=0, eos=1), indexer=indexer, q_lora_rank=None)
