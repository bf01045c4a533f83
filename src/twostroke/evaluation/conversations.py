"""How well a model answers held-out conversations: nats for each of the assistant's tokens, given all that precedes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from twostroke.core.errors import DataError
from twostroke.data.conversation_loader import ConversationLoader
from twostroke.data.conversations import BEGINS, LEARNED
from twostroke.data.packing import IGNORE_INDEX
from twostroke.data.shards import PreparedData, TokenStream
from twostroke.data.tokenizer import load_tokenizer
from twostroke.evaluation.bits import Progress
from twostroke.evaluation.scorer import Scorer

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


@dataclass(frozen=True)
class AnswerNats:
    """Of each held-out conversation that has an answer within the context: Σ −ln p over its answer tokens, and how many."""

    nats: npt.NDArray[np.float64]
    n_tokens: npt.NDArray[np.int64]
    n_cut: int

    def score(self) -> AnswerScore:
        n_tokens = int(self.n_tokens.sum())
        mean = float(self.nats.sum()) / n_tokens
        return AnswerScore(mean, math.exp(min(mean, 700.0)), n_tokens, len(self.nats), self.n_cut)


def answer_nats(scorer: Scorer, prepared: PreparedData, context: int, progress: Progress | None = None) -> AnswerNats:
    """What ``score_answers`` sums, a conversation at a time and through either engine.

    Raises DataError where the data was prepared with another tokenizer than the model's, or no answer is within ``context``.
    """
    if load_tokenizer(prepared.tokenizer_path).to_str() != scorer.tokenizer.to_str():
        raise DataError(
            f"{prepared.directory} was prepared with another tokenizer than the model's, so its tokens mean nothing to it. "
            "Prepare the conversations with this model's tokenizer."
        )
    stream, marked = prepared.heldout_tokens(), prepared.heldout_marks()
    tokens, marks = stream[0 : len(stream)], marked[0 : len(marked)]
    begins = np.flatnonzero(marks & BEGINS)
    sequences: list[tuple[list[int], int]] = []
    learned: list[npt.NDArray[np.bool_]] = []
    n_cut = 0
    for begin, end in zip(begins, np.append(begins[1:], len(marks)), strict=True):
        stop = min(end, begin + context)
        wanted = (marks[begin + 1 : stop] & LEARNED) > 0  # nothing predicts the first token
        if not wanted.any():
            continue
        sequences.append((tokens[begin:stop].tolist(), 1))
        learned.append(wanted)
        n_cut += bool(end > stop)
    if not sequences:
        raise DataError(f"no held-out conversation of {prepared.directory} has an answer within a context of {context} tokens.")
    scored = scorer.token_scores(sequences, None if progress is None else lambda done: progress(done, "scoring answers"))
    sums = [float(nats[w].sum(dtype=np.float64)) for (nats, _), w in zip(scored, learned, strict=True)]
    return AnswerNats(np.array(sums), np.array([int(w.sum()) for w in learned]), n_cut)


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
def score_answers(model: Any, prepared: PreparedData, context: int, progress: Progress | None = None) -> AnswerScore:
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
            wanted = batch.targets != IGNORE_INDEX
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
