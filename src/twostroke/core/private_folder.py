"""A folder that only this user can write, and its files: opened without following links, and never another user's."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True)
class PrivateFolder:
    """Names below are plain file names: everything goes through the open folder, so a path that changes meanwhile is of no
    effect. All methods raise OSError."""

    descriptor: int

    def read(self, name: str) -> FileIO:
        """The file, unbuffered. Raises PermissionError where it is not a regular file of this user."""
        opened = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=self.descriptor)  # a pipe would block
        return os.fdopen(self._checked(opened, name), "rb", buffering=0)

    @staticmethod
    def _checked(opened: int, name: str) -> int:
        try:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(f"{name} is not a regular file of this user.")
        except BaseException:
            os.close(opened)
            raise
        return opened

    def create(self, name: str) -> BinaryIO:
        """A new file that only this user may read. Raises FileExistsError where there is anything of that name."""
        return os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self.descriptor), "wb")

    def update(self, name: str) -> int:
        """A descriptor to read and write the file, which is made where it is missing. Raises PermissionError as ``read``."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _FLAGS
        return self._checked(os.open(name, flags, 0o600, dir_fd=self.descriptor), name)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove the name itself; what a link points to stays."""
        os.unlink(name, dir_fd=self.descriptor)

    def files(self, pattern: re.Pattern[str]) -> list[tuple[str, os.stat_result]]:
        """Regular files of this user whose whole name matches, with their status; the least recently changed first."""
        found = []
        for name in os.listdir(self.descriptor):
            if pattern.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        found.append((name, status))
        return sorted(found, key=lambda file: file[1].st_mtime_ns)


@contextlib.contextmanager
def private_folder(path: Path, create: bool = False) -> Iterator[PrivateFolder]:
    """The folder at ``path``; ``create``: made with mode 0700 where it is missing.

    Raises OSError: FileNotFoundError where it is missing, and PermissionError where it belongs to another user or others may
    write it."""
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} must belong to this user and be writable by nobody else.")
        yield PrivateFolder(descriptor)
    finally:
        os.close(descriptor)
