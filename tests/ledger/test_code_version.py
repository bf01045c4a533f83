"""The code version names the commit of the checkout that the package is run from, and of no other repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke import __version__
from twostroke.ledger.code_version import code_version

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "src" / "twostroke"
    folder.mkdir(parents=True)
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    code_version.cache_clear()
    return folder


def test_a_branch_is_followed_to_its_commit(package: Path) -> None:
    git = package.parent.parent / ".git"
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs" / "heads" / "main").write_text(COMMIT + "\n")
    assert code_version(package) == f"{__version__}+g{COMMIT[:12]}"


def test_a_packed_branch_is_found(package: Path) -> None:
    git = package.parent.parent / ".git"
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n")
    assert code_version(package) == f"{__version__}+g{COMMIT[:12]}"


def test_a_detached_head_is_its_own_commit(package: Path) -> None:
    (package.parent.parent / ".git" / "HEAD").write_text(COMMIT)
    assert code_version(package) == f"{__version__}+g{COMMIT[:12]}"


def test_a_linked_worktree_finds_the_shared_refs(package: Path, tmp_path: Path) -> None:
    main, tree = tmp_path / "main-git", tmp_path / "main-git" / "worktrees" / "x"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/topic\n")
    (tree / "commondir").write_text("../..\n")
    (main / "refs" / "heads").mkdir(parents=True)
    (main / "refs" / "heads" / "topic").write_text(COMMIT)
    git = package.parent.parent / ".git"
    for folder in (git / "refs" / "heads", git / "refs", git):
        folder.rmdir()
    git.write_text(f"gitdir: {tree}\n")
    assert code_version(package) == f"{__version__}+g{COMMIT[:12]}"


def test_an_installed_package_has_no_commit(tmp_path: Path) -> None:
    code_version.cache_clear()
    installed = tmp_path / "site-packages" / "twostroke"
    installed.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(COMMIT)
    assert code_version(installed) == __version__
    code_version.cache_clear()
