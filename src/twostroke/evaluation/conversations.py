"""Scores a model on held-out conversations: −ln p of each of the assistant's tokens, given all tokens before it."""

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
from twostroke.evaluation.decoder_pass import in_eval_mode
from twostroke.evaluation.scorer import Scorer

_TOKENS_PER_PASS = 4096


@dataclass(frozen=True)
class AnswerScore:
    """nats_per_token = Σ −ln p / answer tokens, which include each answer's end token; perplexity = exp(nats_per_token).
    ``n_cut`` conversations were longer than the context and are scored up to it."""

    nats_per_token: float
    perplexity: float
    n_tokens: int
    n_conversations: int
    n_cut: int


@dataclass(frozen=True)
class AnswerNats:
    """Σ −ln p over the answer tokens of each held-out conversation, and their number. Conversations without an answer within
    the context are left out."""

    nats: npt.NDArray[np.float64]
    n_tokens: npt.NDArray[np.int64]
    n_cut: int

    def score(self) -> AnswerScore:
        n_tokens = int(self.n_tokens.sum())
        mean = float(self.nats.sum()) / n_tokens
        return AnswerScore(mean, math.exp(min(mean, 700.0)), n_tokens, len(self.nats), self.n_cut)


def answer_nats(scorer: Scorer, prepared: PreparedData, context: int, progress: Progress | None = None) -> AnswerNats:
    """The sums of ``score_answers`` for each conversation, by either engine.

    Raises DataError if the data was prepared with another tokenizer than the model's, or no answer is within ``context``.
    """
    if load_tokenizer(prepared.tokenizer_path).to_str() != scorer.tokenizer.to_str():
        raise DataError(
            f"{prepared.directory} was prepared with another tokenizer than the model's, so the model cannot read its tokens. "
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
        raise DataError(
            f"no held-out conversation of {prepared.directory} has an answer within a context of {context} tokens. Raise it."
        )
    scored = scorer.token_scores(sequences, None if progress is None else lambda done: progress(done, "scoring answers"))
    sums = [float(nats[w].sum(dtype=np.float64)) for (nats, _), w in zip(scored, learned, strict=True)]
    return AnswerNats(np.array(sums), np.array([int(w.sum()) for w in learned]), n_cut)


@dataclass(frozen=True)
class _HeldOut:
    """Presents the held-out part of ``prepared`` as the training part, for a loader."""

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

    A conversation attends only to itself, as in training and in the server. The model's mode (train or eval) is restored.
    tests/evaluation/test_conversation_score.py compares it with scoring one conversation at a time.
    """
    rows = max(1, _TOKENS_PER_PASS // context)
    loader = ConversationLoader(_HeldOut(prepared), rows, context, seed=0)
    device, total, n_tokens = model.head_weight.device, 0.0, 0
    with in_eval_mode(model):
        for begin in range(0, loader.windows_per_epoch, rows):
            batch = loader.next_batch().to(device)
            hidden = model.hidden(batch.tokens, batch.positions, batch.documents)
            wanted = batch.targets != IGNORE_INDEX
            wanted[loader.windows_per_epoch - begin :] = False  # the last batch continues into a second epoch
            targets = batch.targets[wanted]
            logits = model.logits(hidden[wanted]).float()
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
            n_tokens += int(targets.numel())
            if progress is not None:
                progress(min(1.0, (begin + rows) / loader.windows_per_epoch), "scoring answers")
    nats = total / max(1, n_tokens)
    return AnswerScore(nats, math.exp(min(nats, 700.0)), n_tokens, loader.fitting.n_conversations, loader.fitting.n_cut)
