"""Bytes that a loaded model takes and that each token adds to its KV cache: what both phases share."""

from __future__ import annotations

from twostroke.core.dtypes import bytes_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.params import block_products, count_parameters

FP32 = 4.0
"""Bytes."""


def weights_bytes(spec: ModelSpec, scheme: str) -> float:
    """Bytes of the weights that an engine holds under ``scheme``.

    fp32 4·N, bf16 and fp16 2·N. int8: 1 byte per element of the block matrices and one fp32 scale per output row; embedding,
    head, norms and biases stay bf16. (An int8 weight counted as half a byte is a known mistake of other calculators.)
    """
    parameters = count_parameters(spec)
    if scheme != "int8":
        return bytes_of(scheme) * parameters.total
    rows = spec.n_layers * sum(p.n for p in block_products(spec))
    return parameters.block_matrices * 1.0 + rows * FP32 + 2.0 * (parameters.total - parameters.block_matrices)


def kv_bytes_per_token(spec: ModelSpec, dtype: str = "bf16") -> float:
    """2·L·K·D·w bytes: key and value of one token in every layer. The factor 2 and the K (not H) heads matter: Llama-3-8B
    at 8,192 tokens is 1.00 GiB in bf16 (tests/planner/test_memory.py)."""
    return 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * bytes_of(dtype)
