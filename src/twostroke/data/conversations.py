"""Prepares conversations as token shards with a loss mask: a mark beside each token says whether it is learned.

Beside the files that ``data.prepare`` describes (``heldout.txt`` is the rendered text), a prepared directory holds::

    marks-train-00000.bin …     uint8, one a token: LEARNED on the assistant's tokens, BEGINS on a conversation's first token
    marks-heldout-00000.bin …   the same for the held-out conversations

The marks also separate conversations. Between plain documents the end-of-text token does, but many chat models end every
message with it.
"""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from twostroke.core.errors import ConfigError, DataError, InputError
from twostroke.core.paths import data_cache_dir
from twostroke.core.recipe import DataRecipe
from twostroke.data.answer_spans import ConversationTemplate, Rendered, assistant_mask
from twostroke.data.chat import read_chat_template, read_template_file
from twostroke.data.conversation_source import (
    ConversationSelection,
    ConversationSource,
    Found,
    select_conversations,
    without_surrogates,
)
from twostroke.data.packing import BEGINS, LEARNED
from twostroke.data.shards import (
    FORMAT,
    HELD_OUT_ENDS,
    HELD_OUT_TEXT,
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
from twostroke.data.source_files import check_unchanged
from twostroke.data.tokenizer import eos_id_of, load_tokenizer, tokenizer_file

_BATCH = 256


@dataclass
class ConversationReport:
    """Counts of one preparation. ``n_without_answer`` conversations were left out. ``n_unlearned_answers`` could not be found
    in the rendered text. The bytes of answers are UTF-8, with each answer's end token."""

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
    """Tokenised training and held-out conversations of ``recipe``'s sources, from the cache or made now.

    Conversations are rendered by ``recipe.chat_template``, else by the template beside the tokenizer, else by the plain default
    (``data.chat.DEFAULT_TEMPLATE``). A conversation that does not end with an end-of-text gets one. A conversation is held out
    if the sha256 of its file and number, read as a number in [0, 1), is below ``held_out_fraction``; at least one is. If
    ``recipe.held_out`` names sources, their conversations are held out instead.

    Raises DataError naming file and record, ConfigError, CorruptFileError for bad input, TwostrokeError if the directory cannot
    be written.
    """
    if recipe.tokenizer is None:
        raise ConfigError(f"layout={recipe.layout!r} needs a tokenizer. Give model.init_from or data.tokenizer.")
    tokenizer_path = tokenizer_file(recipe.tokenizer)
    tokenizer = load_tokenizer(tokenizer_path)
    eos_id = eos_id_of(tokenizer, tokenizer_path)
    template = conversation_template(recipe, tokenizer, eos_id)
    source = ConversationSource(recipe.sources, recipe.layout)
    held_out = ConversationSource(recipe.held_out, recipe.layout) if recipe.held_out else None
    inputs = {
        "format": FORMAT,
        "tokenizers_version": tokenizers.__version__,
        "recipe": recipe.preparation(),
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
        writer = _Writer(partial, tokenizer, eos_id, template, len(recipe.sources), keep_equal=recipe.dedup == "none")
        try:
            left_out = _write(writer, recipe, source, held_out, partial, progress)
            shutil.copyfile(tokenizer_path, partial / "tokenizer.json")
            files = writer.close() | {"tokenizer.json": hash_and_flush(partial / "tokenizer.json")}
        except BaseException:
            writer.abandon()
            raise
        for checked in (source, held_out):
            check_unchanged(checked.files if checked else ())
        manifest = {"key": key, "inputs": inputs, "eos_id": eos_id, **writer.manifest(), "files": files}
        manifest["report"] |= {
            "left_out": left_out,
            "sources": [{"source": name, **n} for name, n in zip(recipe.sources, writer.sources, strict=True)],
        }
        write_manifest(partial, manifest)

    prepared = open_or_write(directory, key, fill)
    progress(1.0, "done")
    return prepared


def conversation_template(recipe: DataRecipe, tokenizer: Tokenizer, eos_id: int) -> ConversationTemplate:
    """The template that ``recipe`` names or its tokenizer's directory holds, with the special tokens that end messages."""
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


def _write(
    writer: _Writer,
    recipe: DataRecipe,
    source: ConversationSource,
    held_out: ConversationSource | None,
    scratch: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Give every selected conversation to ``writer``. Returns the manifest's table of conversations that were left out
    before."""
    report = writer.report
    report.n_files = len(source.files) + (len(held_out.files) if held_out else 0)
    report.n_other_files = source.n_other_files + (held_out.n_other_files if held_out else 0)
    n_records, selection = select_conversations(
        recipe,
        source,
        held_out,
        scratch,
        lambda n: progress(0.3 * n / (n + 1000), "reading conversations") if n % 100 == 0 else None,
    )
    for found in held_out or ():  # first, so that an equal conversation in the sources counts as the duplicate
        writer.add(found, selection, held=True)
    for done, found in enumerate(source):
        writer.add(found, selection, held=bucket(found.key) < selection.threshold)
        if done % 100 == 0:
            progress(0.3 + 0.7 * min(1.0, done / max(1, n_records)), "tokenising conversations")
    writer.flush()
    writer.collect()
    left_out = selection.left_out()
    if report.n_train_conversations == 0 or report.n_heldout_conversations == 0:
        filtered = "".join(f", {v['n_documents']} {reason.replace('_', ' ')}" for reason, v in left_out.items())
        raise DataError(
            f"{', '.join(f.path for f in source.files[:3])}: of {report.n_conversations} conversations "
            f"{report.n_train_conversations} are left to train on and {report.n_heldout_conversations} to hold out "
            f"({report.n_without_answer} have no answer by an assistant, {report.n_duplicates} are duplicates{filtered}). "
            "Give at least two with an answer, or name data.held_out."
        )
    return left_out


@dataclass(frozen=True)
class _Waiting:
    """A rendered conversation that waits to be tokenised; ``text`` is what the tokenizer gets."""

    rendered: Rendered
    text: str
    held: bool
    ends_with_answer: bool
    source: int


class _Writer:
    """Renders, tokenises and marks conversations in batches, and writes them to their part."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        eos_id: int,
        template: ConversationTemplate,
        n_sources: int,
        keep_equal: bool,
    ) -> None:
        self.tokenizer, self.eos_id, self.template = tokenizer, eos_id, template
        self.eos = str(tokenizer.id_to_token(eos_id))
        # The largest id + 1 and not the count, because a vocabulary may have gaps.
        self.vocab_size = max(tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values()))
        self.dtype = "<u2" if self.vocab_size <= 2**16 else "<u4"
        self.tokens = {held: ShardWriter(directory, _PART[held], self.dtype) for held in _PART}
        self.marks = {held: ShardWriter(directory, f"marks-{_PART[held]}", "<u1") for held in _PART}
        self.text, self.ends = HashedFile(directory / HELD_OUT_TEXT), HashedFile(directory / HELD_OUT_ENDS)
        self.report = ConversationReport()
        self.sources = [{"n_documents": 0, "n_bytes": 0, "n_tokens": 0} for _ in range(n_sources)]
        self._keep_equal = keep_equal
        self._seen: set[bytes] = set()
        self._batch: list[_Waiting] = []
        self._batch_at_work: list[_Waiting] = []
        self._background = ThreadPoolExecutor(1, "tokenise")
        self._at_work: Future[list[tuple[list[int], list[bool]]]] | None = None

    def add(self, found: Found, selection: ConversationSelection, held: bool) -> None:
        """Add one conversation. If it has no answer, or an equal one came before, it is counted and left out."""
        report, conversation = self.report, found.conversation
        report.n_conversations += 1
        if not conversation.has_answer:
            report.n_without_answer += 1
            return
        if not selection.takes(found):
            return
        try:
            rendered = self.template.render(conversation)
        except InputError as error:
            raise DataError(f"{found.where}: {error}") from None
        name = hashlib.sha256(rendered.text.encode(errors="surrogatepass")).digest()[:16]
        if name in self._seen and not self._keep_equal:
            report.n_duplicates += 1
            return
        self._seen.add(name)
        report.n_answers += len(rendered.spans)
        report.n_unlearned_answers += rendered.n_unlearned
        ends_with_answer = conversation.messages[-1]["role"] == "assistant"
        self._batch.append(_Waiting(rendered, without_surrogates(rendered.text), held, ends_with_answer, found.source))
        if len(self._batch) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the batch that was tokenised in the background, and start tokenising the current one."""
        self.collect()
        self._batch_at_work, self._batch = self._batch, []
        self._at_work = self._background.submit(self._encode, self._batch_at_work)

    def _encode(self, batch: list[_Waiting]) -> list[tuple[list[int], list[bool]]]:
        """Token ids and loss mask of each conversation."""
        # Without a template the tokenizer adds its own special tokens, as it does in the server.
        encodings = self.tokenizer.encode_batch([w.text for w in batch], add_special_tokens=self.template.source is None)
        return [(list(e.ids), assistant_mask(e, w.rendered.spans)) for e, w in zip(encodings, batch, strict=True)]

    def collect(self) -> None:
        if self._at_work is None:
            return
        for (ids, learned), waiting in zip(self._at_work.result(), self._batch_at_work, strict=True):
            if ids[-1] != self.eos_id and not waiting.text.rstrip().endswith(self.eos):
                ids.append(self.eos_id)
                learned.append(waiting.ends_with_answer)
            self._write(waiting, ids, learned)
        self._at_work = None

    def _write(self, waiting: _Waiting, ids: list[int], learned: list[bool]) -> None:
        held, text = waiting.held, waiting.text
        marks = [LEARNED * mark for mark in learned]
        marks[0] |= BEGINS
        self.tokens[held].write(ids)
        self.marks[held].write(marks)
        n_answer_bytes = sum(len(text[begin:end].encode()) for begin, end in waiting.rendered.spans)
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
            counts = self.sources[waiting.source]
            counts["n_documents"] += 1
            counts["n_bytes"] += len(text.encode())
            counts["n_tokens"] += len(ids)

    def close(self) -> dict[str, dict[str, Any]]:
        self._background.shutdown()
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
        self._background.shutdown(cancel_futures=True)
        for shards in (*self.tokens.values(), *self.marks.values()):
            shards.abandon()
        self.text.abandon()
        self.ends.abandon()


_PART = {False: "train", True: "heldout"}
