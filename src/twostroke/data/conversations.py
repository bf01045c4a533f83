"""Conversations into token shards with a mark beside each token: whether it is learned, and where a conversation begins.

A prepared directory holds, beside what ``data.prepare`` describes (``heldout.txt`` is the rendered text)::

    marks-train-00000.bin …     uint8, one a token: LEARNED where the token is the assistant's, BEGINS on a first token
    marks-heldout-00000.bin …   the same of the held-out conversations

Ends of text cannot mark the boundaries, as they do between documents: many chat models end every turn with one.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from twostroke.core.errors import ConfigError, DataError, InputError
from twostroke.core.paths import data_cache_dir
from twostroke.core.recipe import DataRecipe
from twostroke.data.answer_spans import ConversationTemplate, Rendered, learned_tokens
from twostroke.data.chat import read_chat_template, read_template_file
from twostroke.data.conversation_layouts import LAYOUT_KEYS, Conversation, read_conversation
from twostroke.data.records import is_table, parse_json, read_array, read_lines, read_table, reading, table_columns
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
from twostroke.data.source_files import CONVERSATION_SUFFIXES, SourceFile, check_unchanged, find_files
from twostroke.data.tokenizer import eos_id_of, load_tokenizer, tokenizer_file

LEARNED, BEGINS = 1, 2
_BATCH = 256


@dataclass
class ConversationReport:
    """Counts of one preparation. ``n_without_answer`` were left out; of ``n_unlearned_answers`` the template does not show
    where they are; ``n_answer_bytes`` are UTF-8 of what is learned, ends of turns included."""

    n_files: int = 0
    n_other_files: int = 0
    n_conversations: int = 0
    n_duplicates: int = 0
    n_without_answer: int = 0
    n_answers: int = 0
    n_unlearned_answers: int = 0
    n_train_conversations: int = 0
    n_heldout_conversations: int = 0
    n_train_learned_tokens: int = 0
    n_heldout_learned_tokens: int = 0
    n_train_answer_bytes: int = 0
    n_heldout_answer_bytes: int = 0


def prepare_conversations(
    recipe: DataRecipe, cache_dir: Path | None, progress: Progress, out: Path | None = None
) -> PreparedData:
    """Tokenised train and held-out conversations of ``recipe``'s sources: found in the cache, or made.

    Rendered by ``recipe.chat_template``, else by the template beside the tokenizer, else by the plain default
    (``data.chat.DEFAULT_TEMPLATE``); an end-of-text is put behind a conversation that does not end with one. Held out are the
    conversations whose sha256 of file and number is below ``held_out_fraction``, one at least, or all of ``recipe.held_out``.

    Raises DataError naming file and record, ConfigError, CorruptFileError for bad input, TwostrokeError where the directory
    cannot be written.
    """
    if recipe.tokenizer is None:
        raise ConfigError(f"layout={recipe.layout!r} needs a tokenizer: give model.init_from or data.tokenizer.")
    tokenizer_path = tokenizer_file(recipe.tokenizer)
    tokenizer = load_tokenizer(tokenizer_path)
    eos_id = eos_id_of(tokenizer, tokenizer_path)
    template = conversation_template(recipe, tokenizer, eos_id)
    source = _Source(recipe.sources, recipe.layout)
    held_out = _Source(recipe.held_out, recipe.layout) if recipe.held_out else None
    inputs = {
        "format": FORMAT,
        "tokenizers_version": tokenizers.__version__,
        "recipe": asdict(replace(recipe, too_long="cut")),  # whatever it is, is the loader's business
        "tokenizer_sha256": hashlib.sha256(tokenizer_path.read_bytes()).hexdigest(),
        "template": template.source,
        "template_variables": dict(template.variables),
        "eos_id": eos_id,
        "sources": source.fingerprint(),
        "held_out": held_out.fingerprint() if held_out else None,
    }
    key = digest(inputs)[:20]
    directory = out if out is not None else (cache_dir or data_cache_dir()) / key

    def fill(partial: Path) -> None:
        writer = _Writer(partial, tokenizer, eos_id, template)
        try:
            _write(writer, source, held_out, recipe.held_out_fraction, progress)
            shutil.copyfile(tokenizer_path, partial / "tokenizer.json")
            files = writer.close() | {"tokenizer.json": hash_and_flush(partial / "tokenizer.json")}
        except BaseException:
            writer.abandon()
            raise
        for checked in (source, held_out):
            check_unchanged(checked.files if checked else ())
        manifest = {"key": key, "inputs": inputs, "eos_id": eos_id, **writer.manifest(), "files": files}
        write_manifest(partial, manifest)

    prepared = made_whole(directory, key, fill)
    progress(1.0, "done")
    return prepared


def conversation_template(recipe: DataRecipe, tokenizer: Tokenizer, eos_id: int) -> ConversationTemplate:
    """The template that ``recipe`` names or its tokenizer's directory holds, and the special tokens that end turns."""
    assert recipe.tokenizer is not None
    directory = tokenizer_file(recipe.tokenizer).parent
    source, variables = read_chat_template(directory)
    if recipe.chat_template is not None:
        file = Path(recipe.chat_template).expanduser()
        if not file.is_file():
            raise ConfigError(f"data.chat_template={recipe.chat_template!r} does not exist. Name a Jinja file.")
        source = read_template_file(file)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    special.add(str(tokenizer.id_to_token(eos_id)))
    return ConversationTemplate(source, variables, tuple(sorted(special)))


