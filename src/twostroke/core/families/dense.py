"""Dense relatives of Llama with a part of their own: StarCoder2, OLMo 2 and Granite."""

from __future__ import annotations

from typing import Any

from twostroke.core.families.llama import Defaults, llama_like, write_llama_like
from twostroke.core.families.reader import STORED_OTHERWISE, Reader
from twostroke.core.spec import Departures, ModelSpec


def parse_starcoder2(config: dict[str, Any]) -> ModelSpec:
    """LayerNorm, a plain MLP, biases, grouped-query attention with a window."""
    r = Reader(config)
    bias = r.flag("use_bias", True)
    return llama_like(
        "starcoder2", config | {"hidden_act": config.get("hidden_act", "gelu_pytorch_tanh")},
        Defaults(max_positions=4096, n_kv_heads=2, bos=50256, eos=50256), norm="layernorm",
        norm_eps=r.number("norm_epsilon", 1e-5), mlp="gelu", qkv_bias=bias, attn_out_bias=bias, mlp_bias=bias,
        tied_embeddings=r.flag("tie_word_embeddings", True), sliding_window=r.optional_integer("sliding_window"),
        departures=STORED_OTHERWISE,
    )  # fmt: skip


def parse_olmo2(config: dict[str, Any]) -> ModelSpec:
    """Norms after each branch instead of before, QK-norm over all heads together."""
    r = Reader(config)
    bias = r.flag("attention_bias", False)
    return llama_like(
        "olmo2", config, Defaults(max_positions=2048, eos=50279), norm_eps=r.number("rms_norm_eps", 1e-5), qk_norm=True,
        qkv_bias=bias, attn_out_bias=bias,
        departures=Departures(qk_norm_over_heads=True, norms_after=True),
    )  # fmt: skip


def write_olmo2(spec: ModelSpec) -> dict[str, Any]:
    return write_llama_like(spec) | {"attention_bias": spec.qkv_bias}


def parse_granite(config: dict[str, Any]) -> ModelSpec:
    """Llama with constant multipliers on embedding, attention, residuals and logits."""
    r = Reader(config)
    bias = r.flag("attention_bias", False)
    return llama_like(
        "granite", config, Defaults(max_positions=2048, bos=1, eos=2), qkv_bias=bias, attn_out_bias=bias,
        mlp_bias=r.flag("mlp_bias", False), departures=Departures(without_parameters=("constant multipliers",)),
    )  # fmt: skip
