"""Batches that every engine gets: the Python standard library's own source in words, so that there is something to learn.

A token is one of the V − 1 most frequent pieces of the text (identifiers, runs of spaces, single other characters) or 0.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

IGNORED = -100
_PIECE = re.compile(r"\w+|[ \t]+|\n|.", re.ASCII)
_MOST_CHARACTERS = 12_000_000


def read_text() -> str:
    """Up to 12 MB of the standard library's source, in the order of the file names."""
    parts: list[str] = []
    length = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        parts.append(path.read_text(encoding="utf-8", errors="ignore"))
        length += len(parts[-1])
        if length > _MOST_CHARACTERS:
            break
    return "\n".join(parts)


def read_tokens(vocab_size: int) -> npt.NDArray[np.int64]:
    pieces = _PIECE.findall(read_text())
    frequent = {piece: i + 1 for i, (piece, _) in enumerate(Counter(pieces).most_common(vocab_size - 1))}
    return np.fromiter((frequent.get(piece, 0) for piece in pieces), dtype=np.int64, count=len(pieces))


def document_lengths(rng: np.random.Generator, n_tokens: int, longest: int) -> list[int]:
    """Lengths with a median of 180 and a log-normal spread of 0.8, from 16 to ``longest``; their sum is ``n_tokens``."""
    lengths: list[int] = []
    while (left := n_tokens - sum(lengths)) > 0:
        drawn = int(np.clip(rng.lognormal(np.log(180), 0.8), 16, longest))
        lengths.append(min(drawn, left))
    return lengths


def write_batches(
    path: Path, vocab_size: int, batch_size: int, sequence_length: int, n_batches: int, layout: str, seed: int = 0
) -> None:
    """Rows (n, B, T) of tokens and of the documents' numbers, and for engines that pad, the documents of ``packed`` one a row.

    ``padded`` (n, B, T) holds B documents a batch from their beginnings, ``lengths`` (n, B) what of each row is text: such an
    engine shortens a batch to its longest. Both walk through the same documents in the same order.
    """
    rng = np.random.default_rng(seed)
    text = read_tokens(vocab_size)
    needed = n_batches * batch_size * sequence_length
    begin = int(rng.integers(len(text) - needed)) if len(text) > needed else 0
    stream = np.resize(text[begin : begin + needed], needed)
    shape = (n_batches, batch_size, sequence_length)
    arrays: dict[str, npt.NDArray[np.int64]] = {"tokens": stream.reshape(shape)}
    if layout == "fixed":
        arrays["documents"] = np.zeros(shape, dtype=np.int64)
    else:
        lengths = document_lengths(rng, needed, sequence_length)
        arrays["documents"] = np.repeat(np.arange(len(lengths)), lengths).reshape(shape)
        begins = np.cumsum([0, *lengths])
        padded = np.zeros(shape, dtype=np.int64).reshape(-1, sequence_length)
        kept = np.zeros(len(padded), dtype=np.int64)
        for row in range(len(padded)):
            n = lengths[row]
            padded[row, :n] = stream[begins[row] : begins[row] + n]
            kept[row] = n
        arrays["padded"], arrays["lengths"] = padded.reshape(shape), kept.reshape(shape[:2])
    np.savez(path, **arrays)
