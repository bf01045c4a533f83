from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.training import checkpoint as checkpoint_module
from twostroke.training import saver as saver_module
from twostroke.training.checkpoint import Checkpoint, CheckpointError, list_checkpoints, load_checkpoint, load_newest
from twostroke.training.retention import Retention
from twostroke.training.saver import CheckpointSaver


def _checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        {"w": torch.full((64, 64), float(step))},
        {"w::exp_avg": torch.full((64, 64), -float(step)), "w::step": torch.tensor(float(step))},
        {"step": step},
    )


def _nothing() -> None:
    pass


def _make(folder: Path, lines: list[str], **more: Any) -> CheckpointSaver:
    settings: dict[str, Any] = {"flush_log": _nothing, "sync_log": _nothing, "in_background": True} | more
    return CheckpointSaver(folder, Retention(2), lines.append, **settings)


def _steps(folder: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(folder)]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves wait for it."""
    event, original = threading.Event(), saver_module.save_checkpoint

    def gated(*args: Any, **kwargs: Any) -> Path:
        assert event.wait(20)
        return original(*args, **kwargs)

    monkeypatch.setattr(saver_module, "save_checkpoint", gated)
    return event


def test_what_is_saved_is_of_the_moment_it_began(tmp_path: Path, gate: threading.Event) -> None:
    saver, live = _make(tmp_path, []), _checkpoint(1)
    saver.begin(lambda: live, wait=False)
    for tensor in (*live.weights.values(), *live.optimizer.values()):
        tensor.fill_(99.0)  # training goes on
    assert _steps(tmp_path) == []
    gate.set()
    saver.settle()
    loaded = load_checkpoint(tmp_path / "step-00000001")
    assert torch.equal(loaded.weights["w"], torch.ones(64, 64))
    assert loaded.optimizer["w::step"].item() == 1.0


def test_one_is_in_flight_at_most(tmp_path: Path, gate: threading.Event) -> None:
    lines: list[str] = []
    saver = _make(tmp_path, lines)
    saver.begin(lambda: _checkpoint(1), wait=False)
    saver.begin(lambda: _checkpoint(2), wait=False)
    assert "step-00000001 is still being written, so this step has none" in lines[0]
    gate.set()
    saver.begin(lambda: _checkpoint(3), wait=True)
    saver.settle()
    assert _steps(tmp_path) == [1, 3]
    assert len(lines) == 1


def test_a_save_at_once_waits_for_the_one_in_flight(tmp_path: Path, gate: threading.Event) -> None:
    saver = _make(tmp_path, [])
    saver.begin(lambda: _checkpoint(1), wait=False)
    threading.Timer(0.1, gate.set).start()
    assert saver.save(_checkpoint(2)).name == "step-00000002"
    assert _steps(tmp_path) == [1, 2]


def test_host_memory_is_taken_once(tmp_path: Path) -> None:
    saver = _make(tmp_path, [])
    addresses = set()
    for step in range(1, 4):
        saver.begin(lambda step=step: _checkpoint(step), wait=True)
        saver.settle()
        addresses.add(tuple(buffer.data_ptr() for buffer in saver._snapshot._buffers.values()))
    assert len(addresses) == 1


def test_no_checkpoint_is_newer_than_its_log(tmp_path: Path) -> None:
    order: list[str] = []
    present: list[list[int]] = []

    def sync() -> None:
        order.append("sync")
        present.append(_steps(tmp_path))

    saver = _make(tmp_path, [], flush_log=lambda: order.append("flush"), sync_log=sync)
    saver.begin(lambda: _checkpoint(1), wait=True)
    saver.settle()
    assert order == ["flush", "sync"]
    assert present == [[]]  # when the log was brought to the disk, nothing had the checkpoint's name


def test_without_its_log_lines_there_is_no_checkpoint(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lines: list[str] = []
    saver = _make(tmp_path, lines, flush_log=full)
    saver.begin(lambda: _checkpoint(1), wait=False)
    assert "log cannot be written (No space left on device)" in lines[0]
    with pytest.raises(CheckpointError, match="its log cannot be written"):
        saver.save(_checkpoint(1))


def test_failures_are_logged_once_a_minute_and_so_is_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(saver_module.time, "monotonic", lambda: now[0])
    lines: list[str] = []
    saver = _make(tmp_path, lines)
    saver.begin(lambda: _checkpoint(1), wait=True)
    saver.settle()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_write", _no_room)
        for step in range(2, 8):
            now[0] += 20
            saver.begin(lambda step=step: _checkpoint(step), wait=True)
            saver.settle()
    saver.begin(lambda: _checkpoint(9), wait=True)
    saver.settle()
    assert len(lines) == 3
    assert "No space left on device" in lines[0]
    assert "Checkpoint step-00000001 is kept. Training continues." in lines[0]
    assert "(3 before it were not written either.)" in lines[1]
    assert lines[2] == "checkpoints are written again, after 6 that were not."
    assert _steps(tmp_path) == [1, 9]


def _no_room(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


CALLS = [
    (os, "open"),
    (os, "write"),
    (os, "fsync"),
    (os, "close"),
    (Path, "mkdir"),
    (Path, "rename"),
]


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EIO])
def test_each_system_call_of_a_background_save_may_fail(tmp_path: Path, kind: int) -> None:
    """Training goes on, the last good checkpoint loads, the reason is said, and the next save works."""
    for number in range(1, 100):
        folder, lines = tmp_path / f"{number}", []
        saver = _make(folder, lines)
        saver.save(_checkpoint(1))
        with pytest.MonkeyPatch.context() as patch:
            made = _fail_at(patch, number, lambda: OSError(kind, os.strerror(kind)))
            saver.begin(lambda: _checkpoint(2), wait=False)
            saver.settle()
        newest = load_newest(folder, print)
        assert newest is not None
        assert newest.weights["w"][0, 0].item() == newest.state["step"]
        if len(made) < number:
            assert (newest.state["step"], lines) == (2, [])
            break
        assert len(lines) == 1
        assert os.strerror(kind) in lines[0]
        assert "Training continues." in lines[0]
        saver.save(_checkpoint(3))
        assert _steps(folder)[-1] == 3
    assert number > 20


def _fail_at(patch: pytest.MonkeyPatch, number: int, error: Callable[[], OSError]) -> list[str]:
    """Let call ``number`` of the writing thread raise; what other threads call is let through."""
    made: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name != "checkpoint":
                return original(*args, **kwargs)
            made.append(name)
            if len(made) == number:
                raise error()
            return original(*args, **kwargs)

        patch.setattr(owner, name, wrapped)

    for owner, name in CALLS:
        wrap(owner, name)
    return made


def test_what_is_no_disks_fault_reaches_the_thread_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Path:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(saver_module, "save_checkpoint", broken)
    saver = _make(tmp_path, [])
    saver.begin(lambda: _checkpoint(1), wait=False)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        saver.settle()
