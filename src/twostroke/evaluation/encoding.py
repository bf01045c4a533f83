"""Encodes prompts and continuations as evaluation harnesses do, and cuts them to the length that a model can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from twostroke.core.errors import InputError
from twostroke.evaluation.scorer import Scorer


@dataclass(frozen=True)
class Pair:
    """A context with a continuation. ``ids[first:]`` is scored. ``n_cut`` tokens were cut off on the left, so that the model
    can read the rest."""

    ids: list[int]
    first: int
    n_cut: int


class Encoder:
    """Encodes text with the tokens that the tokenizer puts before it (a beginning-of-text token, for models that were trained
    with one) and without those that it adds after it. After an end-of-text the model would not continue the prompt."""

    def __init__(self, scorer: Scorer) -> None:
        self.tokenizer: Tokenizer = scorer.tokenizer
        self.longest = scorer.longest
        probe = self.tokenizer.encode("a")
        marks = probe.special_tokens_mask
        self.prefix: list[int] = probe.ids[: marks.index(0)] if 0 in marks else []
        self._prefix_text = self.tokenizer.decode(self.prefix, skip_special_tokens=False)
        ends = scorer.spec.eos_token_ids
        begin = self.prefix[-1] if self.prefix else scorer.spec.bos_token_id
        # Stands for an empty context: the beginning-of-text token, or else an end-of-text, after which a new text begins.
        self.start: int | None = begin if begin is not None else ends[0] if ends else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self.prefix and text.startswith(self._prefix_text):  # a chat template has already written the prefix
            return ids
        return self.prefix + ids

    def pair(self, context: str, continuation: str) -> Pair:
        """Encode both as one text, and split it where the encoding of the context alone ends. Spaces at the end of the context
        count to the continuation, because models rarely see a space apart from its word. lm-eval's ``TemplateLM`` does the
        same."""
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
