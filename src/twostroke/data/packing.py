"""Finds the documents inside rows of a flat token stream. The training loader and scoring use it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""The target that the loss ignores. It is torch's default ``ignore_index``."""

LEARNED, BEGINS = 1, 2
"""Bits of the mark of a conversation's token: LEARNED on the assistant's tokens, BEGINS on a conversation's first token."""

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


def document_layout(tokens: npt.NDArray[np.integer], eos_id: int) -> tuple[Int64Array, Int32Array]:
    """Positions and document numbers (B, T) of the tokens in rows (B, T). ``eos_id`` is the last token of a document.

    Positions restart at 0 after each end-of-text. A row's first token is at 0 even if its document began in an earlier row,
    because attention cannot see that part. Document numbers count from 0 in each row.
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
    """Targets (B, T) for the first T columns of ``tokens`` (B, T + 1).

    An end-of-text is predicted like any other token. The token after it is not (``IGNORE_INDEX``), because it begins a document
    and may attend to nothing that would predict it.
    """
    return np.where(tokens[:, :-1] == eos_id, IGNORE_INDEX, tokens[:, 1:]).astype(np.int64, copy=False)
