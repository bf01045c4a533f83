"""The table of training beside prefill beside decode, rebuilt from what the ledger holds of finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.core.errors import CorruptFileError
from twostroke.core.recipe import recipe_from_dict
from twostroke.core.spec import ModelSpec
from twostroke.ledger.scoring import number_of
from twostroke.ledger.store import Run
from twostroke.planner.comparison import COLUMNS, Cell, Comparison, compare, merge_measured
from twostroke.planner.hardware import Hardware
from twostroke.planner.serving import ServingShape
from twostroke.planner.text.format import format_quantity
from twostroke.planner.training import TrainingShape
from twostroke.report.page import Table

TITLES = {"train": "training", "prefill": "prefill", "decode": "decode"}


def spec_from_ledger(values: Mapping[str, Any]) -> ModelSpec:
    """A specification as a run's inputs hold it: a dataclass turned to a dictionary, tuples to lists."""
    return ModelSpec.from_dict(values)


def compare_runs(train: Run, bench: Run, others: Sequence[Run], hardware: Hardware) -> Comparison:
    """The table for the model of run ``train``, served as in the load run ``bench``, measured values beside the predictions;
    ``others`` add what they measured of serving. Raises CorruptFileError where a run's inputs are not what its kind records."""
    try:
        spec = spec_from_ledger(train.inputs["spec"])
        shape = TrainingShape.from_settings(recipe_from_dict(train.inputs["recipe"]).train, train.inputs["steps"])
        prompt, output = (round(sum(bench.inputs[name]) / 2) for name in ("prompt_tokens", "output_tokens"))
        batch = max(1, round(number_of(bench.prediction.get("concurrency")) or bench.inputs["users"] or 1))
        serving = ServingShape(scheme=bench.inputs["scheme"] or "bf16", batch=batch, prompt_tokens=prompt, output_tokens=output)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"runs {train.run_id} and {bench.run_id} cannot be compared: {error!r} in their inputs."
        ) from None
    served: dict[str, Any] = {}
    for run in (*others, bench):
        served |= run.measurement
    return merge_measured(compare(spec, shape, serving, hardware, spec.family), train.measurement, served)


def phases_table(comparison: Comparison) -> Table:
    """The same rows as text cells for the page, each value with its mark."""

    def text(cell: Cell | None) -> tuple[str, str]:
        if cell is None:
            return "–", ""
        shown = format_quantity(cell.value, cell.unit)
        if cell.kind in ("datasheet", "assumed"):
            shown += f" ({cell.kind})"
        if cell.note:
            shown += f", {cell.note}"
        return shown, "" if cell.measured is None else format_quantity(cell.measured, cell.unit)

    columns = ["", *(f"{TITLES[c]}, {mark}" for c in COLUMNS for mark in ("predicted", "measured"))]
    rows: list[list[str]] = []
    section = None
    for row in comparison.rows:
        if row.section != section:
            section = row.section
            rows.append([section])
        rows.append([row.label, *(part for c in COLUMNS for part in text(row.cells.get(c)))])
    return Table("Training beside inference", columns, rows, " ".join(comparison.assumptions))