class _Source:
    """Records of .json and .jsonl files in order, each with a key (``file#number``) that its part is chosen by."""

    def __init__(self, sources: tuple[str, ...], layout: str) -> None:
        self.files, self.n_other_files = find_files(sources, CONVERSATION_SUFFIXES)
        self.layout = layout

    def fingerprint(self) -> list[Any]:
        return [[f.path, f.key, f.n_bytes, f.mtime_ns] for f in self.files]

    @property
    def n_bytes(self) -> int:
        return sum(f.n_bytes for f in self.files)

    def __iter__(self) -> Iterator[tuple[str, str, Conversation]]:
        """(key, where for messages, conversation)."""
        for file in self.files:
            with reading(file):
                for number, where, record in _records(file, self.layout):
                    if not isinstance(record, dict):
                        raise DataError(f"{where} holds {type(record).__name__}, not an object.")
                    yield f"{file.key}#{number}", where, read_conversation(record, self.layout, where)


def _records(file: SourceFile, layout: str) -> Iterator[tuple[int, str, Any]]:
    """(number, where for messages, record). Of a table the columns that ``layout`` reads."""
    if is_table(file):
        names = table_columns(file)
        columns = [name for name in names if name in LAYOUT_KEYS[layout]] or names  # all, for a message that names them
        for number, where, values in read_table(file, columns):
            yield number, where, {name: value for name, value in zip(columns, values, strict=True) if value is not None}
    elif file.path.lower().endswith(".json"):
        yield from read_array(file)
    else:
        for number, where, line in read_lines(file):
            yield number, where, parse_json(line, where)


def _write(writer: _Writer, source: _Source, held_out: _Source | None, fraction: float, progress: Progress) -> None:
    report = writer.report
    report.n_files = len(source.files) + (len(held_out.files) if held_out else 0)
    report.n_other_files = source.n_other_files + (held_out.n_other_files if held_out else 0)
    if held_out is not None:
        for _, where, conversation in held_out:  # first, so that their duplicates leave the training part
            writer.add(where, conversation, held=True)
    n_records, threshold = _threshold(source, 0.0 if held_out is not None else fraction)
    for done, (key, where, conversation) in enumerate(source):
        writer.add(where, conversation, held=bucket(key) < threshold)
        if done % 100 == 0:
            progress(done / n_records, "tokenising conversations")
    writer.flush()
    if report.n_train_conversations == 0 or report.n_heldout_conversations == 0:
        raise DataError(
            f"{', '.join(f.path for f in source.files[:3])}: of {report.n_conversations} conversations "
            f"{report.n_train_conversations} are left to train on and {report.n_heldout_conversations} to hold out "
            f"({report.n_without_answer} have no answer by an assistant, {report.n_duplicates} are duplicates). "
            "Give at least two with an answer, or name data.held_out."
        )


def _threshold(source: _Source, fraction: float) -> tuple[int, int]:
    """Records there are, and the bucket below which one is held out: ``fraction`` of all buckets, or the least that holds out
    one conversation. 0 holds out none."""
    n_records, least = 0, N_BUCKETS
    for key, _, conversation in source:
        n_records += 1
        if conversation.has_answer:
            least = min(least, bucket(key))
    return max(1, n_records), max(round(fraction * N_BUCKETS), least + 1) if fraction > 0 else 0


