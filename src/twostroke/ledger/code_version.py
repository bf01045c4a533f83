"""Names the code that made a prediction: the package's version and, in a checkout, the git commit."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from twostroke.core.version import __version__


def _commit(git: Path) -> str | None:
    """The commit that ``HEAD`` of the git directory ``git`` points to; None if it cannot be read.

    It reads git's files, because starting ``git rev-parse`` takes longer than everything else that `plan` does.
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

    Only a repository counts whose ``src/twostroke`` is this package. If the package is installed in a virtual environment
    inside another project's checkout, that project's commit says nothing about it.
    """
    if package.parent.name == "src":
        commit = _commit(package.parent.parent / ".git")
        if commit:
            return f"{__version__}+g{commit[:12]}"
    return __version__
