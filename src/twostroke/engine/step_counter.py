"""``StepCounter``: what steps read and computed, added up by their kind."""

from __future__ import annotations

from twostroke.engine.early_exit import EarlyExits
from twostroke.engine.expert_load import ExpertLoad
from twostroke.engine.meters import EngineStats, StepMeter
from twostroke.scheduling.step import ScheduledStep


class StepCounter:
    """Counts in ``stats``. ``expert_bytes`` is what one expert's matrices take."""

    def __init__(self, meter: StepMeter, expert_bytes: int, n_pages: int) -> None:
        self.stats = EngineStats(pages_total=n_pages)
        self._meter, self._expert_bytes = meter, expert_bytes

    def count(
        self,
        step: ScheduledStep,
        n_output: int,
        n_sampled: int,
        n_wrong: int,
        n_failed: int,
        seconds: float,
        experts: ExpertLoad | None,
        exits: EarlyExits | None,
    ) -> None:
        """Count ``step``, of which ``n_wrong`` rows were wrong drafts and ``n_failed`` requests had no finite output."""
        counts = self.stats
        counts.output_tokens += n_output
        n_right = step.n_tokens - n_wrong
        counts.failed_requests += n_failed
        n_bytes = self._meter.bytes_read(step.starts, step.counts)
        if experts is not None:
            n_bytes += experts.more_than_one_row() * self._expert_bytes
        flop = self._meter.flop(step.starts, step.counts, n_sampled)
        if exits is not None and exits.read_share != 1.0:
            # Weights count as a row of the step read them on average, and products go with weights.
            n_bytes += round((exits.read_share - 1.0) * self._meter.weights_bytes)
            flop = round(flop * exits.read_share)
        if step.n_decodes == len(step.requests):
            counts.decode_steps += 1
            counts.decode_s += seconds
            counts.decode_tokens += n_right
            counts.decode_requests += step.n_decodes
            counts.decode_bytes += n_bytes
            counts.decode_flop += flop
        elif step.n_decodes == 0:
            counts.prefill_steps += 1
            counts.prefill_s += seconds
            counts.prefill_tokens += step.n_tokens
            counts.prefill_bytes += n_bytes
            counts.prefill_flop += flop
        else:
            counts.mixed_steps += 1
            counts.mixed_s += seconds
            counts.mixed_tokens += n_right
            counts.mixed_bytes += n_bytes
            counts.mixed_flop += flop
