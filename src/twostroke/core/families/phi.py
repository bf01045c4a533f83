"""Phi (1, 1.5 and 2) and Phi-3."""

from __future__ import annotations

from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.llama import NO_PADDING, Defaults, llama_like, write_llama_like
from twostroke.core.families.reader import Reader
from twostroke.core.spec import Departures, ModelSpec


def parse_phi(config: dict[str, Any]) -> ModelSpec:
    """Attention and MLP read one LayerNorm side by side; biases everywhere, the output head's among them."""
    r = Reader(config)
    r.must_be("qk_layernorm", False)
    width, heads = r.integer("hidden_size"), r.integer("num_attention_heads")
    if heads < 1 or width % heads:
        raise ConfigError(f"config.json: num_attention_heads={heads} must divide hidden_size={width}.")
    return llama_like(
        "phi", config | {"hidden_act": config.get("hidden_act", "gelu_new"), "head_dim": width // heads},
        Defaults(max_positions=2048, bos=1, eos=2), r.rope(),
        norm="layernorm", norm_eps=r.number("layer_norm_eps", 1e-5), mlp="gelu",
        qkv_bias=True, attn_out_bias=True, mlp_bias=True,
        departures=Departures(
            parallel_block=True, norms_per_block=1, head_bias=True, rotary_dim=r.rotary_dim(width // heads, 0.5)
        ),
    )  # fmt: skip


def parse_phi3(config: dict[str, Any]) -> ModelSpec:
    """Llama's block with a window; its checkpoints hold q, k, v and gate, up in one matrix each."""
    r = Reader(config)
    scaling = r.object("rope_scaling") or r.object("rope_parameters")
    if scaling.get("rope_type", scaling.get("type")) == "yarn":  # what older configs call it here
        config = config | {"rope_scaling": scaling | {"rope_type": "longrope"}}
    width, heads = r.integer("hidden_size"), r.integer("num_attention_heads")
    turned = r.rotary_dim(r.integer("head_dim", width // max(1, heads)))
    return llama_like(
        "phi3", config, Defaults(max_positions=4096, bos=1, eos=32_000),
        norm_eps=r.number("rms_norm_eps", 1e-5), sliding_window=r.optional_integer("sliding_window"),
        departures=Departures(rotary_dim=turned),
    )  # fmt: skip


def write_phi3(spec: ModelSpec) -> dict[str, Any]:
    longrope = spec.rope.scaling == "longrope"
    return (
        write_llama_like(spec)
        | NO_PADDING
        | {
            "sliding_window": spec.sliding_window,
            "original_max_position_embeddings": spec.rope.original_max_positions if longrope else spec.max_positions,
        }
    )
