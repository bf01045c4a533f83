"""Writes and opens prepared data: shards of token ids under a manifest.

A prepared directory is filled under another name beside its place, flushed to disk, and renamed when it is complete. A full
disk or a kill leaves nothing under the final name.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.aside import directory_beside, flush_to_disk
from twostroke.core.documents import read_object
from twostroke.core.errors import CorruptFileError, DataError, TwostrokeError

FORMAT = 1
MANIFEST = "manifest.json"
HELD_OUT_TEXT = "heldout.txt"
HELD_OUT_ENDS = "heldout-ends.bin"

SHARD_BYTES = 512 * 2**20

_MAX_MANIFEST_BYTES = 64 * 2**20
N_BUCKETS = 2**16
"""Number of buckets into which a hash divides documents. A bucket / 2¹⁶ is a number in [0, 1)."""

Progress = Callable[[float, str], None]
"""``progress(done, note)``, with ``done`` from 0 to 1."""

TokenArray = npt.NDArray[np.integer]


class TokenStream:
    """The token ids of several memory-mapped shards as one sequence. A slice within one shard is a view."""

    def __init__(self, paths: list[Path], dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.paths = paths
        # Plain arrays over the maps, because slicing a np.memmap costs several microseconds more.
        self._shards = [np.asarray(np.memmap(p, dtype=self.dtype, mode="r")) for p in paths if p.stat().st_size]
        self._ends = np.cumsum([len(s) for s in self._shards], dtype=np.int64).tolist()

    def description(self) -> dict[str, Any]:
        """The description from which another process opens the same stream."""
        return {"paths": [str(path.resolve()) for path in self.paths], "dtype": self.dtype.str}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends else 0

    def __getitem__(self, where: slice) -> TokenArray:
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise IndexError("a token stream is sliced with step 1 only.")
        if start >= stop:
            return np.empty(0, dtype=self.dtype)
        first = bisect.bisect_right(self._ends, start)
        begin = self._ends[first - 1] if first else 0
        if stop <= self._ends[first]:
            return self._shards[first][start - begin : stop - begin]
        parts = []
        while start < stop:
            part = self._shards[first][start - begin : min(stop, self._ends[first]) - begin]
            parts.append(part)
            start += len(part)
            begin = self._ends[first]
            first += 1
        return np.concatenate(parts)


@dataclass(frozen=True)
class PreparedData:
    """A prepared directory with a checked manifest. ``key`` names the combination of input, recipe and format."""

    directory: Path
    key: str
    vocab_size: int
    eos_id: int
    dtype: str
    n_train_tokens: int
    n_heldout_tokens: int
    n_heldout_bytes: int
    n_heldout_documents: int
    report: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / "tokenizer.json"

    @property
    def heldout_path(self) -> Path:
        return self.directory / HELD_OUT_TEXT

    def _stream(self, split: str) -> TokenStream:
        names = sorted(n for n in self.files if n.startswith(f"{split}-") and n.endswith(".bin") and n != HELD_OUT_ENDS)
        return TokenStream([self.directory / n for n in names], self.dtype)

    def train_tokens(self) -> TokenStream:
        return self._stream("train")

    def heldout_tokens(self) -> TokenStream:
        return self._stream("heldout")

    def source_ranges(self) -> list[tuple[str, int, int]]:
        """(source, first token, number of tokens) in the training stream, of each source of the recipe in order.

        Raises DataError if the data was prepared by a version that did not count sources.
        """
        if "sources" not in self.report:
            raise DataError(
                f"{self.directory} does not say which source its text comes from, because an earlier version prepared it. "
                "Delete it and prepare again."
            )
        ranges, begin = [], 0
        for counted in self.report["sources"]:
            ranges.append((counted["source"], begin, counted["n_tokens"]))
            begin += counted["n_tokens"]
        return ranges

    @property
    def holds_conversations(self) -> bool:
        """Whether each token has a mark (``data.conversations``)."""
        return any(name.startswith("marks-") for name in self.files)

    def train_marks(self) -> TokenStream:
        return self._marks("train")

    def heldout_marks(self) -> TokenStream:
        return self._marks("heldout")

    def _marks(self, split: str) -> TokenStream:
        names = sorted(n for n in self.files if n.startswith(f"marks-{split}-"))
        return TokenStream([self.directory / n for n in names], "<u1")

    def heldout_documents(self) -> Iterator[str]:
        """The text of each held-out document, for scoring with another tokenizer."""
        ends = np.fromfile(self.directory / HELD_OUT_ENDS, dtype="<u8")
        with open(self.heldout_path, "rb") as stream:
            start = 0
            for end in ends.tolist():
                yield stream.read(end - start).decode()
                start = end

    def verify(self) -> None:
        """Read every file and compare its sha256 with the manifest's. Raises CorruptFileError naming the first that differs."""
        for name, expected in self.files.items():
            with open(self.directory / name, "rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != expected["sha256"]:
                raise CorruptFileError(
                    f"{self.directory / name} was altered: its sha256 is not the one in {MANIFEST}. "
                    f"Delete {self.directory} and prepare again."
                )


def open_prepared(directory: Path | str, verify: bool = False) -> PreparedData:
    """Open the prepared data in ``directory``. Sizes are always checked, hashes if ``verify`` is set.

    Raises DataError if the manifest is missing, CorruptFileError naming the file that is missing, truncated or altered.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    if not path.is_file():
        raise DataError(f"{directory} is not prepared data: it has no {MANIFEST}. Make one with `twostroke data prepare`.")
    again = f"Delete {directory} and prepare again."
    try:
        manifest = read_object(path, _MAX_MANIFEST_BYTES)
        claimed = manifest.pop("sha256")
    except CorruptFileError as error:
        raise CorruptFileError(f"{error} {again}") from None
    except KeyError:
        raise CorruptFileError(f"{path} is not a manifest. {again}") from None
    if claimed != digest(manifest):
        raise CorruptFileError(f"{path} was altered: its sha256 is not the one it holds. {again}")
    if manifest["format"] != FORMAT:
        raise DataError(f"{directory} has format {manifest['format']}; this version reads {FORMAT}. {again}")
    for name, expected in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise CorruptFileError(f"{file} is missing. {again}")
        if file.stat().st_size != expected["bytes"]:
            raise CorruptFileError(f"{file} is {file.stat().st_size} bytes, the manifest says {expected['bytes']}. {again}")
    names = {f.name for f in dataclasses.fields(PreparedData)} - {"directory"}
    prepared = PreparedData(directory=directory, **{name: manifest[name] for name in names})
    if verify:
        prepared.verify()
    return prepared


def digest(table: dict[str, Any]) -> str:
    # Hashing the JSON makes tuples and lists equal, as they are after the manifest is read back.
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def bucket(*key: object) -> int:
    """The top 16 bits of sha256(key). It depends on the key alone, so a document's part never changes with the corpus."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, key)).encode()).digest()[:2], "big")


class HashedFile:
    """A file that is hashed while it is written, and flushed to disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = 0
        self._hash = hashlib.sha256()
        self._stream = open(path, "xb")  # noqa: SIM115 - closed by close(), or by the removal of its directory

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._hash.update(data)
        self.n_bytes += len(data)

    def close(self) -> dict[str, Any]:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return {"bytes": self.n_bytes, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        self._stream.close()


class ShardWriter:
    """Writes the tokens of one split in order, into files of about ``SHARD_BYTES``."""

    def __init__(self, directory: Path, split: str, dtype: str) -> None:
        self.directory, self.split, self.dtype = directory, split, np.dtype(dtype)
        self.files: dict[str, dict[str, Any]] = {}
        self.n_tokens = 0
        self._file = self._open()

    def _open(self) -> HashedFile:
        return HashedFile(self.directory / f"{self.split}-{len(self.files):05d}.bin")

    def write(self, ids: list[int]) -> None:
        self._file.write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.n_tokens += len(ids)
        if self._file.n_bytes >= SHARD_BYTES:
            self._finish()
            self._file = self._open()

    def _finish(self) -> None:
        self.files[self._file.path.name] = self._file.close()

    def close(self) -> None:
        self._finish()

    def abandon(self) -> None:
        self._file.abandon()


def _move_into_place(partial: Path, directory: Path) -> None:
    try:
        os.rename(partial, directory)  # replaces an empty directory, and fails on any other
    except OSError:
        if not (directory / MANIFEST).is_file():
            raise
        return  # another process has prepared the same data meanwhile
    flush_to_disk(directory.parent)


def open_or_write(directory: Path, key: str, fill: Callable[[Path], None]) -> PreparedData:
    """The prepared data at ``directory``. If it does not exist, ``fill`` writes it into a new directory that is then renamed.

    Raises DataError for a file or a directory that holds data of another key, TwostrokeError if it cannot be written.
    """
    if directory.exists() and not directory.is_dir():
        raise DataError(f"{directory} is a file, and data are prepared into a directory. Name a directory.")
    if directory.is_dir() and any(directory.iterdir()):
        prepared = open_prepared(directory)
        if prepared.key != key:
            raise DataError(
                f"{directory} holds data prepared from other input or settings. Delete it or choose another folder."
            )
        return prepared
    try:
        with directory_beside(directory) as partial:
            fill(partial)
            _move_into_place(partial, directory)
    except OSError as error:
        raise TwostrokeError(
            f"prepared data cannot be written to {directory}: {error.strerror or error}. "
            "Free space there, or choose another folder with --out or TWOSTROKE_HOME."
        ) from error
    return open_prepared(directory)


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, the last file of a prepared directory, with its own sha256, and flush file and directory to disk."""
    manifest = json.loads(json.dumps(manifest))
    manifest["sha256"] = digest(manifest)
    with open(directory / MANIFEST, "x", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    flush_to_disk(directory)


def hash_and_flush(file: Path) -> dict[str, Any]:
    """Flush a small file to disk. Returns its size and sha256 as a manifest lists them."""
    content = file.read_bytes()
    flush_to_disk(file)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
