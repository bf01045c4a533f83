"""The usage log: whole lines, whatever happens to its file."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError
from twostroke.server import usage
from twostroke.server.usage import UsageLine, UsageLog


def line(name: str) -> UsageLine:
    return UsageLine(1.5, name, "ann", "m", "complete", 3, 1, 2, {"stop": 1}, 0.25, 0.5)


def test_lines_are_appended_in_order_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    for names in (("a", "b"), ("c",)):
        log = UsageLog(path)
        for name in names:
            log.add(line(name))
        log.close()
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert [one["id"] for one in found] == ["a", "b", "c"]
    assert found[0]["key"] == "ann"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_a_kill_left_torn_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text('{"id":"a"}\n{"id":"b')
    log = UsageLog(path)
    log.add(line("c"))
    log.close()
    texts = path.read_text().splitlines()
    assert (texts[1], json.loads(texts[2])["id"]) == ('{"id":"b', "c")


def test_a_line_that_was_written_in_part_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.write, []

    def full_once(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1:
            return write(file, data[:5])
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(file, data)

    log = UsageLog(tmp_path / "usage.jsonl")
    monkeypatch.setattr(usage.os, "write", full_once)
    log.add(line("a"))
    log.add(line("b"))
    log.close()
    assert log.lost == 1
    assert json.loads((tmp_path / "usage.jsonl").read_text().splitlines()[1])["id"] == "b"


def test_a_disk_that_hangs_holds_nobody_up_and_lost_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), os.write

    def slow(file: int, data: bytes) -> int:
        go.wait()
        return write(file, data)

    monkeypatch.setattr(usage, "MOST_WAITING", 3)
    monkeypatch.setattr(usage.os, "write", slow)
    log = UsageLog(tmp_path / "usage.jsonl")
    for i in range(20):
        log.add(line(str(i)))
    assert 16 <= log.lost <= 17  # three wait, and one may have been taken
    go.set()
    log.close()
    assert len((tmp_path / "usage.jsonl").read_text().splitlines()) == 20 - log.lost


@pytest.mark.parametrize("place", ["nowhere/usage.jsonl", "."])
def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        UsageLog(tmp_path / place)
