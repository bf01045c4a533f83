"""Which of torch's attention kernels is faster for one token, by the keys it sees: the torch runner asks it at each step."""

from __future__ import annotations

import torch

from twostroke.calibration.timing import Clock
from twostroke.core.crossovers import Crossovers
from twostroke.kernels.attention import explicit_attention, flash_attention

HEADS, HEAD_DIM, LAYERS = 4, 64, 6


@torch.inference_mode()
def _attend_one_s(clock: Clock, keys: int, flash: bool) -> float:
    """Seconds of one layer's attention, in bf16, of one token to the cached keys of its request."""
    pool = torch.randn(LAYERS, 2 * HEADS, keys, HEAD_DIM).to(torch.bfloat16)
    q = torch.randn(HEADS, 1, 1, 1, HEAD_DIM).to(torch.bfloat16)
    kernel = flash_attention if flash else explicit_attention

    def layers() -> None:
        for layer in range(LAYERS):
            k, v = (half[:, None] for half in pool[layer].split(HEADS))
            kernel(q, k, v, None, HEAD_DIM**-0.5)

    return clock.best_s(layers, seconds=0.03, least=4) / LAYERS


def measure_flash_limit(clock: Clock) -> float:
    """``flash_max_scores``: up to so many (request, KV head, key) triples of a bf16 decode the flash kernel is faster."""
    limit = 0.0
    for keys in (32, 64, 128, 256, 512):
        if _attend_one_s(clock, keys, flash=True) > _attend_one_s(clock, keys, flash=False):
            break
        limit = float(HEADS * keys)
    return limit if limit else Crossovers().flash_max_scores / 4
