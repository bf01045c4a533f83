"""What drafts gave in earlier runs of a model: what a plan of the next one expects of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from twostroke.core.engine_settings import NGRAM, OFF
from twostroke.ledger.store import Ledger
from twostroke.planner.serving.shape import Speculation

DRAFTS_A_STEP, TOKENS_A_STEP = "drafts_per_step", "tokens_per_step"
"""Measured names: drafted tokens, and tokens that were given, of one request in one decode step."""

NEWEST_RUNS = 200
"""Runs of the ledger that are searched, the newest first."""


def draft_values(requests: float, tokens: float, drafted: float, right: float) -> dict[str, float]:
    """What a run measured of drafts, by the ledger's names; empty where it checked none. ``requests`` that decoded, summed over
    decode steps, and ``tokens`` that they were given."""
    if not drafted or not requests:
        return {}
    return {"draft_acceptance": right / drafted, DRAFTS_A_STEP: drafted / requests, TOKENS_A_STEP: tokens / requests}


def drafts_seen(directory: Path | str, speculate: str, ledger: Ledger | None = None) -> Speculation | None:
    """Drafts as the last run of the model in ``directory`` found them with the same ``speculate``; None if none is known."""
    if speculate == OFF:
        return None
    wanted = _named(speculate)
    for run in (ledger or Ledger()).runs(limit=NEWEST_RUNS):
        found: Mapping[str, object] = run.measurement
        drafts, tokens = found.get(DRAFTS_A_STEP), found.get(TOKENS_A_STEP)
        if _named(str(run.inputs.get("speculate", OFF))) != wanted or run.inputs.get("directory") != str(
            Path(directory).resolve()
        ):
            continue
        if isinstance(drafts, int | float) and isinstance(tokens, int | float) and tokens >= 1:
            return Speculation.measured(drafts, tokens)
    return None


def _named(speculate: str) -> str:
    return NGRAM if speculate == "auto" else speculate
