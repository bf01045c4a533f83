"""Operations agree with counts made by hand and with a count over the products that really run."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines import small_llama
from twostroke.core.families import read_spec
from twostroke.core.matrices import block_matrices
from twostroke.core.spec import IndexerSpec, MlaSpec, MoeSpec
from twostroke.planner.work.flops import (
    attention_flops_per_token,
    decode_flops,
    mean_keys,
    prefill_flops,
    training_flops_per_token,
)
from twostroke.planner.work.params import count_parameters


def test_training_is_six_n_plus_causal_attention() -> None:
    spec = small_llama()
    n = count_parameters(spec).total
    assert training_flops_per_token(spec, 512) == 6 * n + 6 * spec.n_layers * spec.n_heads * spec.head_dim * 512


def test_an_untied_embedding_is_looked_up_and_not_multiplied() -> None:
    tied, untied = small_llama(), small_llama(tied_embeddings=False)
    assert training_flops_per_token(tied, 512) == training_flops_per_token(untied, 512)


def test_a_window_shortens_the_keys() -> None:
    assert mean_keys(100) == 50
    assert mean_keys(100, 100) == 50
    assert mean_keys(100, 1000) == 50
    # exactly: Σ min(i, w) over i = 1…s, less the half key of the diagonal that the continuous count leaves out
    s, w = 1000, 100
    exact = sum(min(i, w) for i in range(1, s + 1)) / s
    assert mean_keys(s, w) == pytest.approx(exact, rel=0.01)
    spec = small_llama(sliding_window=64, sliding_window_layers=(0, 1, 2))
    half = attention_flops_per_token(spec.with_(sliding_window=None), 512) / 2
    windowed = 3 * 4 * 4 * 64 * mean_keys(512, 64)
    assert attention_flops_per_token(spec, 512) == half + windowed


def test_prefill_and_decode_count_each_product_once() -> None:
    spec = small_llama(n_kv_heads=2)
    products = sum(2 * p.n * p.k for p in block_matrices(spec)) * spec.n_layers
    head = 2 * 4096 * 256
    assert prefill_flops(spec, 100) == products * 100 + head + attention_flops_per_token(spec, 100) * 100
    # one token against 100 keys: QKᵀ and PV in every layer, all query heads
    assert decode_flops(spec, 100) == products + head + 6 * 4 * 4 * 64 * 100


@pytest.mark.parametrize(
    ("name", "gflop"),
    [("deepseek-ai--DeepSeek-V3_config", 250), ("meta-llama--Meta-Llama-3.1-405B_config", 2448)],
)
def test_training_flops_are_the_published_ones(assets: Path, name: str, gflop: float) -> None:
    """arXiv 2505.09343, table 2: GFLOP a token at 4,096 tokens. It rounds to whole numbers and does not say how it counts the
    output head, which is 0.5% of the larger model: 1.5%."""
    spec = read_spec(assets / "configs" / "hf" / f"{name}.json")
    assert training_flops_per_token(spec, 4096) / 1e9 == pytest.approx(gflop, rel=0.015)


def test_experts_cost_what_a_token_passes_and_not_what_is_stored() -> None:
    dense = small_llama(d_ff=512)
    experts = dense.with_(moe=MoeSpec(n_experts=8, top_k=2, d_expert=256))
    router = 2 * 8 * dense.d_model * dense.n_layers
    assert decode_flops(experts, 100) == decode_flops(dense, 100) + router
    assert prefill_flops(experts, 64) == prefill_flops(dense, 64) + 64 * router


def test_latent_attention_is_rebuilt_in_prefill_and_absorbed_in_decode() -> None:
    spec = small_llama(n_layers=1, tied_embeddings=False).with_(mla=MlaSpec(None, 32, 16, 8, 24))
    heads, width = spec.n_heads, spec.d_model
    matrices = heads * 24 * width + 40 * width + heads * (16 + 24) * 32 + width * heads * 24 + 3 * spec.d_ff * width
    head = spec.vocab_size * width
    assert prefill_flops(spec, 10) == 2 * (10 * matrices + head) + 10 * (2 * heads * (24 + 24) * 10 / 2)
    assert decode_flops(spec, 10) == 2 * (matrices + head) + 10 * 2 * heads * ((32 + 8) + 32)


def test_an_indexer_bounds_the_keys_and_scores_all_of_them() -> None:
    latent = small_llama(n_layers=1).with_(mla=MlaSpec(64, 32, 16, 8, 24))
    sparse = latent.with_(indexer=IndexerSpec(n_heads=2, head_dim=8, top_k=50))
    matrices = 2 * (2 * 8 * 64 + 8 * 256 + 2 * 256)  # its queries, its key, its weights per head
    scores = 2 * 2 * (8 + 1)  # two heads of eight, and their weighted sum
    assert decode_flops(sparse, 50) == decode_flops(latent, 50) + matrices + scores * 50
    assert decode_flops(sparse, 1000) == decode_flops(latent, 50) + matrices + scores * 1000


def test_a_window_bounds_decode() -> None:
    spec = small_llama(sliding_window=64, sliding_window_layers=(0, 1))
    full = small_llama()
    assert decode_flops(full, 1000) - decode_flops(spec, 1000) == 2 * 4 * 4 * 64 * (1000 - 64)
