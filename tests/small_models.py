"""Small random models of every family, as specs and canonical weights, and as transformers builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from twostroke.core.families import spec_from_config
from twostroke.core.spec import Departures, MlaSpec, ModelSpec, MoeSpec, RopeSpec
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.save import save_model

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "n_layers": 3,
    "d_model": 48,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 80,
    "max_positions": 256,
    "eos_token_ids": (1,),
    "bos_token_id": 0,
}

SPECS: dict[str, ModelSpec] = {
    "llama": ModelSpec(family="llama", **_BASE),
    "llama-scaled": ModelSpec(
        family="llama",
        **_BASE | {"tied_embeddings": True, "mlp_bias": True, "attn_out_bias": True, "qkv_bias": True},
        rope=RopeSpec(theta=5e3, scaling="llama3", factor=8.0, original_max_positions=32),
    ),
    "mistral": ModelSpec(family="mistral", **_BASE | {"head_dim": 16}, sliding_window=11),
    "qwen2": ModelSpec(family="qwen2", **_BASE, qkv_bias=True, sliding_window=9, sliding_window_layers=(1, 2)),
    "qwen3": ModelSpec(family="qwen3", **_BASE | {"head_dim": 16}, qk_norm=True, tied_embeddings=True),
    "olmo2": ModelSpec(family="olmo2", **_BASE, qk_norm=True, departures=Departures(qk_norm_over_heads=True, norms_after=True)),
    "gpt2": ModelSpec(
        family="gpt2",
        **_BASE | {"n_kv_heads": 6, "d_ff": 192},
        norm="layernorm",
        positions="learned",
        mlp="gelu",
        activation="gelu_tanh",
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
    ),
}

_WINDOWS: dict[str, Any] = {"sliding_window": 9, "sliding_window_layers": (0, 2)}
_LAYERNORM: dict[str, Any] = {"norm": "layernorm", "mlp": "gelu", "activation": "gelu", "mlp_bias": True, "attn_out_bias": True}
_GEMMA: dict[str, Any] = {"norm_offset": True, "embedding_scale": 48**0.5, "norms_per_block": 4}

FEATURES: dict[str, ModelSpec] = {
    "gemma2": ModelSpec(
        "gemma2", **_BASE | _WINDOWS | {"activation": "gelu_tanh", "tied_embeddings": True},
        departures=Departures(**_GEMMA, attention_scale=0.2, attention_cap=4.0, logit_cap=12.0),
    ),
    "gemma3_text": ModelSpec(
        "gemma3_text", **_BASE | _WINDOWS | {"activation": "gelu_tanh", "tied_embeddings": True}, qk_norm=True,
        rope=RopeSpec(1e6, "linear", 8.0),
        departures=Departures(**_GEMMA, attention_scale=0.5, windowed_rope=RopeSpec(1e4)),
    ),
    "phi3": ModelSpec(
        "phi3", **_BASE | {"head_dim": 16, "d_model": 96, "n_heads": 6}, departures=Departures(rotary_dim=12),
    ),
    "olmo3": ModelSpec(
        "olmo3", **_BASE | _WINDOWS, qk_norm=True,
        rope=RopeSpec(1e4, "yarn", 4.0, original_max_positions=64, magnitude=1.1386294361119891),
        departures=Departures(qk_norm_over_heads=True, norms_after=True, windowed_rope=RopeSpec(1e4)),
    ),
    "smollm3": ModelSpec("smollm3", **_BASE, departures=Departures(unrotated_layers=(1,))),
    "granite": ModelSpec(
        "granite", **_BASE,
        departures=Departures(embedding_scale=3.0, attention_scale=0.25, residual_scale=0.6, logit_scale=0.5),
    ),
    "cohere2": ModelSpec(
        "cohere2", **_BASE | _WINDOWS | {"norm": "layernorm", "tied_embeddings": True},
        departures=Departures(
            parallel_block=True, norms_per_block=1, norm_bias=False, neighbours_turn=True, logit_scale=0.5,
            unrotated_layers=(1,),
        ),
    ),
    "gpt_neox": ModelSpec(
        "gpt_neox", **_BASE | _LAYERNORM | {"n_kv_heads": 6}, qkv_bias=True,
        departures=Departures(parallel_block=True, rotary_dim=2),
    ),
    "falcon": ModelSpec(
        "falcon", **_BASE | _LAYERNORM, qkv_bias=True, tied_embeddings=True, departures=Departures(parallel_block=True)
    ),
    "glm4": ModelSpec(
        "glm4", **_BASE | {"eos_token_ids": (1, 2)}, qkv_bias=True,
        departures=Departures(norms_per_block=4, neighbours_turn=True, rotary_dim=4),
    ),
    "mixtral": ModelSpec("mixtral", **_BASE | {"norm_eps": 1e-5}, sliding_window=11, moe=MoeSpec(5, 2, 80)),
    "qwen2_moe": ModelSpec(
        "qwen2_moe", **_BASE, qkv_bias=True,
        moe=MoeSpec(6, 3, 32, n_shared_experts=1, d_shared=48, layers=(0, 2), shared_gate=True, normalised=False),
    ),
    "olmoe": ModelSpec(
        "olmoe", **_BASE, qk_norm=True, moe=MoeSpec(8, 3, 80, normalised=False), departures=Departures(qk_norm_over_heads=True)
    ),
    "granitemoe": ModelSpec(
        "granitemoe", **_BASE, moe=MoeSpec(5, 2, 80),
        departures=Departures(embedding_scale=3.0, attention_scale=0.25, residual_scale=0.6, logit_scale=0.5),
    ),
    "glm4_moe": ModelSpec(
        "glm4_moe", **_BASE, qk_norm=True, departures=Departures(rotary_dim=4),
        moe=MoeSpec(
            8, 3, 32, n_shared_experts=2, d_shared=32, layers=(1, 2), correction_bias=True, scores="sigmoid", share_scale=1.5,
            n_groups=4, top_groups=2,
        ),
    ),
    "deepseek_v2": ModelSpec(
        "deepseek_v2", **_BASE | {"n_kv_heads": 6, "head_dim": 40}, mla=MlaSpec(None, 32, 32, 8, 16),
        departures=Departures(rotary_dim=8, neighbours_turn=True),
        moe=MoeSpec(8, 3, 32, n_shared_experts=1, d_shared=32, layers=(1, 2), normalised=False),
    ),
    "deepseek_v3": ModelSpec(
        "deepseek_v3", **_BASE | {"n_kv_heads": 6, "head_dim": 40}, mla=MlaSpec(24, 32, 32, 8, 32),
        departures=Departures(rotary_dim=8, neighbours_turn=True),
        moe=MoeSpec(
            8, 3, 32, n_shared_experts=1, d_shared=32, layers=(1, 2), correction_bias=True, scores="sigmoid", share_scale=2.5,
            n_groups=4, top_groups=2,
        ),
    ),
    "gpt_oss": ModelSpec(
        "gpt_oss", **_BASE | _WINDOWS | {"activation": "clamped_swish"}, qkv_bias=True, attn_out_bias=True,
        moe=MoeSpec(6, 2, 80, router_bias=True, expert_bias=True), departures=Departures(attention_sinks=True),
    ),
}  # fmt: skip
"""One model for what each later family adds; ``EVERY`` has them and those of ``SPECS``."""

EVERY = SPECS | FEATURES


def lively(decoder: Decoder, seed: int) -> Decoder:
    """Weights that make each part matter: large embeddings, norms away from 1 and biases away from 0.

    With plain initial values a small model repeats one token whatever its attention does, and a test would prove little.
    """
    initialise(decoder, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.1 * noise)
            elif "norm" in name:
                parameter.copy_((0 if decoder.spec.departures.norm_offset else 1) + 0.2 * noise)
            elif name in ("embed.weight", "position_embed.weight"):
                scale = decoder.spec.departures.embedding_scale
                parameter.copy_(noise / scale if name == "embed.weight" else 0.3 * noise)
            else:
                parameter.mul_(2.0)
        for name, buffer in decoder.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return decoder.eval()


def decoder_of(name: str, seed: int = 0, **changes: Any) -> Decoder:
    return lively(Decoder(EVERY[name].with_(**changes)), seed)


def saved(name: str, directory: Path, seed: int = 0, **changes: Any) -> tuple[Decoder, Path]:
    decoder = decoder_of(name, seed, **changes)
    return decoder, save_model(decoder, decoder.spec, directory, dtype="fp32")


def transformers_model(name: str, seed: int = 0) -> Any:
    """transformers' own model of the spec's configuration, fp32, eager attention, with lively weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from twostroke.core.families import config_from_spec

    config, away = config_from_spec(EVERY[name]), EVERY[name].departures
    kind = config.pop("model_type")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not parameter_name.endswith("bias"):
                is_table = "embed" in parameter_name or "wte" in parameter_name
                parameter.copy_(torch.randn(parameter.shape) * (1.0 / away.embedding_scale if is_table else 0.3))
            else:
                centre = 0.0 if parameter_name.endswith("bias") or away.norm_offset else 1.0
                parameter.copy_(centre + 0.2 * torch.randn(parameter.shape))
    assert spec_from_config(config | {"model_type": kind}).family == EVERY[name].family
    return model
