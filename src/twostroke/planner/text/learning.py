"""``twostroke ledger fit`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.ledger.text import align
from twostroke.planner.truth.learning import Fit, Judged, Total

LEGEND = """\
factor: on the planned time. error: exp(median |ln(measured / predicted)|) − 1 of the newest 30% of the runs (held out), before:
as calibration plans them, after: with a factor of the older 70%. What is stored is fitted to all of them."""


def fits_text(fits: Sequence[Fit], stored: Sequence[str]) -> str:
    """Tables of every profile, what was left out, and where the corrections are (``stored``, a line each)."""
    lines = []
    for fit in fits:
        lines += [f"{fit.profile.device}, calibrated {fit.profile.measured_at}", *_tables(fit), *_left_out(fit), ""]
    return "\n".join([*lines, LEGEND, *stored])


def _tables(fit: Fit) -> list[str]:
    rows = [["quantity", "runs", "configurations", "held out", "factor", "error before", "after", ""]]
    rows += [_row(one) for one in fit.quantities if one.n_runs]
    totals = [["with all that are adopted", "held out", "error before", "after"], *map(_total, fit.totals)]
    tables = [align(rows, right=(1, 2, 3, 4, 5, 6))] if len(rows) > 1 else []
    return [*tables, *(["", align(totals, right=(1, 2, 3))] if len(totals) > 1 else [])]


def _row(one: Judged) -> list[str]:
    counts = [str(one.n_runs), str(one.n_configurations), str(one.n_held_out)]
    if one.factor is None or one.before_percent is None or one.after_percent is None:
        return [one.quantity, *counts, "–", "–", "–", one.why]
    errors = [f"{one.before_percent:.1f}%", f"{one.after_percent:.1f}%"]
    return [one.quantity, *counts, f"{one.factor:.3f}", *errors, "adopted" if one.is_adopted else f"not adopted: {one.why}"]


def _total(total: Total) -> list[str]:
    return [total.name, str(total.n_held_out), f"{total.before_percent:.1f}%", f"{total.after_percent:.1f}%"]


def _left_out(fit: Fit) -> list[str]:
    reasons = ", ".join(f"{n} {why}" for why, n in fit.left_out.items())
    return [f"runs that do not count: {reasons}"] if reasons else []
