"""Chooses the source of each window, so that any number of windows holds the sources in the wanted shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import InputError


class Mixture:
    """Mixes sources in the shares of ``weights``. The state is the number of windows that each source has given.

    Tijdeman's rule (The chairman assignment problem, Discrete Mathematics 32, 1980) takes, among the sources that are behind
    their share, the one whose next window is due first. After any N windows, source i of n has given N·wᵢ of them up to 1 −
    1/(2n − 2), less than one window, which is the best possible bound. The arithmetic is in whole numbers, so it is equal on
    every machine and does not drift. Proved for any weights by tests/data/test_mixture.py.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth, not the nearest binary number
        whole = math.lcm(*(share.denominator for share in shares))
        counts = [int(share * whole) for share in shares]
        divisor = math.gcd(*counts)
        self._weights = [count // divisor for count in counts]
        self._sum = sum(self._weights)
        multiple = math.lcm(*self._weights)
        self._per_weight = [multiple // weight for weight in self._weights]
        self.given = [0] * len(weights)

    @property
    def shares(self) -> list[float]:
        return [weight / self._sum for weight in self._weights]

    def take(self, n: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Advance by ``n`` windows: (source of each, number of windows that this source gave before)."""
        sources, places = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
        weights, total, given = self._weights, self._sum, self.given
        several = range(len(weights))
        d = max(1, 2 * len(weights) - 2)
        step = sum(given)
        behind = [d * (weight * step - total * count) for weight, count in zip(weights, given, strict=True)]
        growth = [d * weight for weight in weights]
        slack = total * (d - 1)
        for place in range(n):
            best, due = -1, 0
            for i in several:
                behind[i] += growth[i]
                if behind[i] >= total:
                    when = (slack - behind[i]) * self._per_weight[i]
                    if best < 0 or when < due:
                        best, due = i, when
            sources[place], places[place] = best, given[best]
            given[best] += 1
            behind[best] -= d * total
        return sources, places

    def state(self) -> dict[str, int]:
        return {f"source_{i}": count for i, count in enumerate(self.given)}

    def restore(self, state: dict[str, int], n_windows: int) -> None:
        """Continue after ``n_windows``. Raises InputError if these weights cannot have given the counts in ``state``."""
        given = [state.get(f"source_{i}") for i in range(len(self.given))]
        counts = [count for count in given if isinstance(count, int) and not isinstance(count, bool) and count >= 0]
        n_off = sum(
            abs(weight * n_windows - self._sum * count) >= self._sum
            for weight, count in zip(self._weights, counts, strict=False)
        )
        if len(counts) != len(given) or sum(counts) != n_windows or n_off:
            raise InputError(
                f"loader state has {given} windows of the sources, which are not those of {n_windows} windows by the recipe's "
                "data.weights. Resume with the same recipe."
            )
        self.given = counts
