"""Reads the text that a model is scored on, from prepared data, files or one joined file, and tokenises it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from twostroke.core.documents import read_object
from twostroke.core.errors import CorruptFileError, DataError, InputError
from twostroke.core.recipe import DataRecipe
from twostroke.data.prepare import prepare
from twostroke.data.shards import MANIFEST, PreparedData, open_prepared
from twostroke.data.sources import PIECE_BYTES, decode, find_documents, read_pieces, split_text

_BATCH_CHARACTERS = 2**20


@dataclass(frozen=True)
class HeldOutText:
    """Documents to score. Each call of ``pieces()`` starts a new pass of (text, whether its document ends with it).

    If the text is the held-out part of prepared data, ``prepared`` is that data; its tokens and caches can then be used.
    """

    name: str
    pieces: Callable[[], Iterator[tuple[str, bool]]]
    prepared: PreparedData | None = None

    def joined(self) -> Iterator[bytes]:
        """The bytes of the text without separators. xz compresses the same."""
        return (text.encode() for text, _ in self.pieces())


@dataclass(frozen=True)
class Tokens:
    """A text as one stream of ids, with ``eos_id`` after each document. ``n_bytes`` is the length of the joined text."""

    ids: npt.NDArray[np.int64]
    eos_id: int
    n_bytes: int


def held_out_of(prepared: PreparedData) -> HeldOutText:
    def pieces() -> Iterator[tuple[str, bool]]:
        for document in prepared.heldout_documents():
            for text, _, is_last in split_text(document):
                yield text, is_last

    return HeldOutText(str(prepared.directory), pieces, prepared)


def held_out_from_sources(sources: Sequence[str], text_key: str = "text") -> HeldOutText:
    """Every document of files, folders, globs or "stdlib", without duplicates."""
    source = find_documents(sources, text_key)
    return HeldOutText(", ".join(sources), lambda: ((d.text, d.is_last) for d in source))


def held_out_from_file(path: Path | str) -> HeldOutText:
    """One file with any suffix, as one document."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"held-out text {file} does not exist. Name a file.")

    def pieces() -> Iterator[tuple[str, bool]]:
        with open(file, "rb") as stream:
            before: str | None = None
            for raw in read_pieces(stream, PIECE_BYTES):
                if before is not None:
                    yield before, False
                before = decode(raw)[0]
            if before is not None:
                yield before, True

    return HeldOutText(str(file), pieces)


def held_out_at(path: Path | str) -> HeldOutText:
    """The held-out part of prepared data if ``path`` is such a directory, else the file at ``path`` as one document."""
    path = Path(path)
    return held_out_of(open_prepared(path)) if (path / MANIFEST).is_file() else held_out_from_file(path)


def _batches(text: HeldOutText) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    batch_characters = 0
    for piece, is_last in text.pieces():
        batch.append((piece, is_last))
        batch_characters += len(piece)
        if batch_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, batch_characters = [], 0
    yield batch


def tokenize(text: HeldOutText, tokenizer: Tokenizer, eos_id: int) -> Tokens:
    """``text`` as ids of ``tokenizer``, in bounded batches. Raises DataError if the text is empty.

    The text is encoded without special tokens, so ``eos_id`` marks ends of documents only.
    """
    tokenizer.encode_special_tokens = True
    parts: list[npt.NDArray[np.int64]] = []
    n_bytes = 0
    for batch in _batches(text):
        encodings = tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
        for encoding, (piece, is_last) in zip(encodings, batch, strict=True):
            parts.append(np.asarray(encoding.ids + [eos_id] * is_last, dtype=np.int64))
            n_bytes += len(piece.encode())
    return Tokens(_joined(parts, n_bytes, text), eos_id, n_bytes)


def tokenize_with_ends(text: HeldOutText, tokenizer: Tokenizer, eos_id: int) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """As ``tokenize``, with the number of bytes of the joined text up to each token's end, so that tokenizers can be
    compared."""
    tokenizer.encode_special_tokens = True
    parts: list[npt.NDArray[np.int64]] = []
    ends: list[npt.NDArray[np.int64]] = []
    n_bytes = 0
    for batch in _batches(text):
        encodings = tokenizer.encode_batch([piece for piece, _ in batch], add_special_tokens=False)
        for encoding, (piece, is_last) in zip(encodings, batch, strict=True):
            offsets = _byte_offsets(piece)
            stops = [stop for _, stop in encoding.offsets] + [len(piece)] * is_last
            parts.append(np.asarray(encoding.ids + [eos_id] * is_last, dtype=np.int64))
            ends.append(n_bytes + offsets[np.asarray(stops, dtype=np.int64)])
            n_bytes += int(offsets[-1])
    return Tokens(_joined(parts, n_bytes, text), eos_id, n_bytes), np.concatenate(ends)


def _joined(parts: list[npt.NDArray[np.int64]], n_bytes: int, text: HeldOutText) -> npt.NDArray[np.int64]:
    if n_bytes == 0:
        raise DataError(f"{text.name} holds no text to score. Name other text.")
    return np.concatenate(parts)


def _byte_offsets(text: str) -> npt.NDArray[np.int64]:
    """Bytes of UTF-8 before each character and before the end, (len(text) + 1)."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))


def held_out_to_score(
    model_directory: Path, sources: Sequence[str] = (), prepared_data: Path | str | None = None, text_key: str = "text"
) -> HeldOutText:
    """The text that a command scores: the named sources or prepared data, else the held-out part of the model's training run.

    A run keeps its model under ``model/``, and its ``recipe.json`` names the data. If the data is not there any more, it is
    prepared again. Raises InputError if two texts or none are named, DataError if the run's data has changed.
    """
    if sources and prepared_data is not None:
        raise InputError("--data and --prepared both name a text to score. Give --data or --prepared, not both.")
    if sources:
        return held_out_from_sources(sources, text_key)
    if prepared_data is not None:
        return held_out_of(open_prepared(prepared_data))
    file = model_directory.parent / "recipe.json"
    if not file.is_file():
        raise InputError(
            f"{model_directory} is not part of a training run, so it names no held-out text. Give --data or --prepared."
        )
    try:
        record = read_object(file)
        settings, resolved = record["data"], record["resolved"]
        directory, key = Path(resolved["data_directory"]), str(resolved["data_key"])
        recipe = DataRecipe(**settings | {"sources": tuple(settings["sources"]), "held_out": tuple(settings["held_out"])})
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(f"{file} does not name the run's data: {error}. Give --data or --prepared.") from None
    data = open_prepared(directory) if (directory / MANIFEST).is_file() else prepare(recipe)
    if data.key != key:
        # The input has changed, so other documents are held out now, and the model was trained on some of them.
        raise DataError(
            f"{directory}, the data of {model_directory.parent}, is missing or has changed. Give --data or --prepared."
        )
    return held_out_of(data)
