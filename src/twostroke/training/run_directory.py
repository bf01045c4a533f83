"""The directory of a run: its recipe, its log, its results, and the lock that lets one process train in it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.aside import write_text, written_file
from twostroke.core.described import plain
from twostroke.core.documents import read_object
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.core.spec import ModelSpec
from twostroke.training.retrying_file import RetryingFile

FORMAT = 1
CHANGE_WEIGHTS = (
    "compress",
    "compress_rank",
    "error_feedback",
    "compress_weights",
    "outer_every",
    "outer_learning_rate",
    "outer_momentum",
    "fragments",
    "outer_overlap",
    "outer_mixing",
)
"""Keys of ``[parallel]`` on which weights depend beyond the last bits."""

CHANGEABLE = (
    "output",
    "data.workers",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.keep_every",
    "train.checkpoint_in_background",
    "train.offload_optimizer",
    "train.offload_activations",
    "train.evaluate_every",
    "train.diagnostics_every",
    "train.tensorboard",
    "train.sample_every",
    "train.sample_prompts",
    *(f"parallel.{field.name}" for field in dataclasses.fields(ParallelRecipe) if field.name not in CHANGE_WEIGHTS),
)
"""Recipe keys that may differ when a run is resumed, because no weight depends on them. (The directory may have been moved.)
The order of sums that ``[parallel]`` decides is in the run's environment, and a resume in another one is logged."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Resolved:
    """What the recipe was resolved to when its run began. ``recipe.json`` holds it as "resolved" beside the recipe."""

    spec: ModelSpec
    steps: int
    data_directory: str
    data_key: str
    run_id: str  # of the prediction in the ledger
    environment: dict[str, Any]  # training.environment, when the run began
    dtype: str = ""  # the training type it is computed in (core.policy.computed_type); empty: the recipe's
    format: int = FORMAT


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def anomalies(self) -> Path:
        return self.path / "anomalies.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def is_unused(self) -> bool:
        """True if the directory does not exist or holds only dot files, such as a lock or an incomplete recipe.json."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"output={self.path} is a file. Name a directory.")
        return not self.path.is_dir() or all(entry.name.startswith(".") for entry in self.path.iterdir())

    def open(self, recipe: TrainRecipe, resume: bool) -> Resolved | None:
        """None for a new run, or the ``Resolved`` of the run in the directory.

        Raises InputError if ``resume`` is set without a run to resume, or not set with one. Raises ConfigError, naming the key,
        if the run began with another recipe.
        """
        if self.is_unused():
            if resume:
                raise InputError(f"{self.path} holds no run to resume. Start it without --resume.")
            return None
        if not self.recipe.is_file():
            raise InputError(
                f"{self.path} is not empty and holds no run (it has no recipe.json). Name another directory: --set output=..."
            )
        if not resume:
            raise InputError(
                f"{self.path} already holds a run. Continue it with --resume, or name another directory: --set output=..."
            )
        stored = read_object(self.recipe)
        try:
            resolved = _resolved_from(stored.pop("resolved"))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{self.recipe} does not describe a run: {error}. Restore it, or name another directory."
            ) from None
        key = first_difference(_completed(stored), plain(recipe))
        if key is not None:
            raise ConfigError(
                f"{key[0]}={key[2]!r} in the recipe differs from {key[1]!r}, with which the run in {self.path} began. "
                "Resume with the same recipe, or start another run: --set output=..."
            )
        return resolved

    def create(self, recipe: TrainRecipe, resolved: Resolved) -> None:
        """Write ``recipe.json``. From then on the run can be resumed."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.recipe, plain(recipe) | {"resolved": dataclasses.asdict(resolved)})

    def abandon(self) -> None:
        """Take back what a run left that ended before its first step and cannot be resumed, if that is all there is."""
        self.recipe.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others' files, or this run's, are in it
            for file in (self.log, self.anomalies):
                if file.is_file() and not file.stat().st_size:
                    file.unlink()
            if self.checkpoints.is_dir():
                self.checkpoints.rmdir()
            if self.is_unused():
                (self.path / ".lock").unlink(missing_ok=True)
                self.path.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory, so that no other process trains in it. Raises InputError if another process holds it,
        or if the directory cannot be written. The system releases the lock of a process that ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise InputError(
                f"output={self.path} cannot be written ({error.strerror}). Name another directory: --set output=..."
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another process is training in {self.path}. Wait for it, or name another directory."
                ) from None
            yield
        finally:
            os.close(descriptor)


