"""Learning-rate schedules as factors of the base rate: a linear warm-up, then constant, linear, cosine, or wsd (a late
decay)."""

from __future__ import annotations

import math

from twostroke.core.errors import ConfigError
from twostroke.core.train_settings import TrainSettings


def warmup_steps(steps: int, warmup_fraction: float) -> int:
    """Steps of linear warm-up: ⌈warmup_fraction · steps⌉, but fewer than ``steps``."""
    return min(math.ceil(warmup_fraction * steps), max(0, steps - 1))


def decay_steps(steps: int, decay_fraction: float, warm: int) -> int:
    """Steps of a late decay: ⌈decay_fraction · steps⌉, but none of the ``warm`` steps, and not the first step."""
    return min(math.ceil(decay_fraction * steps), steps - max(1, warm))


def learning_rate_factor(
    step: int, steps: int, schedule: str, warmup_fraction: float, min_lr_ratio: float, decay_fraction: float = 0.2
) -> float:
    """The factor in (0, 1] of the base learning rate in step ``step`` (counted from 0) of ``steps``.

    Warm-up of w steps: (step + 1) / w. After it, with p = (step − w) / (steps − 1 − w) from 0 to 1 and r = ``min_lr_ratio``:
    cosine r + (1 − r)·(1 + cos πp)/2 (Loshchilov & Hutter 2016, arXiv:1608.03983), linear 1 − (1 − r)·p, constant 1.
    wsd (warm-up, stable, decay): 1 until the last d = ⌈``decay_fraction`` · steps⌉ steps, then r + (1 − r)·(1 − √q) with
    q = 1/d, 2/d, …, 1, which Hägele et al. (2024, arXiv:2405.18392, section 4) found to end lower than a straight line.
    With r = 0 the factor of the last step is 0, and its update changes nothing. Raises ConfigError for an unknown schedule.
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
    if schedule == "wsd":
        length = decay_steps(steps, decay_fraction, warm)
        late = min(1.0, max(0.0, (step + 1 - (steps - length)) / max(1, length)))
        return min_lr_ratio + (1 - min_lr_ratio) * (1 - math.sqrt(late))
    raise ConfigError(f"train.schedule={schedule!r} is not known. Use one of 'cosine', 'linear', 'constant', 'wsd'.")


def scheduled_factor(settings: TrainSettings, step: int, steps: int) -> float:
    """``learning_rate_factor`` of a run of ``steps`` with ``settings``."""
    return learning_rate_factor(
        step, steps, settings.schedule, settings.warmup_fraction, settings.min_lr_ratio, settings.decay_fraction
    )
