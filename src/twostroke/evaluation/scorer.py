"""The interface between evaluation and both engines: log-probabilities of given tokens, and greedy continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from twostroke.core.spec import ModelSpec
from twostroke.engine.scoring import TokenScores

Progress = Callable[[float], None]


class Scorer(Protocol):
    """A model with its tokenizer. ``longest`` is the most tokens that it can read at once. ``formats`` names the format of its
    weights and, if they were given, those of its head and cache."""

    engine: str
    dtype: str
    formats: str
    spec: ModelSpec
    tokenizer: Tokenizer
    longest: int

    def token_scores(
        self, sequences: Sequence[tuple[Sequence[int], int]], progress: Progress | None = None
    ) -> list[TokenScores]:
        """For each (ids, first): −ln p of each token of ``ids[first:]`` given all before it, and whether it is the most
        probable."""
        ...

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = (), progress: Progress | None = None
    ) -> list[str]:
        """The most probable continuation of each prompt as text, up to a stop string, an end token or ``max_tokens``."""
        ...
