"""Bytes of weights and KV caches against published sizes of checkpoints and against counts by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from machines import small_llama
from twostroke.core.errors import ConfigError
from twostroke.core.families import named_model, read_spec
from twostroke.core.matrices import block_matrices
from twostroke.core.schemes import PLANNED
from twostroke.core.spec import MlaSpec, ModelSpec, MoeSpec
from twostroke.core.units import GIB
from twostroke.planner.work.params import count_parameters
from twostroke.planner.work.weights import experts_touched, kv_bytes_per_token, weights_bytes


def published(assets: Path, name: str) -> ModelSpec:
    return read_spec(assets / "configs" / "hf" / f"{name}.json")


@pytest.mark.parametrize(("name", "gib"), [("openai--gpt-oss-20b_config", 12.8), ("openai--gpt-oss-120b_config", 60.8)])
def test_mxfp4_gives_the_published_checkpoint_sizes(assets: Path, name: str, gib: float) -> None:
    """gpt-oss model card, table 1. Its numbers have one decimal, so half a tenth is the tolerance."""
    assert weights_bytes(published(assets, name), "mxfp4") / GIB == pytest.approx(gib, abs=0.05)


def test_kimi_k2_thinking_takes_the_bytes_of_its_published_files() -> None:
    """The Hub's 62 files take 594 GB: experts in 4.5 bits, attention, shared experts, the dense layer and both ends in 16."""
    kimi = named_model("moonshotai/Kimi-K2-Thinking")
    assert kimi.scheme == "int4-experts"
    assert weights_bytes(kimi.spec, "int4-experts") / 1e9 == pytest.approx(594, rel=0.002)
    experts = 60 * 384 * 3 * 7168 * 2048
    others = count_parameters(kimi.spec).total - experts
    assert weights_bytes(kimi.spec, "int4-experts") == experts * 4.5 / 8 + 2 * others


def test_fp8_holds_a_byte_an_element_and_a_scale_for_each_block_of_128_by_128() -> None:
    """Latent attention and experts whose every width is a multiple of 128, counted in blocks by hand."""
    spec = ModelSpec(
        "deepseek_v3", 100, 2, 128, 2, 2, 256, 128, 64, mla=MlaSpec(256, 256, 128, 128, 128), moe=MoeSpec(4, 2, 128, 1, 128)
    )  # fmt: skip
    attention = 2 + 8 + 3 + 8 + 2  # q_a 256 × 128, q_b 512 × 256, kv_a 384 × 128, kv_b 512 × 256, out 128 × 256
    experts = 4 * 3 + 3  # gate, up and down of four experts and of the shared one; the router keeps its 16 bits
    blocks = 2 * (attention + experts)
    kept = count_parameters(spec).total - blocks * 128 * 128
    assert weights_bytes(spec, "fp8") == blocks * (128 * 128 + 4) + 2 * kept


def test_a_quantised_dense_model_keeps_everything_but_its_blocks_matrices_in_16_bits() -> None:
    spec = small_llama(tied_embeddings=False)
    p = count_parameters(spec)
    kept = 2 * (p.total - p.block_matrices)
    rows = spec.n_layers * sum(x.n for x in block_matrices(spec))
    groups = spec.n_layers * sum(x.n * -(-x.k // 128) for x in block_matrices(spec))
    assert weights_bytes(spec, "int8") == weights_bytes(spec, "w8a8") == p.block_matrices + 4 * rows + kept
    assert weights_bytes(spec, "int4") == p.block_matrices / 2 + 2.5 * groups + kept
    assert weights_bytes(spec, "mxfp4") == p.block_matrices * 4.25 / 8 + kept  # every width here is a multiple of 32


def test_llama_70b_in_int4_is_more_than_35_gb(assets: Path) -> None:
    """Half a byte a parameter leaves out scales, zero points, embedding and head, which AWQ checkpoints hold too."""
    by_hand = 80 * (10_240 * 8192 + 8192 * 8192 + 3 * 28_672 * 8192) * (4 + 20 / 128) / 8 + 2 * 2 * 128_256 * 8192
    # the norms, 161 vectors in 16 bits, are what the count by hand leaves out
    spec = published(assets, "meta-llama--Meta-Llama-3.1-70B_config")
    assert weights_bytes(spec, "int4") == by_hand + 2 * 161 * 8192 > 39.7e9


def test_schemes_are_ordered_by_size(assets: Path) -> None:
    spec = published(assets, "meta-llama--Meta-Llama-3.1-8B_config")
    sizes = [weights_bytes(spec, name) for name in ("fp32", "bf16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert weights_bytes(spec, "fp8") < weights_bytes(spec, "int8") < weights_bytes(spec, "bf16") == weights_bytes(spec, "fp16")
    with pytest.raises(ConfigError, match=r"scheme='int2' is not a way to hold weights\. Use one of fp32"):
        weights_bytes(spec, "int2")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-ai--DeepSeek-V3_config", 70_272),  # arXiv 2505.09343, table 1, as the next but one
        ("meta-llama--Meta-Llama-3.1-8B_config", 131_072),
        ("meta-llama--Meta-Llama-3.1-405B_config", 516_096),
        ("meta-llama--Meta-Llama-3.1-70B_config", 327_680),
        ("openai--gpt-oss-20b_config", 24 * 2 * 8 * 64 * 2),
        ("google--gemma-4-26B-A4B_config", (25 * 2 * 8 * 256 + 5 * 2 * 2 * 512) * 2),
        ("zai-org--GLM-5_config", 78 * (512 + 64 + 128) * 2),  # with the indexer's key
    ],
)
def test_kv_cache_of_a_token_is_what_is_published(assets: Path, name: str, expected: int) -> None:
    assert kv_bytes_per_token(published(assets, name), "bf16") == expected
    assert kv_bytes_per_token(published(assets, name), "fp8") == expected / 2


def test_experts_touched_agrees_with_drawing_them() -> None:
    import random

    draw = random.Random(0)
    seen = [len({e for _ in range(6) for e in draw.sample(range(16), 2)}) for _ in range(4000)]
    # 4,000 draws of a number with a standard deviation near 1.3: the mean is within 0.1 with five sigma
    assert experts_touched(16, 2, 6) == pytest.approx(sum(seen) / len(seen), abs=0.1)


def test_every_scheme_holds_every_published_model(assets: Path) -> None:
    for file in sorted((assets / "configs" / "hf").glob("*.json")):
        spec = read_spec(file)
        full = weights_bytes(spec, "bf16")
        assert all(0.25 * full < weights_bytes(spec, scheme) <= 2 * full for scheme in PLANNED)


@pytest.mark.parametrize(
    ("scheme", "gigabytes"),
    [("Q4_0", 4.66), ("Q4_K_S", 4.69), ("Q4_K_M", 4.92), ("Q5_K_M", 5.73), ("Q6_K", 6.60), ("Q8_0", 8.54)],
)
def test_llama_3_8b_takes_what_its_gguf_files_take(assets: Path, scheme: str, gigabytes: float) -> None:
    """Sizes of the published files (bartowski/Meta-Llama-3-8B-Instruct-GGUF), which hold 8 MB of vocabulary beside."""
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    assert weights_bytes(spec, scheme) == pytest.approx(gigabytes * 1e9, rel=0.004)


def test_a_tied_head_is_held_once_in_the_heads_own_type(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    tied = dataclasses.replace(spec, tied_embeddings=True)
    table = spec.vocab_size * spec.d_model
    assert weights_bytes(spec, "Q4_K_M") - weights_bytes(tied, "Q4_K_M") == pytest.approx(table * 4.5 / 8)
