"""Which code made a prediction: the package's version, and the git commit where the package runs from a checkout."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from twostroke.core.version import __version__


def _commit(git: Path) -> str | None:
    """Commit that ``HEAD`` of the git directory ``git`` points to, read from its files; None where it cannot be read.

    Files are read, not ``git rev-parse``: starting a process costs more than everything else a `plan` does.
    """
    try:
        if git.is_file():  # a linked worktree: "gitdir: <path>"
            git = (git.parent / git.read_text().partition("gitdir:")[2].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.partition(":")[2].strip()
        common = git / "commondir"
        shared = (git / common.read_text().strip()).resolve() if common.is_file() else git
        for folder in (git, shared):
            if (folder / name).is_file():
                return (folder / name).read_text().strip()
        for line in (shared / "packed-refs").read_text().splitlines():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return commit
    except (OSError, UnicodeDecodeError):
        pass
    return None


@lru_cache(maxsize=1)
def code_version(package: Path = Path(__file__).resolve().parent.parent) -> str:
    """``0.1.0+g0123456789ab`` from a checkout, ``0.1.0`` from an installed wheel. Uncommitted changes are not detected.

    Only a repository whose ``src/twostroke`` is this very package counts: a virtual environment inside somebody else's
    checkout must not lend us that project's commit.
    """
    if package.parent.name == "src":
        commit = _commit(package.parent.parent / ".git")
        if commit:
            return f"{__version__}+g{commit[:12]}"
    return __version__
