from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twostroke.core.crossovers import Crossovers
from twostroke.kernels import attention as kernels


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The obvious form, in fp32."""
    scores = torch.einsum("kbtgd,kbsd->kbtgs", q.float(), k.float()) * scale
    if mask is not None:
        scores[..., k.shape[2] - mask.shape[2] :] += mask.float()[None, :, :, None]
    return torch.einsum("kbtgs,kbsd->kbtgd", scores.softmax(dim=-1), v.float()).to(q.dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n_kv=st.integers(1, 3),
    n_rows=st.integers(1, 4),
    n_queries=st.integers(1, 5),
    group=st.integers(1, 4),
    n_keys=st.integers(1, 70),
    head_dim=st.sampled_from((2, 8, 16, 64, 80)),
    bf16=st.booleans(),
    masked=st.sampled_from((0.0, 0.3, 1.0)),
    seed=st.integers(0, 99),
)
def test_both_kernels_are_the_reference(
    n_kv: int, n_rows: int, n_queries: int, group: int, n_keys: int, head_dim: int, bf16: bool, masked: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    q = torch.randn(n_rows, n_queries, n_kv, group, head_dim, generator=g).to(dtype).permute(2, 0, 1, 3, 4)
    # Keys as they lie in the pool: one request's slots are a slice of a longer run.
    k, v = torch.randn(2, n_kv, n_rows, n_keys + 3, head_dim, generator=g).to(dtype)[:, :, :, 1 : n_keys + 1]
    mask = None
    if masked:  # of the last keys
        hidden = torch.rand(n_rows, n_queries, max(1, int(masked * n_keys)), generator=g) < 0.5
        hidden[..., 0] = False
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    expected = reference_attention(q, k, v, mask, 0.3).float()
    # bf16: outputs are below 4, rounded to 2⁻⁸ of that; explicit rounds scores of up to 8 to 2⁻⁸ as well
    tolerance = 0.06 if bf16 else 2e-5
    for kernel in (kernels.flash_attention, kernels.explicit_attention, kernels.attention):
        found = kernel(q, k, v, mask, 0.3)
        assert found.shape == q.shape
        assert float((found.float() - expected).abs().max()) <= tolerance, kernel.__name__


def test_the_crossover_decides_between_the_kernels() -> None:
    q, kv = torch.randn(2, 3, 1, 2, 8).bfloat16(), torch.randn(2, 3, 40, 8).bfloat16()
    few, many = Crossovers(flash_max_scores=1e9), Crossovers(flash_max_scores=0)
    assert torch.equal(kernels.attention(q, kv, kv, None, 0.3, few), kernels.flash_attention(q, kv, kv, None, 0.3))
    assert torch.equal(kernels.attention(q, kv, kv, None, 0.3, many), kernels.explicit_attention(q, kv, kv, None, 0.3))
