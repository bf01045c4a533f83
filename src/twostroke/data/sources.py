"""Finding and reading text: files, folders, globs and the standard library, lazily and in constant memory.

Nothing is lost without being counted: invalid UTF-8, duplicates, empty documents and files of other kinds all appear
in the ``SourceReport`` of a pass.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from twostroke.core.errors import DataError
from twostroke.core.recipe import STDLIB_SOURCE

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz")
PIECE_BYTES = 64 * 1024
"""Longest stretch of text handed on at once, and the unit by which a corpus of one file is split. See ``DocumentSource``."""

MAX_LINE_BYTES = 64 * 2**20
"""Longest line of a .jsonl file: one line must be held in memory whole, so an unbounded one would break constant memory."""

_STDLIB_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_BOM = "\ufeff"


@dataclass(frozen=True)
class Document:
    """A document, or one piece of it where it is longer than the source's ``piece_bytes``.

    ``path`` is the key relative to the source that was named (``json/decoder.py``; ``stories.jsonl#12`` for a record on
    line 12), the same for every piece. ``n_bytes`` is the length of ``text`` in UTF-8.
    """

    path: str
    text: str
    n_bytes: int
    piece: int = 0
    is_last: bool = True


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

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class SourceFile:
    """One file found: where it is, its key relative to the named source, and what tells that it changed."""

    path: str
    key: str
    n_bytes: int
    mtime_ns: int


def _suffix_of(name: str, suffixes: Sequence[str] = SUFFIXES) -> str | None:
    lowered = name.lower()
    return next((s for s in suffixes if lowered.endswith(s)), None)


def _source_file(path: str, key: str) -> SourceFile | None:
    """None where ``path`` is no regular file: a dangling link, a pipe or a device inside a folder is no text."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return SourceFile(os.path.realpath(path), key.replace(os.sep, "/"), status.st_size, status.st_mtime_ns)


def _raise(error: OSError) -> None:
    raise DataError(f"folder {error.filename} cannot be read: {error.strerror}.")


def _walk(folder: str) -> Iterator[str]:
    """Paths under ``folder`` in a fixed order, without hidden files and folders (.git, .venv) and caches."""
    for directory, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(directory, name)


