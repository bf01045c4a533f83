"""How well a model answers held-out conversations: nats for each of the assistant's tokens, given all that precedes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from twostroke.data.conversation_loader import ConversationLoader
from twostroke.data.packing import IGNORED
from twostroke.data.shards import PreparedData, TokenStream

_TOKENS_PER_PASS = 4096


@dataclass(frozen=True)
class AnswerScore:
    """nats_per_token = Σ −ln p / answer tokens, ends of turns included; perplexity = exp of it. ``n_cut`` conversations were
    longer than the context: what is behind it is not scored."""

    nats_per_token: float
    perplexity: float
    n_tokens: int
    n_conversations: int
    n_cut: int

    def to_dict(self) -> dict[str, float | int]:
        return asdict(self)


@dataclass(frozen=True)
class _HeldOut:
    """The held-out part of ``prepared``, where a loader looks for the training part."""

    prepared: PreparedData

    @property
    def key(self) -> str:
        return self.prepared.key

    @property
    def eos_id(self) -> int:
        return self.prepared.eos_id

    def train_tokens(self) -> TokenStream:
        return self.prepared.heldout_tokens()

    def train_marks(self) -> TokenStream:
        return self.prepared.heldout_marks()


@torch.no_grad()
def score_answers(
    model: Any, prepared: PreparedData, context: int, progress: Callable[[float, str], None] | None = None
) -> AnswerScore:
    """Score ``model``, a ``Decoder``, on the held-out conversations of ``prepared``, in rows of ``context`` tokens.

    Each conversation sees itself alone, as in training and when it is served. The model's mode is left as it was. Proven
    against one conversation at a time in tests/evaluation/test_conversation_score.py.
    """
    rows = max(1, _TOKENS_PER_PASS // context)
    loader = ConversationLoader(_HeldOut(prepared), rows, context, seed=0)
    weight, was_training = model.head_weight, model.training
    model.train(False)
    total, n_tokens = 0.0, 0
    try:
        for begin in range(0, loader.windows_per_epoch, rows):
            batch = loader.next_batch().to(weight.device)
            hidden = model.hidden(batch.tokens, batch.positions, batch.documents)
            wanted = batch.targets != IGNORED
            wanted[loader.windows_per_epoch - begin :] = False  # the last pass begins a second epoch
            targets = batch.targets[wanted]
            logits = F.linear(hidden[wanted], weight).float()
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
            n_tokens += int(targets.numel())
            if progress is not None:
                progress(min(1.0, (begin + rows) / loader.windows_per_epoch), "scoring answers")
    finally:
        model.train(was_training)
    nats = total / max(1, n_tokens)
    return AnswerScore(nats, math.exp(min(nats, 700.0)), n_tokens, loader.fitting.n_conversations, loader.fitting.n_cut)
