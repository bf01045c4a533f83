"""Text that a model is scored on, from prepared data, files or one joined file, tokenised with any tokenizer."""

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
    """Documents to score. ``pieces()`` starts a new pass each time: (text, whether its document ends with it).

    ``prepared`` is set where the text is the held-out part of prepared data, so that its tokens and caches can be used.
    """

    name: str
    pieces: Callable[[], Iterator[tuple[str, bool]]]
    prepared: PreparedData | None = None

    def joined(self) -> Iterator[bytes]:
        """The text's bytes without separators, as xz gets them."""
        return (text.encode() for text, _ in self.pieces())


@dataclass(frozen=True)
class Tokens:
    """A text as one stream of ids, each document followed by ``eos_id``; ``n_bytes`` are the joined text's."""

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
    """Every document of files, folders, globs or "stdlib", duplicates left out."""
    source = find_documents(sources, text_key)
    return HeldOutText(", ".join(sources), lambda: ((d.text, d.is_last) for d in source))


def held_out_from_file(path: Path | str) -> HeldOutText:
    """One file, whatever its suffix, as one document."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"held-out text {file} does not exist.")

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
    """Prepared data where ``path`` is a directory with a manifest, else one file as one document."""
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
    """``text`` as ids by ``tokenizer``, in bounded batches. Raises DataError where there is no text.

    Special tokens are not looked for in the text: ``eos_id`` marks ends of documents and nothing else.
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
    """As ``tokenize``, and for each token the bytes of the joined text up to its end, so that tokenizers can be compared."""
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
        raise DataError(f"{text.name} holds no text to score.")
    return np.concatenate(parts)


def _byte_offsets(text: str) -> npt.NDArray[np.int64]:
    """(len(text) + 1): bytes of UTF-8 before each character, and before the end."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))


def held_out_to_score(
    model_directory: Path, sources: Sequence[str] = (), prepared_data: Path | str | None = None, text_key: str = "text"
) -> HeldOutText:
    """The text that a command scores: the sources or the prepared data it names, else what the model's own run held out.

    A run keeps its model under ``model/``; its ``recipe.json`` names the data, which is found where it was or prepared
    again. Raises InputError where two texts are named or none, DataError where the run's data cannot be had any more.
    """
    if sources and prepared_data is not None:
        raise InputError("give --data or --prepared, not both.")
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
        # Prepared from input that has changed since, other documents are held out: the model was trained on some of them.
        raise DataError(f"{directory}, the data of {model_directory.parent}, is gone or another. Give --data or --prepared.")
    return held_out_of(data)
