"""Files and directories that appear whole or not at all, and what is removed beside them."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twostroke.core import aside
from twostroke.core.aside import directory_beside, file_beside, remove_abandoned, take_place, write_text, written_file
from twostroke.core.errors import InputError

SOURCES = Path(aside.__file__).parents[1]
ABANDONED = f".report.html.{32 * '0'}.partial"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    with written_file(target) as stream:
        stream.write(b"new")
        stream.flush()
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert names(tmp_path) == ["report.html"]


def test_an_error_inside_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the error comes from inside
        with written_file(target) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert names(tmp_path) == ["report.html"]


@pytest.mark.parametrize("writer", [written_file, directory_beside, file_beside])
def test_a_full_disk_is_named_by_what_was_to_be_written(tmp_path: Path, writer: Callable[[Path], Any]) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="No space left") as caught:
        with writer(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(target)
    assert names(tmp_path) == []


@pytest.mark.parametrize("writer", [written_file, directory_beside, file_beside])
def test_a_folder_that_takes_nothing_is_told_by_the_name_that_was_typed(writer: Callable[[Path], Any]) -> None:
    with pytest.raises(OSError, match="/proc/model") as caught, writer(Path("/proc/model")):
        raise AssertionError
    assert caught.value.filename == "/proc/model"


@pytest.mark.parametrize("writer", [directory_beside, file_beside])
def test_a_file_on_the_way_is_named(tmp_path: Path, writer: Callable[[Path], Any]) -> None:
    (tmp_path / "notes").write_text("mine")
    for target in (tmp_path / "notes" / "model", tmp_path / "notes" / "a" / "b" / "model"):
        with (
            pytest.raises(InputError, match=r"model cannot be made, because .*notes is a file\. Name another place\."),
            writer(target),
        ):
            raise AssertionError
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_link_that_waits_under_the_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the name was foretold: the file is created, and a link that is there is an error."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    (tmp_path / ABANDONED).symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "report.html", "page")
    assert victim.read_text() == "precious"


def test_names_cannot_be_foretold(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        with written_file(tmp_path / ("a" * 200)):
            (partial,) = tmp_path.iterdir()
            assert str(os.getpid()) not in re.sub(r"[0-9a-f]{32}", "", partial.name)
            seen.add(partial.name)
        (tmp_path / ("a" * 200)).unlink()
    assert len(seen) == 3


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "report.html").symlink_to(victim)
    write_text(tmp_path / "report.html", "page")
    assert victim.read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "page"


def test_the_longest_name_that_a_file_may_have_can_be_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("ö" * 127), "text")  # 254 bytes of the 255


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom twostroke.core.aside import written_file\n"
        "with written_file(Path(sys.argv[1])) as stream:\n"
        "    stream.write(bytes(1000)); stream.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent)}
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "report.html")], env=environment)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    write_text(tmp_path / "other", "text")
    assert left.exists(), "a young one may be about to be locked"
    os.utime(left, (0, 0))
    write_text(tmp_path / "other", "text")
    assert names(tmp_path) == ["other"]


def test_what_is_being_written_is_never_removed_however_old(tmp_path: Path) -> None:
    with written_file(tmp_path / "report.html") as stream, directory_beside(tmp_path / "model") as folder:
        (folder / "weights").write_text("half")
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0))
        remove_abandoned(tmp_path)
        assert len(names(tmp_path)) == 2
        stream.write(b"whole")
    assert (tmp_path / "report.html").read_text() == "whole"


def test_nothing_is_removed_that_was_not_written_here(tmp_path: Path) -> None:
    """Links with our names, names like ours, folders of the user: all stay, with what is in them."""
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter").write_text("precious")
    others = [".partial-notes", "thesis.999999.partial", f"report.{31 * '0'}.partial", f".report.{32 * 'x'}.partial", "x.tmp"]
    for name in others:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    link = tmp_path / ABANDONED
    link.symlink_to(thesis)
    os.utime(link, (0, 0), follow_symlinks=False)
    remove_abandoned(tmp_path)
    assert names(tmp_path) == sorted([*others, link.name, "thesis"])
    assert (thesis / "chapter").read_text() == "precious"


def test_a_directory_takes_the_place_of_another_and_of_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("precious")
    (tmp_path / "model").symlink_to(elsewhere)
    for content in ("first", "second"):
        with directory_beside(tmp_path / "model") as folder:
            (folder / "weights").write_text(content)
            take_place(folder, tmp_path / "model")
        assert (tmp_path / "model" / "weights").read_text() == content
        assert names(tmp_path) == ["elsewhere", "model"]
    assert (elsewhere / "kept").read_text() == "precious"


def test_there_is_one_way_of_writing_aside() -> None:
    """Names of half-written files that hold a process id, or nothing that changes, were how links came to be followed. The
    build of the native library runs where nothing of the package can be imported. Files of a private folder are made through
    its descriptor, where nobody else can put a link."""
    exempt = {
        SOURCES / "core" / "aside.py",
        SOURCES / "kernels" / "native" / "build.py",
        SOURCES / "engine" / "packed_cache.py",
        SOURCES / "server" / "batch" / "store.py",
        SOURCES / "server" / "response_cache.py",
    }
    pattern = re.compile(r"""["'][^"'\n]*\.(tmp|part|partial|saving)["']|os\.replace\(""")
    found = [
        f"{file.relative_to(SOURCES)}: {match.group()}"
        for file in SOURCES.rglob("*.py")
        if file not in exempt
        for match in pattern.finditer(file.read_text(encoding="utf-8"))
    ]
    assert found == []
