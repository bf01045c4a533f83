"""Drawing tokens and finding the most probable ones by the native library: a pass over the vocabulary and a look at few of it.

``sampler`` has the plain reference of each. Absent where the library was not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.core.errors import CapacityError, EngineError
from twostroke.kernels.native_library import library

if TYPE_CHECKING:
    from jaxtyping import Float

DRAW = np.dtype(
    [
        ("row", np.int64),
        ("token", np.int64),
        ("number", np.float64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
    ]
)
"""``Draw`` in kernels/native/sample.cpp. ``number`` in [0, 1) is the random one; ``top_k`` 0: all."""


def draw(logits: Float[Tensor, "n V"], draws: npt.NDArray[np.void], n_threads: int = 1) -> list[int]:
    """The token of each of ``draws`` (of ``DRAW``) from its row, none of which may hold NaN or only −∞.

    Raises EngineError where one does, CapacityError where memory is short."""
    native, n_vocab = library(), logits.shape[1]
    assert native is not None
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    _check(native.ts_draw(logits.data_ptr(), n_vocab, draws.ctypes.data, len(draws), n_threads))
    tokens: list[int] = draws["token"].tolist()
    return tokens


def top(
    logits: Float[Tensor, "n V"], rows: Sequence[int], k: int, n_threads: int = 1
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Of each of ``rows`` the logarithm of Σ exp(logits), and its ``k`` largest logits, best first, with their tokens.

    Raises EngineError where a row holds NaN, CapacityError where memory is short."""
    native, n_vocab, n = library(), logits.shape[1], len(rows)
    assert native is not None
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    k = min(k, n_vocab)
    which = np.asarray(rows, np.int64)
    normalisers, values, tokens = np.empty(n), np.empty((n, k), np.float32), np.empty((n, k), np.int64)
    pointers = (normalisers.ctypes.data, values.ctypes.data, tokens.ctypes.data)
    _check(native.ts_top(logits.data_ptr(), n_vocab, which.ctypes.data, n, k, *pointers, n_threads))
    return normalisers, values, tokens


def _check(outcome: int) -> None:
    """Raises CapacityError or EngineError for what the library answers (``Outcome`` in sample.cpp)."""
    if outcome == 1:
        raise CapacityError("the sampler's working memory cannot be allocated. Lower max_running.")
    if outcome == 2:
        raise EngineError("a row of logits holds NaN, or no finite number. Fail its request before drawing or ranking tokens.")
