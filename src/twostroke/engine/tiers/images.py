"""The bytes of a page of the KV cache, as one string, out of a pool and back into it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class PageImages:
    """``arrays`` are a pool's memory, (runs, pages, bytes) each: a page is its place in every run, one behind the other."""

    def __init__(self, arrays: Sequence[Bytes]) -> None:
        self._arrays = [array for array in arrays if array.size]
        ends = [0, *np.cumsum([array.shape[0] * array.shape[2] for array in self._arrays]).tolist()]
        self._places = [slice(begin, end) for begin, end in pairwise(ends)]
        self.n_bytes: int = ends[-1]

    def copy_out(self, page: int, into: Bytes) -> None:
        """The bytes of ``page``, ``n_bytes``, to ``into``."""
        for array, place in zip(self._arrays, self._places, strict=True):
            into[place].reshape(array.shape[0], -1)[:] = array[:, page]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Each of the pages ``sources`` into the one of ``targets`` at its place."""
        for array in self._arrays:
            array[:, list(targets)] = array[:, list(sources)]

    def copy_in(self, page: int, image: Bytes) -> None:
        """``image`` into ``page``."""
        for array, place in zip(self._arrays, self._places, strict=True):
            array[:, page] = image[place].reshape(array.shape[0], -1)
