"""Where documents begin inside rows of a flat token stream. Shared by the training loader and by scoring."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""Target that no loss counts: torch's own default ``ignore_index``."""

LEARNED, BEGINS = 1, 2
"""Bits of the mark beside a conversation's token: the assistant's, and the first one of a conversation."""

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


def document_layout(tokens: npt.NDArray[np.integer], eos_id: int) -> tuple[Int64Array, Int32Array]:
    """Positions and document numbers of each token in rows (B, T), where ``eos_id`` ends a document and belongs to it.

    Positions restart at 0 behind each end-of-text; the first token of a row is at 0 even when its document began earlier.
    Document numbers count from 0 in each row.
    """
    n_rows, length = tokens.shape
    begins = np.zeros((n_rows, length), dtype=bool)
    np.equal(tokens[:, :-1], eos_id, out=begins[:, 1:])
    documents = np.cumsum(begins, axis=1, dtype=np.int32)
    index = np.arange(length, dtype=np.int64)
    start = np.where(begins, index, 0)
    np.maximum.accumulate(start, axis=1, out=start)
    return index - start, documents


def next_token_targets(tokens: npt.NDArray[np.integer], eos_id: int) -> Int64Array:
    """Targets (B, T) for the first T of rows ``tokens`` (B, T + 1).

    An end-of-text is predicted like any token; what follows it is not (``IGNORED``), as nothing before it may be seen.
    """
    return np.where(tokens[:, :-1] == eos_id, IGNORED, tokens[:, 1:]).astype(np.int64, copy=False)
