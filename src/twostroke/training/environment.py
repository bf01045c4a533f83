"""Records the environment that determines the last bits of a run, beside recipe, data and seed; and hashes the final weights.

Floating-point sums depend on their order. The order depends on the kernels (torch's, a compiler's, the native library's), the
vector width and the number of threads. With the same environment, the same recipe gives the same weights
(docs/determinism.md; tests/training/test_determinism.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twostroke.core.profile import read_fingerprint
from twostroke.kernels.native_library import holding
from twostroke.ledger.code_version import code_version
from twostroke.model.safetensors_file import tensor_bytes
from twostroke.training.parallelize import why_not_compile

SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that select kernels."""


def environment(device: torch.device, compile: bool, sums: str) -> dict[str, Any]:
    """Everything that is known to change the last bits of a run on ``device``, as plain JSON. ``sums`` is the order of
    gradients' sums (``Ranks.sums``)."""
    return {
        "twostroke": code_version(),
        "torch": str(torch.__version__),
        "n_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": read_fingerprint().cpu_model,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native": " ".join(holding()) or "none",
        "compiled": compile and why_not_compile(device) is None,
        "sums": sums,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys in which two environments differ, with both values, as in ``torch 2.12.0 → 2.13.0``. A key that only one of them
    has is not compared, because another release wrote it."""
    return [f"{name} {_shown(then[name])} → {_shown(now[name])}" for name in then if name in now and then[name] != now[name]]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in sorted(value.items())) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of ``weights``, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        found.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        found.update(tensor_bytes(tensor))
    return found.hexdigest()
