"""How the decoder scores: in which mode, which rows at once, and how many rows go through the head together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.core.policy import LOGITS_AT_ONCE, streamed_tokens
from twostroke.data.packing import document_layout
from twostroke.model.streamed import Input, StreamedDecoder

if TYPE_CHECKING:
    from twostroke.engine.scoring import TokenScores


@dataclass(frozen=True)
class Pass:
    """Rows of ``tokens`` (B, T) that the decoder reads at once, and the ``targets`` (n,) that they predict at (``rows``,
    ``columns``), each (n,).

    With ``eos_id`` a row is packed documents, each of which ends with that token, and attention stays within one. Without it a
    row is one document, behind which anything may stand. ``greedy``: whether it is asked if targets are the most probable
    tokens.
    """

    tokens: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    eos_id: int | None = None
    greedy: bool = False

    def inputs(self, device: torch.device) -> Input:
        tokens = torch.from_numpy(self.tokens).to(device)
        if self.eos_id is None:
            return tokens, torch.arange(tokens.shape[1], device=device)[None], None
        positions, documents = document_layout(self.tokens, self.eos_id)
        # Rows without document boundaries need no mask, and torch's causal kernel is faster than its masked one.
        packed = torch.from_numpy(documents).to(device) if documents.any() else None
        return tokens, torch.from_numpy(positions).to(device), packed


@contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """Without dropout; the mode that ``model`` was in comes back afterwards."""
    was_training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def score_passes(model: Any, passes: Iterable[Pass], device: torch.device | str | None = None) -> Iterator[TokenScores]:
    """−ln p in fp32 of the targets of each pass by ``model``, a ``Decoder`` or what scores like one (``bits.Scorable``), and
    whether they are the most probable tokens if that is asked. Passes do not depend on each other."""
    place = device_of(model) if device is None else torch.device(device)
    read: deque[Pass] = deque()  # passes whose scores have not come yet

    def inputs() -> Iterator[Input]:
        for each in passes:
            read.append(each)
            yield each.inputs(place)

    with in_eval_mode(model):
        for hidden in hidden_of_each(model, inputs()):
            yield _scores(model, read.popleft(), hidden)


def device_of(model: Any) -> torch.device:
    """Where ``model`` computes."""
    device: torch.device = model.device if isinstance(model, StreamedDecoder) else model.head_weight.device
    return device


def hidden_of_each(model: Any, inputs: Iterable[Input]) -> Iterator[Tensor]:
    """What ``model.hidden`` makes of each of ``inputs``. A model that is read layer by layer takes many of them together, so
    that it is read less often."""
    if isinstance(model, StreamedDecoder):
        for group in _groups(inputs, streamed_tokens(model.spec.d_model)):
            yield from model.hidden_of_each(group)
        return
    for each in inputs:
        yield model.hidden(*each)


def _groups(inputs: Iterable[Input], most_tokens: int) -> Iterator[list[Input]]:
    """``inputs`` in runs of at most ``most_tokens`` tokens, or of one."""
    group: list[Input] = []
    n_tokens = 0
    for each in inputs:
        if group and n_tokens + each[0].numel() > most_tokens:
            yield group
            group, n_tokens = [], 0
        group.append(each)
        n_tokens += each[0].numel()
    if group:
        yield group


def _scores(model: Any, each: Pass, hidden: Tensor) -> TokenScores:
    parts = [_scores_of(*part, each.greedy) for part in _logits(model, each, hidden)]
    if not parts:
        return np.empty(0, np.float32), np.empty(0, np.bool_)
    nats, greedy = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return nats, greedy


def _logits(model: Any, each: Pass, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(fp32 logits, targets) in chunks of at most ``LOGITS_AT_ONCE`` logits."""
    rows, columns, targets = (torch.from_numpy(a).to(hidden.device) for a in (each.rows, each.columns, each.targets))
    chosen = hidden[rows, columns]  # (n, E)
    chunk = max(1, LOGITS_AT_ONCE // model.spec.vocab_size)
    for i in range(0, len(targets), chunk):
        yield model.logits(chosen[i : i + chunk]).float(), targets[i : i + chunk]


def _scores_of(logits: Tensor, targets: Tensor, greedy: bool) -> TokenScores:
    """The scores of ``targets`` (n,) by fp32 ``logits`` (n, V)."""
    nats = F.cross_entropy(logits, targets, reduction="none")
    best = (logits.argmax(dim=-1) == targets).cpu().numpy() if greedy else np.empty(0, np.bool_)
    return nats.cpu().numpy(), best