class _Writer:
    """Renders, tokenises and marks conversations in batches, and writes them to their part."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, eos_id: int, template: ConversationTemplate) -> None:
        self.tokenizer, self.eos_id, self.template = tokenizer, eos_id, template
        self.eos = str(tokenizer.id_to_token(eos_id))
        # The greatest id, not the count: a vocabulary may have gaps.
        self.vocab_size = max(tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values()))
        self.dtype = "<u2" if self.vocab_size <= 2**16 else "<u4"
        self.tokens = {held: ShardWriter(directory, _PART[held], self.dtype) for held in _PART}
        self.marks = {held: ShardWriter(directory, f"marks-{_PART[held]}", "<u1") for held in _PART}
        self.text, self.ends = HashedFile(directory / HELD_OUT_TEXT), HashedFile(directory / HELD_OUT_ENDS)
        self.report = ConversationReport()
        self._seen: set[bytes] = set()
        self._batch: list[tuple[Rendered, bool, bool]] = []  # rendered, held out, whether an answer ends it

    def add(self, where: str, conversation: Conversation, held: bool) -> None:
        """Take one conversation; one without an answer, or that was there before, is counted and left out."""
        report = self.report
        report.n_conversations += 1
        if not conversation.has_answer:
            report.n_without_answer += 1
            return
        try:
            rendered = self.template.render(conversation)
        except InputError as error:
            raise DataError(f"{where}: {error}") from None
        name = hashlib.sha256(rendered.text.encode(errors="surrogatepass")).digest()[:16]
        if name in self._seen:
            report.n_duplicates += 1
            return
        self._seen.add(name)
        report.n_answers += len(rendered.spans)
        report.n_unlearned_answers += rendered.n_unlearned
        self._batch.append((rendered, held, conversation.messages[-1]["role"] == "assistant"))
        if len(self._batch) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        # Without a template the tokenizer puts its own special tokens around a text, as a server lets it do.
        texts = [_clean(rendered.text) for rendered, _, _ in self._batch]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=self.template.source is None)
        for encoding, text, (rendered, held, ends_with_answer) in zip(encodings, texts, self._batch, strict=True):
            ids, learned = list(encoding.ids), learned_tokens(encoding, rendered.spans)
            if ids[-1] != self.eos_id and not text.rstrip().endswith(self.eos):
                ids.append(self.eos_id)
                learned.append(ends_with_answer)
            self._write(held, ids, learned, text, rendered)
        self._batch = []

    def _write(self, held: bool, ids: list[int], learned: list[bool], text: str, rendered: Rendered) -> None:
        marks = [LEARNED * mark for mark in learned]
        marks[0] |= BEGINS
        self.tokens[held].write(ids)
        self.marks[held].write(marks)
        n_answer_bytes = sum(len(text[begin:end].encode()) for begin, end in rendered.spans)
        report = self.report
        if held:
            report.n_heldout_conversations += 1
            report.n_heldout_learned_tokens += sum(learned)
            report.n_heldout_answer_bytes += n_answer_bytes
            self.text.write(text.encode())
            self.ends.write(self.text.n_bytes.to_bytes(8, "little"))
        else:
            report.n_train_conversations += 1
            report.n_train_learned_tokens += sum(learned)
            report.n_train_answer_bytes += n_answer_bytes

    def close(self) -> dict[str, dict[str, Any]]:
        files: dict[str, dict[str, Any]] = {}
        for shards in (*self.tokens.values(), *self.marks.values()):
            shards.close()
            files |= shards.files
        return files | {HELD_OUT_TEXT: self.text.close(), HELD_OUT_ENDS: self.ends.close()}

    def manifest(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype,
            "n_train_tokens": self.tokens[False].n_tokens,
            "n_heldout_tokens": self.tokens[True].n_tokens,
            "n_heldout_bytes": self.text.n_bytes,
            "n_heldout_documents": self.report.n_heldout_conversations,
            "report": {**asdict(self.report), "template": "plain default" if self.template.source is None else "own"},
        }

    def abandon(self) -> None:
        for shards in (*self.tokens.values(), *self.marks.values()):
            shards.abandon()
        self.text.abandon()
        self.ends.abandon()


_PART = {False: "train", True: "heldout"}


def _clean(text: str) -> str:
    """Half a surrogate pair, an escape in JSON, is no character: replaced. One for one, so that spans stay where they are."""
    return text if text.isascii() else "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
