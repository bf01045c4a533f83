"""The directory of a server's files: uploads, and the answers of batches.

Names on the disk are made here, of random numbers. What a client calls its file is kept as text and never used as a path. A
file is there once its record is: ``file-….jsonl`` is the content and ``file-….json`` the record, which is written last.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import Struct

from twostroke.core.errors import ConfigError
from twostroke.core.private_folder import PrivateFolder, private_folder
from twostroke.server.errors import ApiError

log = logging.getLogger("twostroke.server")

MAX_FILE_BYTES = 200 * 10**6
MOST_FILES = 10_000
MOST_STORED_BYTES = 10 * 2**30
MAX_FILENAME = 255
_RECORD_BYTES = 2**20
_CONTENT = re.compile(r"file-[0-9a-f]{32}\.jsonl")
_RECORD = re.compile(r"file-[0-9a-f]{32}\.json")
_PARTIAL = re.compile(r"(file-|batch_)[0-9a-f]{32}\.jsonl?\.partial")

R = TypeVar("R", bound=Struct)


class FileRecord(Struct, forbid_unknown_fields=True):
    """OpenAI's file object, and whose it is."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    owner: str = ""
    object: str = "file"
    status: str = "processed"


class FileStore:
    """The files of ``folder``, which no other process uses meanwhile."""

    def __init__(self, folder: PrivateFolder) -> None:
        self.folder = folder
        self.records = {record.id: record for record in sorted(self.read_records("file-", FileRecord), key=_age)}
        for name, _ in folder.files(_PARTIAL):
            folder.remove(name)

    def read_records(self, prefix: str, kind: type[R]) -> list[R]:
        """What can be read of the records whose names begin so. A damaged one is left where it is, and logged."""
        found = []
        for name, _ in self.folder.files(re.compile(re.escape(prefix) + r"[0-9a-f]{32}\.json")):
            with self.folder.read(name) as stream:
                try:
                    found.append(msgspec.json.decode(stream.read(_RECORD_BYTES), type=kind))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    log.error("%s is damaged and left out: %s", name, error)
        return found

    def write_record(self, record_id: str, record: Struct) -> None:
        """Write it whole, or leave the one before. Raises OSError."""
        name = f"{record_id}.json"
        with contextlib.suppress(FileNotFoundError):
            self.folder.remove(f"{name}.partial")
        with self.folder.create(f"{name}.partial") as stream:
            stream.write(msgspec.json.encode(record))
            stream.flush()
            os.fsync(stream.fileno())
        self.folder.rename(f"{name}.partial", name)
        os.fsync(self.folder.descriptor)

    def remove_record(self, record_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.folder.remove(f"{record_id}.json")

    def remove_strays(self, used: Collection[str]) -> None:
        """Remove contents that have no record, not even a damaged one, and that no batch in ``used`` is writing."""
        known = {name.removesuffix(".json") for name, _ in self.folder.files(_RECORD)}.union(used)
        for name, _ in self.folder.files(_CONTENT):
            if name.removesuffix(".jsonl") not in known:
                self.folder.remove(name)

    @contextlib.contextmanager
    def upload(self) -> Iterator[Upload]:
        """A new file to be filled and kept; one that is not kept is removed. Raises ApiError 413 where there is no room."""
        if len(self.records) >= MOST_FILES or sum(r.bytes for r in self.records.values()) >= MOST_STORED_BYTES:
            message = f"the server keeps at most {MOST_FILES} files and {MOST_STORED_BYTES} bytes. Delete some."
            raise ApiError(413, message, code="storage_full")
        upload = Upload(f"file-{secrets.token_hex(16)}", self)
        try:
            yield upload
        finally:
            upload.stream.close()
            with contextlib.suppress(FileNotFoundError):
                self.folder.remove(upload.partial)

    def keep(self, record: FileRecord) -> None:
        """Have a file whose content is on the disk. Raises OSError."""
        self.write_record(record.id, record)
        self.records[record.id] = record

    def of(self, owner: str, file_id: str, param: str = "file_id") -> FileRecord:
        """The record of a file of ``owner``. Raises ApiError 404, about the field ``param``."""
        record = self.records.get(file_id)
        if record is None or record.owner != owner:
            raise ApiError(404, f"file {file_id!r:.100} was not found.", param, "file_not_found")
        return record

    def content(self, file_id: str) -> FileIO:
        """The content of a file that has, or will have, a record. Raises OSError."""
        return self.folder.read(f"{file_id}.jsonl")

    @contextlib.contextmanager
    def writable(self, file_id: str) -> Iterator[int]:
        """A descriptor to read and write the content, which is made where it is missing. Raises OSError."""
        descriptor = self.folder.update(f"{file_id}.jsonl")
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def delete(self, file_id: str) -> None:
        """Raises OSError."""
        self.remove_record(file_id)  # first: a content without a record is removed at the next start
        self.records.pop(file_id, None)
        self.remove_content(file_id)

    def remove_content(self, file_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.folder.remove(f"{file_id}.jsonl")


class Upload:
    """A file that is arriving."""

    def __init__(self, file_id: str, store: FileStore) -> None:
        self.file_id = file_id
        self.partial = f"{file_id}.jsonl.partial"
        self.stream: BinaryIO = store.folder.create(self.partial)
        self.n_bytes = 0
        self._store = store

    def write(self, data: bytes) -> None:
        """Raises ApiError 413 above the limit, and OSError."""
        self.n_bytes += len(data)
        if self.n_bytes > MAX_FILE_BYTES:
            message = f"a file has at most {MAX_FILE_BYTES} bytes. Split it into several batches."
            raise ApiError(413, message, "file", "request_too_large", {"connection": "close"})
        self.stream.write(data)

    def keep(self, filename: str, purpose: str, owner: str) -> FileRecord:
        """The record of the file, which is complete and on the disk now. Raises OSError."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self._store.folder.rename(self.partial, f"{self.file_id}.jsonl")
        shown = "".join(c for c in filename if c.isprintable())[:MAX_FILENAME]
        record = FileRecord(self.file_id, self.n_bytes, int(time.time()), shown, purpose, owner)
        self._store.keep(record)
        return record


def _age(record: FileRecord) -> tuple[int, str]:
    return record.created_at, record.id


@contextlib.contextmanager
def opened_store(path: Path | None) -> Iterator[FileStore | None]:
    """The store in the directory ``path``, which is made where it is missing; None without one. Raises ConfigError for a
    directory that is another user's, that others may write, or that another server uses."""
    if path is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(private_folder(path, create=True))
            fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            store = FileStore(folder)
        except BlockingIOError:
            raise ConfigError(f"--files-dir {path} is another server's. Give each server its own.") from None
        except OSError as error:
            raise ConfigError(f"--files-dir {path} cannot be used: {error.strerror or error}. Name another.") from None
        yield store
