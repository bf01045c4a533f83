"""What this machine and this build of torch can run. Asked once, and proved by running the operator."""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_packed_linear(dtype: torch.dtype) -> bool:
    """oneDNN's product with weights that were reordered once (``mkldnn._linear_pointwise``), for CPU tensors of ``dtype``."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x, weight = torch.ones(2, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        y = torch.ops.mkldnn._linear_pointwise.binary(x, x, packed, None, "add")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((y == 17).all())


@cache
def has_w8a8_linear() -> bool:
    """oneDNN's product of unsigned 8-bit activations and signed 8-bit weights, exact because the CPU adds in 32 bits.

    Asked for 255·127 summed in pairs: without VNNI the instruction behind it saturates at 16 bits and the answer is wrong.
    """
    try:
        weight = torch.full((16, 64), 127, dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        x = torch.full((2, 64), 255, dtype=torch.uint8)
        ones, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int64)
        y = torch.ops.onednn.qlinear_pointwise(x, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((y == 64 * 127 * 127).all())


@cache
def has_int8_weight_only() -> bool:
    """``aten._weight_int8pack_mm``: bf16 activations, int8 weights."""
    try:
        x, weight = torch.ones(1, 32, dtype=torch.bfloat16), torch.ones(16, 32, dtype=torch.int8)
        y = torch.ops.aten._weight_int8pack_mm(x, weight, torch.ones(16, dtype=torch.bfloat16))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((y == 32).all())
