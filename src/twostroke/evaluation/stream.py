"""Scores a stream of documents with any ``Scorer``, in the windows of ``bits.token_nats`` and with a sequence for each
document."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import InputError
from twostroke.evaluation.scorer import Scorer

_SEQUENCES_AT_ONCE = 256


def stream_nats(
    scorer: Scorer,
    ids: npt.NDArray[np.integer],
    eos_id: int,
    context: int,
    stride: int,
    progress: Callable[[float, str], None] | None = None,
) -> npt.NDArray[np.float32]:
    """−ln p of each token as ``bits.token_nats`` defines it: the same windows, attention within documents only, and ln V for a
    document's first token. tests/evaluation/test_stream.py compares the two."""
    if not 1 <= stride <= context:
        raise InputError(f"stride={stride} must be between 1 and context={context}.")
    nats = np.full(len(ids), math.log(scorer.spec.vocab_size), dtype=np.float32)
    n_targets = len(ids) - 1
    if n_targets < 1:
        return nats
    length = min(context, n_targets)
    starts = [*range(0, n_targets - length, stride), n_targets - length]
    begins = np.concatenate(([0], np.flatnonzero(ids[:-1] == eos_id) + 1))
    sequences: list[tuple[list[int], int]] = []
    places: list[tuple[int, int]] = []
    scored_to = 1
    for start in starts:
        end = start + length + 1  # behind the last target
        inside = begins[(begins > start) & (begins < end)]
        for begin, stop in zip([start, *inside], [*inside, end], strict=True):
            first = max(scored_to, begin + 1)
            if first < stop:
                sequences.append((ids[begin:stop].tolist(), int(first - begin)))
                places.append((int(first), int(stop)))
        scored_to = max(scored_to, end)
    for at in range(0, len(sequences), _SEQUENCES_AT_ONCE):
        found = scorer.token_scores(sequences[at : at + _SEQUENCES_AT_ONCE])
        for (first, stop), (own, _) in zip(places[at : at + _SEQUENCES_AT_ONCE], found, strict=True):
            nats[first:stop] = own
        if progress is not None:
            progress(min(1.0, (at + _SEQUENCES_AT_ONCE) / len(sequences)), "scoring")
    return nats
