"""Prompts and continuations to token ids, as evaluation harnesses do it, cut to what a model can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from twostroke.core.errors import InputError
from twostroke.evaluation.scorer import Scorer


@dataclass(frozen=True)
class Pair:
    """A context with a continuation, cut from the left to ``longest`` inputs: ``ids[first:]`` is what is scored.

    ``n_cut`` tokens were cut off."""

    ids: list[int]
    first: int
    n_cut: int


class Encoder:
    """The tokenizer with what it puts in front of a text (a beginning-of-text token, for models that were trained with one) and
    nothing behind it, whatever its post-processor adds there: an end-of-text would hide the prompt from the model."""

    def __init__(self, scorer: Scorer) -> None:
        self.tokenizer: Tokenizer = scorer.tokenizer
        self.longest = scorer.longest
        probe = self.tokenizer.encode("a")
        marks = probe.special_tokens_mask
        self.prefix: list[int] = probe.ids[: marks.index(0)] if 0 in marks else []
        self._prefix_text = self.tokenizer.decode(self.prefix, skip_special_tokens=False)
        ends = scorer.spec.eos_token_ids
        begin = self.prefix[-1] if self.prefix else scorer.spec.bos_token_id
        # What an empty context is: the beginning-of-text token, or the end of the text before it.
        self.start: int | None = begin if begin is not None else ends[0] if ends else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self.prefix and text.startswith(self._prefix_text):  # a chat template has written it already
            return ids
        return self.prefix + ids

    def pair(self, context: str, continuation: str) -> Pair:
        """Both encoded as one text and parted where the context's own encoding ends, spaces at the context's end counted to the
        continuation: models never saw a word's space apart from it. (What lm-eval's ``TemplateLM`` does.)"""
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        if not context:
            ids = self.tokenizer.encode(continuation, add_special_tokens=False).ids
            if self.start is None or ids[:1] == [self.start]:
                return self.cut(ids, min(1, len(ids)))
            return self.cut([self.start, *ids], 1)
        before, whole = self.encode(context), self.encode(context + continuation)
        if (
            len(whole) <= len(before) and continuation
        ):  # the tokenizer drew the two together: no token is the continuation's own
            whole = before + self.tokenizer.encode(continuation, add_special_tokens=False).ids
        return self.cut(whole, len(before))

    def cut(self, ids: Sequence[int], first: int) -> Pair:
        """At most ``longest`` inputs and one more target, the last ones."""
        n_cut = max(0, len(ids) - self.longest - 1)
        return Pair(list(ids[n_cut:]), max(1, first - n_cut), n_cut)

    def prompt(self, text: str, max_tokens: int) -> tuple[list[int], int]:
        """Ids of a prompt that leaves room for ``max_tokens``, and how many were cut from its left."""
        room = self.longest - max_tokens
        if room < 1:
            raise InputError(
                f"max_tokens={max_tokens} leaves no room for a prompt in the model's context of {self.longest}. Lower it."
            )
        ids = self.encode(text) or ([] if self.start is None else [self.start])
        if not ids:
            raise InputError("the prompt is empty, and the model has no token to begin a text with.")
        return ids[-room:], max(0, len(ids) - room)
