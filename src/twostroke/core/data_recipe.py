"""``DataRecipe``: the text of a training run, how it is cleaned, mixed and read. The ``[data]`` section of a recipe."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from twostroke.core.errors import ConfigError

STDLIB_SOURCE = "stdlib"
"""The name in ``data.sources`` that stands for this machine's own Python standard library."""

MAX_WORKERS = 64

MIN_VOCAB_SIZE = 257
MAX_VOCAB_SIZE = 2**22
"""One of the largest vocabularies in use, XLM-V's, has 0.9 million entries."""

REUSED = "reused"
"""The note of preparing that found the shards of the same text and recipe."""


def check_vocab_size(vocab_size: int, name: str = "vocab_size") -> None:
    """Raises ConfigError for a number of entries that no tokenizer is trained with. ``tokenizers`` reserves memory for all
    entries at once, and the process aborts if that fails."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise ConfigError(
            f"{name}={vocab_size} must be at least {MIN_VOCAB_SIZE}, for 256 bytes and one end-of-text, and at most "
            f"{MAX_VOCAB_SIZE}."
        )


@dataclass(frozen=True)
class DataRecipe:
    """``sources`` are files, folders, globs, "stdlib", or Hugging Face data sets: a directory that ``save_to_disk`` wrote, or
    "hf:owner/name[:config][:split]" ("hf:owner/name::test" is a split of the default config).

    Held-out documents are chosen by a hash of their path, or given in ``held_out``.

    ``layout`` says what a document is: "text", or one conversation a record of .json, .jsonl and .parquet files, laid out as
    "messages" (OpenAI), "alpaca" (instruction, input, output), "sharegpt" (conversations of from and value) or "prompt"
    (prompt and response); then the loss counts the assistant's tokens only. ``chat_template`` is a Jinja file that takes the
    place of the model's own template. ``too_long`` is what happens to a conversation longer than the sequence: "cut" keeps
    its beginning, "drop" leaves it out, "error" stops; each is counted.

    ``dedup``: "exact" leaves out documents equal to an earlier one, "near" also those that share ``near_threshold`` of their
    shingles with an earlier one (``data.near_duplicates``), "none" neither; held-out text is never in the training part.

    The filters are off by default (``data.filters`` says how each is measured; shares from 0 to 1): ``min_chars``,
    ``max_chars`` (0: no limit), ``max_repeated_lines``, ``max_top_ngram``, ``max_symbols``, ``min_mean_word`` and
    ``max_mean_word`` (0: no limit; they mean little in writing that puts no spaces between words).

    ``weights``, one a source, are the shares of the training windows that come from each; without them every window is read
    once an epoch. ``workers`` is the number of processes that make batches; with 0 a thread of the training process does.
    """

    sources: tuple[str, ...] = (STDLIB_SOURCE,)
    held_out: tuple[str, ...] = ()
    held_out_fraction: float = 0.1
    vocab_size: int = 4096
    tokenizer: str | None = None
    text_key: str = "text"
    layout: Literal["text", "messages", "alpaca", "sharegpt", "prompt"] = "text"
    chat_template: str | None = None
    too_long: Literal["cut", "drop", "error"] = "cut"
    dedup: Literal["exact", "near", "none"] = "exact"
    near_threshold: float = 0.8
    min_chars: int = 0
    max_chars: int = 0
    max_repeated_lines: float = 1.0
    max_top_ngram: float = 1.0
    max_symbols: float = 1.0
    min_mean_word: float = 0.0
    max_mean_word: float = 0.0
    weights: tuple[float, ...] = ()
    workers: int = 0

    def __post_init__(self) -> None:
        for name in ("min_chars", "max_chars", "min_mean_word", "max_mean_word"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"data.{name}={getattr(self, name)} must be at least 0 and finite; 0 is no limit.")
        for least, most in (("min_chars", "max_chars"), ("min_mean_word", "max_mean_word")):
            if 0 < getattr(self, most) < getattr(self, least):
                raise ConfigError(f"data.{most}={getattr(self, most)} is less than data.{least}={getattr(self, least)}.")
        for name in ("max_repeated_lines", "max_top_ngram", "max_symbols"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"data.{name}={getattr(self, name)} is a share and must be from 0 to 1; 1 is no limit.")
        if not 0.5 <= self.near_threshold <= 1:
            raise ConfigError(f"data.near_threshold={self.near_threshold} must be from 0.5 to 1.")
        if not 0 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"data.workers={self.workers} must be from 0 to {MAX_WORKERS}.")
        if self.chat_template is not None and self.layout == "text":
            raise ConfigError(
                f'data.chat_template={self.chat_template!r} renders conversations, and the layout is "text". '
                "Give theirs, or leave the template out."
            )
        if self.dedup not in ("exact", "near", "none"):
            raise ConfigError(f'data.dedup={self.dedup!r} is not known. Use "exact", "near" or "none".')
        self._check_weights()

    def _check_weights(self) -> None:
        if not self.weights:
            return
        if len(self.weights) != len(self.sources):
            raise ConfigError(
                f"data.weights has {len(self.weights)} entries and data.sources {len(self.sources)}. Give one weight a source."
            )
        for source, weight in zip(self.sources, self.weights, strict=True):
            if not 0 < weight < math.inf:
                raise ConfigError(
                    f"data.weights gives {source} the weight {weight}, which must be above 0 and finite. "
                    "A source that is not wanted is left out of data.sources."
                )

    @property
    def has_filters(self) -> bool:
        return any(getattr(self, name) != value for name, value in _NO_FILTERS.items())

    def preparation(self) -> dict[str, Any]:
        """What of the recipe decides the shards: without what is the loader's business alone."""
        return asdict(replace(self, weights=(), workers=0, too_long="cut"))


_NO_FILTERS = {
    "min_chars": 0,
    "max_chars": 0,
    "max_repeated_lines": 1.0,
    "max_top_ngram": 1.0,
    "max_symbols": 1.0,
    "min_mean_word": 0.0,
    "max_mean_word": 0.0,
}
