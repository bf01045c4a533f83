"""Writes and reads checkpoints. Each is a new directory under a manifest of hashes, and appears only when it is complete.

``checkpoints/step-00000123/`` holds ``model.safetensors`` (fp32 masters under the decoder's names),
``optimizer.safetensors``, ``state.json`` (everything small: step, random states, loader state) and ``manifest.json`` (size
and SHA-256 of the other three). A save fills ``.saving-…`` beside it, flushes every file and the directory to disk, and
renames; ``training.saver`` does so in the background. A kill at any point leaves either the complete new checkpoint or none
of it, and never touches the one before. Why so: neither safetensors nor torch's own formats detect a flipped bit, and a kill
while overwriting in place loses both copies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from twostroke.core.aside import flush_to_disk
from twostroke.core.documents import is_integer, read_object
from twostroke.core.errors import CorruptFileError, TwostrokeError
from twostroke.core.units import format_bytes
from twostroke.training.retention import Retention
from twostroke.training.tensor_file import HashedFile, write_tensors
from twostroke.training.whole import rows_of_tensors

FORMAT = 1
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(saving|removing)-step-\d{8,}")
_OURS = {MODEL, OPTIMIZER, STATE, MANIFEST}
_SET_ASIDE = "corrupt-"

Log = Callable[[str], None]


class CheckpointError(TwostrokeError):
    """A checkpoint could not be written. Earlier checkpoints are not touched."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint. ``state`` is plain JSON, with the step as ``state["step"]``."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: dict[str, Any]


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete-looking checkpoint under ``directory``, oldest first. Nothing is verified."""
    if not directory.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed save or removal left under ``directory``. No other process may be saving there."""
    if directory.is_dir():
        for path in directory.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                _remove(path)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checkpoint_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the tensors of ``checkpoint``."""
    rows = [row for part in (checkpoint.weights, checkpoint.optimizer) for row in rows_of_tensors(part).values()]
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in rows)


def _nothing() -> None:
    pass


def save_checkpoint(
    directory: Path, checkpoint: Checkpoint, retention: Retention, before_rename: Callable[[], None] = _nothing
) -> Path:
    """Write ``checkpoint`` as a new directory under ``directory``, then remove the checkpoints that ``retention`` does not
    keep.

    Returns its path. One of the same step that is there and intact is kept: a run's step is the same each time it is done.
    ``before_rename`` is called when everything is on the disk and nothing has its name yet. Raises CheckpointError, naming the
    reason, if it could not be written; nothing that was there is lost. Proven kill by kill and failure by failure in
    ``tests/training/test_checkpoint.py``.
    """
    step = int(checkpoint.state["step"])
    target = directory / checkpoint_name(step)
    aside = directory / f".saving-{target.name}"
    needed = checkpoint_bytes(checkpoint)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        if target.exists():
            try:
                verify_checkpoint(target)
            except CorruptFileError:
                _discard(target)
            else:
                return target
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise CheckpointError(
                f"checkpoint {target.name} needs {format_bytes(needed)} and {directory} has {format_bytes(free)} free. "
                "Free space, or lower train.keep_checkpoints."
            )
        aside.mkdir()
        _write(aside, checkpoint)
        before_rename()
        aside.rename(target)
        flush_to_disk(directory)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)  # on a full disk this frees space for the log
        reason = error.strerror or str(error)
        raise CheckpointError(f"checkpoint {target.name} was not written to {directory}: {reason}.") from error
    present = dict(list_checkpoints(directory))
    for removable in retention.removable(list(present)):
        with contextlib.suppress(OSError):  # the new checkpoint is written, and the next save tries again to remove this one
            _discard(present[removable])
    return target


def _write(directory: Path, checkpoint: Checkpoint) -> None:
    """Write the four files, the manifest last, and flush each to the disk."""
    files: dict[str, dict[str, Any]] = {}

    def written(name: str, fill: Callable[[HashedFile], None]) -> None:
        with HashedFile(directory / name) as file:
            fill(file)
        files[name] = {"bytes": file.n_bytes, "sha256": file.sha256()}

    def document(content: dict[str, Any]) -> Callable[[HashedFile], None]:
        return lambda file: file.write(json.dumps(content, indent=1).encode())

    written(MODEL, lambda file: write_tensors(file, checkpoint.weights))
    written(OPTIMIZER, lambda file: write_tensors(file, checkpoint.optimizer))
    written(STATE, document(checkpoint.state))
    written(MANIFEST, document({"format": FORMAT, "step": checkpoint.state["step"], "files": dict(files)}))
    flush_to_disk(directory)


def remove_newer(directory: Path, step: int) -> None:
    """Remove the checkpoints under ``directory`` of steps after ``step``."""
    for found, path in list_checkpoints(directory):
        if found > step:
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill in between leaves no directory that looks like a checkpoint."""
    doomed = path.with_name(f".removing-{path.name}")
    _remove(doomed)
    if path.is_symlink() or not _is_ours(path):
        _remove(path)
        return
    path.rename(doomed)
    _remove(doomed)


