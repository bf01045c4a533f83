from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.kernels.attention import explicit_attention, flash_attention, reference_attention


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n_kv=st.integers(1, 3),
    n_rows=st.integers(1, 5),
    n_queries=st.integers(1, 9),
    n_keys=st.integers(1, 70),
    head_dim=st.sampled_from((2, 8, 16, 64, 80)),
    bf16=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_both_kernels_are_the_reference(
    n_kv: int, n_rows: int, n_queries: int, n_keys: int, head_dim: int, bf16: bool, masked: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    q = torch.randn(n_rows, n_kv, n_queries, head_dim, generator=g).to(dtype).transpose(0, 1)
    # Keys as they lie in the pool: one request's slots are a slice of a longer run.
    pool = torch.randn(2, n_kv, n_rows, n_keys + 3, head_dim, generator=g).to(dtype)
    k, v = pool[:, :, :, 1 : n_keys + 1]
    mask = None
    if masked:
        hidden = torch.rand(1, n_rows, 1, n_keys, generator=g) < 0.5
        hidden[..., 0] = False
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    expected = reference_attention(q, k, v, mask, 0.3).float()
    # bf16: outputs are below 4, rounded to 2⁻⁸ of that; explicit rounds scores of up to 8 to 2⁻⁸ as well
    tolerance = 0.06 if bf16 else 2e-5
    for kernel in (flash_attention, explicit_attention):
        found = kernel(q, k, v, mask, 0.3)
        assert found.shape == q.shape
        assert float((found.float() - expected).abs().max()) <= tolerance, kernel.__name__
