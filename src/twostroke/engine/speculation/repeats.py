"""Finds where the end of a text stood before: in the text itself, and in past outputs."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3
"""Tokens that must be equal for a place to be found. Of two, most places lead nowhere, and searching them takes longer."""

MOST_PLACES = 8
"""Places that one search compares, the latest first."""

LONGEST_MATCH = 32
"""Equal tokens that one search counts before a place."""

PAST_TOKENS = 2**16
"""Tokens of past outputs after which a new list is begun; the one before it stays until the new one is full."""


class Repeats:
    """The places of each n-gram of a list that grows, linked from the latest to the earliest, as in a compressor's hash chains
    (RFC 1951, section 4). A token costs one look into a dictionary, whatever the list's length.

    N-grams are numbers to the base of the vocabulary, so that equal keys are equal n-grams."""

    __slots__ = ("_base", "_before", "_last", "tokens")

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self.tokens = tokens
        self._base = vocab_size
        self._last: dict[int, int] = {}
        self._before: list[int] = []  # of each token, where the n-gram that ends with it ended before; −1: nowhere

    def extend(self) -> None:
        """Take the tokens that the list has gained."""
        tokens, last, before, base = self.tokens, self._last, self._before, self._base
        for i in range(len(before), len(tokens)):
            if i < NGRAM - 1:
                before.append(-1)
                continue
            key = (tokens[i - 2] * base + tokens[i - 1]) * base + tokens[i]
            before.append(last.get(key, -1))
            last[key] = i

    def last_before_end(self) -> int:
        """Where the list's last n-gram ended before; −1: nowhere."""
        return self._before[-1] if self._before else -1

    def last(self, end: Sequence[int]) -> int:
        """Where the n-gram ``end[-3:]`` of another list ended; −1: nowhere."""
        return -1 if len(end) < NGRAM else self._last.get((end[-3] * self._base + end[-2]) * self._base + end[-1], -1)

    def longest(self, end: Sequence[int], place: int) -> tuple[int, int]:
        """Of ``place`` and the places before it: (place behind the one with most tokens before it equal to the last of ``end``,
        their number)."""
        tokens, best, most = self.tokens, -1, 0
        n_end = len(end)
        for _ in range(MOST_PLACES):
            if place < 0:
                break
            limit = min(LONGEST_MATCH, place + 1, n_end)
            n = NGRAM
            while n < limit and tokens[place - n] == end[n_end - 1 - n]:
                n += 1
            if n > most and place + 1 < len(tokens):
                best, most = place + 1, n
                if n == LONGEST_MATCH:
                    break
            place = self._before[place]
        return best, most


class PastOutputs:
    """Outputs of requests that have ended, at most two lists of ``PAST_TOKENS`` tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.lists = [Repeats([], vocab_size)]

    def add(self, output: Sequence[int]) -> None:
        current = self.lists[-1]
        if len(current.tokens) >= PAST_TOKENS:
            current = Repeats([], self._vocab_size)
            self.lists = [self.lists[-1], current]
        current.tokens += output
        current.extend()
