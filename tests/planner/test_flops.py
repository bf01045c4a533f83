"""Operations agree with counts made by hand and with a count over the products that really run."""

from __future__ import annotations

import pytest

from machines import small_llama
from twostroke.planner.flops import (
    attention_flops_per_token,
    decode_flops,
    mean_keys,
    mfu,
    prefill_flops,
    training_flops_per_token,
)
from twostroke.planner.params import block_products, count_parameters


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
    products = sum(2 * p.n * p.k for p in block_products(spec)) * spec.n_layers
    head = 2 * 4096 * 256
    assert prefill_flops(spec, 100) == products * 100 + head + attention_flops_per_token(spec, 100) * 100
    # one token against 100 keys: QKᵀ and PV in every layer, all query heads
    assert decode_flops(spec, 100) == products + head + 6 * 4 * 4 * 64 * 100


def test_mfu_is_model_work_over_the_peak() -> None:
    spec = small_llama()
    assert mfu(spec, 512, 1000.0, 2000.0 * training_flops_per_token(spec, 512)) == pytest.approx(0.5)
