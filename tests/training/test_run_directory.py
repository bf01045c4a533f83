from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.core.errors import CorruptFileError, InputError
from twostroke.training.run_directory import RunDirectory, StepLog, first_difference, write_json


def test_the_first_key_that_differs_is_named_with_both_values() -> None:
    stored = {"seed": 0, "train": {"steps": 5, "learning_rate": 0.1}, "data": {"sources": ["a"]}}
    given = {"seed": 0, "train": {"steps": 5, "learning_rate": 0.2}, "data": {"sources": ["b"]}}
    assert first_difference(stored, given) == ("train.learning_rate", 0.1, 0.2)
    assert first_difference(stored, stored) is None


def test_keys_that_no_weight_depends_on_may_change() -> None:
    stored = {"output": "a", "train": {"checkpoint_every": 5, "keep_checkpoints": 1, "evaluate_every": 0}}
    given = {"output": "b", "train": {"checkpoint_every": 9, "keep_checkpoints": 3, "evaluate_every": 2}}
    assert first_difference(stored, given) is None


def test_only_one_process_may_train_in_a_directory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    code = (
        "import fcntl, os, sys\n"
        "descriptor = os.open(sys.argv[1], os.O_RDWR)\n"
        "try: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: sys.exit(3)\n"
    )
    command = [sys.executable, "-c", code, str(directory.path / ".lock")]
    with directory.locked():
        assert subprocess.run(command, check=False).returncode == 3
    assert subprocess.run(command, check=False).returncode == 0
    with directory.locked(), pytest.raises(InputError, match="another process is training"), directory.locked():
        pass


def test_a_directory_with_dot_files_only_is_unused(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "none").is_unused()
    (tmp_path / ".lock").touch()
    assert RunDirectory(tmp_path).is_unused()
    (tmp_path / "notes.txt").touch()
    assert not RunDirectory(tmp_path).is_unused()
    with pytest.raises(InputError, match="is a file"):
        RunDirectory(tmp_path / "notes.txt").is_unused()


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="cannot be written"), RunDirectory(tmp_path).locked():
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}


@pytest.mark.parametrize("content", ["", "[]", '{"seed": 0}', '{"resolved": {"format": 99}}', '{"resolved": {"format": 1}}'])
def test_a_damaged_record_is_a_sentence(tmp_path: Path, content: str, make_recipe) -> None:
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(CorruptFileError, match=r"recipe\.json"):
        RunDirectory(tmp_path).open(make_recipe(), resume=True)


class TestStepLog:
    def test_a_line_that_is_damaged_does_not_cost_those_behind_it(self, tmp_path: Path) -> None:
        file = tmp_path / "log.jsonl"
        file.write_text('{"step": 1}\nnonsense\n{"step": 2}\n[]\n{"step": "3"}\n{"step": 9}\n')
        StepLog(file, print).restart(5)
        assert file.read_text() == '{"step": 1}\n{"step": 2}\n'

    def test_a_log_is_cut_in_place_where_a_full_disk_takes_no_new_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "log.jsonl"
        file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "open", full)
        StepLog(file, print).restart(2)
        assert file.read_text() == '{"step": 1}\n{"step": 2}\n'

    def test_lines_after_the_checkpoint_are_dropped_when_a_run_restarts(self, tmp_path: Path) -> None:
        log = StepLog(tmp_path / "log.jsonl", print)
        for step in range(1, 6):
            log.append({"step": step, "loss": step / 3})
        with log._file.open("a") as stream:
            stream.write('{"step": 6, "lo')  # cut by a kill
        log.restart(3)
        assert log.read() == [{"step": s, "loss": s / 3} for s in (1, 2, 3)]
        log.append({"step": 4, "loss": 0.5})
        assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4

    def test_what_is_not_finite_is_null(self, tmp_path: Path) -> None:
        log = StepLog(tmp_path / "log.jsonl", print)
        log.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
        assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1, "loss": None, "grad_norm": None}

    def test_a_full_disk_delays_lines_and_loses_none(self, tmp_path: Path) -> None:
        lines: list[str] = []
        link = tmp_path / "log.jsonl"
        link.symlink_to("/dev/full")  # every write fails for want of space
        log = StepLog(link, lines.append)
        log.append({"step": 1})
        log.append({"step": 2})
        assert len(lines) == 1
        assert "No space left on device" in lines[0]
        link.unlink()
        log.append({"step": 3})
        assert [record["step"] for record in log.read()] == [1, 2, 3]
