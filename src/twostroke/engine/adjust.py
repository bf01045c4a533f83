"""Changes a request's row of logits before a token is chosen: adds biases, applies penalties, forbids an early end and tokens
that do not continue the form that the answer must have.

Each request has an ``Adjuster`` that keeps everything ready in arrays, so that a step looks only at the tokens that came since
the last one, however long prompt, output and lists are. The native library changes all rows in one call, in place, and changes
them back later: copying whole rows for a few numbers each would cost more than all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from twostroke.engine import native_sampling
from twostroke.engine.grammars import Matcher
from twostroke.kernels.native_library import library
from twostroke.scheduling.request import Request

_NONE = np.empty(0, np.int64)


class _Fixed:
    """What stays the same while a request runs; all answers to it share it. Tokens outside the vocabulary are left out."""

    def __init__(self, request: Request, n_vocab: int) -> None:
        params = request.params
        tokens, biases = (np.asarray(values) for values in params.bias_arrays)
        known = tokens < n_vocab
        self.biased, self.biases = tokens[known], biases[known]
        self.repeats = params.repetition_penalty != 1.0
        self.counts = bool(params.presence_penalty or params.frequency_penalty)
        self.in_prompt = frozenset(request.tokens[: request.n_prompt]) if self.repeats else frozenset()
        self.prompt = np.fromiter(self.in_prompt, np.int64, len(self.in_prompt))
        ends = [token for token in request.stop_ids if token < n_vocab] if params.min_tokens else []
        # If every token may end a request, forbidding them all would leave nothing to choose.
        self.ends = np.array(ends, np.int64) if len(ends) < n_vocab else _NONE


class Adjuster:
    """The arrays of one request. ``output[:n_output]`` are the distinct tokens of its output, ``counts`` says how often each
    came, and ``fresh`` which of them are not in the prompt, whose tokens the repetition penalty reaches anyway. ``record``
    tells the library of all of them."""

    def __init__(self, request: Request, fixed: _Fixed) -> None:
        self.fixed = fixed
        self.ends = fixed.ends
        self.n_output = 0
        self.matcher = request.matcher if isinstance(request.matcher, Matcher) else None
        self._follows = fixed.repeats or fixed.counts
        self.n_seen = request.n_prompt
        self._place_of: dict[int, int] = {}
        self.output, self.counts, self.fresh = _NONE, np.empty(0, np.int32), np.empty(0, np.uint8)
        self._pack(request)

    def see(self, request: Request) -> None:
        """Count the tokens that came since the last call, and find what may follow them."""
        if self.matcher is not None:
            self.matcher.look(request.tokens)
        if len(self.ends) and len(request.tokens) >= request.min_length:
            self.ends = _NONE  # min_tokens is reached: the request may end now
            self._pack(request)
        if self._follows:
            for token in request.tokens[self.n_seen :]:
                place = self._place_of.get(token)
                if place is None:
                    place = self._add(token, request)
                self.counts[place] += 1
        self.n_seen = len(request.tokens)

    def _add(self, token: int, request: Request) -> int:
        place = self._place_of[token] = self.n_output
        self.n_output += 1
        if place == len(self.output):
            # Twice as long, so that copying stays a constant cost a token; the arrays move, so the record is packed anew.
            self.output, self.counts, self.fresh = (_longer(a) for a in (self.output, self.counts, self.fresh))
            self._pack(request)
        else:
            native_sampling.set_n_output(self.record, self.n_output)
        self.output[place] = token
        self.fresh[place] = self.fixed.repeats and token not in self.fixed.in_prompt
        return place

    def _pack(self, request: Request) -> None:
        fixed = self.fixed
        arrays = {"biased": fixed.biased, "biases": fixed.biases, "prompt": fixed.prompt, "ends": self.ends}
        arrays |= {"output": self.output, "counts": self.counts, "fresh": self.fresh}
        if self.matcher is not None:
            arrays["allowed"] = self.matcher.words
        self.record = native_sampling.adjustment(request.params, arrays, self.n_output)


def _longer(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate((array, np.zeros(max(8, len(array)), array.dtype)))


def adjuster_of(request: Request, n_vocab: int) -> Adjuster:
    """The request's adjuster, made when it is first asked for. The answers to one prompt share the part that stays the same.

    One that has seen more tokens than there are is made anew: a step that checked drafts was interrupted."""
    made = request.adjuster
    if not isinstance(made, Adjuster) or made.n_seen > len(request.tokens):
        root = request.fork_of
        made = Adjuster(request, _Fixed(request, n_vocab) if root is None else adjuster_of(root, n_vocab).fixed)
        request.adjuster = made
    return made


def is_changed(request: Request) -> bool:
    """Whether the request's next row of logits is to be changed."""
    return request.adjusted or (len(request.tokens) < request.min_length and bool(request.stop_ids))


