"""Decides which documents are trained on, held out, or left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.data_recipe import DataRecipe
from twostroke.core.errors import DataError
from twostroke.data.inventory import KEPT, N_EXAMPLES, REASONS, Inventory, Verdicts, add_example, left_out
from twostroke.data.shards import N_BUCKETS, Progress, bucket
from twostroke.data.sources import PIECE_BYTES, AdmitAll, Document, DocumentSource

LARGE_CORPUS_BYTES = 10_000_000
MIN_HELD_OUT_BYTES = 1_000_000
"""Least held-out text of a corpus larger than ``LARGE_CORPUS_BYTES``. Bits per byte of less are too noisy to compare models."""


@dataclass
class Selection:
    """The verdicts on the documents of one source (``data.inventory``), and the rule that divides them.

    A bucket below ``threshold`` is held out, so no list of documents is kept. ``by`` names the unit that has a bucket:
    "document" or "piece". With "explicit", nothing (``threshold`` 0) or everything (``N_BUCKETS``) is held out. ``pieces`` are
    the verdicts on pieces, if the corpus is divided by them.
    """

    by: str
    threshold: int
    verdicts: Verdicts
    sizes: npt.NDArray[np.int64]
    pieces: Verdicts | None = None
    piece_sizes: npt.NDArray[np.int64] | None = None
    examples: dict[int, list[str]] = field(default_factory=dict)
    piece_examples: dict[int, list[str]] = field(default_factory=dict)

    def admits(self, ordinal: int, key: str, digest: Callable[[], bytes]) -> bool:
        # A document beyond the last verdict: the file has grown. ``check_unchanged`` reports that after the pass.
        verdict = int(self.verdicts[ordinal]) if ordinal < len(self.verdicts) else KEPT
        return verdict == KEPT or add_example(self.examples, verdict, key)

    def holds_out(self, document: Document) -> bool:
        key = (document.path,) if self.by == "document" else (document.path, document.piece)
        return self.threshold >= N_BUCKETS or (self.threshold > 0 and bucket(*key) < self.threshold)

    def parts(self, source: DocumentSource) -> Iterator[tuple[Document, bool, bool]]:
        """(piece, whether it is held out, whether an end-of-text follows) of one pass. If a document is divided by pieces, a
        run of pieces in one part is a document of that part."""
        waiting: tuple[Document, bool] | None = None  # held back until the next piece shows whether the run goes on
        for number, document in enumerate(source.documents(self)):
            held = self.holds_out(document)
            verdict = KEPT if self.pieces is None or number >= len(self.pieces) else int(self.pieces[number])
            if waiting is not None:
                before, before_held = waiting
                yield before, before_held, before.is_last or before_held != held or verdict != KEPT
            waiting = (document, held) if verdict == KEPT else None
            if verdict != KEPT:
                add_example(self.piece_examples, verdict, f"{document.path} piece {document.piece + 1}")
        if waiting is not None:
            yield waiting[0], waiting[1], True

    @property
    def n_kept_bytes(self) -> int:
        return int(self.sizes[self.verdicts == KEPT].sum())


def report_left_out(selections: list[Selection]) -> dict[str, Any]:
    """The manifest's tables of what was left out: ``left_out`` for documents, ``pieces_left_out`` for pieces of kept ones."""
    examples: dict[int, list[str]] = {}
    for selection in selections:
        for verdict, keys in selection.examples.items():
            examples[verdict] = [*examples.get(verdict, []), *keys][:N_EXAMPLES]
    report = {"left_out": left_out([(s.verdicts, s.sizes) for s in selections], examples)}
    for s in selections:
        if s.pieces is not None and s.piece_sizes is not None and (s.pieces != KEPT).any():
            report["pieces_left_out"] = left_out([(s.pieces, s.piece_sizes)], s.piece_examples)
    return report


