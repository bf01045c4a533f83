"""Prepares text as token shards, once for each combination of input and recipe.

A prepared directory holds::

    manifest.json           written last; every other file with its size and sha256, its own sha256 as the last key
    tokenizer.json
    train-00000.bin …       token ids, little-endian uint16 or uint32; each document is followed by the end-of-text id
    heldout-00000.bin …     the same for the held-out documents
    heldout.txt             their text, joined without separators; bits per byte and xz are measured on it
    heldout-ends.bin        uint64: where each held-out document ends in heldout.txt

The directory is written under another name beside its place, flushed to disk, and renamed when it is complete. A full disk or a
kill leaves nothing under the final name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from twostroke.core.data_recipe import REUSED, DataRecipe, check_vocab_size
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.core.paths import data_cache_dir
from twostroke.data.selection import Selection, report_left_out, select
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
    open_or_write,
    write_manifest,
)
from twostroke.data.sources import Document, DocumentSource, find_documents
from twostroke.data.tokenizer import eos_id_of, load_tokenizer, tokenizer_file, train_tokenizer

TOKENIZER_SAMPLE_BYTES = 256 * 2**20
"""About the most text that a tokenizer is trained on. More hardly changes the merges, and the trainer's memory grows with
it."""

_BATCH_BYTES = 2**20


def prepare(
    recipe: DataRecipe,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    out: Path | None = None,
) -> PreparedData:
    """Tokenised training and held-out shards of ``recipe``'s sources, from the cache or made now.

    They lie at ``<cache_dir>/<key>``, or at ``out``. A document is held out if the sha256 of its relative path, read as a
    number in [0, 1), is below ``held_out_fraction``. If that holds out nothing, or less than 1 MB of a corpus above 10 MB, the
    fraction is raised. A corpus that cannot be divided by documents (one file) is divided by pieces of about 64 kB that end at
    line ends. If ``recipe.held_out`` names sources, their documents are held out instead, and training documents equal to them
    are left out. ``recipe.dedup`` and the filters leave out more (``data.inventory``); the report counts it by reason.

    ``data.conversations`` prepares conversations (``recipe.layout`` other than "text").

    Raises DataError, ConfigError, CorruptFileError for bad input, TwostrokeError if the directory cannot be written.
    """
    report_progress = progress or (lambda done, note: None)
    if recipe.layout != "text":
        from twostroke.data.conversations import prepare_conversations

        return prepare_conversations(recipe, cache_dir, report_progress, out)
    if not 0 < recipe.held_out_fraction < 1:
        raise ConfigError(f"held_out_fraction={recipe.held_out_fraction} must be above 0 and below 1.")
    if recipe.tokenizer is None:
        check_vocab_size(recipe.vocab_size)
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

    prepared = open_or_write(directory, key, fill)
    report_progress(1.0, "done" if made else REUSED)
    return prepared


def _inputs(recipe: DataRecipe, source: DocumentSource, held_out: DocumentSource | None) -> dict[str, Any]:
    """Everything that the result depends on. Equal dictionaries give equal shards, and their hash is the cache's key."""
    tokenizer = None
    if recipe.tokenizer is not None:
        tokenizer = hashlib.sha256(tokenizer_file(recipe.tokenizer).read_bytes()).hexdigest()
    return {
        "format": FORMAT,
        "tokenizers_version": tokenizers.__version__,
        "recipe": recipe.preparation(),
        "tokenizer_sha256": tokenizer,
        "n_files": len(source.files),
        "n_file_bytes": source.n_file_bytes,
        "sources_sha256": source.fingerprint(),
        "held_out_sha256": held_out.fingerprint() if held_out else None,
    }


@dataclass
class _SourceCounts:
    n_documents: int = 0
    n_bytes: int = 0
    n_tokens: int = 0


