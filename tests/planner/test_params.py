"""Parameter counts are exact: against published counts of real models, and against the decoder that is built."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import small_llama
from twostroke.core.families import read_spec, spec_from_config
from twostroke.core.matrices import block_matrices
from twostroke.core.spec import ModelSpec
from twostroke.planner.work.params import count_parameters

# From the safetensors headers of each model on the Hugging Face Hub (tied embeddings counted once).
PUBLISHED = {
    "hf/meta-llama--Meta-Llama-3.1-8B_config.json": 8_030_261_248,
    "hf/Meta-Llama-3-8B.json": 8_030_261_248,
    "hf/meta-llama--Meta-Llama-3.1-70B_config.json": 70_553_706_496,
    "hf/meta-llama--Meta-Llama-3.1-405B_config.json": 405_853_388_800,
    "hf/Mistral-7B-Instruct-v0.3.json": 7_248_023_552,
    "hf/Qwen2-72B-Instruct.json": 72_706_203_648,
    "hf/Qwen--Qwen3-0.6B_config.json": 596_049_920,
    "hf/Qwen--Qwen3-1.7B_config.json": 1_720_574_976,
    "hf/Qwen--Qwen3-8B_config.json": 8_190_735_360,
    "hf/Qwen--Qwen3-32B_config.json": 32_762_123_264,
}


@pytest.mark.parametrize(("config", "expected"), PUBLISHED.items())
def test_counts_of_real_models_are_exact(assets: Path, config: str, expected: int) -> None:
    assert count_parameters(read_spec(assets / "configs" / config)).total == expected


def test_gpt2_has_124_439_808_parameters() -> None:
    config = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    assert count_parameters(spec_from_config(config)).total == 124_439_808


# config.json keys and the elements in the safetensors headers of models on the Hugging Face Hub.
MORE: dict[str, tuple[dict[str, object], int]] = {
    "gemma-2-2b": (
        {
            "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 2304, "num_hidden_layers": 26,
            "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        },
        2_614_341_888,
    ),
    "pythia-70m": (
        {
            "model_type": "gpt_neox", "vocab_size": 50_304, "hidden_size": 512, "num_hidden_layers": 6,
            "intermediate_size": 2048, "num_attention_heads": 8,
        },
        70_426_624,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe", "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24,
            "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
        14_315_784_192,
    ),
    "DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "num_hidden_layers": 27,
            "intermediate_size": 10_944, "num_attention_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
            "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        },
        15_706_484_224,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_counts_of_published_shapes_are_exact(name: str) -> None:
    config, total = MORE[name]
    assert count_parameters(spec_from_config(config)).total == total


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Any dense model: every switch of ``ModelSpec`` that has parameters."""
    kv_heads = draw(st.integers(1, 3))
    return small_llama(
        n_layers=draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(3, 40)),
        d_model=draw(st.integers(2, 24)),
        n_heads=kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 6)),
        d_ff=draw(st.integers(1, 30)),
        max_positions=draw(st.integers(1, 20)),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        mlp=draw(st.sampled_from(["swiglu", "gelu"])),
        qkv_bias=draw(st.booleans()),
        attn_out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(specs())
def test_the_planner_counts_what_the_decoder_holds(spec: ModelSpec) -> None:
    """DESIGN, decision 1. On the meta device, so nothing is allocated."""
    from twostroke.model.decoder import Decoder

    decoder = Decoder(spec, device="meta")
    counted = count_parameters(spec)
    assert counted.total == sum(p.numel() for p in decoder.parameters())
    matrices = [p for name, p in decoder.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    assert counted.block_matrices == sum(p.numel() for p in matrices)
    shapes = {tuple(p.shape) for name, p in decoder.named_parameters() if name.startswith("blocks.0.") and p.dim() == 2}
    assert {(p.n, p.k) for p in block_matrices(spec)} == shapes


@settings(max_examples=60, deadline=None)
@given(specs())
def test_the_parts_add_up_to_the_total(spec: ModelSpec) -> None:
    p = count_parameters(spec)
    assert p.embedding + p.positions + p.head + p.final_norm + p.attention + p.mlp + p.norms == p.total
    looked_up = p.positions + (0 if spec.tied_embeddings else p.embedding)
    assert p.in_products == p.total - looked_up
    assert p.active == p.total
