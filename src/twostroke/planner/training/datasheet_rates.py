"""What training reaches of an accelerator's datasheet: products by type and size, attention, unfused elementwise work, casts.

A calibrated machine has rates of its own; nothing here is read for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.dtypes import bytes_of
from twostroke.core.named import letter
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import (
    ASSUMED_ATTENTION_EFFICIENCY,
    ASSUMED_PRODUCT_EFFICIENCY,
    Hardware,
)
from twostroke.planner.training.layout import Layout
from twostroke.planner.work.component import Work

if TYPE_CHECKING:
    from twostroke.planner.training.shape import TrainingShape

LOW_PRECISION_SHARE = 0.9
"""Of the share of peak that bf16 products sustain, what narrower ones do: 0.65 to 0.73 on H100 (SemiAnalysis, 2024-12)."""

TAIL_OUTPUTS = 3e5
"""Outputs of a product that would take as long as its last, half-filled wave of tiles. Found over Vidur's 14,528 timings of
products of 256 to 4,096 rows: 2e5 on A100 and 4e5 on H100, which leave median errors of 5% and 7%. K depths of 512 to 28,672
showed no term of their own."""


TILE_ROWS = 128
"""Rows of a tile. Each expert's last tile is half empty on average, where a group's products share one kernel."""

GROUPED_SHARE = 0.85
"""Rate of a grouped product of full tiles ÷ of a plain one: experts' operands come from several places, and none is large
(DeepGEMM's README on H800: 1,065 to 1,232 TFLOP/s for contiguous groups, 1,217 to 1,358 for plain products of such widths)."""


@dataclass(frozen=True)
class LowPrecision:
    """How a training type multiplies the blocks' matrices; attention, head and everything elementwise stay in bf16.

    ``peak`` is the device's rate it runs at. ``cast_bytes`` are read and written for each element of an operand before a
    product: its maximum found (2), read (2) and written in the narrow type with its scales.
    """

    peak: str
    cast_bytes: float


LOW_PRECISIONS = {
    "fp8": LowPrecision("fp8", 2 + 2 + 1),  # one scale a tensor (torchao, Transformer Engine's current scaling)
    "mxfp8": LowPrecision("fp8", 2 + 1 + 1 / 32),  # a scale for 32 elements, found while they are cast (OCP MX 1.0)
    "nvfp4": LowPrecision("fp4", 2 + 2 + 0.5 + 1 / 16),  # one for 16 and one a tensor (NVIDIA, arXiv 2509.25149)
}


def peak_type(dtype: str) -> str:
    """The type of the device's peak that products of ``dtype`` run at."""
    low = LOW_PRECISIONS.get(dtype)
    return low.peak if low else dtype


def product_share(hardware: Hardware, dtype: str) -> float:
    """Share of the peak of ``dtype`` that large products sustain, clocks under their power limit included."""
    kind = peak_type(dtype)
    if kind in hardware.sustained:
        return letter("share_π", hardware.sustained[kind])
    share = letter("share_π", hardware.sustained.get("bf16", ASSUMED_PRODUCT_EFFICIENCY))
    return share if kind == dtype else share * LOW_PRECISION_SHARE


def product_s(hardware: Hardware, dtype: str, m: int, n: int, k: int, groups: int = 1) -> float:
    """Seconds of ``groups`` products (m, k) × (k, n) in one kernel: 2·m·n·k·groups FLOP at the sustained share of the peak, and
    the tail of its outputs."""
    rate = product_share(hardware, dtype) * hardware.peak(peak_type(dtype))
    tail = letter("tail", TAIL_OUTPUTS) if hardware.kind == "gpu" else 0.0
    if groups == 1:
        return 2.0 * k * (m * n + tail) / rate
    return 2.0 * k * (groups * (m + TILE_ROWS / 2) * n + tail) / (rate * GROUPED_SHARE)


def cast_s(hardware: Hardware, dtype: str, elements: float) -> float:
    """Seconds to cast ``elements`` of operands; 0 in types that multiply what they hold."""
    low = LOW_PRECISIONS.get(dtype)
    return low.cast_bytes * elements / hardware.bandwidth(elements) if low else 0.0


def attention_rate(hardware: Hardware, dtype: str) -> float:
    """FLOP/s of flash attention over the causal half of the keys."""
    return letter("share_attention", hardware.sustained.get("attention", ASSUMED_ATTENTION_EFFICIENCY)) * hardware.peak(dtype)


EAGER_PASSES = {
    # component: (forward, backward) elements read and written by single operators for one of fused work
    "norms": (42 / 9, 86 / 14),
    "attention": (10 / 2, 10 / 2),
    "mlp": (5 / 3, 9 / 6),
}
"""Elements that eager torch moves for each that fused kernels move (``elementwise_elements``), in 16 bits.

RMSNorm by single operators: cast up, square, mean, scale, cast down, weight: 36 bytes an element, 18 in 16-bit elements, where
a fused one reads and writes 2; two norms and two residual sums of 3 make 42 for 9. Backward twice the norms and their sums.
Rotation in fp32: cast, multiply, cast back 20 bytes for 4. Gated activation: two operators of 2 and 3 for 3, backward 9 for 6.
"""


ROUTING_MOVES = {False: 3.5, True: 7.5}
"""Times that rows of width E are read or written for each of a token's experts, by whether experts are on several devices:
gathered by expert (2), scattered back and summed (1.5), sorted by expert after the all-to-all and back before the next (4)."""

ROUTING_LAUNCHES = 60
"""Small operations of a layer that routes, forward: scores, top-k, counts, offsets, sorting, two permutations; backward twice
(Megatron-LM's router and token dispatcher, counted by hand)."""


def routing_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout, backward: bool) -> Work:
    """Rows taken to the experts of one layer and back."""
    assert spec.moe is not None
    rows = shape.tokens_per_pass * spec.moe.top_k / layout.sequence_cut
    moved = ROUTING_MOVES[layout.expert > 1] * rows * spec.d_model * bytes_of(shape.compute_dtype)
    launch_s = ROUTING_LAUNCHES * (2 if backward else 1) * hardware.op_launch_s
    work = Work.limited("mlp", 0.0, moved, 0.0, moved / hardware.bandwidth(moved), launch_s)
    return work.called("routing", "one layer: rows gathered by expert, sorted, scattered back")
