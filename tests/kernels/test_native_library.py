"""The build, the loading and the threads of the native library."""

from __future__ import annotations

import ctypes
import os
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError
from twostroke.kernels import native_library
from twostroke.kernels.native import build as native_build

library = native_library.library()
needs_library = pytest.mark.skipif(library is None, reason=native_library.why_absent() or "there")

SAY = "from twostroke.kernels import native_library as n; print(n.library() is None, n.features(), n.why_absent())"


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_an_environment_variable_turns_it_off() -> None:
    said = python(SAY, TWOSTROKE_NATIVE="0")
    assert said.startswith("True ()")
    assert "TWOSTROKE_NATIVE=0 turns native code off" in said


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "does not exist"), (b"", "cannot be used"), (b"\x7fELFgarbage", "cannot be used")]
)
def test_a_library_that_does_not_fit_is_absent_with_a_sentence(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "_native.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(native_library, "PATH", path)
    loaded, sentence = native_library._load.__wrapped__()
    assert loaded is None
    assert reason in sentence
    assert "python -m twostroke.kernels.native_library build" in sentence


@needs_library
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "sources_hash", lambda: "another")
    loaded, sentence = native_library._load.__wrapped__()
    assert loaded is None
    assert "was built from other sources" in sentence


def test_no_compiler_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++ -O3")
    assert native_library.main(["build"]) == 1
    assert "/nonexistent/c++ -O3 was not found" in capsys.readouterr().err
    assert native_library.main(["rebuild"]) == 2


def test_a_refusing_compiler_leaves_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(native_build.BuildError, match="failed"):
        native_build.build(tmp_path / "_native.so")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "own"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("TWOSTROKE_HOME", str(made))
    return made


def test_objects_are_kept_in_the_home_for_this_user_alone(home: Path) -> None:
    for _ in range(2):
        with native_build.object_folder() as folder:
            assert folder == home / "objects"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_could_have_filled_is_left_alone(home: Path, tmp_path: Path) -> None:
    """A link, a folder that others may write, another user's, a file: what lies there would be linked and run."""
    objects, elsewhere = home / "objects", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    objects.symlink_to(elsewhere)
    expect_a_folder_apart(objects)
    objects.unlink()
    for mode in (0o770, 0o702, 0o1777):
        objects.mkdir()
        objects.chmod(mode)
        expect_a_folder_apart(objects)
        objects.rmdir()
    objects.write_text("a file")
    expect_a_folder_apart(objects)
    objects.unlink()
    home.chmod(0o777)
    expect_a_folder_apart(objects)
    home.chmod(0o700)
    if os.getuid() == 0:
        objects.rmdir()
        objects.mkdir(mode=0o700)
        os.chown(objects, 65534, 65534)
        expect_a_folder_apart(objects)
    assert list(elsewhere.iterdir()) == []


