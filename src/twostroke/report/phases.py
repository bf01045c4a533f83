"""Rebuilds the table of training, prefill and decode from finished runs in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.recipe import recipe_from_dict
from twostroke.core.spec import ModelSpec
from twostroke.ledger.scoring import number_of
from twostroke.ledger.store import Run
from twostroke.planner.choosing.comparison import COLUMNS, Cell, Comparison, compare, merge_measured
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.drawn import mean_length
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.text.format import format_quantity
from twostroke.planner.training.shape import TrainingShape
from twostroke.report.cards import Table

SHOWN_SECTIONS = ("rate", "passes", "memory")
"""Sections of the comparison that the page shows; the others are folded."""

TITLES = {"train": "training", "prefill": "prefill", "decode": "decode"}


def training_shape_of(train: Run) -> tuple[ModelSpec, TrainingShape]:
    """Model and shape of a training run, from its inputs. Raises CorruptFileError if they are not those of a training run."""
    try:
        spec = ModelSpec.from_dict(train.inputs["spec"])
        return spec, TrainingShape.from_recipe(recipe_from_dict(train.inputs["recipe"]), train.inputs["steps"])
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CorruptFileError(f"run {train.run_id} cannot be planned again: {error!r} in its inputs.") from None


def serving_shape_of(bench: Run) -> ServingShape:
    """Shape of a load run, over HTTP or offline, from its inputs. Raises CorruptFileError if they are not those of such a
    run."""
    try:
        inputs = bench.inputs
        prompt, output = (_mean(inputs[name]) for name in ("prompt_tokens", "output_tokens"))
        users = number_of(bench.prediction.get("concurrency")) or inputs.get("users") or inputs.get("batch") or 1
        return ServingShape(
            scheme=inputs["scheme"] or "bf16", batch=max(1, round(users)), prompt_tokens=prompt, output_tokens=output,
            in_int8=tuple(inputs.get("in_int8", ())), in_bf16=tuple(inputs.get("in_bf16", ())),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CorruptFileError(f"run {bench.run_id} cannot be planned again: {error!r} in its inputs.") from None


def _mean(length: Sequence[int] | str | int) -> int:
    """The mean of a load's lengths."""
    return round(mean_length(length))


def compare_runs(train: Run, bench: Run, others: Sequence[Run], hardware: Hardware, served_on: Hardware) -> Comparison:
    """The table for the model of run ``train``, served as in the load run ``bench``, measured values beside the predictions;
    ``others`` add what they measured of serving. Trained on ``hardware``, served on ``served_on``.

    Raises CorruptFileError if a run's inputs are not what its kind records."""
    spec, shape = training_shape_of(train)
    served: dict[str, Any] = {}
    for run in (*others, bench):
        served |= run.measurement
    table = compare(spec, shape, serving_shape_of(bench), hardware, spec.family, served_on=served_on)
    return merge_measured(table, train.measurement, served)


def phases_table(comparison: Comparison) -> Table:
    """The rows as text cells for the page, each value with its kind (measured, predicted, …)."""

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
    sections: dict[str, list[list[str]]] = {}
    for row in comparison.rows:
        cells = [row.label, *(part for c in COLUMNS for part in text(row.cells.get(c)))]
        sections.setdefault(row.section, [[row.section]]).append(cells)
    shown = [row for name in SHOWN_SECTIONS for row in sections.get(name, ())]
    folded = [row for name, rows in sections.items() if name not in SHOWN_SECTIONS for row in rows]
    return Table("Training beside inference", columns, shown, "; ".join(comparison.assumptions) + ".", folded)
