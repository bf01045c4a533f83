"""Opens Hugging Face data sets: directories that ``save_to_disk`` wrote, and names that the library downloads and caches.

The functions import the library themselves, because it comes with the extra ``train``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from twostroke.core.errors import DataError

PREFIX = "hf:"
DEFAULT_SPLIT = "train"
_ROWS_AT_ONCE = 1000
_DICT_FILE, _STATE_FILES = "dataset_dict.json", ("state.json", "dataset_info.json")


def is_saved_dataset(path: str) -> bool:
    """Whether ``save_to_disk`` wrote the directory ``path``. It may hold one data set or one for each split."""
    return os.path.isfile(os.path.join(path, _DICT_FILE)) or all(os.path.isfile(os.path.join(path, f)) for f in _STATE_FILES)


def parse_name(source: str) -> tuple[str, str | None, str | None]:
    """(name, config, split) of ``hf:name[:config][:split]``. An empty part is read as None. Raises DataError."""
    name, *parts = source.removeprefix(PREFIX).split(":")
    if not name or len(parts) > 2:
        raise DataError(
            f"source {source} is not a data set's name. Write {PREFIX}owner/name, {PREFIX}owner/name:config or "
            f"{PREFIX}owner/name:config:split; the default config's split is {PREFIX}owner/name::split."
        )
    config, split = [*(part or None for part in parts), None, None][:2]
    return name, config, split


def open_dataset(source: str) -> tuple[str, Any]:
    """(full name, memory-mapped data set) of ``source``. The full name is ``hf:name:config:split`` or a directory.

    Raises DataError if the library is missing, or with the library's own reason if it cannot load the data set.
    """
    is_path = not source.startswith(PREFIX)
    name, config, split = (source, None, None) if is_path else parse_name(source)
    path = os.path.expanduser(name)
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source} is a Hugging Face data set. Install the library that reads it: pip install 'twostroke[train]'."
        ) from None
    datasets.disable_progress_bars()
    try:
        if is_saved_dataset(path):
            full_name = os.path.realpath(path)
            found = datasets.load_from_disk(full_name)
            if isinstance(found, datasets.DatasetDict):
                split, found = _split_of(found, split, source)
                full_name = f"{full_name}::{split}"
            return full_name, found
        found = datasets.load_dataset(path if os.path.isdir(path) else name, config, split=split or DEFAULT_SPLIT)
    except DataError:
        raise
    except Exception as error:  # the library passes on any exception of its file systems, its parsers and the network
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"data set {source} cannot be loaded: {reason.rstrip('.')[:400]}.") from None
    return f"{PREFIX}{name}:{config or ''}:{split or DEFAULT_SPLIT}", found


def _split_of(found: Any, split: str | None, source: str) -> tuple[str, Any]:
    wanted = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in found or len(found) != 1 else next(iter(found)))
    if wanted not in found:
        raise DataError(
            f"{source} has no split {wanted!r}; it has {', '.join(map(repr, found))}. "
            f"Name one as {PREFIX}{source.removeprefix(PREFIX).split(':')[0]}::split."
        )
    return wanted, found[wanted]


def dataset_stamp(dataset: Any) -> tuple[int, int]:
    """(size of all files of the data set, latest modification time in ns). Raises OSError if a file is missing."""
    stats = [os.stat(file["filename"]) for file in dataset.cache_files]
    return sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)


def dataset_columns(dataset: Any, names: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    """(number from 1, values of ``names``) of each row."""
    number = 0
    chosen = dataset.select_columns(list(names)).with_format(None)
    for rows in chosen.iter(batch_size=_ROWS_AT_ONCE):
        for values in zip(*(rows[name] for name in names), strict=True):
            number += 1
            yield number, list(values)
