"""Text into token shards: once for each combination of input and recipe, whole or not at all.

A prepared directory holds::

    manifest.json           written last; every other file with its size and sha256, its own sha256 as the last key
    tokenizer.json
    train-00000.bin …       token ids, little-endian uint16 or uint32; each document is followed by the end-of-text id
    heldout-00000.bin …     the same of the held-out documents
    heldout.txt             their text, joined without separators: what bits per byte and xz are measured on
    heldout-ends.bin        uint64: where each held-out document ends in heldout.txt

It is written under another name beside its place, flushed to disk, and renamed when it is complete. A full disk or a
kill leaves nothing under the final name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Tokenizer

from twostroke.core.errors import ConfigError, DataError
from twostroke.core.paths import data_cache_dir
from twostroke.core.recipe import DataRecipe
from twostroke.data.shards import (
    FORMAT,
    HELD_OUT_ENDS,
    HELD_OUT_TEXT,
    N_BUCKETS,
    HashedFile,
    PreparedData,
    Progress,
    ShardWriter,
    bucket,
    digest,
    hash_and_flush,
    made_whole,
    write_manifest,
)
from twostroke.data.sources import PIECE_BYTES, Document, DocumentSource, FirstOfEach, find_documents
from twostroke.data.tokenizer import LEAST_VOCAB_SIZE, eos_id_of, load_tokenizer, tokenizer_file, train_tokenizer

LARGE_CORPUS_BYTES = 10_000_000
LEAST_HELD_OUT_BYTES = 1_000_000
"""Held out at least, of a corpus larger than ``LARGE_CORPUS_BYTES``: less makes bits per byte too noisy to compare models."""

TOKENIZER_SAMPLE_BYTES = 256 * 2**20
"""A tokenizer is trained on about this much text at most: more does not change the merges, and the trainer's memory grows."""

_BATCH_BYTES = 2**20


def prepare(
    recipe: DataRecipe,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    out: Path | None = None,
) -> PreparedData:
    """Tokenised train and held-out shards of ``recipe``'s sources: found in the cache, or made.

    Lives at ``<cache_dir>/<key>``, or at ``out``. Held out are the documents whose sha256 of the relative path, read as
    a number in [0, 1), is below ``held_out_fraction``; where that is less than 1 MB of a corpus above 10 MB, or
    nothing, the fraction is raised until it is not. A corpus whose documents cannot be divided so (one file) is divided
    by pieces of about 64 kB cut at line ends. Documents of ``recipe.held_out`` are held out instead where it is given,
    and their duplicates leave the training part.

    Conversations (``recipe.layout`` other than "text") are prepared by ``data.conversations``.

    Raises DataError, ConfigError, CorruptFileError for bad input, TwostrokeError where the directory cannot be written.
    """
    report_progress = progress or (lambda done, note: None)
    if recipe.layout != "text":
        from twostroke.data.conversations import prepare_conversations

        return prepare_conversations(recipe, cache_dir, report_progress, out)
    if not 0 < recipe.held_out_fraction < 1:
        raise ConfigError(f"held_out_fraction={recipe.held_out_fraction} must be between 0 and 1.")
    if recipe.tokenizer is None and recipe.vocab_size < LEAST_VOCAB_SIZE:
        raise ConfigError(f"vocab_size={recipe.vocab_size} must be at least {LEAST_VOCAB_SIZE}: 256 bytes and one end-of-text.")
    source = find_documents(recipe.sources, recipe.text_key)
    held_out = find_documents(recipe.held_out, recipe.text_key) if recipe.held_out else None
    inputs = _inputs(recipe, source, held_out)
    key = digest(inputs)[:20]
    directory = out if out is not None else (cache_dir or data_cache_dir()) / key
    made = False

    def fill(partial: Path) -> None:
        nonlocal made
        made = True
        _write(partial, recipe, source, held_out, inputs, key, report_progress)

    prepared = made_whole(directory, key, fill)
    report_progress(1.0, "done" if made else "reused")
    return prepared


def _inputs(recipe: DataRecipe, source: DocumentSource, held_out: DocumentSource | None) -> dict[str, Any]:
    """All that decides the result. Two equal dictionaries give equal shards."""
    tokenizer = None
    if recipe.tokenizer is not None:
        tokenizer = hashlib.sha256(tokenizer_file(recipe.tokenizer).read_bytes()).hexdigest()
    return {
        "format": FORMAT,
        "tokenizers_version": tokenizers.__version__,
        "recipe": dataclasses.asdict(recipe),
        "tokenizer_sha256": tokenizer,
        "n_files": len(source.files),
        "n_file_bytes": source.n_file_bytes,
        "sources_sha256": source.fingerprint(),
        "held_out_sha256": held_out.fingerprint() if held_out else None,
    }