def expect_a_folder_apart(objects: Path) -> None:
    with native_build.object_folder() as folder:
        assert folder != objects
        assert objects.resolve() not in (folder.resolve(), *folder.resolve().parents)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_build_without_a_home_has_objects_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "file").write_text("no folder")
    with native_build.object_folder() as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_an_object_that_is_a_link_is_compiled_anew(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(path for path in native_build.sources() if path.stem == "matrix")
    monkeypatch.setattr(native_build, "sources", lambda *_: [source])
    with native_build.object_folder() as folder:
        made = native_build.compile_sources(folder)[source]
        (tmp_path / "prepared.o").write_bytes(b"prepared")
        made.unlink()
        made.symlink_to(tmp_path / "prepared.o")
        assert native_build.compile_sources(folder)[source] == made
        assert not made.is_symlink()
    assert (tmp_path / "prepared.o").read_bytes() == b"prepared"


def test_only_objects_of_ours_are_forgotten(home: Path) -> None:
    with native_build.object_folder() as folder:
        others = [folder / name for name in ("thesis.o", "a.o", "0" * 32, f"{'0' * 31}g.o")]
        own = [folder / f"{i:032x}.o" for i in range(5)]
        for age, path in enumerate([*others, *own]):
            path.write_text("")
            os.utime(path, (age, age))
        native_build._forget_old_objects(folder, keep={own[0]}, at_most=2)
        assert sorted(folder.iterdir()) == sorted([*others, own[0], *own[3:]])


def test_every_source_has_the_flags_of_its_name() -> None:
    flags = {path.stem: native_build.FLAGS["x86_64"].get(native_build._suffix(path), ()) for path in native_build.sources()}
    assert flags["pool"] == flags["kernels_plain"] == ()
    assert "-mavx512bf16" in flags["kernels_avx512bf16"]
    assert "-mavx512f" not in flags["kernels_avxvnni"]


@needs_library
@pytest.mark.parametrize("n_threads", [1, 2, 3, 5])
def test_barriers_hold_with_any_number_of_threads(n_threads: int) -> None:
    assert library is not None
    library.ts_set_threads(n_threads)
    assert library.ts_threads() == n_threads
    library.ts_barrier_seconds(50)  # more threads than processors: they wait asleep
    library.ts_set_threads(2)


@needs_library
def test_absurd_numbers_of_threads_are_bounded() -> None:
    assert library is not None
    library.ts_set_threads(-3)
    assert library.ts_threads() == 1
    library.ts_set_threads(10**6)
    assert library.ts_threads() == 256
    library.ts_set_threads(2)


NOT_ALL_THREADS = """
import resource
from twostroke.kernels.native_library import library
l = library()
l.ts_set_threads(2)
l.ts_barrier_seconds(10)
{limit}
l.ts_set_threads(64)
l.ts_barrier_seconds(10)
some = l.ts_threads()
l.ts_barrier_seconds(10)
l.ts_set_threads(1)
l.ts_barrier_seconds(10)
l.ts_set_threads(3)
l.ts_barrier_seconds(10)
print(some, l.ts_threads())
"""


@needs_library
def test_threads_that_the_system_refuses_are_done_without() -> None:
    """By the address space, of which a stack takes 8 MiB here."""
    limit = """
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20, -1))
"""
    some, few = map(
        int,
        python(
            "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (8 * 2**20, -1))" + NOT_ALL_THREADS.format(limit=limit)
        ).split(),
    )
    assert 1 <= some < 64
    assert few <= 3


@needs_library
@pytest.mark.skipif(os.getuid() != 0, reason="a user without other processes is needed, and only root can become one")
def test_a_limit_of_processes_is_not_the_end() -> None:
    """No user has this number. The library is loaded before: its files may be closed to others."""
    limit = """
import os
import re
resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
os.setgid(54321)
os.setuid(54321)
"""
    found = python(NOT_ALL_THREADS.format(limit=limit)).split()
    # A thread that was joined may count for a moment longer: the system then refuses the second one too.
    assert len(found) == 2
    assert set(found) <= {"1", "2"}


@needs_library
def test_two_callers_take_turns() -> None:
    assert library is not None
    threads = [threading.Thread(target=library.ts_barrier_seconds, args=(200,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


@needs_library
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = """
import ctypes
import os
import re
from twostroke.kernels.native_library import library
l = library()
l.ts_set_threads(2)
l.ts_barrier_seconds(10)
child = os.fork()
if child == 0:
    l.ts_barrier_seconds(10)
    os._exit(7)
l.ts_barrier_seconds(10)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code).strip() == "7"


@needs_library
def test_idle_threads_use_no_processor_time() -> None:
    assert library is not None
    library.ts_set_threads(2)
    library.ts_barrier_seconds(10)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03  # spinning would take 0.3


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@needs_library
def test_blocks_of_memory_keep_to_themselves_and_are_given_back() -> None:
    assert library is not None
    before = resident_bytes()
    sizes = [1, 63, 64, 65, 4096, 100_000, 3_000_001, 1_500_000] * 4
    blocks = [library.ts_allocate(size) for size in sizes]
    for i, (address, size) in enumerate(zip(blocks, sizes, strict=True)):
        assert address % 64 == 0
        assert ctypes.string_at(address, size) == bytes(size)
        ctypes.memset(address, i + 1, size)
    large_page = 2**21
    assert resident_bytes() - before < sum(sizes) + 3 * large_page + 2**20  # not a large page for each
    for i in range(0, len(blocks), 2):
        library.ts_release(blocks[i])
    for i in range(1, len(blocks), 2):
        assert ctypes.string_at(blocks[i], sizes[i]) == bytes([i + 1]) * sizes[i]
        library.ts_release(blocks[i])
    assert resident_bytes() - before < 3 * large_page


@needs_library
def test_memory_that_cannot_be_is_null() -> None:
    assert library is not None
    assert library.ts_allocate(2**60) is None
    assert library.ts_allocate(-1) is None
    library.ts_release(None)
    library.ts_release(library.ts_allocate(0))


@needs_library
def test_a_structure_of_another_size_than_the_librarys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its definition if the library is loaded, else when it is loaded."""
    assert library is not None
    assert library.ts_size_of(b"StepOp") > library.ts_size_of(b"Matrix") > 0
    assert library.ts_size_of(b"Matrices") == -1
    monkeypatch.setattr(native_library, "_MIRRORED", {})
    sentence = r"ts::Matrix takes \d+ bytes in the library and 7 in Python"
    with pytest.raises(ConfigError, match=sentence):
        native_library.mirror_bytes("Matrix", 7)
    loaded, reason = native_library._load.__wrapped__()
    assert loaded is None
    assert re.search(sentence, reason)
