"""The result of one pass over all documents: size and hash of each, and the verdict whether it is kept or why not."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.data_recipe import DataRecipe
from twostroke.data import filters
from twostroke.data.filters import TextMeasure
from twostroke.data.near_duplicates import MinHash, SignatureFile, near_duplicates

REASONS = ("kept", "duplicate", "near_duplicate", "copy_of_held_out", *filters.REASONS)
"""A verdict is an index into these."""

KEPT, DUPLICATE, NEAR_DUPLICATE, COPY_OF_HELD_OUT = range(4)
_FIRST_FILTER = 4
N_EXAMPLES = 3

Verdicts = npt.NDArray[np.uint8]


class Inventory:
    """Content hash, size, bucket and verdict of documents (or pieces, or conversations) in reading order.

    A document takes 27 bytes of memory. Signatures for the search for near-duplicates take 512 bytes each, in a file in
    ``scratch`` until ``close``.
    """

    def __init__(self, recipe: DataRecipe, scratch: Path, dedup: str, with_filters: bool = True) -> None:
        self._recipe, self._dedup = recipe, dedup
        self._has_filters = with_filters and recipe.has_filters
        self._digests = bytearray()
        self._buckets, self._n_bytes, self._verdicts = array("H"), array("Q"), array("B")
        self._signatures = SignatureFile(scratch / "signatures") if dedup == "near" else None
        self._begin()

    def _begin(self) -> None:
        self._hash, self._size = hashlib.sha256(), 0
        self._measure = TextMeasure() if self._has_filters else None
        self._minhash = MinHash() if self._signatures is not None else None

    def add(self, text: str) -> None:
        """Add the next piece of the document."""
        raw = text.encode()
        self._hash.update(raw)
        self._size += len(raw)
        if self._measure is not None:
            self._measure.add(text)
        if self._minhash is not None:
            self._minhash.add(text)

    def end(self, bucket: int, filtered: bool = True) -> None:
        """End the document. With ``filtered`` = False the filters do not apply to it."""
        reason = self._measure.rejection(self._recipe) if self._measure is not None and filtered else None
        self._digests += self._hash.digest()[:16]
        self._buckets.append(bucket)
        self._n_bytes.append(self._size)
        self._verdicts.append(KEPT if reason is None else _FIRST_FILTER + filters.REASONS.index(reason))
        if self._signatures is not None and self._minhash is not None:
            self._signatures.add(self._minhash.signature())
        self._begin()

    def __len__(self) -> int:
        return len(self._verdicts)

    @property
    def buckets(self) -> npt.NDArray[np.int64]:
        return np.array(self._buckets, dtype=np.int64)

    @property
    def n_bytes(self) -> npt.NDArray[np.int64]:
        return np.array(self._n_bytes, dtype=np.int64)

    def judge(self) -> Verdicts:
        """The verdicts: the filters' own, then, among documents that they keep, duplicates and near-duplicates of earlier
        ones."""
        verdicts = np.array(self._verdicts, dtype=np.uint8)
        if self._dedup != "none":
            verdicts[self._repeated(np.flatnonzero(verdicts == KEPT))] = DUPLICATE
        if self._signatures is not None:
            kept = np.flatnonzero(verdicts == KEPT)
            verdicts[near_duplicates(self._signatures.close(), kept, self._recipe.near_threshold)[0]] = NEAR_DUPLICATE
        return verdicts

    def leave_out_copies(self, verdicts: Verdicts, held: npt.NDArray[np.bool_]) -> None:
        """Mark training documents that equal a held-out one, in place. Needed where ``dedup`` did not remove them."""
        kept = verdicts == KEPT
        order = np.concatenate((np.flatnonzero(kept & held), np.flatnonzero(kept & ~held)))  # held-out text comes first
        repeated = self._repeated(order)
        copies = repeated[~held[repeated]]
        if len(copies) == 0:
            return
        names = self._names()
        in_held_out = set(map(bytes, names[kept & held]))
        verdicts[[i for i in copies.tolist() if bytes(names[i]) in in_held_out]] = COPY_OF_HELD_OUT

    def _names(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self._digests, dtype="V16")

    def _repeated(self, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of the documents ``order`` that have the hash of an earlier one in it."""
        halves = np.frombuffer(self._digests, dtype="<u8").reshape(-1, 2)[order]
        by_hash = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: the first of equals stays the first
        same = (halves[by_hash][1:] == halves[by_hash][:-1]).all(axis=1)
        return np.asarray(order[by_hash[1:][same]])

    def close(self) -> None:
        if self._signatures is not None:
            self._signatures.remove()


def left_out(parts: Sequence[tuple[Verdicts, npt.NDArray[np.int64]]], examples: dict[int, list[str]]) -> dict[str, Any]:
    """The manifest's table of what was left out, by reason: documents, bytes and examples. ``parts`` are (verdicts, sizes)."""
    table = {}
    for verdict, reason in enumerate(REASONS[1:], start=1):
        n_documents = sum(int(np.count_nonzero(verdicts == verdict)) for verdicts, _ in parts)
        if n_documents:
            n_bytes = sum(int(sizes[verdicts == verdict].sum()) for verdicts, sizes in parts)
            table[reason] = {"n_documents": n_documents, "n_bytes": n_bytes, "examples": examples.get(verdict, [])}
    return table


def add_example(examples: dict[int, list[str]], verdict: int, key: str) -> bool:
    """Keep ``key`` if it is among the first examples of ``verdict``. Returns False, which callers return as "not admitted"."""
    found = examples.setdefault(verdict, [])
    if len(found) < N_EXAMPLES and key not in found:
        found.append(key)
    return False
