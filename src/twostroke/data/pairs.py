"""Encodes a prompt with a text after it, of which the tokens are scored, as evaluation harnesses do. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


class PairEncoder:
    """Encodes text with the tokens that the tokenizer puts before it (a beginning-of-text token, for models that were trained
    with one) and without those that it adds after it. After an end-of-text the model would not continue the prompt."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], bos_token_id: int | None) -> None:
        self.tokenizer = tokenizer
        probe = tokenizer.encode("a")
        marks = probe.special_tokens_mask
        self.prefix: list[int] = probe.ids[: marks.index(0)] if 0 in marks else []
        self._prefix_text = tokenizer.decode(self.prefix, skip_special_tokens=False)
        begin = self.prefix[-1] if self.prefix else bos_token_id
        # Stands for an empty context: the beginning-of-text token, or else an end-of-text, after which a new text begins.
        self.start: int | None = begin if begin is not None else eos_token_ids[0] if eos_token_ids else None

    def encode(self, text: str) -> list[int]:
        ids = self._plain(text)
        if self.prefix and text.startswith(self._prefix_text):  # a chat template has already written the prefix
            return ids
        return self.prefix + ids

    def split(self, context: str, continuation: str) -> tuple[list[int], int]:
        """(ids of both, number of those that are the context's). They are encoded as one text, and split where the encoding of
        the context alone ends. Spaces at the end of the context count to the continuation, because models rarely see a space
        apart from its word. lm-eval's ``TemplateLM`` does the same."""
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        if not context:
            ids = self._plain(continuation)
            if self.start is None or ids[:1] == [self.start]:
                return ids, min(1, len(ids))
            return [self.start, *ids], 1
        before, whole = self.encode(context), self.encode(context + continuation)
        if (
            len(whole) <= len(before) and continuation
        ):  # the tokenizer drew the two together: no token is the continuation's own
            whole = before + self._plain(continuation)
        return whole, len(before)

    def _plain(self, text: str) -> list[int]:
        """Without special tokens, by ``encode_batch_fast``: ``encode`` holds the interpreter, for which other threads wait."""
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids
