"""What importing and exporting a model is expected to take, for both commands, and what it took."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.cli.console import log
from twostroke.core.errors import ConfigError
from twostroke.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from twostroke.interop.import_model import Opened
    from twostroke.planner.training.moving import Measuring, Moving
    from twostroke.planner.truth.recording import Planned, Recording


def planned_import(opened: Opened) -> Planned:
    """Bytes, memory and time of storing what was opened."""
    from twostroke.interop.import_model import expect_import
    from twostroke.interop.moved import moving

    return _planned("import_s", moving(*expect_import(opened)))


def planned_export(model: Path, to: str, precision: str, has_text: bool) -> Planned:
    """The same of writing ``model``; ``has_text``: one is named that says which inputs matter. Of a format that a foreign
    package converts to, bytes alone."""
    from twostroke.interop.export_model import expect_export
    from twostroke.interop.export_targets import target_of
    from twostroke.interop.moved import moving
    from twostroke.planner.training.moving import Measuring
    from twostroke.planner.truth.recording import Planned
    from twostroke.quantization.calibration_text import has_run, text_size

    row = target_of(to)
    expected = expect_export(model, to, precision, lambda found: has_text or has_run(found))
    if row.packages:
        log(f"no predicted time and memory: the planner does not know how {', '.join(row.packages.values())} converts models.")
        values, inputs = {"written_bytes": expected.made.n_bytes}, {"read_bytes": expected.held.read_bytes}
        return Planned(values, None, inputs)
    measuring = Measuring(expected.spec, *text_size(expected.spec)) if expected.weighed else None
    return _planned("export_s", moving(expected.held, expected.made), measuring)


def _planned(name: str, moving: Moving, measuring: Measuring | None = None) -> Planned:
    """``measuring``: of a text, before that."""
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.training.moving import measuring_bytes, measuring_s, moving_s
    from twostroke.planner.truth.recording import Planned
    from twostroke.training.memory import CPU, memory_bytes

    inputs = {"read_bytes": moving.read_bytes}
    most = max(moving.held_bytes, 0.0 if measuring is None else measuring_bytes(measuring))
    values = {"written_bytes": moving.written_bytes, "peak_memory_bytes": memory_bytes(CPU) + most}
    hardware = None
    try:
        hardware = load_hardware("this")
        before_s = 0.0 if measuring is None else measuring_s(measuring, hardware)
        values[name] = before_s + moving_s(moving, hardware)
    except ConfigError as error:
        log(f"no predicted time: {error}")
    return Planned(values, hardware, inputs)


class Watch:
    """What the work took since this was made."""

    def __init__(self) -> None:
        from twostroke.training.memory import CPU, reset_peak

        reset_peak(CPU)
        self._began = time.perf_counter()

    def read(self, name: str, n_bytes: int) -> dict[str, float]:
        """Seconds, under ``name``, bytes that were written, and most memory of the process meanwhile."""
        from twostroke.training.memory import CPU, peak_memory_bytes

        seconds = time.perf_counter() - self._began
        return {name: seconds, "written_bytes": float(n_bytes), "peak_memory_bytes": float(peak_memory_bytes(CPU))}


def took(run: Recording, name: str, measured: dict[str, float]) -> str:
    """``270 MB (predicted 270 MB), in 1.2 s (predicted 1.1 s), 640 MB of memory (predicted 600 MB)``."""

    def beside(name: str, text: str) -> str:
        expected = run.prediction.get(name)
        say = format_seconds if name.endswith("_s") else format_bytes
        return text if expected is None else f"{text} (predicted {say(expected)})"

    written, seconds = format_bytes(measured["written_bytes"]), format_seconds(measured[name])
    memory = format_bytes(measured["peak_memory_bytes"])
    return (
        f"{beside('written_bytes', written)}, in {beside(name, seconds)}, at most "
        f"{beside('peak_memory_bytes', memory)} of memory"
    )