def select(
    recipe: DataRecipe, source: DocumentSource, held_out: DocumentSource | None, scratch: Path, progress: Progress
) -> tuple[Selection, Selection | None]:
    """The selections of ``source`` and of ``held_out``, after one pass over both. ``scratch`` is a folder for temporary files.

    A corpus that cannot be divided by documents is divided by pieces, after one more pass; for a small one this sets
    ``source.piece_bytes`` to a smaller size. Filters do not apply to ``held_out``. Raises DataError if nothing is left.
    """
    inventory = Inventory(recipe, scratch, recipe.dedup)
    total = max(1, source.n_file_bytes + (held_out.n_file_bytes if held_out else 0))
    try:
        if held_out is not None:
            _take(inventory, held_out, False, lambda done: progress(min(1.0, done / total), "reading"))
            if len(inventory) == 0:
                raise DataError(
                    f"the held-out sources {', '.join(recipe.held_out)} hold no text. Name others as data.held_out."
                )
        n_held = len(inventory)
        before = held_out.n_file_bytes if held_out else 0
        _take(inventory, source, True, lambda done: progress(min(1.0, (before + done) / total), "reading"))
        if len(inventory) == n_held:
            raise DataError(
                f"the sources hold no text: {source.report.n_empty} of {source.report.n_files} files or records are empty. "
                "Name other sources."
            )
        progress(1.0, "looking for near-duplicates" if recipe.dedup == "near" else "looking for duplicates")
        verdicts, sizes, buckets = inventory.judge(), inventory.n_bytes, inventory.buckets
        held = np.arange(len(verdicts)) < n_held
        if held_out is not None:
            inventory.leave_out_copies(verdicts, held)
            chosen = Selection("explicit", 0, verdicts[n_held:], sizes[n_held:])
            _check_left(chosen)
            return chosen, Selection("explicit", N_BUCKETS, verdicts[:n_held], sizes[:n_held])
        _check_left(Selection("explicit", 0, verdicts, sizes))
        threshold = _threshold(_histogram(buckets, sizes, verdicts), recipe.held_out_fraction)
        if threshold is not None:
            inventory.leave_out_copies(verdicts, buckets < threshold)
            return Selection("document", threshold, verdicts, sizes), None
    finally:
        inventory.close()
    return _divide_by_pieces(recipe, source, Selection("piece", 0, verdicts, sizes), scratch), None


def _take(inventory: Inventory, source: DocumentSource, filtered: bool, progress: Callable[[int], None]) -> None:
    done = 0
    for document in source.documents(AdmitAll()):
        inventory.add(document.text)
        if document.is_last:
            inventory.end(bucket(document.path), filtered)
        done += document.n_bytes
        progress(done)


def _check_left(selection: Selection) -> None:
    if (selection.verdicts == KEPT).any():
        return
    counts = ", ".join(
        f"{np.count_nonzero(selection.verdicts == verdict)} {REASONS[verdict].replace('_', ' ')}"
        for verdict in np.unique(selection.verdicts).tolist()
    )
    raise DataError(
        f"nothing is left to train on: every document is left out ({counts}; a duplicate may equal a held-out document). "
        "Loosen the filters or give more text."
    )


def _histogram(buckets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], verdicts: Verdicts) -> npt.NDArray[np.int64]:
    """Bytes of kept text in each bucket."""
    kept = verdicts == KEPT
    return np.bincount(buckets[kept], weights=sizes[kept].astype(np.float64), minlength=N_BUCKETS).astype(np.int64)


def _threshold(histogram: npt.NDArray[np.int64], fraction: float) -> int | None:
    """The smallest threshold, at least ``fraction``, that holds out enough text. None if it would hold out more than half (or
    more than ``fraction`` + 0.25), or everything."""
    total = int(histogram.sum())
    needed = MIN_HELD_OUT_BYTES if total > LARGE_CORPUS_BYTES else 1
    below = np.cumsum(histogram)  # below[t] = bytes in buckets 0 … t
    first = max(1, round(fraction * N_BUCKETS))
    threshold = max(first, int(np.searchsorted(below, needed)) + 1)
    held = int(below[min(threshold, N_BUCKETS) - 1])
    limit = max(0.5, fraction + 0.25) * total
    return threshold if needed <= held <= limit and held < total else None


def _divide_by_pieces(recipe: DataRecipe, source: DocumentSource, selection: Selection, scratch: Path) -> Selection:
    if selection.n_kept_bytes < 16 * PIECE_BYTES:
        source.piece_bytes = max(64, selection.n_kept_bytes // 16)
    near = "near" if recipe.dedup == "near" else "none"
    inventory = Inventory(recipe, scratch, near, with_filters=False)
    try:
        for document in source.documents(selection):
            inventory.add(document.text)
            inventory.end(bucket(document.path, document.piece))
        pieces, sizes, buckets = inventory.judge(), inventory.n_bytes, inventory.buckets
        threshold = _threshold(_histogram(buckets, sizes, pieces), recipe.held_out_fraction)
        if threshold is None:
            raise DataError(
                f"{int(sizes.sum())} bytes of text cannot be divided into a training and a held-out part. "
                "Give more text, or name held-out sources."
            )
        inventory.leave_out_copies(pieces, buckets < threshold)
    finally:
        inventory.close()
    selection.threshold, selection.pieces, selection.piece_sizes = threshold, pieces, sizes
    return selection
