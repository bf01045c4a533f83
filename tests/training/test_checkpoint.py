from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.core.errors import CorruptFileError
from twostroke.training.checkpoint import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Checkpoint,
    CheckpointError,
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    remove_newer,
    save_checkpoint,
)
from twostroke.training.retention import Retention


def _checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        weights={"embed.weight": torch.full((4, 3), float(step)), "final_norm.weight": torch.arange(3.0)},
        optimizer={"embed.weight::exp_avg": torch.full((4, 3), -float(step)), "embed.weight::step": torch.tensor(float(step))},
        state={"step": step, "loader": {"next_window": step * 2}},
    )


def _silent(line: str) -> None:
    pass


def _same(a: Checkpoint, b: Checkpoint) -> bool:
    def equal(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> bool:
        return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)

    return equal(a.weights, b.weights) and equal(a.optimizer, b.optimizer) and a.state == b.state


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, _checkpoint(7), Retention(2))
    assert path.name == "step-00000007"
    assert _same(load_checkpoint(path), _checkpoint(7))


def test_before_the_first_step_there_is_no_optimizer_state(tmp_path: Path) -> None:
    empty = Checkpoint({"w": torch.ones(2)}, {}, {"step": 0})
    assert _same(load_checkpoint(save_checkpoint(tmp_path, empty, Retention(1))), empty)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 10, 123):
        save_checkpoint(tmp_path, _checkpoint(step), Retention(2))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 123]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000123"]


def test_nothing_there_is_not_an_error(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "none", _silent) is None


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "zero", "truncate", "remove", "append"])
def test_damage_is_found_named_and_the_checkpoint_before_is_taken(tmp_path: Path, file: str, damage: str) -> None:
    draw = random.Random(f"{file}{damage}")
    for round_ in range(1 if damage == "remove" else 8):
        folder = tmp_path / str(round_)
        save_checkpoint(folder, _checkpoint(1), Retention(2))
        victim = save_checkpoint(folder, _checkpoint(2), Retention(2)) / file
        content = bytearray(victim.read_bytes())
        where = draw.randrange(len(content))
        if damage == "flip":
            content[where] ^= 1 << draw.randrange(8)
        elif damage == "zero":
            content[where] = content[where] ^ content[where] if content[where] else 1
        elif damage == "truncate":
            del content[where:]
        elif damage == "append":
            content += b"}"
        victim.write_bytes(content)
        if damage == "remove":
            victim.unlink()
        lines: list[str] = []
        newest = load_newest(folder, lines.append)
        assert newest is not None
        if _same(newest, _checkpoint(2)):
            # one byte of the manifest's own white space, or of a key that says nothing of the content
            assert file == MANIFEST
            continue
        assert _same(newest, _checkpoint(1))
        assert len(lines) == 1
        assert "step-00000002 is damaged" in lines[0]
        assert file in lines[0]
        assert [step for step, _ in list_checkpoints(folder)] == [1]


def _damage(file: Path, draw: random.Random) -> str:
    """Flip a bit, zero a stretch, or cut the end of ``file``; what was done. Always changes it."""
    content = bytearray(before := file.read_bytes())
    while content == before:
        kind, where = draw.choice(("flip", "zero", "truncate")), draw.randrange(len(content))
        if kind == "flip":
            content[where] ^= 1 << draw.randrange(8)
        elif kind == "zero":
            end = min(len(content), where + draw.choice((1, 64, 4096)))
            content[where:end] = bytes(end - where)
        else:
            del content[where:]
    file.write_bytes(content)
    return f"{kind} of {file.name} at {where}"


@pytest.mark.soak
def test_each_of_a_thousand_damages_is_detected(tmp_path: Path) -> None:
    """Each is found, its file named, and the checkpoint before taken. The manifest's own white space is the one thing that may
    change without meaning: then what is loaded is what was saved."""
    draw, found, harmless = random.Random(1), 0, 0
    original = tmp_path / "original"
    for step in (1, 2):
        save_checkpoint(original, _checkpoint(step), Retention(2))
    for _ in range(1000):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        file = folder / checkpoint_name(2) / draw.choice((MODEL, OPTIMIZER, STATE, MANIFEST))
        done = _damage(file, draw)
        lines: list[str] = []
        newest = load_newest(folder, lines.append)
        assert newest is not None, done
        if _same(newest, _checkpoint(2)):
            assert file.name == MANIFEST, done
            harmless += 1
            continue
        assert _same(newest, _checkpoint(1)), done
        assert file.name in lines[0], done
        found += 1
    print(f"{found} found and named, {harmless} in the manifest's white space, 0 silent")
    assert found > 800


def test_if_all_checkpoints_are_damaged_the_run_does_not_silently_start_again(tmp_path: Path) -> None:
    for step in (1, 2):
        (save_checkpoint(tmp_path, _checkpoint(step), Retention(2)) / MODEL).write_bytes(b"")
    with pytest.raises(
        CorruptFileError, match=r"all checkpoints in .* are damaged .*corrupt-step-00000001, corrupt-step-00000002"
    ):
        load_newest(tmp_path, _silent)
    with pytest.raises(CorruptFileError, match="delete them to begin this run again"):  # nor when it is asked again
        load_newest(tmp_path, _silent)
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    assert load_newest(tmp_path, _silent) is None


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, _checkpoint(3), Retention(1))
    with pytest.raises(CorruptFileError, match="is of step 3"):
        load_checkpoint(path.rename(tmp_path / "step-00000009"))


