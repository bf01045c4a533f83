"""Small random models of every family, as specs and canonical weights, and as transformers builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from twostroke.core.families import spec_from_config
from twostroke.core.spec import Departures, ModelSpec, RopeSpec
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


def lively(decoder: Decoder, seed: int) -> Decoder:
    """Weights that make each part matter: large embeddings, norms away from 1 and biases away from 0.

    With plain initial values a small model repeats one token whatever its attention does, and a test would prove little.
    """
    initialise(decoder, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name in ("embed.weight", "position_embed.weight"):
                parameter.copy_(noise if name == "embed.weight" else 0.3 * noise)
            else:
                parameter.mul_(2.0)
    return decoder.eval()


def decoder_of(name: str, seed: int = 0, **changes: Any) -> Decoder:
    return lively(Decoder(SPECS[name].with_(**changes)), seed)


def saved(name: str, directory: Path, seed: int = 0, **changes: Any) -> tuple[Decoder, Path]:
    decoder = decoder_of(name, seed, **changes)
    return decoder, save_model(decoder, decoder.spec, directory, dtype="fp32")


def transformers_model(name: str, seed: int = 0) -> Any:
    """transformers' own model of the spec's configuration, fp32, eager attention, with lively weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from twostroke.core.families import config_from_spec

    config = config_from_spec(SPECS[name])
    kind = config.pop("model_type")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(
                    torch.randn(parameter.shape) * (1.0 if "embed" in parameter_name or "wte" in parameter_name else 0.3)
                )
            else:
                parameter.copy_((0.0 if parameter_name.endswith("bias") else 1.0) + 0.2 * torch.randn(parameter.shape))
    assert spec_from_config(config | {"model_type": kind}).family == SPECS[name].family
    return model
