"""Reads the documents of files, data sets and the standard library lazily and in constant memory.

A pass counts everything that it leaves out in its ``SourceReport``: invalid UTF-8, duplicates, empty documents and files of
other formats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Protocol

from twostroke.core.data_recipe import STDLIB_SOURCE
from twostroke.core.errors import DataError
from twostroke.data.records import is_table, open_file, parse_json, read_lines, read_table, reading, table_columns
from twostroke.data.source_files import SUFFIXES, SourceFile, check_unchanged, find_files, suffix_of

PIECE_BYTES = 64 * 1024
"""Longest piece of text that is handed on at once, and the unit that divides a corpus of one file. See ``DocumentSource``."""

_BOM = "\ufeff"


@dataclass(frozen=True)
class Document:
    """A document, or one piece of a document that is longer than the source's ``piece_bytes``.

    ``path`` is the key relative to the named source (``json/decoder.py``; ``stories.jsonl#12`` for the record on line 12), the
    same for every piece. ``n_bytes`` is the length of ``text`` in UTF-8. ``ordinal`` counts all documents that are not empty,
    admitted or not, so it is the same in every pass. ``source`` is the number of the named source.
    """

    path: str
    text: str
    n_bytes: int
    piece: int = 0
    is_last: bool = True
    ordinal: int = 0
    source: int = 0


@dataclass
class SourceReport:
    """Counts of one pass. ``n_bytes`` are UTF-8 of the text that was handed on; ``invalid_utf8_bytes`` are bytes of the input
    that U+FFFD replaced."""

    n_files: int = 0
    n_documents: int = 0
    n_bytes: int = 0
    n_duplicates: int = 0
    n_empty: int = 0
    invalid_utf8_bytes: int = 0
    invalid_utf8_documents: int = 0
    n_other_files: int = 0
    """Files in the named folders, or matched by the globs, with a suffix that is not in ``SUFFIXES``."""


class Admission(Protocol):
    """Decides which documents a pass hands on."""

    def admits(self, ordinal: int, key: str, digest: Callable[[], bytes]) -> bool:
        """``key`` is the document's ``path``. ``digest`` computes its content hash of 16 bytes; it may read the file again."""
        ...


class AdmitAll:
    def admits(self, ordinal: int, key: str, digest: Callable[[], bytes]) -> bool:
        return True


class FirstOfEach:
    """Admits the first of equal documents. ``seen`` holds the content hashes so far, and new ones are added to it."""

    def __init__(self, seen: set[bytes] | None = None) -> None:
        self.seen = set() if seen is None else seen

    def admits(self, ordinal: int, key: str, digest: Callable[[], bytes]) -> bool:
        name = digest()
        if name in self.seen:
            return False
        self.seen.add(name)
        return True


def find_documents(sources: Sequence[str], text_key: str = "text", piece_bytes: int = PIECE_BYTES) -> DocumentSource:
    """The documents of files, folders, globs, data sets or "stdlib". They are read during iteration, and each iteration reads
    them again.

    A folder is walked in sorted order without hidden entries. A file that two sources name is read once. Raises DataError if a
    source is missing, holds nothing readable, or names a file of an unknown format.
    """
    if not sources:
        raise DataError(f'no sources were named. Name files, folders, globs or "{STDLIB_SOURCE}".')
    files, n_other_files = find_files(sources, SUFFIXES)
    return DocumentSource(files, text_key, piece_bytes, n_other_files)


class DocumentSource:
    """The documents of ``files``, read lazily. A text file is one document, and so is each line of a .jsonl file and each row
    of a .parquet file or a data set.

    A document longer than ``piece_bytes`` comes in pieces that end after a line end if there is one, so memory does not grow
    with the size of a file. It grows by about 100 bytes a document, for the set of content hashes that finds duplicates.

    ``report`` holds the counts of the newest pass. It is complete when the pass has ended.
    """

    def __init__(
        self, files: tuple[SourceFile, ...], text_key: str, piece_bytes: int = PIECE_BYTES, n_other_files: int = 0
    ) -> None:
        self.files = files
        self.text_key = text_key
        self.piece_bytes = piece_bytes
        self.n_other_files = n_other_files
        self.report = SourceReport()

    @property
    def n_file_bytes(self) -> int:
        """Size of all files on disk, compressed as they are."""
        return sum(f.n_bytes for f in self.files)

    def fingerprint(self) -> str:
        """sha256 over path, size and modification time of every file. It changes with the input and reads none of it."""
        digest = hashlib.sha256()
        for f in self.files:
            digest.update(json.dumps([f.path, f.key, f.n_bytes, f.mtime_ns]).encode())
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raise DataError naming the first file that was altered since it was found."""
        check_unchanged(self.files)

    def __iter__(self) -> Iterator[Document]:
        return self.documents()

    def documents(self, admission: Admission | None = None) -> Iterator[Document]:
        """One pass over the documents that ``admission`` admits, by default the first of equal documents.

        Raises DataError if a file cannot be read, or if a record has no text under the text key.
        """
        self.report = SourceReport(n_other_files=self.n_other_files)
        reader = _Pass(self, admission or FirstOfEach(), self.report)
        for file in self.files:
            self.report.n_files += 1
            with reading(file):
                yield from reader.file(file)


class _Pass:
    """The state of one pass: its counts, and the number of documents so far."""

    def __init__(self, source: DocumentSource, admission: Admission, report: SourceReport) -> None:
        self.text_key, self.piece_bytes = source.text_key, source.piece_bytes
        self.admission, self.report = admission, report
        self.ordinal = -1

    def file(self, file: SourceFile) -> Iterator[Document]:
        if is_table(file):
            return self._records(file, self._rows(file))
        is_jsonl = (suffix_of(file.path, SUFFIXES) or "").startswith(".jsonl")
        return self._records(file, self._lines(file)) if is_jsonl else self._text(file)

    def _admits(self, key: str, digest: Callable[[], bytes]) -> bool:
        self.ordinal += 1
        if self.admission.admits(self.ordinal, key, digest):
            return True
        self.report.n_duplicates += 1
        return False

    def _text(self, file: SourceFile) -> Iterator[Document]:
        report = self.report

        def digest() -> bytes:  # reads a long file twice, because its first piece must not be handed on if it is a duplicate
            with open_file(file.path) as stream:
                return hashlib.file_digest(stream, "sha256").digest()[:16]  # type: ignore[arg-type]

        with open_file(file.path) as stream:
            n_invalid = 0
            pending: Document | None = None  # held back until the next piece is read, to know whether it is the last
            for piece, raw in enumerate(read_pieces(stream, self.piece_bytes)):
                text, invalid = decode(raw)
                n_invalid += invalid
                if piece == 0:
                    text = text.removeprefix(_BOM)  # a byte order mark marks the encoding and is not part of the text
                if pending is not None:
                    if piece == 1 and not self._admits(file.key, digest):
                        return
                    report.n_bytes += pending.n_bytes
                    yield replace(pending, ordinal=self.ordinal)
                pending = Document(file.key, text, _utf8_length(text), piece, is_last=False, source=file.source)
            if pending is None or (pending.piece == 0 and not pending.text.strip()):
                report.n_empty += 1
                return
            if pending.piece == 0 and not self._admits(file.key, digest):
                return
            report.n_documents += 1
            report.n_bytes += pending.n_bytes
            report.invalid_utf8_bytes += n_invalid
            report.invalid_utf8_documents += n_invalid > 0
            yield replace(pending, is_last=True, ordinal=self.ordinal)

    def _records(self, file: SourceFile, texts: Iterator[tuple[int, str, int]]) -> Iterator[Document]:
        """The documents of ``texts``, which are (number, text, bytes that were not UTF-8) of each record."""
        report = self.report
        number = 0
        for number, text, n_invalid in texts:
            raw = text.encode()
            if not raw.strip():
                report.n_empty += 1
                continue
            key = f"{file.key}#{number}"
            if not self._admits(key, lambda raw=raw: hashlib.sha256(raw).digest()[:16]):  # type: ignore[misc]
                continue
            report.n_documents += 1
            report.n_bytes += len(raw)
            report.invalid_utf8_bytes += n_invalid
            report.invalid_utf8_documents += n_invalid > 0
            for piece, (part, n_bytes, is_last) in enumerate(split_text(text, self.piece_bytes)):
                yield Document(key, part, n_bytes, piece, is_last, self.ordinal, file.source)
        report.n_empty += number == 0

    def _lines(self, file: SourceFile) -> Iterator[tuple[int, str, int]]:
        for number, where, line in read_lines(file):
            decoded, n_invalid = decode(line)
            record = parse_json(decoded.removeprefix(_BOM) if number == 1 else decoded, where)
            if not isinstance(record, dict):
                raise DataError(f"{where} holds {type(record).__name__}; it must be an object with the key {self.text_key!r}.")
            text = record.get(self.text_key)
            if not isinstance(text, str):
                keys = ", ".join(map(repr, sorted(record)[:8])) or "none"
                raise DataError(
                    f"{where} has no text under {self.text_key!r}. Keys there: {keys}. Name the right one as text_key."
                )
            text, n_surrogates = _without_surrogates(text)
            yield number, text, n_invalid + n_surrogates

    def _rows(self, file: SourceFile) -> Iterator[tuple[int, str, int]]:
        columns = table_columns(file)
        if self.text_key not in columns:
            names = ", ".join(map(repr, columns[:8])) or "none"
            raise DataError(
                f"{file.path} has no column {self.text_key!r}. Columns there: {names}. Name the right one as text_key."
            )
        for number, where, (value,) in read_table(file, [self.text_key]):
            if isinstance(value, bytes):
                text, n_invalid = decode(value)
            elif isinstance(value, str):
                text, n_invalid = _without_surrogates(value)
            elif value is None:  # a table's missing value
                text, n_invalid = "", 0
            else:
                raise DataError(
                    f"{where} holds {type(value).__name__} in the column {self.text_key!r}, not text. "
                    "Name the column of the text as text_key."
                )
            yield number, text, n_invalid


def _without_surrogates(text: str) -> tuple[str, int]:
    """(text with U+FFFD for each lone surrogate, replaced bytes). A lone surrogate is half of a pair, written as an escape in
    JSON. UTF-8 cannot hold one. Each counts as the two bytes that it has in UTF-16."""
    try:
        text.encode()
    except UnicodeEncodeError:
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return clean, 2 * (clean.count("\ufffd") - text.count("\ufffd"))
    return text, 0


def split_text(text: str, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[str, int, bool]]:
    """(piece, bytes, whether it is the last) of ``text``, in the same pieces as a file of the same content is read in."""
    raw = text.encode()
    start = 0
    while start < len(raw) or start == 0:
        end = start + _cut(raw[start : start + piece_bytes], at_end=start + piece_bytes > len(raw))
        yield raw[start:end].decode(), end - start, end == len(raw)
        if end == len(raw):
            return
        start = end


def read_pieces(stream: IO[bytes], piece_bytes: int) -> Iterator[bytes]:
    """The content of ``stream`` in pieces of at most ``piece_bytes``, which end after a line end if there is one."""
    carried = b""
    while True:
        block = stream.read(piece_bytes - len(carried))
        buffer = carried + block
        if not buffer:
            return
        cut = _cut(buffer, at_end=len(buffer) < piece_bytes)
        yield buffer[:cut]
        carried = buffer[cut:]


def _cut(buffer: bytes, at_end: bool) -> int:
    """Where to cut ``buffer``: after its last line end, else before an incomplete character. At the end of a file nothing is
    cut off."""
    if at_end:
        return len(buffer)
    newline = buffer.rfind(b"\n") + 1
    if newline:
        return newline
    for back in range(1, min(4, len(buffer) - 1) + 1):
        byte = buffer[-back]
        if byte & 0xC0 != 0x80:  # a first byte of a character, or ASCII
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(buffer) - back if length > back else len(buffer)
    return len(buffer)


def decode(raw: bytes) -> tuple[str, int]:
    """(``raw`` as text with U+FFFD for what is not UTF-8, number of replaced bytes).

    The number is exact: input length − (output length in UTF-8 − 3 · replacements). A U+FFFD that the input held as valid UTF-8
    does not count as a replacement; its bytes EF BF BD cannot occur inside another character.
    """
    try:
        return raw.decode(), 0
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
    replacements = text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
    return text, len(raw) - (_utf8_length(text) - 3 * replacements)


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
