"""What earlier runs measured of a model held in fewer bits: which types keep to ``policy.MAX_KL_NATS``.

Plain weights are rounded to their nearest codes where the engine is asked for another type, so of a survey only such rows
count. Of a type of cache a comparison of the model with itself says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from twostroke.core.policy import MAX_KL_NATS
from twostroke.core.schemes import ASKED, CACHE_TYPES
from twostroke.ledger.scoring import number_of
from twostroke.ledger.store import Ledger, Run

NEAREST = ("", "nearest")
"""Roundings of a survey's rows that are the engine's own: of channels there is one, which has no name."""

NEWEST_RUNS = 500
"""Runs of the ledger that are searched, the newest first."""


class Surveyed(Protocol):
    """A row of a survey."""

    @property
    def scheme(self) -> str: ...
    @property
    def rounding(self) -> str: ...
    @property
    def n_int8_matrices(self) -> int: ...
    @property
    def kl_nats(self) -> float | None: ...


class Quality(NamedTuple):
    """Types of weights, and of the cache, with the KL in nats a token that was measured of each; empty: none was."""

    weights: Mapping[str, float]
    cache: Mapping[str, float]

    def passing(self, kind: str) -> tuple[str, ...]:
        """Types of ``kind`` ("weights" or "cache") that keep to the limit, in the order of their tables."""
        found: Mapping[str, float] = getattr(self, kind)
        table = ASKED if kind == "weights" else CACHE_TYPES
        return tuple(name for name in table if found.get(name, math.inf) <= MAX_KL_NATS)


def survey_values(rows: Iterable[Surveyed]) -> dict[str, float]:
    """What the ledger keeps of a survey: the KL of every type that the engine makes of plain weights."""
    return {
        f"{row.scheme}_kl_nats": row.kl_nats
        for row in rows
        if row.kl_nats is not None and row.rounding in NEAREST and not row.n_int8_matrices
    }


def quality_seen(directory: Path, ledger: Ledger | None = None) -> Quality:
    """What the newest survey of the model in ``directory``, and its comparisons with itself, measured."""
    wanted, weights, cache = str(directory.resolve()), dict[str, float](), dict[str, float]()
    surveyed = False
    for run in (ledger or Ledger()).runs(limit=NEWEST_RUNS):
        if run.inputs.get("model") != wanted:
            continue
        if run.kind == "quantize" and run.inputs.get("survey") and not surveyed:
            weights, surveyed = _kl_by_type(run), True
        if run.kind == "evaluate" and run.inputs.get("beside") == wanted:
            ratio, name = number_of(run.measurement.get("perplexity_ratio")), run.inputs.get("kv_dtype")
            if ratio is not None and ratio > 0 and name in CACHE_TYPES and name not in cache:
                cache[name] = math.log(ratio)
    return Quality(weights, cache)


def _kl_by_type(run: Run) -> dict[str, float]:
    values: dict[str, Any] = run.measurement
    found = {name: number_of(values.get(f"{name}_kl_nats")) for name in ASKED}
    return {name: value for name, value in found.items() if value is not None}
