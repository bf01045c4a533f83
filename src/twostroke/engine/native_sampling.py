"""Draws tokens and finds the most probable ones by the native library: one pass over the vocabulary, then a look at few of it.

``sampler`` has the plain reference of each, and takes it where the library was not built.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.core.errors import CapacityError, EngineError
from twostroke.kernels.native_library import library, mirror_bytes
from twostroke.scheduling.sampling_params import SamplingParams

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
"""``Draw`` in kernels/native/sampling.h. ``number`` is the random number in [0, 1). ``top_k`` 0 keeps all tokens."""

_ARRAYS = ("biased", "biases", "prompt", "output", "counts", "fresh", "ends", "allowed")
ADJUSTMENT = np.dtype(
    [
        *((name, np.int64) for name in ("row", "token", "n_biased", "n_prompt", "n_output", "n_ends")),
        *((name, np.uintp) for name in (*_ARRAYS, "whole", "undo")),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("repetition", np.float32),
        ("best", np.float32),
    ]
)
"""``Adjustment`` in kernels/native/sampling.h."""

mirror_bytes("Draw", DRAW.itemsize)
mirror_bytes("Adjustment", ADJUSTMENT.itemsize)


# One ``ADJUSTMENT`` as bytes. A request packs it anew when its arrays move, and else changes only ``n_output`` in it.
_RECORD = struct.Struct("=6q10Q2d2f")
_N_OUTPUT = struct.Struct("=q"), ADJUSTMENT.fields["n_output"][1]  # type: ignore[index]


def adjustment(params: SamplingParams, arrays: Mapping[str, npt.NDArray[Any]], n_output: int) -> bytearray:
    """One ``ADJUSTMENT`` that points to ``arrays``, so it is valid while they live. Of the arrays that grow with the output
    the first ``n_output`` places are used. Without ``allowed`` among them all tokens are."""
    lengths = len(arrays["biased"]), len(arrays["prompt"]), n_output, len(arrays["ends"])
    addresses = [arrays[name].__array_interface__["data"][0] if name in arrays else 0 for name in _ARRAYS]
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    return bytearray(_RECORD.pack(0, 0, *lengths, *addresses, 0, 0, *penalties, 0.0))


def set_n_output(record: bytearray, n_output: int) -> None:
    """Use the first ``n_output`` places from now on."""
    _N_OUTPUT[0].pack_into(record, _N_OUTPUT[1], n_output)


class Adjustments:
    """Changes to ``rows`` of logits: one of ``records``, made by ``adjustment``, for each row. ``n_vocab`` is given if they are
    to be restored."""

    def __init__(self, rows: Sequence[int], records: Sequence[bytearray], n_vocab: int | None = None) -> None:
        made = np.frombuffer(bytearray(b"".join(records)), ADJUSTMENT)
        made["row"] = rows
        sizes = made["n_biased"] + made["n_prompt"] + 2 * made["n_output"] + made["n_ends"]
        # What a row holds at every place that changes; a place of the output can change twice, by both kinds of penalty.
        self._undo = np.empty(int(sizes.sum()), np.float32)
        made["undo"] = self._undo.ctypes.data + 4 * (np.cumsum(sizes) - sizes).astype(np.uintp)
        if n_vocab is not None and (masked := np.flatnonzero(made["allowed"])).size:
            self._whole = np.empty((len(masked), n_vocab), np.float32)
            made["whole"][masked] = self._whole.ctypes.data + 4 * n_vocab * np.arange(len(masked), dtype=np.uintp)
        self._made = made

    @property
    def tokens(self) -> list[int]:
        """The token of each row's largest logit; the first of several that are equal."""
        tokens: list[int] = self._made["token"].tolist()
        return tokens

    @property
    def best(self) -> list[float]:
        best: list[float] = self._made["best"].tolist()
        return best

    def apply(self, logits: Float[Tensor, "n V"], n_threads: int = 1) -> None:
        self._call("ts_adjust", logits, n_threads)

    def restore(self, logits: Float[Tensor, "n V"], n_threads: int = 1) -> None:
        self._call("ts_restore", logits, n_threads)

    def _call(self, name: str, logits: Tensor, n_threads: int) -> None:
        native: Any = library()
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        getattr(native, name)(logits.data_ptr(), logits.shape[1], self._made.ctypes.data, len(self._made), n_threads)


def draw(logits: Float[Tensor, "n V"], draws: npt.NDArray[np.void], n_threads: int = 1) -> list[int]:
    """The token that each of ``draws`` (of type ``DRAW``) takes from its row.

    Raises EngineError if a row holds NaN or only −∞, and CapacityError if memory is short.
    """
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
    """For each of ``rows``: the logarithm of Σ exp(logits), its ``k`` largest logits, best first, and their tokens.

    Raises EngineError if a row holds NaN, and CapacityError if memory is short.
    """
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
