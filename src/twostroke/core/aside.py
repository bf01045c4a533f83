"""Writing beside the target: a file or a directory appears whole under its name, or not at all.

What is being written has a name that cannot be foretold, and is created and never opened, so that a link that waits in a shared
folder is not followed. It stands in the target's own folder, because a rename stays on one disk. Its writer holds a lock on
it until it ends; a writer that was killed holds none, by which the next writer in that folder knows what it may remove.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from twostroke.core.errors import InputError
from twostroke.core.units import format_bytes

ABANDONED_S = 10.0
"""Between being created and being locked, what another process writes looks abandoned: younger ones are left alone."""

_NAME_CHARACTERS = 40  # of the target's: with 43 more it stays below the 255 bytes of a file name, whatever the alphabet

_OURS = re.compile(r"\..+\.[0-9a-f]{32}\.partial", re.DOTALL)


def flush_to_disk(path: Path) -> None:
    """fsync: after it, what was written to the file, or renamed in the directory, survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def require_space(folder: Path, n_bytes: int) -> None:
    """Raise OSError (ENOSPC) if the disk of ``folder`` has fewer free bytes: before a library writes that does not say why it
    failed, or ends the process."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {format_bytes(n_bytes)} to write, {format_bytes(free)} free")


@contextlib.contextmanager
def naming(target: Path) -> Iterator[None]:
    """An error of writing to a full disk names no path, and one of a folder that takes nothing a name that nobody typed: both
    get ``target``'s."""
    try:
        yield
    except OSError as error:
        is_ours = isinstance(error.filename, str) and _OURS.fullmatch(Path(error.filename).name)
        if is_ours or (error.errno in _FULL and error.filename is None):
            error.filename = str(target)
        raise


@contextlib.contextmanager
def written_file(target: Path) -> Iterator[BinaryIO]:
    """``with written_file(target) as stream``: fill ``stream``; at the end it is on the disk and takes ``target``'s place.

    A reader sees the old file or the new one, never a part; an error inside leaves the old one. A link at ``target`` is
    replaced, not followed. Raises OSError.
    """
    remove_abandoned(target.parent)
    partial = _new_name(target)
    with naming(target):
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o666)
    try:
        with naming(target), os.fdopen(descriptor, "wb") as stream:
            _lock(descriptor)
            yield stream
            stream.flush()
            os.fsync(descriptor)
            os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(target: Path, content: str) -> None:
    """``content`` in UTF-8 as the file ``target``, whole or not at all, also after a power cut. Raises OSError."""
    with written_file(target) as stream:
        stream.write(content.encode())


def make_parent(target: Path) -> None:
    """Make the folders above ``target``. Raises OSError, and InputError where one of them is a file."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(folder for folder in target.parents if folder.exists())
        raise InputError(f"{target} cannot be made, because {file} is a file. Name another place.") from None


@contextlib.contextmanager
def directory_beside(target: Path) -> Iterator[Path]:
    """``with directory_beside(target) as aside``: a new directory to be filled and then renamed by the caller; one that still
    has its first name at the end, after an error for example, is removed. Raises OSError, and InputError where a folder of its
    path is a file."""
    make_parent(target)
    remove_abandoned(target.parent)
    aside = _new_name(target)
    with naming(target):
        aside.mkdir()
    descriptor = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _lock(descriptor)
        with naming(target):
            yield aside
    finally:
        os.close(descriptor)
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def file_beside(target: Path) -> Iterator[Path]:
    """``with file_beside(target) as aside``: as ``written_file``, for a writer that opens a path itself. Raises OSError."""
    with directory_beside(target) as folder:
        aside = folder / target.name
        yield aside
        flush_to_disk(aside)
        os.replace(aside, target)
        flush_to_disk(target.parent)


def take_place(aside: Path, target: Path) -> None:
    """Rename the directory ``aside`` to ``target`` and remove the one that was there; of a link there, the link."""
    before = _new_name(target)  # under which a kill leaves what the next writer removes
    with contextlib.suppress(FileNotFoundError):
        target.rename(before)
    aside.rename(target)
    flush_to_disk(target.parent)
    if before.is_symlink():
        before.unlink()
    else:
        shutil.rmtree(before, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove what writers left in ``folder`` that were killed. Nothing else is touched: neither other names, nor links, nor
    what another user owns, nor what is still being written."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _OURS.fullmatch(name):
                _remove_if_abandoned(folder / name)


def _new_name(target: Path) -> Path:
    return target.parent / f".{target.name[:_NAME_CHARACTERS]}.{secrets.token_hex(16)}.partial"


def _lock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks: nothing is ever removed there
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_if_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        is_directory = stat.S_ISDIR(status.st_mode)
        if not (is_directory or stat.S_ISREG(status.st_mode)) or status.st_uid != os.getuid():
            return
        if time.time() - status.st_mtime < ABANDONED_S:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError where its writer lives
            if is_directory:
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        finally:
            os.close(descriptor)
