"""Small random transformers models: the references that the decoder is held against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from twostroke.model.load import load_model

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

YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]

GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2}

LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip

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
    "olmo3": {"model_type": "olmo3", "sliding_window": 5, "layer_types": WINDOWED},
    "olmo3-yarn": {
        "model_type": "olmo3",
        "sliding_window": 5,
        "layer_types": WINDOWED,
        "rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "llama-yarn-rope": {"model_type": "llama", "rope_parameters": YARN_ROPE, "head_dim": 16},
    "llama-dynamic-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "max_position_embeddings": 24,
    },
    "llama-proportional-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 2.0},
        "head_dim": 16,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 7,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 7, "layer_types": WINDOWED},
    "gemma3-linear-rope": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 7,
        "layer_types": WINDOWED,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "phi3-windowed": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 6, "tie_word_embeddings": True},
    "phi3-longrope": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "hidden_size": 64,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.5, 1.7, 1.9],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
        },
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 4.0,
    },
    "cohere": {"model_type": "cohere"},
    "cohere-biases": {"model_type": "cohere", "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.5},
    "cohere2": {"model_type": "cohere2", "sliding_window": 6, "layer_types": WINDOWED},
    "stablelm": {"model_type": "stablelm", "hidden_size": 64, "use_qkv_bias": True},
    "stablelm-parallel": {"model_type": "stablelm", "hidden_size": 64, "use_parallel_residual": True},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 9},
    "starcoder2-no-biases": {"model_type": "starcoder2", "use_bias": False, "tie_word_embeddings": False},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 64},
    "gpt_neox-in-turn": {"model_type": "gpt_neox", "hidden_size": 64, "use_parallel_residual": False, "attention_bias": False},
    "falcon": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 100},
    "falcon-biases": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4, "bias": True},
    "glm4": {"model_type": "glm4", "head_dim": 16, "pad_token_id": 0},
    "exaone4": {"model_type": "exaone4", "sliding_window": 6, "layer_types": WINDOWED},
    "exaone4-no-window": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16, "use_bias": True},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global", "local", "global"], 1]],
        "window_size": 6,
    },
    "gpt_bigcode": GPT2_SIZES | {"model_type": "gpt_bigcode"},
    "gpt_bigcode-multi-head": GPT2_SIZES | {"model_type": "gpt_bigcode", "multi_query": False},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "mixtral-windowed": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 7},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0},
    "granitemoe": {
        "model_type": "granitemoe",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 4.0,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        **GROUPED,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        **LATENT,
        **GROUPED,
    },
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 24,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.0,
        **LATENT,
        **GROUPED,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
        **LATENT,
        **GROUPED,
    },
    "kimi_k2": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        **LATENT,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "layer_types": WINDOWED,
        "rope_parameters": YARN_ROPE | {"truncate": False},
    },
    "gpt2": {"model_type": "gpt2"},
    "gpt2-untied": {"model_type": "gpt2", "tie_word_embeddings": False, "n_inner": 70, "activation_function": "gelu"},
}

SAVED_AS = {"kimi_k2": "kimi_k2"}
"""The ``model_type`` of a case's checkpoints where transformers reads them as another family."""


def reference_model(case: str, seed: int = 0) -> Any:
    """A transformers model whose every parameter matters: biases and norm weights are random too, and matrices large enough
    for attention to be far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **(({} if CASES[case].keys() >= GPT2_SIZES.keys() else GPT2_SIZES if case.startswith("gpt2") else SIZES) | CASES[case])
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.normal_(0.0, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    return model


def save_reference(case: str, directory: Path) -> Any:
    model = reference_model(case)
    model.save_pretrained(directory)
    if case in SAVED_AS:
        config = json.loads((directory / "config.json").read_text()) | {"model_type": SAVED_AS[case]}
        (directory / "config.json").write_text(json.dumps(config))
    return model


def random_tokens(n_rows: int = 2, n_tokens: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, V, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@torch.no_grad()
def decoder_error(theirs: Any, directory: Path) -> float:
    """Relative error of the decoder of ``directory`` against the transformers model that was saved there."""
    tokens = random_tokens()
    return relative_error(load_model(directory)(tokens), theirs(tokens).logits)
