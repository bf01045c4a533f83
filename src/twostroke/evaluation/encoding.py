"""Encodes prompts and continuations as evaluation harnesses do, and cuts them to the length that a model can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.core.errors import InputError
from twostroke.data.pairs import PairEncoder
from twostroke.evaluation.scorer import Scorer


@dataclass(frozen=True)
class Pair:
    """A context with a continuation. ``ids[first:]`` is scored. ``n_cut`` tokens were cut off on the left, so that the model
    can read the rest."""

    ids: list[int]
    first: int
    n_cut: int


class Encoder(PairEncoder):
    """A ``PairEncoder`` of the scorer's tokenizer, which cuts what the scorer cannot read."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer.tokenizer, scorer.spec.eos_token_ids, scorer.spec.bos_token_id)
        self.longest = scorer.longest

    def pair(self, context: str, continuation: str) -> Pair:
        """Both as one text, split where the context ends (``PairEncoder.split``)."""
        return self.cut(*self.split(context, continuation))

    def cut(self, ids: Sequence[int], first: int) -> Pair:
        """Keep the last ``longest`` inputs and one more target."""
        n_cut = max(0, len(ids) - self.longest - 1)
        return Pair(list(ids[n_cut:]), max(1, first - n_cut), n_cut)

    def prompt(self, text: str, max_tokens: int) -> tuple[list[int], int]:
        """(ids of a prompt that leaves room for ``max_tokens``, number of ids that were cut off on its left)."""
        room = self.longest - max_tokens
        if room < 1:
            raise InputError(
                f"max_tokens={max_tokens} leaves no room for a prompt in the model's context of {self.longest}. Lower "
                "max_tokens."
            )
        ids = self.encode(text) or ([] if self.start is None else [self.start])
        if not ids:
            raise InputError("the prompt is empty, and the model has no token that begins a text. Give a prompt with text.")
        return ids[-room:], max(0, len(ids) - room)
