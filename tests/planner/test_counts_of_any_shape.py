"""Counts of models of any shape in every family that is planned only, held against what transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.families import PLANNED_FAMILIES, spec_from_config
from twostroke.planner.work.params import count_parameters

FEW = st.integers(1, 3)
WIDTH = st.integers(1, 9)


def usual(draw: st.DrawFn, **more: Any) -> dict[str, Any]:
    kv_heads, head_dim = draw(FEW), 4 * draw(FEW)
    heads = kv_heads * draw(FEW)
    return {
        "vocab_size": 10 + draw(WIDTH), "num_hidden_layers": draw(FEW), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": heads * head_dim,
        "intermediate_size": draw(WIDTH),
        "max_position_embeddings": 16 + draw(WIDTH), "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


def layer_types(draw: st.DrawFn, n_layers: int) -> list[str]:
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    return [draw(kinds) for _ in range(n_layers - 1)] + ["full_attention"]


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    experts = draw(st.integers(2, 6))
    routed = {"num_experts_per_tok": draw(st.integers(1, experts))}
    c = usual(draw)
    if family in ("mixtral", "minimax_m2"):
        c |= routed | {"num_local_experts": experts, "rotary_dim": 4}
    elif family == "qwen3_moe":
        c |= routed | {"num_experts": experts, "moe_intermediate_size": draw(WIDTH), "attention_bias": draw(st.booleans())}
        c |= {"decoder_sparse_step": draw(FEW), "mlp_only_layers": draw(st.lists(st.integers(0, 3), max_size=2))}
    elif family == "gpt_oss":
        c |= routed | {"num_local_experts": experts, "layer_types": layer_types(draw, c["num_hidden_layers"])}
    elif family == "qwen2_moe":
        c |= routed | {"num_experts": experts, "moe_intermediate_size": draw(WIDTH), "qkv_bias": draw(st.booleans())}
        c |= {"shared_expert_intermediate_size": draw(WIDTH), "decoder_sparse_step": draw(FEW)}
    elif family == "glm4_moe":
        c |= routed | {"n_routed_experts": experts, "moe_intermediate_size": draw(WIDTH), "attention_bias": draw(st.booleans())}
        c |= {"n_shared_experts": draw(FEW), "first_k_dense_replace": draw(FEW), "use_qk_norm": draw(st.booleans())}
    elif family in ("gemma", "gemma2", "gemma3_text", "olmo2", "granite"):
        c |= {"attention_bias": draw(st.booleans())} if family in ("olmo2", "granite") else {}
    elif family == "gpt_neox":
        c |= {"attention_bias": draw(st.booleans()), "use_parallel_residual": draw(st.booleans()), "rotary_pct": 0.5}
    elif family == "starcoder2":
        c |= {"use_bias": draw(st.booleans())}
    elif family in ("deepseek_v2", "deepseek_v3", "glm_moe_dsa", "kimi_k2"):
        c |= routed | {
            "n_routed_experts": experts, "n_shared_experts": draw(FEW), "moe_intermediate_size": draw(WIDTH),
            "first_k_dense_replace": draw(st.integers(0, 3)), "kv_lora_rank": draw(WIDTH), "q_lora_rank": draw(WIDTH),
            "qk_nope_head_dim": draw(WIDTH), "qk_rope_head_dim": 2 * draw(FEW), "v_head_dim": draw(WIDTH),
            "n_group": 1, "topk_group": 1, "num_key_value_heads": c["num_attention_heads"],
            "attention_bias": draw(st.booleans()),
        }  # fmt: skip
        if family == "glm_moe_dsa":
            c |= {"index_n_heads": draw(FEW), "index_head_dim": c["qk_rope_head_dim"] + draw(WIDTH), "index_topk": 4}
        elif draw(st.booleans()):
            c["q_lora_rank"] = None
    elif family == "gemma4_text":
        c |= {
            "layer_types": layer_types(draw, c["num_hidden_layers"]), "global_head_dim": 4 * draw(FEW),
            "attention_k_eq_v": draw(st.booleans()), "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
            "enable_moe_block": draw(st.booleans()), "num_experts": experts, "top_k_experts": 1, "sliding_window": 4,
            "moe_intermediate_size": draw(WIDTH), "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        }  # fmt: skip
    elif family in ("phi", "phi3"):
        c |= {"partial_rotary_factor": 0.5} if family == "phi" else {}
        c["head_dim"] = c["hidden_size"] // c["num_attention_heads"]
    else:
        sizes = {"n_layer": c["num_hidden_layers"], "n_head": c["num_attention_heads"], "vocab_size": c["vocab_size"]}
        more = {"n_positions": c["max_position_embeddings"], "n_inner": draw(WIDTH), "n_embd": c["hidden_size"]}
        tied = {"tie_word_embeddings": c["tie_word_embeddings"]}
        c = {
            "gpt_bigcode": sizes | more | tied | {"multi_query": draw(st.booleans())},
            "gptj": sizes | more | tied | {"rotary_dim": 4},
            "bloom": sizes | tied | {"hidden_size": c["hidden_size"]},
            "gpt_neo": {
                "num_layers": 2 * c["num_hidden_layers"], "num_heads": c["num_attention_heads"], **tied,
                "attention_types": [[["global", "local"], c["num_hidden_layers"]]], "intermediate_size": draw(WIDTH),
                "hidden_size": c["hidden_size"], "vocab_size": c["vocab_size"],
            },
            "opt": {
                **c, "ffn_dim": draw(WIDTH), "word_embed_proj_dim": c["hidden_size"] + draw(st.integers(0, 2)),
                "do_layer_norm_before": draw(st.booleans()), "enable_bias": draw(st.booleans()),
            },
        }[family]  # fmt: skip
    return {"model_type": family, **c}


# gemma3 and gemma4 wrap their language models with towers, which are left out.
@pytest.mark.parametrize("family", [name for name in PLANNED_FAMILIES if name not in ("gemma3", "gemma4")])
@pytest.mark.filterwarnings("ignore")  # transformers' own, about ids and old keys
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_counts_agree_with_transformers_at_any_shape(family: str, data: st.DataObject) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = data.draw(configs(family))
    with torch.device("meta"):
        # Kimi K2 is DeepSeek-V3 in transformers, by another name on disk.
        theirs = config | {"model_type": "deepseek_v3"} if family == "kimi_k2" else config
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**theirs))
    tensors = {id(t): t.numel() for t in model.state_dict(keep_vars=True).values()}
    assert count_parameters(spec_from_config(config)).total == sum(tensors.values())
