from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from small_models import saved
from twostroke.engine import packed_cache
from twostroke.engine.core import EngineConfig, EngineCore
from twostroke.engine.packed_cache import FOLDER, PackedCache, cache_key
from twostroke.evaluation.comparison import model_bytes
from twostroke.kernels.native_library import library
from twostroke.scheduling.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="the native library was not built")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    write = packed_cache._write
    monkeypatch.setattr(packed_cache.threading, "Thread", _AtOnce)
    assert packed_cache._write is write
    return saved("qwen2", tmp_path / "m")[1]  # with biases


class _AtOnce:
    """A thread that has run when it was started."""

    def __init__(self, target: object, args: tuple[object, ...], name: str) -> None:
        self._run = lambda: target(*args)  # type: ignore[operator]

    def start(self) -> None:
        self._run()


def answer(directory: Path, dtype: str = "int8", head: str = "auto") -> tuple[bool, list[int]]:
    core = EngineCore(directory, EngineConfig(dtype=dtype, head_dtype=head, n_threads=1, runner="native"))
    core.add_request("a", [5, 9, 3, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    tokens: list[int] = []
    while core.has_work:
        for event in core.step():
            tokens += event.token_ids
    return core.loaded_packed, tokens


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_the_second_start_reads_what_the_first_packed_and_says_the_same(model: Path, dtype: str) -> None:
    size = model_bytes(model)
    first, second = answer(model, dtype), answer(model, dtype)
    assert (first[0], second[0]) == (False, True)
    assert first[1] == second[1]
    assert model_bytes(model) == size  # what is kept for a faster start is not the model


def test_every_way_to_hold_weights_has_its_own_file(model: Path) -> None:
    assert [answer(model, *ways)[0] for ways in (("int8",), ("int4",), ("int8", "int8"))] == [False] * 3
    assert [answer(model, *ways)[0] for ways in (("int8",), ("int4",), ("int8", "int8"))] == [True] * 3


def test_changed_weights_are_packed_anew(model: Path) -> None:
    answer(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert answer(model)[0] is False


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "nonsense"])
def test_a_damaged_file_is_not_used_and_made_anew(model: Path, damage: str) -> None:
    expected = answer(model)[1]
    (file,) = (model / FOLDER).glob("*.bin")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1000] ^= 4
    data = {"truncate": data[:-1], "empty": bytearray(), "nonsense": bytearray(b"x" * len(data))}.get(damage, data)
    file.write_bytes(data)
    assert answer(model) == (False, expected)
    assert answer(model) == (True, expected)


def test_only_the_newest_files_are_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "_KEPT", 2)
    for i, dtype in enumerate(("bf16", "int8", "int4")):
        answer(model, dtype)
        newest = max((model / FOLDER).glob("*.bin"), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, (i + 1, i + 1))
    assert len(list((model / FOLDER).glob("*"))) == 2


def test_what_a_killed_process_left_is_removed(model: Path) -> None:
    (model / FOLDER).mkdir()
    dead, living = (model / FOLDER / f"x.bin.{process}.partial" for process in (2**22 + 1, os.getpid()))
    dead.write_bytes(b"half")
    living.write_bytes(b"half")
    answer(model)
    assert (dead.exists(), living.exists()) == (False, True)


def test_a_directory_that_cannot_be_written_costs_nothing_but_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / FOLDER).write_text("a file where the folder should be")
    expected = answer(model)[1]
    assert answer(model) == (False, expected)


def test_a_folder_that_is_gone_has_no_key(tmp_path: Path) -> None:
    assert cache_key(tmp_path / "nowhere", "int8") is None
    assert PackedCache(tmp_path, None).finish() is None


def test_a_disk_that_fills_up_leaves_nothing_half_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(model)[1]
    (file,) = (model / FOLDER).glob("*.bin")
    file.unlink()

    class Filling:
        def __init__(self, stream: object) -> None:
            self.stream = stream

        def __getattr__(self, name: str) -> object:
            return getattr(self.stream, name)

        def __enter__(self) -> Filling:
            return self

        def __exit__(self, *error: object) -> None:
            self.stream.close()  # type: ignore[attr-defined]

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = Path.open

    def filling(path: Path, mode: str = "r", **options: Any) -> Any:
        stream = opened(path, mode, **options)
        return Filling(stream) if mode == "wb" else stream

    monkeypatch.setattr(Path, "open", filling)
    assert answer(model) == (False, expected)
    assert not list((model / FOLDER).iterdir())


def test_too_little_room_is_not_filled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(model)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    expected = answer(model)[1]
    assert answer(model) == (False, expected)
    assert not list((model / FOLDER).iterdir())