class Adjusted:
    """``requests`` have changed their ``rows`` of ``logits`` (fp32, contiguous) until ``restore``, which is possible unless
    ``kept`` is False. ``best`` holds the largest logit of each changed row, and ``tokens`` its token."""

    def __init__(
        self, logits: Tensor, rows: Sequence[int], requests: Sequence[Request], n_threads: int = 1, kept: bool = True
    ) -> None:
        adjusters = [adjuster_of(request, logits.shape[1]) for request in requests]
        for adjuster, request in zip(adjusters, requests, strict=True):
            adjuster.see(request)
        self._logits, self._n_threads = logits, n_threads
        self._undo: list[Changes] = []
        self._native: native_sampling.Adjustments | None = None
        if library() is not None:
            self._adjusters = adjusters  # keeps the arrays alive that the records point to
            n_vocab = logits.shape[1] if kept else None
            self._native = native_sampling.Adjustments(rows, [adjuster.record for adjuster in adjusters], n_vocab)
            self._native.apply(logits, n_threads)
            self.tokens, self.best = self._native.tokens, self._native.best
            return
        arrays = logits.numpy()
        self._rows = [arrays[i] for i in rows]
        for row, request, adjuster in zip(self._rows, requests, adjusters, strict=True):
            self._undo.append(plain_adjust(row, request, adjuster))
        self.tokens = [int(row.argmax()) for row in self._rows]
        self.best = [float(row[token]) for row, token in zip(self._rows, self.tokens, strict=True)]

    def restore(self) -> None:
        if self._native is not None:
            self._native.restore(self._logits, self._n_threads)
            return
        for row, changes in zip(self._rows, self._undo, strict=True):
            for index, before in reversed(changes):  # a place that changed twice gets back what stood there first
                row[index] = before


Changes = list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]
"""Places of a row and what stood there, in the order of the changes."""


def plain_adjust(row: npt.NDArray[np.float32], request: Request, adjuster: Adjuster) -> Changes:
    """Change ``row`` in place with numpy, the reference of the native library: first biases, then penalties, then ends, then
    what is not allowed."""
    params, fixed = request.params, adjuster.fixed
    changes: Changes = []

    def change(index: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
        changes.append((index, row[index]))
        row[index] = values

    if len(fixed.biased):
        change(fixed.biased, row[fixed.biased] + fixed.biases)
    output = adjuster.output[: adjuster.n_output]
    if fixed.repeats:
        seen = np.concatenate((fixed.prompt, output[adjuster.fresh[: len(output)] != 0]))
        penalty, values = np.float32(params.repetition_penalty), row[seen]
        with np.errstate(over="ignore"):  # what a penalty takes below the smallest number is −inf, as in the native library
            change(seen, np.where(values > 0, values / penalty, values * penalty))
    if fixed.counts and len(output):
        taken_off = params.presence_penalty + params.frequency_penalty * adjuster.counts[: len(output)]
        change(output, row[output] - taken_off.astype(np.float32))
    if len(adjuster.ends):
        change(adjuster.ends, np.full(len(adjuster.ends), -np.inf, np.float32))
    if adjuster.matcher is not None:
        forbidden = np.flatnonzero(~adjuster.matcher.allowed(len(row)))
        change(forbidden, np.full(len(forbidden), -np.inf, np.float32))
    return changes
