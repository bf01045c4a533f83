"""What committed benchmark runs say of a claim: the runs, and the readers, are those of ``docs/measured.py``."""

from __future__ import annotations

import re

from claims.claim import Case, Unit
from measured import BENCHMARKS, INFERENCE_RUNS, QUALITY_RUNS, Row, number, tables

SMALL, LARGE = "smollm-135m", "tinyllama-1.1b"
SIZES = {SMALL: "135M", LARGE: "1.1B"}


def _case(what: str, value: float, unit: Unit, run: str, name: str) -> Case:
    return Case(what, what, value, unit, f"[{name}](../benchmarks/{run})")


def _row(rows: list[Row], key: str, value: str) -> Row:
    return next(row for row in rows if row[key] == value)


def _rate(run: str, model: str, engine: str, column: str) -> float:
    """Tokens a second of a cell. Raises ValueError for one that failed."""
    found = number(_row(tables(run)[model], "engine", engine)[column])
    if found is None:
        raise ValueError(f"{run}: {engine} has no {column} of {model}. Take another cell or another run.")
    return found


def speed_ups(model: str, of: str, over: str, column: str, what: str) -> tuple[Case, ...]:
    """Tokens a second of engine ``of`` ÷ those of ``over``, on each processor."""
    return tuple(
        _case(
            f"{SIZES[model]}: {what}, {machine}",
            _rate(run, model, of, column) / _rate(run, model, over, column),
            "x",
            run,
            machine,
        )
        for machine, run in INFERENCE_RUNS.items()
    )


def batching(model: str, batch: int) -> tuple[Case, ...]:
    """Tokens a second of ``batch`` requests ÷ those of one, of our engine in bf16, on each processor."""
    engine, column = "twostroke bf16", f"decode {batch}"
    return tuple(
        _case(
            f"{SIZES[model]}: tokens a second of {batch} requests over one, {machine}",
            _rate(run, model, engine, column) / _rate(run, model, engine, "decode 1"),
            "x",
            run,
            machine,
        )
        for machine, run in INFERENCE_RUNS.items()
    )


def aim(name: str, what: str) -> Case:
    """A percentage of our engine in bf16 beside an aim of the Xeon's run, as a share of one."""
    run = INFERENCE_RUNS["Xeon"]
    found = re.search(
        rf"\| {re.escape(name)} \| bf16 \| ([\d.]+)%", (BENCHMARKS / run / "summary.md").read_text(encoding="utf-8")
    )
    assert found is not None, name
    return _case(f"{SIZES[SMALL]}: {what}", float(found[1]) / 100, "share", run, "Xeon")


def losses(scheme: str, what: str) -> tuple[Case, ...]:
    """Perplexity over bf16's, less one, of each judged model."""
    found = []
    for model, run in QUALITY_RUNS.items():
        ratio = number(_row(next(iter(tables(run).values())), "scheme", scheme)["perplexity ratio (95%)"])
        assert ratio is not None
        found.append(_case(f"perplexity lost by {what}, {model}", ratio - 1, "share", run, "run"))
    return tuple(found)
