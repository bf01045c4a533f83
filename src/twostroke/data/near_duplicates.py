"""Near-duplicates by MinHash and locality-sensitive hashing: documents that share most of their shingles.

A document is the set of its stretches of ``SHINGLE_BYTES`` bytes, lower-cased and with white space as single spaces. Bytes
instead of words make it the same for every writing. The signature is one permutation hashing (Li, Owen, Zhang 2012) into
``N_BINS`` bins, empty ones filled from others chosen by a fixed hash (optimal densification, Shrivastava 2017), so a document
costs one sort of its hashes whatever ``N_BINS``. The share of equal bins of two signatures estimates the Jaccard similarity of
the two sets with a standard deviation of √(J(1 − J) / 128): 0.035 at 0.8.

Candidates share all ``ROWS`` bins of one of ``BANDS`` bands (Broder 1997; Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", 3.4): of pairs with J = 0.8 all but 5·10⁻⁸, with J = 0.3 a quarter. Each is then held to the threshold by its
signatures. Signatures lie in a file (512 bytes a document); in memory are about 50 bytes a document and 8 a candidate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.data.permutation import UInt64Array, mix
from twostroke.data.shingles import shingle_hashes

SHINGLE_BYTES = 24
N_BINS = 128
ROWS = 4
BANDS = N_BINS // ROWS
NEIGHBOURS = 8
"""A document of a bucket is held against the bucket's first and this many before it: all pairs of a bucket that thousands of
documents share would take hours. Documents that it hides share other buckets."""

_BIN_BITS = N_BINS.bit_length() - 1
_EMPTY = np.uint64(2**64 - 1)
_CHUNK = 8192

UInt32Array = npt.NDArray[np.uint32]
Int64Array = npt.NDArray[np.int64]

_EDGES = np.arange(N_BINS, dtype=np.uint64) << np.uint64(64 - _BIN_BITS)
_DONOR_RANK = mix(np.arange(N_BINS * N_BINS, dtype=np.uint64) + np.uint64(1)).reshape(N_BINS, N_BINS)


class MinHash:
    """The signature of one document, taken piece by piece."""

    def __init__(self) -> None:
        self._least = np.full(N_BINS, _EMPTY, dtype=np.uint64)
        self._carried = b""

    def add(self, text: str) -> None:
        words = text.casefold().split()
        if not words:
            return
        raw = self._carried + (" ".join(words) + " ").encode()
        if len(raw) >= SHINGLE_BYTES:
            self._take(raw)
        self._carried = raw[-(SHINGLE_BYTES - 1) :]

    def _take(self, raw: bytes) -> None:
        hashes = np.sort(shingle_hashes(np.frombuffer(raw, dtype=np.uint8), SHINGLE_BYTES))
        first = np.searchsorted(hashes, _EDGES)
        filled = first < np.append(first[1:], len(hashes))
        self._least[filled] = np.minimum(self._least[filled], hashes[first[filled]])

    def signature(self) -> UInt32Array:
        """``N_BINS`` values. A document shorter than a shingle is one shingle."""
        is_empty = self._least == _EMPTY
        if is_empty.all():
            self._take(self._carried or b" ")
            is_empty = self._least == _EMPTY
        values = (self._least << np.uint64(_BIN_BITS)) >> np.uint64(32)
        if is_empty.any():
            donors = np.flatnonzero(~is_empty)
            values[is_empty] = values[donors[_DONOR_RANK[is_empty][:, donors].argmin(axis=1)]]
        return values.astype(np.uint32)


def similarity(a: UInt32Array, b: UInt32Array) -> npt.NDArray[np.float64]:
    """Estimated Jaccard similarity of each row of ``a`` with that of ``b``."""
    return np.asarray((a == b).mean(axis=-1), dtype=np.float64)


class SignatureFile:
    """Signatures of documents in order, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n = 0
        self._stream = open(path, "xb")  # noqa: SIM115 - closed by close()

    def add(self, signature: UInt32Array) -> None:
        self._stream.write(signature.tobytes())
        self.n += 1

    def close(self) -> UInt32Array:
        """All of them (n, ``N_BINS``), mapped."""
        self._stream.close()
        if self.n == 0:
            return np.empty((0, N_BINS), dtype=np.uint32)
        return np.memmap(self.path, dtype=np.uint32, mode="r", shape=(self.n, N_BINS))

    def remove(self) -> None:
        self._stream.close()
        self.path.unlink(missing_ok=True)


def near_duplicates(signatures: UInt32Array, among: Int64Array, threshold: float) -> tuple[Int64Array, Int64Array]:
    """(row, the earlier row it is near to) of each of the rows ``among`` (ascending) that leaves: those whose similarity with
    an earlier row that stays is at least ``threshold``. The same for the same signatures."""
    pairs: list[Int64Array] = []
    met = np.empty(0, dtype=np.int64)  # candidates held to the threshold already, as numbers
    for band in range(BANDS):
        candidates = np.setdiff1d(_candidates(signatures, among, band), met)
        for begin in range(0, len(candidates), _CHUNK):
            pair = np.stack(np.divmod(candidates[begin : begin + _CHUNK], len(signatures)), axis=1)
            near = similarity(np.asarray(signatures[pair[:, 0]]), np.asarray(signatures[pair[:, 1]])) >= threshold
            pairs += [pair[near]] if near.any() else []
        met = np.union1d(met, candidates)
    if not pairs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    both = np.unique(np.concatenate(pairs), axis=0)  # by the later row, then by the earlier
    leader: dict[int, int] = {}
    for later, earlier in both.tolist():
        if later in leader:
            continue
        kept = leader.get(earlier, earlier)
        if kept == earlier or similarity(signatures[later], signatures[kept]) >= threshold:
            leader[later] = kept
    rows = np.array(sorted(leader), dtype=np.int64)
    return rows, np.array([leader[row] for row in rows.tolist()], dtype=np.int64)


def _candidates(signatures: UInt32Array, among: Int64Array, band: int) -> Int64Array:
    """Pairs that share a band, each as the number later · n + earlier."""
    keys = np.empty(len(among), dtype=np.uint64)
    for begin in range(0, len(among), _CHUNK):
        values = np.asarray(signatures[among[begin : begin + _CHUNK], band * ROWS : (band + 1) * ROWS])
        keys[begin : begin + _CHUNK] = _band_keys(values)
    order = np.argsort(keys, kind="stable")
    keys, rows = keys[order], among[order]
    begins = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))
    place = np.arange(len(keys)) - first  # within its bucket
    found = [rows[place > NEIGHBOURS] * len(signatures) + rows[first[place > NEIGHBOURS]]]
    for back in range(1, NEIGHBOURS + 1):
        later = np.flatnonzero(place >= back)
        found.append(rows[later] * len(signatures) + rows[later - back])
    return np.concatenate(found)


def _band_keys(rows: UInt32Array) -> UInt64Array:
    pairs = np.ascontiguousarray(rows).view(np.uint64)
    keys = np.zeros(len(rows), dtype=np.uint64)
    for column in pairs.T:
        keys = mix(keys ^ column)
    return keys