class _Killed(BaseException):
    """Stands for the process's end: nothing of ours catches it."""


CALLS = [
    (os, "fsync"),
    (os, "open"),
    (Path, "mkdir"),
    (Path, "rename"),
    (os, "write"),
    (os, "close"),
    (shutil, "rmtree"),
]


def _fail_at(monkeypatch: pytest.MonkeyPatch, number: int, error: Callable[[], BaseException], after: bool) -> list[str]:
    """Let call ``number`` of all that a save makes raise ``error``, before or ``after`` it took effect. Removals, which need no
    room, fail by a kill only."""
    made: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            fails = len(made) == number
            if fails and not after:
                raise error()
            result = original(*args, **kwargs)
            if fails:
                raise error()
            return result

        monkeypatch.setattr(owner, name, wrapped)

    kills = isinstance(error(), _Killed)
    for owner, name in CALLS:
        if kills or name != "rmtree":
            wrap(owner, name)
    return made


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call_of_a_save_the_old_or_the_new_checkpoint_loads(tmp_path: Path, after: bool) -> None:
    outcomes = set()
    number = 0
    while True:
        number += 1
        folder = tmp_path / f"{number}"
        save_checkpoint(folder, _checkpoint(1), Retention(1))
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = _fail_at(monkeypatch, number, _Killed, after)
            with contextlib.suppress(_Killed):
                save_checkpoint(folder, _checkpoint(2), Retention(1))
            if len(made) < number:
                break
        newest = load_newest(folder, _silent)
        assert newest is not None
        step = newest.state["step"]
        assert _same(newest, _checkpoint(step))
        outcomes.add(step)
        save_checkpoint(folder, _checkpoint(3), Retention(1))  # leftovers do not stand in the way of the next
        assert [p.name for p in folder.iterdir()] == ["step-00000003"]
    assert number > 20
    assert outcomes == {1, 2}


def test_a_full_disk_at_any_write_keeps_the_old_one_and_says_why(tmp_path: Path) -> None:
    reasons = []
    for number in range(1, 100):
        folder = tmp_path / f"{number}"
        save_checkpoint(folder, _checkpoint(1), Retention(1))
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = _fail_at(monkeypatch, number, lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), after=False)
            try:
                save_checkpoint(folder, _checkpoint(2), Retention(1))
                failed = None
            except CheckpointError as error:
                failed = str(error)
                reasons.append(failed)
            if len(made) < number:
                break
        newest = load_newest(folder, _silent)
        assert newest is not None
        assert newest.state["step"] == 2 if failed is None else newest.state["step"] in (1, 2)
    assert len(reasons) > 15
    assert all("step-00000002 was not written" in r and "No space left on device" in r for r in reasons)


def test_too_little_space_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, _checkpoint(1), Retention(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(CheckpointError, match=r"needs \d+ B and .* has 10 B free"):
        save_checkpoint(tmp_path, _checkpoint(2), Retention(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_an_intact_checkpoint_of_the_step_is_not_written_again(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, _checkpoint(4), Retention(1))
    before = (path / MODEL).stat().st_mtime_ns
    assert save_checkpoint(tmp_path, _checkpoint(4), Retention(1)) == path
    assert (path / MODEL).stat().st_mtime_ns == before
    (path / MODEL).write_bytes(b"spoilt")
    save_checkpoint(tmp_path, _checkpoint(4), Retention(1))
    assert _same(load_checkpoint(path), _checkpoint(4))


class TestWhatOthersPutThere:
    """A checkpoint is removed by retention, a roll-back or as a leftover; what no save wrote stays."""

    def test_files_of_the_user_in_a_checkpoint_stay(self, tmp_path: Path) -> None:
        first = save_checkpoint(tmp_path, _checkpoint(1), Retention(1))
        (first / "thesis.odt").write_text("precious")
        save_checkpoint(tmp_path, _checkpoint(2), Retention(1))
        assert [path.name for path in first.iterdir()] == ["thesis.odt"]
        remove_newer(tmp_path, 0)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]

    def test_a_link_to_another_runs_checkpoint_is_removed_and_not_followed(self, tmp_path: Path) -> None:
        other = save_checkpoint(tmp_path / "other", _checkpoint(1), Retention(1))
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / other.name).symlink_to(other)
        (tmp_path / "run" / ".saving-step-00000007").symlink_to(other)
        save_checkpoint(tmp_path / "run", _checkpoint(2), Retention(1))
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
        assert _same(load_checkpoint(other), _checkpoint(1))

    def test_only_leftovers_of_a_save_are_removed(self, tmp_path: Path) -> None:
        for name in (".saving-thesis", ".removing-notes", ".saving-step-00000003"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "chapter").write_text("precious")
        (tmp_path / ".removing-step-00000004").mkdir()
        save_checkpoint(tmp_path, _checkpoint(5), Retention(1))
        kept = [".removing-notes", ".saving-step-00000003", ".saving-thesis", "step-00000005"]
        assert sorted(path.name for path in tmp_path.iterdir()) == kept
