"""Hashes every stretch of n bytes of a text. N-gram counts and the search for near-duplicates are built on these hashes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.data.permutation import UInt64Array, splitmix64

_BASE = 0x9E3779B97F4A7C15


def shingle_hashes(raw: npt.NDArray[np.uint8], length: int) -> UInt64Array:
    """A 64-bit hash of each of the len(raw) − length + 1 stretches of ``length`` bytes, in order. A shorter text has one hash.

    The hash is a polynomial in the bytes modulo 2⁶⁴, mixed so that every bit depends on every byte. Doubling
    (h₂ₙ[i] = hₙ[i]·pⁿ + hₙ[i + n]) takes O(len · log length) without a loop over bytes.
    tests/data/test_near_duplicates.py compares it with hashing one stretch at a time.
    """
    length = max(1, min(length, len(raw)))
    power = raw.astype(np.uint64) + np.uint64(1)  # hashes of stretches of ``size`` bytes
    base = _BASE  # p^size, modulo 2^64
    total: UInt64Array | None = None  # hashes over the low binary digits of ``length`` that were processed so far
    done, total_base, size, rest = 0, 1, 1, length
    while rest:
        if rest & 1:
            if total is None:
                total = power
            else:
                n = len(raw) - done - size + 1
                total = power[:n] * np.uint64(total_base) + total[size : size + n]
            done += size
            total_base = total_base * base % 2**64
        rest >>= 1
        if rest:
            n = len(power) - size
            power = power[:n] * np.uint64(base) + power[size : size + n]
            base = base * base % 2**64
            size *= 2
    assert total is not None
    return splitmix64(total)