def _completed(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored recipe with defaults for keys that are newer than the release that wrote it, which behaved like the defaults."""
    try:
        completed: dict[str, Any] = plain(recipe_from_dict(stored))
    except ConfigError:
        return stored  # it breaks a rule of this release, so it is compared as it is, and the error names the key
    return completed


def _resolved_from(record: dict[str, Any]) -> Resolved:
    if not isinstance(record, dict):
        raise TypeError(f"what it was resolved to is {record!r:.80}")
    if record.get("format") != FORMAT:
        raise ValueError(f"format {record.get('format')!r}, this release reads {FORMAT}")
    if "environment" not in record:  # of the first release
        names = {"torch_version": "torch", "n_threads": "n_threads", "device": "device"}
        record = record | {"environment": {new: record[old] for old, new in names.items()}}
        record = {name: value for name, value in record.items() if name not in names}
    return Resolved(**(record | {"spec": ModelSpec.from_dict(record["spec"])}))


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def first_difference(stored: dict[str, Any], given: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """(key, stored value, given value) of the first recipe key that differs although it must not; None if all agree."""
    before = dict(_flat(_with_layout(stored)))
    for key, value in _flat(_with_layout(given)):
        if key not in CHANGEABLE and before.get(key) != value:
            return key, before.get(key), value
    return None


def _with_layout(recipe: dict[str, Any]) -> dict[str, Any]:
    """``recipe`` with the defaults of ``[parallel]`` where it has none."""
    return recipe if recipe.get("parallel") is not None else recipe | {"parallel": plain(ParallelRecipe())}


def write_json(file: Path, document: dict[str, Any]) -> None:
    """Write ``document`` to ``file`` atomically; after a power cut the file is the old or the new one."""
    write_text(file, json.dumps(document, indent=1))


def read_summary(directory: Path) -> dict[str, Any] | None:
    """``summary.json`` of the run in ``directory``; None if the run has not finished."""
    file = RunDirectory(directory).summary
    return read_object(file) if file.is_file() else None


def _step_of(line: bytes) -> int:
    """The step of a log line; −1 for a line that does not record a step."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
    return step if isinstance(step, int) else -1


class StepLog:
    """``log.jsonl`` has one line for each step. A full disk delays lines and does not stop the run."""

    def __init__(self, file: Path, log: Log) -> None:
        self._file, self._lines = file, RetryingFile(file, log)

    def restart(self, step: int) -> None:
        """Keep the lines of steps up to ``step``, because the resumed run repeats those that a killed run logged after its
        checkpoint.

        Those lines are the file's end, so it is cut, which needs no room on a full disk.
        """
        try:
            lines = self._file.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return
        kept = [number for number, line in enumerate(lines) if line.endswith(b"\n") and _step_of(line) in range(step + 1)]
        if kept == list(range(len(kept))):
            os.truncate(self._file, sum(map(len, lines[: len(kept)])))
            return
        with written_file(self._file) as stream:
            stream.writelines(lines[number] for number in kept)

    def read(self) -> list[dict[str, Any]]:
        """All complete lines that record a step. The last one may be incomplete after a kill."""
        if not self._file.is_file():
            return []
        records = []
        for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
        return records

    def append(self, record: dict[str, Any]) -> None:
        self._lines.append((json.dumps(plain(record)) + "\n").encode())

    def flush(self) -> None:
        """Write every line to the file. Raises OSError if that fails; the lines are kept for the next time."""
        self._lines.flush()

    def sync(self) -> None:
        """Flush the log to the disk. It is called before each checkpoint, so that no checkpoint is newer than its log."""
        try:
            descriptor = os.open(self._file, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
