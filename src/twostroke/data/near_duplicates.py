"""Finds near-duplicates, documents that share most of their shingles, by MinHash and locality-sensitive hashing.

A document is the set of its shingles: stretches of ``SHINGLE_BYTES`` bytes, lower-cased and with white space as single spaces.
Bytes instead of words treat every script alike. The signature is one permutation hashing (Li, Owen, Zhang 2012) into ``N_BINS``
bins. Empty bins are filled from others that a fixed hash chooses (optimal densification, Shrivastava 2017), so that a document
costs one sort of its hashes for any ``N_BINS``. The share of equal bins of two signatures estimates the Jaccard similarity of
the two sets with a standard deviation of √(J(1 − J) / 128), which is 0.035 at 0.8.

Candidates share all ``ROWS`` bins of one of ``BANDS`` bands (Broder 1997; Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", 3.4). Those are all pairs with J = 0.8 but a share of 5·10⁻⁸, and a quarter of the pairs with J = 0.3. The similarity
of each candidate's signatures is then compared with the threshold. Signatures lie in a file (512 bytes a document); memory
holds about 50 bytes a document and 8 a candidate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.data.permutation import UInt64Array, splitmix64
from twostroke.data.shingles import shingle_hashes

SHINGLE_BYTES = 24
N_BINS = 128
ROWS = 4
BANDS = N_BINS // ROWS
NEIGHBOURS = 8
"""A document of a bucket is compared with the bucket's first and with this many before it. All pairs of a bucket that thousands
of documents share would take hours, and near documents that are missed here share other buckets."""

_BIN_BITS = N_BINS.bit_length() - 1
_EMPTY = np.uint64(2**64 - 1)
_CHUNK = 8192

UInt32Array = npt.NDArray[np.uint32]
Int64Array = npt.NDArray[np.int64]

_EDGES = np.arange(N_BINS, dtype=np.uint64) << np.uint64(64 - _BIN_BITS)
_DONOR_RANK = splitmix64(np.arange(N_BINS * N_BINS, dtype=np.uint64) + np.uint64(1)).reshape(N_BINS, N_BINS)


class MinHash:
    """Computes the signature of one document piece by piece."""

    def __init__(self) -> None:
        self._minima = np.full(N_BINS, _EMPTY, dtype=np.uint64)
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
        self._minima[filled] = np.minimum(self._minima[filled], hashes[first[filled]])

    def signature(self) -> UInt32Array:
        """``N_BINS`` values. A document shorter than a shingle counts as one shingle."""
        is_empty = self._minima == _EMPTY
        if is_empty.all():
            self._take(self._carried or b" ")
            is_empty = self._minima == _EMPTY
        values = (self._minima << np.uint64(_BIN_BITS)) >> np.uint64(32)
        if is_empty.any():
            donors = np.flatnonzero(~is_empty)
            values[is_empty] = values[donors[_DONOR_RANK[is_empty][:, donors].argmin(axis=1)]]
        return values.astype(np.uint32)


def similarity(a: UInt32Array, b: UInt32Array) -> npt.NDArray[np.float64]:
    """Estimated Jaccard similarity of each row of ``a`` with that of ``b``."""
    return np.asarray((a == b).mean(axis=-1), dtype=np.float64)


class SignatureFile:
    """A file of the documents' signatures, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n = 0
        self._stream = open(path, "xb")  # noqa: SIM115 - closed by close()

    def add(self, signature: UInt32Array) -> None:
        self._stream.write(signature.tobytes())
        self.n += 1

    def close(self) -> UInt32Array:
        """All signatures (n, ``N_BINS``), memory-mapped."""
        self._stream.close()
        if self.n == 0:
            return np.empty((0, N_BINS), dtype=np.uint32)
        return np.memmap(self.path, dtype=np.uint32, mode="r", shape=(self.n, N_BINS))

    def remove(self) -> None:
        self._stream.close()
        self.path.unlink(missing_ok=True)


def near_duplicates(signatures: UInt32Array, among: Int64Array, threshold: float) -> tuple[Int64Array, Int64Array]:
    """(rows to leave out, the earlier row that each is near to), of the rows ``among`` in ascending order. A row is left out if
    its similarity with an earlier row that stays is at least ``threshold``. The result depends on the signatures alone."""
    pairs: list[Int64Array] = []
    met = np.empty(0, dtype=np.int64)  # candidates that were compared in an earlier band, as later · n + earlier
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
        keys = splitmix64(keys ^ column)
    return keys
