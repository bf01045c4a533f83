"""Shows the beginnings of some documents of prepared data as a model will see them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twostroke.data.packing import BEGINS, LEARNED
from twostroke.data.shards import PreparedData, TokenStream
from twostroke.data.tokenizer import load_tokenizer

_SEARCHED_TOKENS = 2**20


@dataclass(frozen=True)
class Excerpt:
    """``parts`` are (text, whether the loss counts its tokens). Every part of a plain document counts."""

    first_token: int
    n_tokens: int
    parts: tuple[tuple[str, bool], ...]
    is_whole: bool


def excerpts(prepared: PreparedData, split: str, n: int, max_tokens: int) -> Iterator[Excerpt]:
    """At most ``n`` documents of ``split`` ("train" or "heldout"), each up to ``max_tokens``. They are the first that begin
    after evenly spaced places in the stream, so every call gives the same ones."""
    tokens = prepared.train_tokens() if split == "train" else prepared.heldout_tokens()
    marks: TokenStream | None = None
    if prepared.holds_conversations:
        marks = prepared.train_marks() if split == "train" else prepared.heldout_marks()
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    last = -1
    for i in range(n):
        place = i * len(tokens) // n
        searched = _begins(prepared, tokens, marks, place, place + _SEARCHED_TOKENS)[:1]
        if not searched:
            searched = _begins(prepared, tokens, marks, max(0, place - _SEARCHED_TOKENS), place)[-1:]
        if not searched or searched[0] <= last:
            continue
        begin = last = searched[0]
        end = next(iter(_begins(prepared, tokens, marks, begin + 1, begin + _SEARCHED_TOKENS)), len(tokens))
        shown = min(end, begin + max_tokens)
        ids = tokens[begin:shown].astype(np.int64)
        learned = np.ones(len(ids), dtype=bool) if marks is None else (marks[begin:shown] & LEARNED).astype(bool)
        cuts = [0, *(np.flatnonzero(learned[1:] != learned[:-1]) + 1).tolist(), len(ids)]
        parts = tuple(
            (tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False), bool(learned[a]))
            for a, b in itertools.pairwise(cuts)
        )
        yield Excerpt(begin, end - begin, parts, shown == end)


def _begins(prepared: PreparedData, tokens: TokenStream, marks: TokenStream | None, start: int, stop: int) -> list[int]:
    """Places in [start, stop) at which a document begins."""
    if marks is not None:
        return [start + i for i in np.flatnonzero(marks[start:stop] & BEGINS).tolist()]
    before = max(0, start - 1)
    behind = [before + 1 + i for i in np.flatnonzero(tokens[before : stop - 1] == prepared.eos_id).tolist()]
    return [*([0] if start == 0 else []), *(begin for begin in behind if begin < len(tokens))]
