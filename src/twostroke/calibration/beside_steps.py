"""What surrounds steps, by profile section: preparing text, handling weights, choosing tokens, first uses, HTTP."""

from __future__ import annotations

from typing import Any

from twostroke.calibration.first_uses import measure_first_uses
from twostroke.calibration.http_rates import measure_http
from twostroke.calibration.sampling_rates import measure_sampling
from twostroke.calibration.text_rates import SAMPLE_BYTES, measure_text
from twostroke.calibration.timing import Clock
from twostroke.calibration.weight_rates import SIDE, measure_weights


def measure_beside_steps(clock: Clock, serves: bool, starts_processes: bool) -> dict[str, Any]:
    """Sections of ``MachineProfile``; sampling if the inference engine ``serves`` here, and if it ``starts_processes`` what
    their first answers take and what HTTP adds."""
    return {
        "text": measure_text(round(min(1.0, clock.effort) * SAMPLE_BYTES)),
        "weights": measure_weights(clock, SIDE if clock.effort >= 1 else SIDE // 4),
        "sampling": tuple(measure_sampling(clock)) if serves else (),
        "first_uses": measure_first_uses() if starts_processes else None,
        "http": measure_http(clock) if starts_processes else None,
    }
