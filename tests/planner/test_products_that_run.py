"""The products that a plan counts are the ones transformers runs: its forward passes counted by torch, for every family."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.core.families import all_families, spec_from_config
from twostroke.core.matrices import head_matrix, layer_kinds
from twostroke.planner.work.params import count_parameters

N_TOKENS = 8
USUAL: dict[str, Any] = {
    "vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_size": 32, "intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 4, "n_shared_experts": 1, "head_dim": 4,
}  # fmt: skip
OLD: dict[str, Any] = {"vocab_size": 40, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, "n_inner": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "olmo3", "smollm3", "cohere", "cohere2", "exaone4", "ernie4_5", "seed_oss", "glm4"), USUAL),
    "stablelm": USUAL | {"partial_rotary_factor": 0.5},
    "falcon": {k: v for k, v in USUAL.items() if k != "head_dim"}
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 24},
    "mistral": USUAL | {"sliding_window": 4},
    "qwen2": USUAL,
    "qwen3": USUAL,
    "gpt2": OLD,
    "mixtral": USUAL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": USUAL | {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "decoder_sparse_step": 2},
    "gpt_oss": USUAL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": USUAL | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
    "deepseek_v3": USUAL | LATENT,
    "kimi_k2": USUAL | LATENT,
    "glm_moe_dsa": USUAL | LATENT | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 16},
    "qwen2_moe": USUAL | {
        "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
    },
    "olmoe": USUAL | {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": USUAL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": USUAL | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1,
    },
    "deepseek_v2": USUAL | LATENT | {"n_group": None, "topk_group": None, "q_lora_rank": None},
    "gemma": USUAL,
    "gemma2": USUAL | {"sliding_window": 4},
    "gemma3_text": USUAL | {"sliding_window": 4},
    "starcoder2": USUAL,
    "olmo2": USUAL,
    "granite": USUAL,
    "gpt_neox": USUAL,
    "gemma4_text": USUAL | {
        "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 12, "num_kv_shared_layers": 0, "sliding_window": 4,
    },
    "phi": USUAL,
    "phi3": USUAL,
    "gpt_bigcode": OLD,
    "gptj": OLD | {"rotary_dim": 4},
    "gpt_neo": {
        "vocab_size": 40, "num_layers": 2, "num_heads": 4, "hidden_size": 32, "attention_types": [[["global", "local"], 1]],
        "intermediate_size": 24, "max_position_embeddings": 16,
    },
    "bloom": {"vocab_size": 40, "n_layer": 2, "n_head": 4, "hidden_size": 32},
    "opt": USUAL | {"ffn_dim": 24, "word_embed_proj_dim": 20},
}  # fmt: skip


def test_every_family_is_run_here() -> None:
    assert set(CONFIGS) == set(all_families()) - {"gemma3", "gemma4"}  # which wrap a language model


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.filterwarnings("ignore")  # transformers' own, about ids and old keys
def test_forward_flops_are_those_that_torch_counts(family: str) -> None:
    """Eager attention multiplies every query with every key and every token with the head, so that is what is compared here."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {"model_type": family, **CONFIGS[family]}
    # Kimi K2 is DeepSeek-V3 in transformers, by another name on disk.
    theirs = AutoConfig.for_model(**config | ({"model_type": "deepseek_v3"} if family == "kimi_k2" else {}))
    theirs._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(N_TOKENS)[None] + 3, use_cache=False)

    spec = spec_from_config(config)
    parameters = count_parameters(spec)
    expected = 2 * N_TOKENS * (parameters.active_matrices + parameters.projections + head_matrix(spec).weights)
    for kind, count in layer_kinds(spec):
        per_key = 2 * kind.n_heads * (kind.qk_dim + kind.v_dim) + kind.index_flops_per_key
        expected += count * per_key * N_TOKENS**2
    assert counter.get_total_flops() == expected
