"""Rates and counts that both phases share: flash attention, and the elementwise work between the products of a block."""

from __future__ import annotations

from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware import ASSUMED_ATTENTION_EFFICIENCY, Hardware, interpolate_log


def attention_rate(hardware: Hardware, dtype: str, direction: str, sequence_length: int) -> float:
    """FLOP/s of flash attention counted over the whole T×T square (2 products forward, 5 backward), which a CPU kernel
    walks: measured at a few lengths and interpolated in log T; datasheets get an assumed share of peak, for the causal half."""
    prefix, suffix = f"sdpa_{dtype}_{direction}_t", "_flop_per_s"
    points = [
        (float(name[len(prefix) : -len(suffix)]), rate)
        for name, rate in hardware.extras.items()
        if name.startswith(prefix) and name.endswith(suffix)
    ]
    if points:
        return interpolate_log(points, sequence_length)
    return 2 * ASSUMED_ATTENTION_EFFICIENCY * hardware.peak(dtype)


def elementwise_elements(spec: ModelSpec, backward: bool) -> dict[str, float]:
    """Elements read and written per token and block by fused elementwise work, by component.

    Forward: norms and residual sums 9E (first norm 2E; sum and second norm 4E; sum 3E), rotary turn 2(H+K)D, activation 3F
    gated or 2F plain. Backward: norms and sums 14E (each norm reads its input, its gradient and the residual's and writes one:
    4E twice; two recomputed normed inputs 2E each; the output's gradient twice), rotary turn 2(H+K)D and the gathering of
    dq, dk, dv 2(H+2K)D, activation 6F gated (reads 2F + F, writes 2F and the recomputed product F) or 3F plain.
    """
    width, heads = spec.d_model, (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    turn = 2 * heads if spec.positions == "rope" else 0
    gated = spec.mlp == "swiglu"
    if backward:
        return {"norms": 14 * width, "attention": turn + 2 * spec.qkv_rows, "mlp": (6 if gated else 3) * spec.d_ff}
    return {"norms": 9 * width, "attention": turn, "mlp": (3 if gated else 2) * spec.d_ff}


def elementwise_flops(spec: ModelSpec, backward: bool) -> dict[str, float]:
    """FLOP per token and block of the same work, by component, for its arithmetic intensity: 4 per element normed and 1 per
    residual sum (10E), 3 per element turned, 5 per activation (an exponential counted as 1); backward twice that. Model FLOP
    (``flops.py``) exclude all of it."""
    heads = (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    times = 2 if backward else 1
    return {
        "norms": times * 10 * spec.d_model,
        "attention": times * 3 * heads if spec.positions == "rope" else 0.0,
        "mlp": times * 5 * spec.d_ff,
    }
