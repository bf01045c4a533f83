"""Small random transformers models: the references that the decoder is held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

V, T = 211, 40
TOLERANCE = 1e-4
"""Of max |ours − theirs| / max |theirs| in fp32. Both sum the same few hundred products in another order, which measures 1e-6;
a wrong constant (an epsilon, a rounding of a frequency) measures above 1e-3."""

SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-multi-head": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-wide-heads": {"model_type": "llama", "head_dim": 32},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear-rope": {"model_type": "llama", "rope_parameters": LINEAR_ROPE},
    "llama-llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    "llama-gelu": {"model_type": "llama", "hidden_act": "gelu_new"},
    "mistral": {"model_type": "mistral", "sliding_window": 7, "head_dim": 8},
    "mistral-window-of-one": {"model_type": "mistral", "sliding_window": 1},
    "mistral-wide-window": {"model_type": "mistral", "sliding_window": 4096},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "qwen2-upper-layers-windowed": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-biases-tied": {"model_type": "qwen3", "head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3-one-layer-windowed": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo2-biases-tied": {"model_type": "olmo2", "attention_bias": True, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2"},
    "gpt2-untied": {"model_type": "gpt2", "tie_word_embeddings": False, "n_inner": 70, "activation_function": "gelu"},
}


def reference_model(case: str, seed: int = 0) -> Any:
    """A transformers model whose every parameter matters: biases and norm weights are random too, and matrices large enough
    for attention to be far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**((GPT2_SIZES if case.startswith("gpt2") else SIZES) | CASES[case]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def save_reference(case: str, directory: Path) -> Any:
    model = reference_model(case)
    model.save_pretrained(directory)
    return model


def random_tokens(n_rows: int = 2, n_tokens: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, V, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
