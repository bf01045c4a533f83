"""Finds the files that sources name: files, folders, globs, Hugging Face data sets and the standard library."""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.core.data_recipe import STDLIB_SOURCE
from twostroke.core.errors import DataError
from twostroke.data.hub_datasets import PREFIX, dataset_stamp, is_saved_dataset, open_dataset

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst")
CONVERSATION_SUFFIXES = (".json", ".jsonl", ".parquet", ".jsonl.gz", ".jsonl.zst")

_STDLIB_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """A file: its path, its key relative to the named source, and the size and time that show whether it has changed.

    ``source`` is the number of the named source. For a data set, ``dataset`` is the opened data set, ``n_bytes`` the size of
    all its files, and ``mtime_ns`` the latest time.
    """

    path: str
    key: str
    n_bytes: int
    mtime_ns: int
    source: int = 0
    dataset: Any = field(default=None, compare=False, repr=False)

    def has_changed(self) -> bool:
        try:
            now: tuple[int, int] | None = dataset_stamp(self.dataset) if self.dataset is not None else _stamp(self.path)
        except OSError:
            now = None
        return now != (self.n_bytes, self.mtime_ns)


def _stamp(path: str) -> tuple[int, int] | None:
    status = os.stat(path)
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def suffix_of(name: str, suffixes: Sequence[str]) -> str | None:
    lowered = name.lower()
    return next((s for s in suffixes if lowered.endswith(s)), None)


def _source_file(path: str, key: str) -> SourceFile | None:
    """The file at ``path``, or None if it is not a regular file but a dangling link, a pipe or a device."""
    try:
        stamp = _stamp(path)
    except OSError:
        return None
    return SourceFile(os.path.realpath(path), key.replace(os.sep, "/"), *stamp) if stamp is not None else None


def _raise(error: OSError) -> None:
    raise DataError(f"folder {error.filename} cannot be read: {error.strerror}.")


def _walk(folder: str) -> Iterator[str]:
    """Paths under ``folder`` in a fixed order, without hidden files, hidden folders (.git, .venv) and caches. The folder of a
    saved data set is one path."""
    for directory, folders, names in os.walk(folder, onerror=_raise):
        visible = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        saved = [f for f in visible if is_saved_dataset(os.path.join(directory, f))]
        folders[:] = [f for f in visible if f not in saved]
        for name in sorted([*saved, *names]):
            if not name.startswith("."):
                yield os.path.join(directory, name)


def stdlib_files() -> list[SourceFile]:
    """The .py files of the running interpreter's standard library, without tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    files = []
    for directory, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(f for f in folders if f not in _STDLIB_SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("test_"):
                path = os.path.join(directory, name)
                found = _source_file(path, os.path.relpath(path, root))
                if found is not None:
                    files.append(found)
    if not files:
        raise DataError(f"the standard library at {root} holds no .py files. Name other sources.")
    return files


def _dataset_file(source: str, key: str | None = None) -> SourceFile:
    name, dataset = open_dataset(source)
    n_bytes, mtime_ns = dataset_stamp(dataset)
    return SourceFile(name, (key or name).replace(os.sep, "/"), n_bytes, mtime_ns, dataset=dataset)


def _find(source: str, suffixes: Sequence[str]) -> tuple[list[SourceFile], int]:
    """(files that ``source`` names, number of files with other suffixes)."""
    if source == STDLIB_SOURCE:
        return stdlib_files(), 0
    path = os.path.expanduser(source)
    if source.startswith(PREFIX):
        return [_dataset_file(source)], 0
    if is_saved_dataset(path):
        return [_dataset_file(path, os.path.basename(os.path.abspath(path)))], 0
    if os.path.isdir(path):
        root, paths, what = path, _walk(path), f"folder {source}"
    elif os.path.exists(path):
        if suffix_of(path, suffixes) is None:
            raise DataError(f"{source} is not one of the formats {', '.join(suffixes)}. Rename or convert it.")
        root, paths, what = os.path.dirname(path), iter([path]), source
    elif glob.has_magic(path):
        root = path
        while glob.has_magic(root):
            root = os.path.dirname(root)
        paths, what = iter(sorted(p for p in glob.iglob(path, recursive=True) if not os.path.isdir(p))), f"glob {source!r}"
    else:
        raise DataError(
            f"source {source} does not exist. Name a file, a folder, a glob, a data set as {PREFIX}owner/name, "
            f'or "{STDLIB_SOURCE}".'
        )
    files, n_other_files = [], 0
    for candidate in paths:
        key = os.path.relpath(candidate, root or ".")
        if os.path.isdir(candidate):
            files.append(_dataset_file(candidate, key))
        elif suffix_of(candidate, suffixes) is None:
            n_other_files += 1
        elif (found := _source_file(candidate, key)) is not None:
            files.append(found)
    if not files:
        raise DataError(f"{what} holds no regular file of the formats {', '.join(suffixes)}. Name another source.")
    return files, n_other_files


def find_files(sources: Sequence[str], suffixes: Sequence[str]) -> tuple[tuple[SourceFile, ...], int]:
    """(files of ``suffixes`` that ``sources`` name, each once; number of files with other suffixes).

    Raises DataError if a source is missing, holds nothing readable, or names a file of an unknown format.
    """
    n_other_files = 0
    files: dict[str, SourceFile] = {}
    for index, source in enumerate(sources):
        found, n_others = _find(source, suffixes)
        n_other_files += n_others
        for file in found:
            files.setdefault(file.path, replace(file, source=index))
    return tuple(files.values()), n_other_files


def check_unchanged(files: Sequence[SourceFile]) -> None:
    """Raise DataError naming the first file that was altered since it was found."""
    for file in files:
        if file.has_changed():
            raise DataError(f"{file.path} changed while it was being read. Run again when no program writes to it.")
