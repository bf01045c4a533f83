"""Reads a run's directory and ledger entry as they grow, and makes the numbers of the live page."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from twostroke.core.errors import TwostrokeError
from twostroke.core.units import format_count, format_seconds
from twostroke.ledger.scoring import Row, compare, error_percent, interval_of, number_of
from twostroke.ledger.store import Ledger, Run
from twostroke.ledger.text import format_error, format_inside, format_interval, format_value
from twostroke.report.growing_files import GrowingRecords, NewestRecords, read_object, stamp
from twostroke.report.thinned_series import ThinnedSeries
from twostroke.training.measurement import OVER_RANKS, PEAKS, StepRecord

COLUMNS = (
    "step", "loss", "grad_norm", "learning_rate", "tok_per_s", "mfu", "memory_bytes", "peak_memory_bytes", "step_time_s",
    "forward_s", "backward_s", "optimizer_s", "data_s", "data_wait_share", "elapsed_s", "sent_bytes", *PEAKS, *OVER_RANKS,
)  # fmt: skip
"""The numbers of a log line that the page draws over the steps."""

_NOT_SCORES = frozenset(
    {*(field.name for field in fields(StepRecord)), "data_wait_share", "straggler_ratio", *PEAKS, *OVER_RANKS}
)
"""What a step measures of itself. Other numbers of a line are scores of held-out text."""

_NOT_MEASURED = ("step", "loss", "grad_norm", "learning_rate", "elapsed_s", "memory_bytes", "sent_bytes", *PEAKS)

MOST_POINTS = 2000
MOST_STRIP_POINTS = 300
ACTIONS = {"skip": "skipped", "rollback": "rolled back", "stop": "stopped"}
"""The action that was taken on an anomaly, by the policy's name."""

MOST_EVENTS, MOST_SAMPLES = 100, 200
SAMPLED_STEPS_SHOWN = 8
LEDGER_EVERY_S = 3.0
QUIET_AFTER_S = 60.0
"""A log that has not grown for so long, and for the time of 20 steps, is shown as quiet, because the run may have been
killed."""

FIRST_STEP_AFTER_S = 1200.0
"""A run without a step for so long is shown as quiet: compiling a large model takes minutes."""

PREDICTED_FIRST = ("train_time_s", "step_time_s", "train_tok_per_s", "mfu", "peak_memory_bytes")


