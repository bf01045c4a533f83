"""Reads conversations from files and data sets, and decides which are trained on, held out, or left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.data_recipe import DataRecipe
from twostroke.core.errors import DataError
from twostroke.data.conversation_layouts import LAYOUT_KEYS, Conversation, read_conversation
from twostroke.data.inventory import KEPT, Inventory, Verdicts, add_example, left_out
from twostroke.data.records import is_table, parse_json, read_array, read_lines, read_table, reading, table_columns
from twostroke.data.shards import N_BUCKETS, bucket
from twostroke.data.source_files import CONVERSATION_SUFFIXES, SourceFile, find_files


@dataclass(frozen=True)
class Found:
    """A conversation, the key that chooses its part (``file#number``), its place for error messages, and the number of its
    source."""

    key: str
    where: str
    conversation: Conversation
    source: int

    @property
    def text(self) -> str:
        """The contents of all messages, joined. Filters and the search for near-duplicates read it."""
        return without_surrogates("\n\n".join(m["content"] for m in self.conversation.messages))


class ConversationSource:
    """The conversations of .json, .jsonl and .parquet files and of data sets, in order."""

    def __init__(self, sources: tuple[str, ...], layout: str) -> None:
        self.files, self.n_other_files = find_files(sources, CONVERSATION_SUFFIXES)
        self.layout = layout

    def fingerprint(self) -> list[Any]:
        return [[f.path, f.key, f.n_bytes, f.mtime_ns] for f in self.files]

    def __iter__(self) -> Iterator[Found]:
        for file in self.files:
            with reading(file):
                for number, where, record in _records(file, self.layout):
                    if not isinstance(record, dict):
                        raise DataError(f"{where} holds {type(record).__name__}; a conversation must be a JSON object.")
                    conversation = read_conversation(record, self.layout, where)
                    yield Found(f"{file.key}#{number}", where, conversation, file.source)


def _records(file: SourceFile, layout: str) -> Iterator[tuple[int, str, Any]]:
    """(number, place for error messages, record) of each record. Of a table only the columns that ``layout`` reads are read."""
    if is_table(file):
        names = table_columns(file)
        columns = [name for name in names if name in LAYOUT_KEYS[layout]] or names  # all, so that an error can list them
        for number, where, values in read_table(file, columns):
            yield number, where, {name: value for name, value in zip(columns, values, strict=True) if value is not None}
    elif file.path.lower().endswith(".json"):
        yield from read_array(file)
    else:
        for number, where, line in read_lines(file):
            yield number, where, parse_json(line, where)


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate (half of a pair, from an escape in JSON) by U+FFFD. UTF-8 cannot hold one. Each is replaced
    by one character, so that spans stay valid."""
    return text if text.isascii() else "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


@dataclass
class ConversationSelection:
    """The verdicts on the conversations that have an answer, in order. The first ``n_named`` are held out because the recipe
    names their files, others if their bucket is below ``threshold``."""

    threshold: int
    n_named: int
    verdicts: Verdicts
    sizes: npt.NDArray[np.int64]
    examples: dict[int, list[str]] = field(default_factory=dict)
    _next: int = 0

    def takes(self, found: Found) -> bool:
        """Whether the next conversation with an answer is kept."""
        verdict = int(self.verdicts[self._next]) if self._next < len(self.verdicts) else KEPT
        self._next += 1
        return verdict == KEPT or add_example(self.examples, verdict, found.key)

    def left_out(self) -> dict[str, Any]:
        return left_out([(self.verdicts, self.sizes)], self.examples)


def select_conversations(
    recipe: DataRecipe,
    source: ConversationSource,
    held_out: ConversationSource | None,
    scratch: Path,
    progress: Callable[[int], None],
) -> tuple[int, ConversationSelection]:
    """(number of records in ``source``, the selection of them), after one pass.

    This pass finds near-duplicates, conversations that the filters leave out and, with dedup = "none", training copies of
    held-out conversations. Equal conversations are found later, when they are rendered. At least one conversation is held
    out."""
    dedup = "near" if recipe.dedup == "near" else "none"
    inventory = Inventory(recipe, scratch, dedup)
    n_records = 0
    try:
        for found in held_out or ():
            if found.conversation.has_answer:
                inventory.add(found.text)
                inventory.end(bucket(found.key), filtered=False)
        n_named = len(inventory)
        for found in source:
            n_records += 1
            progress(n_records)
            if found.conversation.has_answer:
                inventory.add(found.text)
                inventory.end(bucket(found.key))
        verdicts, buckets = inventory.judge(), inventory.buckets
        kept = buckets[n_named:][verdicts[n_named:] == KEPT]
        threshold = 0
        if held_out is None and len(kept):
            threshold = max(round(recipe.held_out_fraction * N_BUCKETS), int(kept.min()) + 1)
        if recipe.dedup == "none":
            inventory.leave_out_copies(verdicts, (buckets < threshold) | (np.arange(len(verdicts)) < n_named))
        return n_records, ConversationSelection(threshold, n_named, verdicts, inventory.n_bytes)
    finally:
        inventory.close()
