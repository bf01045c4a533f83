"""Learning-rate schedules: a linear warm-up, then cosine, linear or constant, as a factor of the base rate."""

from __future__ import annotations

import math

from twostroke.core.errors import ConfigError


def warmup_steps(steps: int, warmup_fraction: float) -> int:
    """Steps of linear warm-up: ⌈warmup_fraction · steps⌉, and never the whole run."""
    return min(math.ceil(warmup_fraction * steps), max(0, steps - 1))


def learning_rate_factor(step: int, steps: int, schedule: str, warmup_fraction: float, min_lr_ratio: float) -> float:
    """What the base learning rate is multiplied by in step ``step``, counted from 0, of ``steps``; in (0, 1].

    Warm-up of w steps: (step + 1) / w. After it, with p = (step − w) / (steps − 1 − w) from 0 to 1 and r = ``min_lr_ratio``:
    cosine r + (1 − r)·(1 + cos πp)/2 (Loshchilov & Hutter 2016, arXiv:1608.03983), linear 1 − (1 − r)·p, constant 1.
    A factor of 0 (r = 0 in the last step) is an update that changes nothing. Raises ConfigError for an unknown schedule.
    """
    warm = warmup_steps(steps, warmup_fraction)
    if step < warm:
        return (step + 1) / warm
    progress = min(1.0, (step - warm) / max(1, steps - 1 - warm))
    if schedule == "cosine":
        return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return 1 - (1 - min_lr_ratio) * progress
    if schedule == "constant":
        return 1.0
    raise ConfigError(f"train.schedule={schedule!r} is not known. Use one of 'cosine', 'linear', 'constant'.")
