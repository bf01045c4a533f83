"""Measures the native engine at several moments of a calibration. The median of the moments is what a run usually finds.

Neighbours on its host slow a rented machine for seconds or minutes. On a 2-core Zen 4, over 100 seconds, steps in cache took
1.05 times their shortest at the median and steps that read 10 MB of weights 1.3 to 2 times. Plans of shortest steps were 19%
too fast at the median of 44 configurations.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from twostroke.calibration.native_rates import (
    NATIVE_WORKING_SET_BYTES,
    measure_native_bandwidth,
    measure_native_passes,
    measure_native_products,
)
from twostroke.calibration.native_steps import measure_native_steps
from twostroke.calibration.serving_steps import Engines, Prompts
from twostroke.calibration.timing import Clock
from twostroke.core.contention import OtherPrograms
from twostroke.core.crossovers import Crossovers
from twostroke.core.profile import BandwidthPoint, MatmulPoint
from twostroke.core.rates import NativePass, NativeRates, NativeStep


class NativeMoments:
    """What was found at the moments so far. ``sizes`` are working sets to read, ``classes`` and ``rows`` those of products.
    With ``crossovers``, which say when an engine takes one thread, it measures whole steps and what plans of small models stand
    on as well. ``take`` measures everything once."""

    def __init__(
        self,
        clock: Clock,
        schemes: Sequence[str],
        sizes: Sequence[int],
        classes: Sequence[tuple[int, int]],
        rows: Sequence[int],
        crossovers: Crossovers | None,
    ) -> None:
        self._clock, self._schemes, self._sizes, self._classes, self._rows = clock, schemes, sizes, classes, rows
        folder = tempfile.mkdtemp(prefix="twostroke-anchors-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._engines = Engines(Path(folder), crossovers) if crossovers is not None else None
        self._prompts = Prompts()
        self._bandwidth: list[list[BandwidthPoint]] = []
        self._products: list[list[MatmulPoint]] = []
        self._passes: list[list[NativePass]] = []
        self._steps: list[list[NativeStep]] = []
        self._used: list[float] = []

    def take(self) -> None:
        others = OtherPrograms()
        self._bandwidth.append(list(measure_native_bandwidth(self._clock, self._sizes)))
        self._products.append(list(measure_native_products(self._clock, self._schemes, self._classes, self._rows)))
        if self._engines is not None:
            self._passes.append(list(measure_native_passes(self._clock, self._schemes)))
            self._steps.append(list(measure_native_steps(self._clock, self._engines, self._prompts)))
        self._used.append(others.used)

    @property
    def others_used(self) -> float:
        """Processors that other programs used meanwhile."""
        return statistics.median(self._used)

    @property
    def bandwidth(self) -> tuple[BandwidthPoint, ...]:
        return usual(self._bandwidth, "bytes_per_s")

    @property
    def products(self) -> tuple[MatmulPoint, ...]:
        return usual(self._products, "flop_per_s")

    @property
    def rates(self) -> NativeRates:
        """Whole steps without prices (``native_steps.with_fitted_prices``), and passes."""
        passes = usual(self._passes, "flop_per_s")
        n_threads = torch.get_num_threads() if passes else 1
        return NativeRates(float(NATIVE_WORKING_SET_BYTES), usual(self._steps, "seconds"), passes=passes, n_threads=n_threads)


Measured = TypeVar("Measured", BandwidthPoint, MatmulPoint, NativePass, NativeStep)


def usual(moments: Iterable[Iterable[Measured]], quantity: str) -> tuple[Measured, ...]:
    """Each of the things that were measured at every moment, in the same order, with the median of ``quantity``."""
    return tuple(
        replace(same[0], **{quantity: statistics.median(getattr(one, quantity) for one in same)})
        for same in zip(*moments, strict=True)
    )
