"""Machines that tests plan for: rates written down by hand, so that no test depends on the machine it runs on."""

from __future__ import annotations

import dataclasses
from typing import Any

from twostroke.core.profile import BandwidthPoint, Fingerprint, MachineProfile, MatmulPoint
from twostroke.core.rates import NativeRates, NativeStep, StepPrices
from twostroke.core.schemes import NATIVE_PRODUCTS
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import hardware_from_profile

GFLOP = 1e9

ROWS = (1, 16, 256, 4096)
CLASSES = ((384, 384), (1536, 384), (4096, 384), (384, 1024), (2048, 2048), (384, 8192))


def profile(**changes: Any) -> MachineProfile:
    """Two cores: bf16 products at 800 GFLOP/s and fp32 at 200, fewer with few rows; reads at 144 GB/s in cache, 74 beyond."""
    share = {1: 0.05, 16: 0.3, 256: 1.0, 4096: 1.0}
    rates = {"fp32": 200 * GFLOP, "bf16": 800 * GFLOP, "w8": 300 * GFLOP}
    made = MachineProfile(
        fingerprint=Fingerprint("AMD EPYC", 2, 24 * 2**30, ("avx512f", "avx512_bf16")),
        measured_at="2026-01-01T00:00:00Z",
        device="cpu",
        n_threads=2,
        torch_version="2.13.0",
        read_bandwidth=(BandwidthPoint(32 * 2**20, 144e9), BandwidthPoint(256 * 2**20, 74e9), BandwidthPoint(2**30, 74e9)),
        matmul=tuple(
            MatmulPoint(scheme, m, n, k, rate * share[m]) for scheme, rate in rates.items() for n, k in CLASSES for m in ROWS
        ),
        peak_flop_per_s={"fp32": 222 * GFLOP, "bf16": 880 * GFLOP, "w8": 300 * GFLOP},
        op_launch_s=1e-6,
        linear_launch_s=3e-6,
        disk_write_bytes_per_s=2e9,
    )
    return dataclasses.replace(made, **changes)


def machine(**changes: Any) -> Hardware:
    return hardware_from_profile(profile(**changes))


def ideal_machine(**changes: object) -> Hardware:
    """One rate for every product, one bandwidth, no launch cost: what hand calculations assume."""
    base = machine()
    plain = {
        "matmul": tuple(MatmulPoint(s, 1, 64, 64, 1e12) for s in ("fp32", "bf16", "w8")),
        "peak_flop_per_s": dict.fromkeys(("fp32", "bf16", "w8"), 1e12),
        "read_bandwidth": (BandwidthPoint(2**20, 1e11),),
        "op_launch_s": 0.0,
        "linear_launch_s": 0.0,
    }
    return dataclasses.replace(base, **(plain | changes))  # type: ignore[arg-type]


W0 = 128e6


def native(
    rate: float = 1e12, steps: tuple[NativeStep, ...] = (), prices: tuple[StepPrices, ...] = (), **changes: Any
) -> Hardware:
    """A machine with the native engine's rates: every product at ``rate``, reading at 40 GB/s to 128 MB and 20 beyond 1 GB."""
    points = tuple(MatmulPoint(name, m, 512, 512, rate) for name in NATIVE_PRODUCTS for m in (1, 512))
    base = machine()
    return dataclasses.replace(
        base,
        native=NativeRates(W0, steps, prices),
        matmul=(*base.matmul, *points),
        read_bandwidth=(BandwidthPoint(int(W0), 40e9), BandwidthPoint(10**9, 20e9)),
        **changes,
    )


def small_llama(**changes: object) -> ModelSpec:
    """The demo's kind of model: width 256, 6 layers, 5.9 M parameters."""
    values: dict[str, object] = {
        "family": "llama",
        "vocab_size": 4096,
        "n_layers": 6,
        "d_model": 256,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 64,
        "d_ff": 704,
        "max_positions": 1024,
        "tied_embeddings": True,
    }
    return ModelSpec(**(values | changes))  # type: ignore[arg-type]