@dataclass
class _Split:
    """Which documents, or pieces of them, are held out: those whose bucket is below ``threshold``. No list is kept."""

    by: str
    threshold: int

    def holds_out(self, document: Document) -> bool:
        if self.by == "explicit":
            return False
        key = (document.path,) if self.by == "document" else (document.path, document.piece)
        return bucket(*key) < self.threshold


def _threshold(histogram: npt.NDArray[np.int64], fraction: float) -> int | None:
    """The least threshold from ``fraction`` up that holds out enough, or None where what is left would be less than half."""
    total = int(histogram.sum())
    needed = LEAST_HELD_OUT_BYTES if total > LARGE_CORPUS_BYTES else 1
    below = np.cumsum(histogram)  # below[t] = bytes in buckets 0 … t
    first = max(1, round(fraction * N_BUCKETS))
    threshold = max(first, int(np.searchsorted(below, needed)) + 1)
    held = int(below[min(threshold, N_BUCKETS) - 1])
    limit = max(0.5, fraction + 0.25) * total
    return threshold if needed <= held <= limit and held < total else None


def _choose_split(source: DocumentSource, fraction: float, report: Progress) -> _Split:
    """One pass over the source, in constant memory: bytes by bucket, counted by document and by piece.

    A small corpus is cut in smaller pieces, so that it has some; sets ``source.piece_bytes``.
    """
    if source.n_file_bytes < 16 * PIECE_BYTES:
        source.piece_bytes = max(64, source.n_file_bytes // 16)
    by_document = np.zeros(N_BUCKETS, dtype=np.int64)
    by_piece = np.zeros(N_BUCKETS, dtype=np.int64)
    done = 0
    for document in source:
        by_document[bucket(document.path)] += document.n_bytes
        by_piece[bucket(document.path, document.piece)] += document.n_bytes
        done += document.n_bytes
        report(min(1.0, done / max(1, source.n_file_bytes)), "reading")
    if source.report.n_documents == 0:
        raise DataError(
            f"the sources hold no text: {source.report.n_empty} of {source.report.n_files} files or records are empty."
        )
    for by, histogram in (("document", by_document), ("piece", by_piece)):
        threshold = _threshold(histogram, fraction)
        if threshold is not None:
            if by == "document":
                source.piece_bytes = PIECE_BYTES
            return _Split(by, threshold)
    raise DataError(
        f"{source.report.n_bytes} bytes of text cannot be divided into a training and a held-out part. "
        "Give more text, or name held-out sources."
    )


def _training_texts(
    source: DocumentSource, seen: set[bytes], split: _Split, total_bytes: int, report: Progress
) -> Iterator[str]:
    """What a tokenizer is trained on: never held-out text; of a very large corpus the pieces that a hash chooses."""
    share = min(1.0, TOKENIZER_SAMPLE_BYTES / max(1, total_bytes))
    done = 0
    for document in source.documents(FirstOfEach(seen)):
        done += document.n_bytes
        # The library reads all text first and merges then; its merging reports nothing, so reading is given half the bar.
        report(0.5 * min(1.0, done / max(1, total_bytes)), "training the tokenizer")
        if not split.holds_out(document) and (
            share == 1.0 or bucket("sample", document.path, document.piece) < share * N_BUCKETS
        ):
            yield document.text


class _SplitWriter:
    """Tokenises documents in bounded batches and writes them to their part, an end-of-text behind each.

    Where a document is divided by pieces, a run of pieces in one part counts as one document of that part.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, eos_id: int, dtype: str) -> None:
        self.tokenizer, self.eos_id = tokenizer, eos_id
        self.shards = {False: ShardWriter(directory, "train", dtype), True: ShardWriter(directory, "heldout", dtype)}
        self.n_documents = {False: 0, True: 0}
        self.n_bytes = {False: 0, True: 0}
        self.text = HashedFile(directory / HELD_OUT_TEXT)
        self.ends = HashedFile(directory / HELD_OUT_ENDS)
        self._batch: list[tuple[str, bool, bool]] = []  # text, held out, an end-of-text behind it
        self._batch_bytes = 0

    def add(self, text: str, n_bytes: int, held: bool, ends: bool) -> None:
        self._batch.append((text, held, ends))
        self._batch_bytes += n_bytes
        self.n_bytes[held] += n_bytes
        self.n_documents[held] += ends
        if held:
            self.text.write(text.encode())
            if ends:
                self.ends.write(self.text.n_bytes.to_bytes(8, "little"))
        if self._batch_bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        encodings = self.tokenizer.encode_batch_fast([text for text, _, _ in self._batch], add_special_tokens=False)
        for encoding, (_, held, ends) in zip(encodings, self._batch, strict=True):
            ids = encoding.ids
            if ends:
                ids.append(self.eos_id)
            self.shards[held].write(ids)
        self._batch = []
        self._batch_bytes = 0

    def close(self) -> dict[str, dict[str, Any]]:
        self.flush()
        for shards in self.shards.values():
            shards.close()
        text, ends = self.text.close(), self.ends.close()
        return {**self.shards[False].files, **self.shards[True].files, HELD_OUT_TEXT: text, HELD_OUT_ENDS: ends}

    def abandon(self) -> None:
        for shards in self.shards.values():
            shards.abandon()
        self.text.abandon()
        self.ends.abandon()


def _write(
    directory: Path,
    recipe: DataRecipe,
    source: DocumentSource,
    held_out: DocumentSource | None,
    inputs: dict[str, Any],
    key: str,
    progress: Progress,
) -> None:
    held_hashes: set[bytes] = set()
    if held_out is not None:
        for _ in held_out.documents(FirstOfEach(held_hashes)):
            pass
        if held_out.report.n_documents == 0:
            raise DataError(f"the held-out sources {', '.join(recipe.held_out)} hold no text.")
        for _ in source.documents(FirstOfEach(set(held_hashes))):
            pass
        if source.report.n_documents == 0:
            raise DataError("nothing is left to train on: every document is empty or a duplicate of a held-out one.")
        split = _Split("explicit", 0)
    else:
        split = _choose_split(source, recipe.held_out_fraction, lambda done, note: progress(0.04 * done, note))
    total_bytes = source.report.n_bytes

    if recipe.tokenizer is None:
        texts = _training_texts(
            source, set(held_hashes), split, total_bytes, lambda done, note: progress(0.05 + 0.45 * done, note)
        )
        tokenizer = train_tokenizer(texts, recipe.vocab_size, directory / "tokenizer.json")
        eos_id = eos_id_of(tokenizer)
    else:
        tokenizer = load_tokenizer(recipe.tokenizer)
        eos_id = eos_id_of(tokenizer, recipe.tokenizer)
        shutil.copyfile(tokenizer_file(recipe.tokenizer), directory / "tokenizer.json")
    # "<|endoftext|>" inside a document is text about tokens, not the end of it.
    tokenizer.encode_special_tokens = True
    vocab_size = tokenizer.get_vocab_size()
    # The greatest id, not the count: a vocabulary may have gaps.
    vocab_size = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"

    writer = _SplitWriter(directory, tokenizer, eos_id, dtype)
    try:
        reports = _encode(writer, source, held_out, held_hashes, split, total_bytes, progress)
        files = writer.close()
    except BaseException:
        writer.abandon()
        raise
    for checked in (source, held_out):
        if checked is not None:
            checked.check_unchanged()
    files["tokenizer.json"] = hash_and_flush(directory / "tokenizer.json")
    n_text_bytes = sum(writer.n_bytes.values())
    n_tokens = writer.shards[False].n_tokens + writer.shards[True].n_tokens
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "inputs": inputs,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "dtype": dtype,
        "n_train_tokens": writer.shards[False].n_tokens,
        "n_heldout_tokens": writer.shards[True].n_tokens,
        "n_heldout_bytes": writer.n_bytes[True],
        "n_heldout_documents": writer.n_documents[True],
        "report": {
            **reports,
            "split_by": split.by,
            "held_out_share": writer.n_bytes[True] / n_text_bytes,
            "n_train_bytes": writer.n_bytes[False],
            "n_train_documents": writer.n_documents[False],
            "bytes_per_token": n_text_bytes / n_tokens,
        },
        "files": files,
    }
    write_manifest(directory, manifest)


def _encode(
    writer: _SplitWriter,
    source: DocumentSource,
    held_out: DocumentSource | None,
    held_hashes: set[bytes],
    split: _Split,
    total_bytes: int,
    progress: Progress,
) -> dict[str, int]:
    """The pass that writes. Returns the counts of both sources together."""
    done = 0
    if held_out is not None:
        for document in held_out:
            writer.add(document.text, document.n_bytes, held=True, ends=document.is_last)
    waiting: tuple[Document, bool] | None = None  # until it is known whether the next piece goes on in the same part
    for document in source.documents(FirstOfEach(set(held_hashes))):
        held = split.holds_out(document)
        if waiting is not None:
            before, before_held = waiting
            writer.add(before.text, before.n_bytes, before_held, ends=before.is_last or before_held != held)
        waiting = document, held
        done += document.n_bytes
        progress(0.5 + 0.48 * min(1.0, done / max(1, total_bytes)), "tokenising")
    if waiting is not None:
        writer.add(waiting[0].text, waiting[0].n_bytes, waiting[1], ends=True)
    reports = source.report.to_dict()
    if held_out is not None:
        for name, count in held_out.report.to_dict().items():
            reports[name] += count
    return reports
