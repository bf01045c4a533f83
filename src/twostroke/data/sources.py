"""Documents of files, data sets and the standard library, read lazily and in constant memory.

Nothing is lost without being counted: invalid UTF-8, duplicates, empty documents and files of other kinds all appear
in the ``SourceReport`` of a pass.
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
"""Longest stretch of text handed on at once, and the unit by which a corpus of one file is split. See ``DocumentSource``."""

_BOM = "\ufeff"


@dataclass(frozen=True)
class Document:
    """A document, or one piece of it where it is longer than the source's ``piece_bytes``.

    ``path`` is the key relative to the source that was named (``json/decoder.py``; ``stories.jsonl#12`` for a record on
    line 12), the same for every piece. ``n_bytes`` is the length of ``text`` in UTF-8. ``ordinal`` counts the documents that
    are not empty, those that were not admitted too: the same in every pass. ``source`` counts the sources that were named.
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
    """Counts of one pass. Bytes are of UTF-8 text as handed on; ``invalid_utf8_bytes`` of the input that U+FFFD replaced."""

    n_files: int = 0
    n_documents: int = 0
    n_bytes: int = 0
    n_duplicates: int = 0
    n_empty: int = 0
    invalid_utf8_bytes: int = 0
    invalid_utf8_documents: int = 0
    n_other_files: int = 0
    """Files in the named folders, or matched by the globs, whose suffix is not one of ``SUFFIXES``."""


class Admission(Protocol):
    """Which documents a pass hands on."""

    def admits(self, ordinal: int, key: str, digest: Callable[[], bytes]) -> bool:
        """``key`` is the document's ``path``. ``digest`` computes its content hash, 16 bytes: costly, so only where it is
        asked for."""
        ...


class AdmitAll:
    def admits(self, ordinal: int, key: str, digest: Callable[[], bytes]) -> bool:
        return True


class FirstOfEach:
    """The first of equal documents. ``seen`` holds the content hashes and is added to."""

    def __init__(self, seen: set[bytes] | None = None) -> None:
        self.seen = set() if seen is None else seen

    def admits(self, ordinal: int, key: str, digest: Callable[[], bytes]) -> bool:
        name = digest()
        if name in self.seen:
            return False
        self.seen.add(name)
        return True


def find_documents(sources: Sequence[str], text_key: str = "text", piece_bytes: int = PIECE_BYTES) -> DocumentSource:
    """The documents of files, folders, globs, data sets or "stdlib". Nothing is read before iteration; each iteration is a new
    pass.

    A folder is walked in sorted order, hidden entries left out. A file reached by two sources is taken once. Raises
    DataError where a source is missing, holds nothing readable, or names a file of an unknown format.
    """
    if not sources:
        raise DataError(f'no sources were named. Name files, folders, globs or "{STDLIB_SOURCE}".')
    files, n_other_files = find_files(sources, SUFFIXES)
    return DocumentSource(files, text_key, piece_bytes, n_other_files)


class DocumentSource:
    """Documents of ``files``, read lazily. A text file is one document; each line of a .jsonl file is one, each row of a
    .parquet file and of a data set.

    A document longer than ``piece_bytes`` is handed on in pieces cut behind a line end where there is one, so memory
    stays constant whatever the size of a file. What grows is the set of 16-byte content hashes by which duplicates
    are dropped: about 100 bytes a document.

    ``report`` holds the counts of the newest pass; it is complete when that pass is.
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
        """Size of all files on disk: compressed where they are compressed."""
        return sum(f.n_bytes for f in self.files)

    def fingerprint(self) -> str:
        """sha256 over path, size and modification time of every file: changes when the input does, without reading it."""
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
        """One pass over what ``admission`` admits; without one, over the first of equal documents.

        Raises DataError where a file cannot be read, or a record has no text under the text key.
        """
        self.report = SourceReport(n_other_files=self.n_other_files)
        reader = _Pass(self, admission or FirstOfEach(), self.report)
        for file in self.files:
            self.report.n_files += 1
            with reading(file):
                yield from reader.file(file)


class _Pass:
    """One pass: its counts, and how many documents it met."""

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

        def digest() -> bytes:  # a second reading of a long file: duplicates must be known before its first piece is handed on
            with open_file(file.path) as stream:
                return hashlib.file_digest(stream, "sha256").digest()[:16]  # type: ignore[arg-type]

        with open_file(file.path) as stream:
            n_invalid = 0
            pending: Document | None = None  # held back by one, so that the last piece can say so
            for piece, raw in enumerate(read_pieces(stream, self.piece_bytes)):
                text, invalid = decode(raw)
                n_invalid += invalid
                if piece == 0:
                    text = text.removeprefix(_BOM)  # marks the encoding, is no part of the text
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
        """``texts``: (number, text, bytes of it that were no UTF-8) of each record."""
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
                raise DataError(f"{where} holds {type(record).__name__}, not an object with the key {self.text_key!r}.")
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
            elif value is None:  # how a table says that there is none
                text, n_invalid = "", 0
            else:
                raise DataError(
                    f"{where} holds {type(value).__name__} in the column {self.text_key!r}, not text. "
                    "Name the column of the text as text_key."
                )
            yield number, text, n_invalid


def _without_surrogates(text: str) -> tuple[str, int]:
    """Half a surrogate pair, written as an escape in JSON, is no character: replaced and counted as two bytes of UTF-16."""
    try:
        text.encode()
    except UnicodeEncodeError:
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return clean, 2 * (clean.count("\ufffd") - text.count("\ufffd"))
    return text, 0


def split_text(text: str, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[str, int, bool]]:
    """``text`` in the pieces that a file of the same content is read in: (piece, its bytes, whether it is the last)."""
    raw = text.encode()
    start = 0
    while start < len(raw) or start == 0:
        end = start + _cut(raw[start : start + piece_bytes], at_end=start + piece_bytes > len(raw))
        yield raw[start:end].decode(), end - start, end == len(raw)
        if end == len(raw):
            return
        start = end


def read_pieces(stream: IO[bytes], piece_bytes: int) -> Iterator[bytes]:
    """What ``stream`` holds, in stretches of at most ``piece_bytes`` that end behind a line where they can."""
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
    """Where to cut ``buffer``: behind its last line end, else before a character that is not whole; all of it at the end."""
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
    """``raw`` as text with U+FFFD for what is not UTF-8, and the number of bytes so replaced.

    The count is exact: input length − (output length in UTF-8 − 3 · replacements), where a U+FFFD that was in the input
    as valid UTF-8 is no replacement. (Its first byte EF never occurs inside another character.)
    """
    try:
        return raw.decode(), 0
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
    replacements = text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
    return text, len(raw) - (_utf8_length(text) - 3 * replacements)


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
