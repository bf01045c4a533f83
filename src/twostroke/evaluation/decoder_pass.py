"""How the decoder scores: in which mode, how many tokens a pass, and how many rows go through the head together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.core.policy import LOGITS_AT_ONCE

Scored = TypeVar("Scored")


@contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """Without dropout; the mode that ``model`` was in comes back afterwards."""
    was_training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(was_training)


def score_rows(
    score: Callable[[Tensor, Tensor], Scored],
    model: Any,
    hidden: Tensor,
    at: tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]],
    targets: npt.NDArray[np.int64],
) -> list[Scored]:
    """``score`` of (fp32 logits, targets) for ``hidden[at]``, the rows by which ``model``, a ``Decoder``, predicts ``targets``:
    one result for each chunk of at most ``LOGITS_AT_ONCE`` logits."""
    weight = model.head_weight
    rows, columns, wanted = (torch.from_numpy(a).to(weight.device) for a in (*at, targets))
    chosen = hidden[rows, columns]  # (n, E)
    chunk = max(1, LOGITS_AT_ONCE // model.spec.vocab_size)
    return [score(model.logits(chosen[i : i + chunk]).float(), wanted[i : i + chunk]) for i in range(0, len(targets), chunk)]