class _SplitWriter:
    """Tokenises documents in bounded batches and writes them to their part, each with an end-of-text.

    The library's threads, one a core, tokenise a batch in the background while the next is read. If a document is divided by
    pieces, a run of pieces in one part counts as one document of that part.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, eos_id: int, dtype: str, n_sources: int) -> None:
        self.tokenizer, self.eos_id = tokenizer, eos_id
        self.sources = [_SourceCounts() for _ in range(n_sources)]
        self._background = ThreadPoolExecutor(1, "tokenise")
        self._at_work: Future[list[list[int]]] | None = None
        self.shards = {False: ShardWriter(directory, "train", dtype), True: ShardWriter(directory, "heldout", dtype)}
        self.n_documents = {False: 0, True: 0}
        self.n_bytes = {False: 0, True: 0}
        self.text = HashedFile(directory / HELD_OUT_TEXT)
        self.ends = HashedFile(directory / HELD_OUT_ENDS)
        self._batch: list[_Piece] = []
        self._batch_at_work: list[_Piece] = []
        self._batch_bytes = 0

    def add(self, document: Document, held: bool, ends: bool) -> None:
        self._batch.append(_Piece(document.text, held, ends, document.source))
        self._batch_bytes += document.n_bytes
        self.n_bytes[held] += document.n_bytes
        self.n_documents[held] += ends
        if held:
            self.text.write(document.text.encode())
            if ends:
                self.ends.write(self.text.n_bytes.to_bytes(8, "little"))
        else:
            self.sources[document.source].n_documents += ends
            self.sources[document.source].n_bytes += document.n_bytes
        if self._batch_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the batch that was tokenised in the background, and start tokenising the current one."""
        self._collect()
        self._batch_at_work, self._batch, self._batch_bytes = self._batch, [], 0
        self._at_work = self._background.submit(self._encode, [piece.text for piece in self._batch_at_work])

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _collect(self) -> None:
        if self._at_work is None:
            return
        for ids, piece in zip(self._at_work.result(), self._batch_at_work, strict=True):
            if piece.ends:
                ids.append(self.eos_id)
            self.shards[piece.held].write(ids)
            if not piece.held:
                self.sources[piece.source].n_tokens += len(ids)
        self._at_work = None

    def close(self) -> dict[str, dict[str, Any]]:
        self._flush()
        self._collect()
        self._background.shutdown()
        for shards in self.shards.values():
            shards.close()
        text, ends = self.text.close(), self.ends.close()
        return {**self.shards[False].files, **self.shards[True].files, HELD_OUT_TEXT: text, HELD_OUT_ENDS: ends}

    def abandon(self) -> None:
        self._background.shutdown(cancel_futures=True)
        for shards in self.shards.values():
            shards.abandon()
        self.text.abandon()
        self.ends.abandon()


@dataclass(frozen=True)
class _Piece:
    """A piece that waits to be tokenised. With ``ends``, an end-of-text follows it."""

    text: str
    held: bool
    ends: bool
    source: int


def _training_texts(source: DocumentSource, selection: Selection, report: Progress) -> Iterator[str]:
    """The texts that a tokenizer is trained on: the training part, and of a very large corpus pieces that a hash chooses."""
    total_bytes = max(1, selection.n_kept_bytes)
    share = min(1.0, TOKENIZER_SAMPLE_BYTES / total_bytes)
    done = 0
    for document, held, _ in selection.parts(source):
        done += document.n_bytes
        # The library first reads all text and then merges without reporting progress, so reading gets half of the bar.
        report(0.5 * min(1.0, done / total_bytes), "training the tokenizer")
        if not held and (share == 1.0 or bucket("sample", document.path, document.piece) < share * N_BUCKETS):
            yield document.text


def _write(
    directory: Path,
    recipe: DataRecipe,
    source: DocumentSource,
    held_out: DocumentSource | None,
    inputs: dict[str, Any],
    key: str,
    progress: Progress,
) -> None:
    read = 0.2 if recipe.dedup == "near" or recipe.has_filters else 0.04  # share of the bar
    selection, of_held_out = select(recipe, source, held_out, directory, lambda done, note: progress(read * done, note))
    if recipe.tokenizer is None:
        texts = _training_texts(source, selection, lambda done, note: progress(read + (0.5 - read) * done, note))
        tokenizer = train_tokenizer(texts, recipe.vocab_size, directory / "tokenizer.json")
        eos_id = eos_id_of(tokenizer)
    else:
        tokenizer = load_tokenizer(recipe.tokenizer)
        eos_id = eos_id_of(tokenizer, recipe.tokenizer)
        shutil.copyfile(tokenizer_file(recipe.tokenizer), directory / "tokenizer.json")
    # A document that contains the text "<|endoftext|>" does not end there: it is encoded as ordinary characters.
    tokenizer.encode_special_tokens = True
    vocab_size = tokenizer.get_vocab_size()
    # The largest id + 1 and not the count, because a vocabulary may have gaps.
    vocab_size = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"

    writer = _SplitWriter(directory, tokenizer, eos_id, dtype, len(recipe.sources))
    try:
        if held_out is not None and of_held_out is not None:
            for document, held, ends in of_held_out.parts(held_out):
                writer.add(document, held, ends)
        done, total_bytes = 0, max(1, selection.n_kept_bytes)
        for document, held, ends in selection.parts(source):
            writer.add(document, held, ends)
            done += document.n_bytes
            progress(0.5 + 0.48 * min(1.0, done / total_bytes), "tokenising")
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
            **_counts(source, held_out),
            **report_left_out([s for s in (of_held_out, selection) if s is not None]),
            "split_by": selection.by,
            "held_out_share": writer.n_bytes[True] / n_text_bytes,
            "n_train_bytes": writer.n_bytes[False],
            "n_train_documents": writer.n_documents[False],
            "bytes_per_token": n_text_bytes / n_tokens,
            "sources": [
                {"source": name, **dataclasses.asdict(counts)}
                for name, counts in zip(recipe.sources, writer.sources, strict=True)
            ],
        },
        "files": files,
    }
    report = manifest["report"]
    report["n_duplicates"] = report["left_out"].get("duplicate", {}).get("n_documents", 0)
    write_manifest(directory, manifest)


def _counts(source: DocumentSource, held_out: DocumentSource | None) -> dict[str, int]:
    """The counts of the last passes over both sources, added up."""
    counts = plain(source.report)
    if held_out is not None:
        for name, count in plain(held_out.report).items():
            counts[name] += count
    return counts