def stdlib_files() -> list[SourceFile]:
    """The running interpreter's standard library: its .py files without tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    files = []
    for directory, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(f for f in folders if f not in _STDLIB_SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("test_"):
                path = os.path.join(directory, name)
                found = _source_file(path, os.path.relpath(path, root))
                if found is not None:
                    files.append(found)
    if not files:
        raise DataError(f"the standard library at {root} holds no .py files. Name other sources.")
    return files


def _find(source: str, report: SourceReport, suffixes: Sequence[str] = SUFFIXES) -> list[SourceFile]:
    if source == STDLIB_SOURCE:
        return stdlib_files()
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        root, paths, what = path, _walk(path), f"folder {source}"
    elif os.path.exists(path):
        if _suffix_of(path, suffixes) is None:
            raise DataError(f"{source} is not one of the formats {', '.join(suffixes)}.")
        root, paths, what = os.path.dirname(path), iter([path]), source
    elif glob.has_magic(path):
        root = path
        while glob.has_magic(root):
            root = os.path.dirname(root)
        paths, what = iter(sorted(p for p in glob.iglob(path, recursive=True) if not os.path.isdir(p))), f"glob {source!r}"
    else:
        raise DataError(f'source {source} does not exist. Name a file, a folder, a glob or "{STDLIB_SOURCE}".')
    files = []
    for candidate in paths:
        if _suffix_of(candidate, suffixes) is None:
            report.n_other_files += 1
            continue
        found = _source_file(candidate, os.path.relpath(candidate, root or "."))
        if found is not None:
            files.append(found)
    if not files:
        raise DataError(f"{what} holds no regular file of the formats {', '.join(suffixes)}.")
    return files


def find_files(sources: Sequence[str], suffixes: Sequence[str]) -> tuple[tuple[SourceFile, ...], int]:
    """The files of ``suffixes`` that files, folders or globs name, each once, and how many others were passed over.

    Raises DataError as ``find_documents`` does.
    """
    report = SourceReport()
    files: dict[str, SourceFile] = {}
    for source in sources:
        for file in _find(source, report, suffixes):
            files.setdefault(file.path, file)
    return tuple(files.values()), report.n_other_files


def find_documents(sources: Sequence[str], text_key: str = "text", piece_bytes: int = PIECE_BYTES) -> DocumentSource:
    """The documents of files, folders, globs or "stdlib". Nothing is read before iteration; each iteration is a new pass.

    A folder is walked in sorted order, hidden entries left out. A file reached by two sources is taken once. Raises
    DataError where a source is missing, holds nothing readable, or names a file of an unknown format.
    """
    if not sources:
        raise DataError(f'no sources were named. Name files, folders, globs or "{STDLIB_SOURCE}".')
    files, n_other_files = find_files(sources, SUFFIXES)
    return DocumentSource(files, text_key, piece_bytes, n_other_files)


class DocumentSource:
    """Documents of ``files``, read lazily. A text file is one document; each line of a .jsonl file is one.

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
        for f in self.files:
            now = _source_file(f.path, f.key)
            if now is None or (now.n_bytes, now.mtime_ns) != (f.n_bytes, f.mtime_ns):
                raise DataError(f"{f.path} changed while it was being read. Run again when nothing writes to it.")

    def __iter__(self) -> Iterator[Document]:
        return self.documents()

    def documents(self, seen: set[bytes] | None = None) -> Iterator[Document]:
        """One pass. ``seen`` holds content hashes of documents to drop as duplicates and is added to.

        Raises DataError where a file cannot be read, or a .jsonl line is no JSON object with the text key.
        """
        self.report = report = SourceReport(n_other_files=self.n_other_files)
        seen = set() if seen is None else seen
        for file in self.files:
            report.n_files += 1
            try:
                if _suffix_of(file.path) in (".jsonl", ".jsonl.gz"):
                    yield from self._records(file, seen, report)
                else:
                    yield from self._text(file, seen, report)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"{file.path} is not a whole gzip file: {error}.") from None
            except OSError as error:
                raise DataError(f"{file.path} cannot be read: {error.strerror or error}.") from None

    def _text(self, file: SourceFile, seen: set[bytes], report: SourceReport) -> Iterator[Document]:
        with open(file.path, "rb") as stream:
            # Two readings of a long file, one to hash it: duplicates must be known before the first piece is handed on.
            digest = hashlib.file_digest(stream, "sha256").digest()[:16]
            stream.seek(0)
            n_invalid = 0
            pending: Document | None = None  # held back by one, so that the last piece can say so
            for piece, raw in enumerate(read_pieces(stream, self.piece_bytes)):
                text, invalid = decode(raw)
                n_invalid += invalid
                if piece == 0:
                    text = text.removeprefix(_BOM)  # marks the encoding, is no part of the text
                if pending is not None:
                    if piece == 1 and _is_duplicate(digest, seen, report):
                        return
                    report.n_bytes += pending.n_bytes
                    yield pending
                pending = Document(file.key, text, _utf8_length(text), piece, is_last=False)
            if pending is None or (pending.piece == 0 and not pending.text.strip()):
                report.n_empty += 1
                return
            if pending.piece == 0 and _is_duplicate(digest, seen, report):
                return
            report.n_documents += 1
            report.n_bytes += pending.n_bytes
            report.invalid_utf8_bytes += n_invalid
            report.invalid_utf8_documents += n_invalid > 0
            yield Document(pending.path, pending.text, pending.n_bytes, pending.piece)

    def _records(self, file: SourceFile, seen: set[bytes], report: SourceReport) -> Iterator[Document]:
        opener: Any = gzip.open if file.path.lower().endswith(".gz") else open
        with opener(file.path, "rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{file.path} line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(f"{where} is longer than {MAX_LINE_BYTES} bytes. A .jsonl file holds one document a line.")
                if not line.strip():
                    continue
                decoded, n_invalid = decode(line)
                text, n_surrogates = self._text_of_record(decoded.removeprefix(_BOM) if number == 1 else decoded, where)
                n_invalid += n_surrogates
                raw = text.encode()
                if not raw.strip():
                    report.n_empty += 1
                    continue
                if _is_duplicate(hashlib.sha256(raw).digest()[:16], seen, report):
                    continue
                report.n_documents += 1
                report.n_bytes += len(raw)
                report.invalid_utf8_bytes += n_invalid
                report.invalid_utf8_documents += n_invalid > 0
                key = f"{file.key}#{number}"
                for piece, (part, n_bytes, is_last) in enumerate(split_text(text, self.piece_bytes)):
                    yield Document(key, part, n_bytes, piece, is_last)

    def _text_of_record(self, line: str, where: str) -> tuple[str, int]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not valid JSON: {error}.") from None
        if not isinstance(record, dict):
            raise DataError(f"{where} holds {type(record).__name__}, not an object with the key {self.text_key!r}.")
        text = record.get(self.text_key)
        if not isinstance(text, str):
            keys = ", ".join(map(repr, sorted(record)[:8])) or "none"
            raise DataError(f"{where} has no text under {self.text_key!r}. Keys there: {keys}. Name the right one as text_key.")
        try:
            text.encode()
        except UnicodeEncodeError:
            # Half a surrogate pair, written as an escape in JSON: no character, so replaced and counted as two bytes of UTF-16.
            clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            return clean, 2 * (clean.count("\ufffd") - text.count("\ufffd"))
        return text, 0


def _is_duplicate(digest: bytes, seen: set[bytes], report: SourceReport) -> bool:
    if digest in seen:
        report.n_duplicates += 1
        return True
    seen.add(digest)
    return False


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


def write_text_atomically(path: Path, content: str) -> None:
    """Write beside ``path``, flush to disk, rename: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