def _is_ours(path: Path) -> bool:
    """Whether ``path`` is a directory that holds files of a checkpoint only."""
    return not path.is_symlink() and path.is_dir() and set(os.listdir(path)) <= _OURS


def _remove(path: Path) -> None:
    """Remove the files of a checkpoint from the directory ``path``, and the directory if it holds nothing else. A link is
    removed without what it points to."""
    if path.is_symlink():
        path.unlink()
    elif _is_ours(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_dir():
        for name in _OURS:
            with contextlib.suppress(OSError):
                (path / name).unlink()


def verify_checkpoint(path: Path) -> None:
    """Compare every file of the checkpoint at ``path`` with its manifest. Raises CorruptFileError naming what differs."""
    manifest = read_object(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CorruptFileError(f"{path / MANIFEST} has format {manifest.get('format')!r}, and this release reads {FORMAT}.")
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != {MODEL, OPTIMIZER, STATE}:
        raise CorruptFileError(f"{path / MANIFEST} does not list {MODEL}, {OPTIMIZER} and {STATE}. It was altered.")
    with ThreadPoolExecutor(len(files)) as pool:  # hashing releases the interpreter lock
        for _ in pool.map(lambda name: _verify_file(path / name, files[name]), files):
            pass


def _verify_file(file: Path, expected: Any) -> None:
    if not file.is_file():
        raise CorruptFileError(f"{file} is missing.")
    size = file.stat().st_size
    if not isinstance(expected, dict) or size != expected.get("bytes"):
        raise CorruptFileError(f"{file} is {size} bytes, and {MANIFEST} has another size. It was truncated or altered.")
    if _sha256(file) != expected.get("sha256"):
        raise CorruptFileError(f"{file} was altered: its SHA-256 differs from the one in {MANIFEST}.")


def load_checkpoint(path: Path) -> Checkpoint:
    """The verified checkpoint at ``path``. Raises CorruptFileError naming the file that has changed since it was written."""
    verify_checkpoint(path)
    return read_checkpoint(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``, which this process or another has verified. Raises CorruptFileError if it cannot be read."""
    state = read_object(path / STATE)
    step = state.get("step")
    if not is_integer(step) or checkpoint_name(step) != path.name:
        raise CorruptFileError(f"{path / STATE} is of step {step!r:.40}, not of {path.name}.")
    try:
        return Checkpoint(load_file(path / MODEL), load_file(path / OPTIMIZER), state)
    except (OSError, SafetensorError) as error:
        raise CorruptFileError(f"{path} cannot be read: {error}.") from None


def _any(step: int) -> bool:
    return True


def load_newest(directory: Path, log: Log, wanted: Callable[[int], bool] = _any) -> Checkpoint | None:
    """The newest intact checkpoint under ``directory`` whose step is ``wanted``; None if no such checkpoint was ever written.

    One that does not verify is named with the reason through ``log``, renamed to ``corrupt-…`` so that it is neither
    counted nor tried again, and the one before it is taken. Raises CorruptFileError when all there were are damaged, now or
    before: to start from nothing would be a silent loss.
    """
    remove_leftovers(directory)
    reasons = []
    for step, path in reversed(list_checkpoints(directory)):
        if not wanted(step):
            continue
        try:
            checkpoint = load_checkpoint(path)
        except CorruptFileError as error:
            log(f"checkpoint {path.name} is damaged and was set aside: {error}")
            reasons.append(str(error))
            aside = path.with_name(f"{_SET_ASIDE}{path.name}")
            _remove(aside)
            with contextlib.suppress(OSError):  # on a read-only disk it is only skipped
                path.rename(aside)
            continue
        return checkpoint
    damaged = sorted(path.name for path in directory.glob(f"{_SET_ASIDE}*")) if directory.is_dir() else []
    if damaged or reasons:
        newest = f" The newest: {reasons[0]}" if reasons else ""
        raise CorruptFileError(
            f"all checkpoints in {directory} are damaged ({', '.join(damaged)}).{newest} Start a run in another output "
            "directory, or delete them to begin this run again from its first step."
        )
    return None