class RunReader:
    """Reads one run's directory repeatedly, each time only what is new.

    A reader is not thread-safe; the server holds a lock while it reads.
    """

    def __init__(self, directory: Path, ledger: Ledger | None = None) -> None:
        self.directory, self._ledger = directory, ledger or Ledger()
        self._recipe: dict[str, Any] = {}
        self._recipe_stamp = ""
        self._run: Run | None = None
        self._ledger_read = -math.inf
        self._log = GrowingRecords(directory / "log.jsonl")
        self._samples = NewestRecords(directory / "samples.jsonl", MOST_SAMPLES)
        self._anomalies = NewestRecords(directory / "anomalies.jsonl", MOST_EVENTS)
        self._readings = 0
        self._forget()

    def _forget(self) -> None:
        self._readings += 1
        self._points = ThinnedSeries(len(COLUMNS), MOST_POINTS)
        self._steady = ThinnedSeries(len(COLUMNS), MOST_POINTS)
        self._strips: dict[str, tuple[list[str], ThinnedSeries]] = {}
        self._scores: dict[str, ThinnedSeries] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._recent: deque[tuple[float, float]] = deque(maxlen=200)  # (step, elapsed_s)
        self._last: dict[str, Any] = {}

    # -- reading ---------------------------------------------------------------------------------------------------------

    @property
    def more(self) -> bool:
        """Whether the log holds lines that the last ``refresh`` has not read."""
        return self._log.more

    def refresh(self) -> None:
        """Read what was written since the last call. A long log is read in several calls."""
        mark = stamp(self.directory / "recipe.json")
        if mark != self._recipe_stamp:
            self._recipe, self._recipe_stamp, self._run = read_object(self.directory / "recipe.json"), mark, None
        is_new_file, records = self._log.fresh()
        if is_new_file:
            self._forget()
        for record in records:
            if isinstance(record.get("step"), int):
                self._take(record)
        self._samples.refresh()
        self._anomalies.refresh()
        if self._recipe and time.monotonic() - self._ledger_read > LEDGER_EVERY_S:
            self._ledger_read = time.monotonic()
            self._read_ledger()

    def _take(self, line: dict[str, Any]) -> None:
        self._last = line
        row = [_number(line.get(name)) for name in COLUMNS]
        self._points.add(row)
        if not line.get("warm_up") and not line.get("skipped"):
            self._steady.add(row)
        elapsed = _number(line.get("elapsed_s"))
        if elapsed and not line.get("warm_up"):
            self._recent.append((float(line["step"]), elapsed))
        for name, parts, values in _strips_of(line):
            self._add_strip(name, line["step"], parts, values)
        for name, value in line.items():
            if isinstance(value, str):
                self._events.append({"step": line["step"], "kind": name, "text": value})
            elif name not in _NOT_SCORES and _number(value) is not None:
                self._scores.setdefault(name, ThinnedSeries(2, MOST_STRIP_POINTS)).add([line["step"], _number(value)])

    def _add_strip(self, name: str, step: int, parts: list[str], values: list[float | None]) -> None:
        known = self._strips.get(name)
        if known is None or known[0] != parts:
            known = self._strips[name] = (parts, ThinnedSeries(1 + len(parts), MOST_STRIP_POINTS))
        known[1].add([float(step), *values])

    def expect_news(self) -> None:
        """Read the ledger at the next refresh even if it was read a moment ago, because the run has ended."""
        self._ledger_read = -math.inf

    def _read_ledger(self) -> None:
        run_id = self._resolved.get("run_id")
        try:
            self._run = self._ledger.get(str(run_id)) if run_id else None
        except (TwostrokeError, OSError):
            self._run = None  # the ledger is missing or another one, so the page shows no predictions

    # -- telling ---------------------------------------------------------------------------------------------------------

    @property
    def _resolved(self) -> dict[str, Any]:
        found = self._recipe.get("resolved")
        return found if isinstance(found, dict) else {}

    @property
    def generation(self) -> str:
        """A name that changes when points that were sent earlier are not valid any more."""
        return f"{self._readings}-{self._points.bucket}"

    def state(self, known: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Everything that a page shows, without what it already has.

        ``known`` says what it has: "generation" and "have" for points of the curves, "strip" for the values by part that it
        shows, with "strip_generation" and "strip_have", and "samples" for the mark of its samples. The last point is sent
        again, because it may have changed.
        """
        known = known or {}
        first = _first_to_send(known.get("generation"), known.get("have"), self.generation, len(self._points))
        measured = self._measured()
        status, sentence = self._status(measured)
        document: dict[str, Any] = {
            "generation": self.generation,
            "first": first,
            "points": {name: _compact(self._points.column(i, first), name) for i, name in enumerate(COLUMNS)},
            "bucket": self._points.bucket,
            "more": self.more,
            "status": status,
            "sentence": sentence,
            "run": self._about(),
            "last": {name: _number(self._last.get(name)) for name in (*COLUMNS, "tokens", "epoch")},
            "age_s": self._age_s(),
            "eta_s": self._eta_s() if status in ("running", "quiet") else None,
            "predicted": self._predicted(),
            "table": [_cells(row) for row in self._rows(status, measured)],
            "strips": list(self._strips),
            "strip": self._strip(known),
            "scores": {name: [series.column(0), _compact(series.column(1))] for name, series in self._scores.items()},
            "events": self._all_events(),
            "checkpoints": self._checkpoints(),
            "samples_mark": self._samples.mark,
        }
        if known.get("samples") != self._samples.mark:
            steps = sorted({_number(s.get("step")) or 0.0 for s in self._samples.records})[-SAMPLED_STEPS_SHOWN:]
            document["samples"] = [s for s in self._samples.records if (_number(s.get("step")) or 0.0) in steps]
        return document

    def _all_events(self) -> list[dict[str, Any]]:
        """Anomalies and other messages of the log, by step. Anomalies of steps that were repeated later are included."""
        anomalies = [
            {"step": a["step"], "kind": ACTIONS.get(str(a.get("action")), "skipped"), "text": _anomaly_text(a)}
            for a in self._anomalies.records
            if isinstance(a.get("step"), int)
        ]
        told = {a["step"] for a in anomalies}
        return sorted([*anomalies, *(e for e in self._events if e["step"] not in told)], key=lambda event: event["step"])

    def _strip(self, known: Mapping[str, str]) -> dict[str, Any] | None:
        name = known.get("strip") or next(iter(self._strips), "")
        if name not in self._strips:
            return None
        parts, series = self._strips[name]
        generation = f"{name}-{self._readings}-{series.bucket}-{len(parts)}"
        first = _first_to_send(known.get("strip_generation"), known.get("strip_have"), generation, len(series))
        rows = [_compact(series.column(i + 1, first)) for i in range(len(parts))]
        return {
            "name": name,
            "generation": generation,
            "first": first,
            "parts": parts,
            "steps": series.column(0, first),
            "rows": rows,
        }

    def _about(self) -> dict[str, Any]:
        settings, resolved = self._recipe.get("train", {}), self._resolved
        spec = resolved.get("spec", {})
        words = [self._recipe.get("method")]
        if spec:
            words.append(f"{spec.get('family')} {spec.get('n_layers')} × {spec.get('d_model')}")
        dtype, computed = settings.get("dtype"), resolved.get("dtype")
        dtype = f"{dtype} computed in {computed}" if computed and computed != dtype else dtype
        words += [settings.get("optimizer"), dtype, settings.get("schedule")]
        if settings:
            sizes = (settings.get(name, 1) for name in ("batch_size", "sequence_length", "grad_accumulation"))
            words.append(f"{format_count(math.prod(sizes))} tokens a step")
        words.append(resolved.get("device"))
        return {
            "directory": str(self.directory),
            "name": self.directory.resolve().name,
            "steps": resolved.get("steps"),
            "words": [str(word) for word in words if word],
        }

    def _logged_at(self) -> float | None:
        return _modified_at(self.directory / "log.jsonl") or None

    def _age_s(self) -> float | None:
        logged_at = self._logged_at()
        return None if logged_at is None else max(0.0, time.time() - logged_at)

    def _status(self, measured: Mapping[str, float]) -> tuple[str, str]:
        if not self._recipe:
            return "starting", "Data is being prepared, or the run has not begun."
        if (self.directory / "summary.json").is_file():
            return "finished", "The run is finished."
        age, logged_at = self._age_s(), self._logged_at() or 0.0
        row = self._run.measurements[-1] if self._run is not None and self._run.measurements else None
        if row is not None and row.status in ("interrupted", "failed"):
            ended = datetime.fromisoformat(row.measured_at).timestamp()
            if ended >= logged_at - 1.0:  # later than the newest line, so no session has begun since
                return row.status, row.notes or f"The run was {row.status}."
        if not len(self._points):
            waited_s = time.time() - _modified_at(self.directory / "recipe.json")
            if waited_s > FIRST_STEP_AFTER_S:
                waited = format_seconds(round(waited_s))
                return "quiet", f"No step has been logged in the {waited} since the run began: it may have been stopped."
            return "starting", "Waiting for the first step: the model is being made or compiled."
        if age is not None and age > max(QUIET_AFTER_S, 20 * measured.get("step_time_s", 0.0)):
            return "quiet", "No step has been logged for a while: the run may be stopped, saving or scoring."
        return "running", ""

    def _eta_s(self) -> float | None:
        steps, step = self._resolved.get("steps"), self._last.get("step")
        if not isinstance(steps, int) or not isinstance(step, int):
            return None
        if len(self._recent) >= 5 and self._recent[-1][0] > self._recent[0][0]:
            (s0, t0), (s1, t1) = self._recent[0], self._recent[-1]
            return max(0.0, (t1 - t0) / (s1 - s0) * (steps - step))
        step_time = _number(self._last.get("step_time_s"))
        if step_time is None or self._last.get("warm_up"):  # a step that compiled takes longer than the others
            return None
        return step_time * (steps - step)

    def _measured(self) -> dict[str, float]:
        """Measurements so far under the prediction's names: medians of steps after the warm-up, and the expected total time.
        What ranks send is left to the ledger, because some send in few of their steps."""
        series = self._steady if len(self._steady) else self._points
        measured: dict[str, float] = {}
        for place, name in enumerate(COLUMNS):
            values = [value for value in series.column(place) if value is not None]
            if values and name not in _NOT_MEASURED:
                measured[name] = statistics.median(values)
        peaks = [value for value in self._points.column(COLUMNS.index("peak_memory_bytes")) if value is not None]
        if peaks:
            measured["peak_memory_bytes"] = max(peaks)
        if "tok_per_s" in measured:
            measured["train_tok_per_s"] = measured.pop("tok_per_s")
        eta, elapsed = self._eta_s(), _number(self._last.get("elapsed_s"))
        if eta is not None and elapsed:
            measured["train_time_s"] = elapsed + eta
        return measured

    def _predicted(self) -> dict[str, dict[str, float | None]]:
        prediction = self._run.prediction if self._run is not None else {}
        found = {}
        for name, value in prediction.items():
            low, high = interval_of(value)
            found[name] = {"value": number_of(value), "low": low, "high": high}
        return found

    def _rows(self, status: str, measured: Mapping[str, float]) -> list[Row]:
        """Predicted beside measured values: the ledger's after the run has ended, and those so far before."""
        run = self._run
        if run is not None and "step_time_s" in run.measurement and status not in ("running", "quiet"):
            return [row for row in compare(run) if row.measured is not None]
        prediction: Mapping[str, Any] = run.prediction if run is not None else {}
        names = [*PREDICTED_FIRST, *(n for n in prediction if n not in PREDICTED_FIRST)]
        rows = []
        for name in names:
            predicted, found = number_of(prediction.get(name)), measured.get(name)
            if found is not None:
                low, high = interval_of(prediction.get(name))
                rows.append(Row(name, predicted, found, error_percent(predicted, found), low, high))
        return rows

    def _checkpoints(self) -> list[dict[str, Any]]:
        found = []
        for path in (self.directory / "checkpoints").glob("step-*"):
            try:
                found.append({"step": int(path.name.removeprefix("step-")), "age_s": time.time() - path.stat().st_mtime})
            except (OSError, ValueError):
                continue
        return sorted(found, key=lambda checkpoint: checkpoint["step"])


def _modified_at(file: Path) -> float:
    """0 if there is no such file."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _anomaly_text(anomaly: Mapping[str, Any]) -> str:
    windows = anomaly.get("windows")
    read = f"; windows {windows[0]} to {windows[-1]} of the data" if isinstance(windows, list) and windows else ""
    return f"{anomaly.get('reason')}{read}"


def _strips_of(line: dict[str, Any]) -> Iterator[tuple[str, list[str], list[float | None]]]:
    """(name, parts of the model or ranks, a value for each) of the values by part or rank in a log line."""
    for name in ("block_grad_norms", "update_ratios"):
        table = line.get(name)
        if isinstance(table, dict) and table:
            yield name, list(table), [_number(value) for value in table.values()]
    for name in ("rank_compute_s", "rank_waiting_s"):
        by_rank = line.get(name)
        if isinstance(by_rank, list):
            yield name, [f"rank {rank}" for rank in range(len(by_rank))], [_number(value) for value in by_rank]
    activations = line.get("activations")
    if isinstance(activations, dict):
        for name, values in activations.items():
            if isinstance(values, list):
                yield name, [f"blocks.{i}" for i in range(len(values))], [_number(value) for value in values]


def _cells(row: Row) -> dict[str, str]:
    return {
        "name": row.name,
        "predicted": format_interval(row.name, row.predicted, row.low, row.high),
        "measured": format_value(row.name, row.measured),
        "error": format_error(row.error_percent),
        "inside": format_inside(row.inside),
    }


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _compact(values: list[float | None], name: str = "") -> list[float | None]:
    """Values with five significant digits, which is more than a picture shows. Steps stay whole numbers."""
    return values if name == "step" else [None if value is None else float(f"{value:.5g}") for value in values]


def _first_to_send(generation: str | None, have: str | None, current: str, n_points: int) -> int:
    if generation != current or have is None or not have.isdecimal():
        return 0
    return max(0, min(int(have), n_points) - 1)
