"""Writes log-probabilities in the forms that clients know: OpenAI's for completions and for chats, vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostroke.server import responses, wire
from twostroke.server.text import ModelText


class CompletionLogprobs:
    """Collects OpenAI's parallel lists: each token's text, log-probability, alternatives, and place in the text.

    The token itself is always among its alternatives, as the last if it is not one of the most probable. So there may be one
    more than was asked for (OpenAI's reference says the same). Bytes that are not a whole character are written
    ``bytes:\\xe2\\x80``.
    """

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self.lists = responses.CompletionLogprobs([], [], [], [])

    @property
    def columns(self) -> list[list[Any]]:
        """The lists, in the order of the response's fields."""
        return [getattr(self.lists, name) for name in responses.CompletionLogprobs.__struct_fields__]

    def add_prompt(
        self, ids: Sequence[int], scores: Sequence[wire.TokenLogprobs | None], offsets: Sequence[int], n_top: int
    ) -> None:
        """Add tokens of a prompt. ``scores`` is None for its first token, which nothing predicts."""
        for token, entry, offset in zip(ids, scores, offsets, strict=True):
            self._add(token, entry, n_top, offset)

    def add(self, ids: Sequence[int], entries: Sequence[wire.TokenLogprobs], offset: int) -> None:
        """Add tokens of an answer, the first of which begins at ``offset``."""
        for token, entry in zip(ids, entries, strict=True):
            self._add(token, entry, len(entry.top), offset)
            offset += len(self._text.token_bytes(token).decode(errors="ignore"))

    def _add(self, token: int, entry: wire.TokenLogprobs | None, n_top: int, offset: int) -> None:
        lists, shown = self.lists, _shown(self._text.token_bytes(token))
        lists.tokens.append(shown)
        lists.text_offset.append(offset)
        if entry is None:
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
            return
        lists.token_logprobs.append(finite(entry.logprob))
        top: dict[str, float] = {}
        for other, logprob in entry.top[:n_top]:
            top.setdefault(_shown(self._text.token_bytes(other)), finite(logprob))
        if n_top:
            top.setdefault(shown, finite(entry.logprob))
        lists.top_logprobs.append(top)


def chat_logprobs(
    text: ModelText, token_ids: Sequence[int], entries: Sequence[wire.TokenLogprobs] | None
) -> responses.ChatLogprobs | None:
    if entries is None:
        return None

    def one(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = text.token_bytes(token_id)
        return raw.decode(errors="replace"), finite(logprob), list(raw)

    return responses.ChatLogprobs(
        [
            responses.ChatTokenLogprob(
                *one(token_id, entry.logprob),
                top_logprobs=[responses.TopLogprob(*one(i, logprob)) for i, logprob in entry.top],
            )
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]
    )


def prompt_logprobs(
    text: ModelText, ids: Sequence[int], scores: Sequence[wire.TokenLogprobs | None], n_top: int
) -> responses.PromptLogprobs:
    """The scores of a prompt's tokens in vLLM's form: null for the first token, whose score is None, and for each other token
    the ``n_top`` most probable ones and itself."""
    found: responses.PromptLogprobs = []
    for token, entry in zip(ids, scores, strict=True):
        if entry is None:
            found.append(None)
            continue
        table = {
            other: responses.PromptLogprob(finite(logprob), rank, text.token_text(other))
            for rank, (other, logprob) in enumerate(entry.top[:n_top], 1)
        }
        if token not in table:
            table[token] = responses.PromptLogprob(finite(entry.logprob), None, text.token_text(token))
        found.append(table)
    return found


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def finite(logprob: float) -> float:
    """JSON has no −∞; OpenAI writes −9999 for a token that cannot come."""
    return max(logprob, -9999.0)
