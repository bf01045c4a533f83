"""The ledger keeps every row under concurrent and killed writers, and does not change other programs' files."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError, CorruptFileError, InputError, TwostrokeError
from twostroke.ledger import store
from twostroke.ledger.store import Ledger

WRITER = """
import sys
from twostroke.ledger.store import Ledger
ledger = Ledger(sys.argv[1])
print("ready", flush=True)
for i in range(int(sys.argv[2])):
    run = ledger.freeze("bench", "writer", {"i": i}, {"ttft_s": 0.5})
    ledger.measure(run, {"ttft_s": 0.4 + i})
    print(run, flush=True)
"""


def writer(path: Path, n: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def test_a_run_comes_back_as_it_was_frozen_and_measured(ledger: Ledger) -> None:
    inputs, prediction = {"batch": 4, "shape": [1, 2]}, {"step_time_s": 0.5, "mfu": {"value": 0.4, "low": 0.3}}
    run_id = ledger.freeze("train", "demo", inputs, prediction)
    assert ledger.get(run_id).status == "frozen"
    ledger.measure(run_id, {"step_time_s": 0.6}, status="partial")
    ledger.measure(run_id, {"step_time_s": 0.7, "mfu": 0.35}, notes="second session")
    run = ledger.get(run_id)
    assert (run.inputs, run.prediction) == (inputs, prediction)
    assert run.measurement == {"step_time_s": 0.7, "mfu": 0.35}
    assert [m.status for m in run.measurements] == ["partial", "finished"]
    assert run.status == "finished"
    assert run.measurements[1].notes == "second session"
    assert run.code_version.startswith("0.")
    assert len(run.fingerprint) == 12
    assert run.frozen_at.endswith("Z")


def test_the_default_ledger_lives_in_the_home(twostroke_home: Path) -> None:
    Ledger().freeze("serve", "m", {}, {})
    assert (twostroke_home / "ledger.sqlite").is_file()


def test_reading_a_ledger_that_does_not_exist_makes_no_file(ledger: Ledger) -> None:
    assert ledger.runs() == []
    with pytest.raises(InputError, match="no ledger"):
        ledger.get("last")
    assert not ledger.path.exists()


def test_runs_are_newest_first_by_kind_and_limited(ledger: Ledger) -> None:
    ids = [ledger.freeze(kind, "x", {}, {}) for kind in ("train", "bench", "train", "serve")]
    assert [r.run_id for r in ledger.runs()] == ids[::-1]
    assert [r.run_id for r in ledger.runs("train")] == [ids[2], ids[0]]
    assert [r.run_id for r in ledger.runs(limit=1)] == [ids[3]]
    assert ledger.get("last").run_id == ids[3]


def test_a_short_id_must_be_one_run(ledger: Ledger) -> None:
    first, second = ledger.freeze("train", "a", {}, {}), ledger.freeze("train", "b", {}, {})
    assert ledger.get(first[:-1]).run_id == first
    with pytest.raises(InputError, match="more than one"):
        ledger.get("train-")
    for unknown in ("train-x", "%", "", "_rain"):
        with pytest.raises(InputError, match="not in the ledger"):
            ledger.get(unknown)
    assert first != second


def test_numbers_that_are_not_finite_are_kept_as_null(ledger: Ledger) -> None:
    run = ledger.freeze("train", "a", {}, {"x_s": float("inf"), "y": {"value": float("nan")}})
    ledger.measure(run, {"x_s": float("nan")})
    assert ledger.get(run).prediction == {"x_s": None, "y": {"value": None}}
    assert ledger.get(run).measurement == {"x_s": None}


@pytest.mark.parametrize("sql", ["UPDATE {} SET run_id = 'x'", "DELETE FROM {}"])
@pytest.mark.parametrize("table", ["predictions", "measurements"])
def test_rows_cannot_be_changed_or_removed(ledger: Ledger, sql: str, table: str) -> None:
    ledger.measure(ledger.freeze("train", "a", {}, {}), {})
    connection = sqlite3.connect(ledger.path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(sql.format(table))
    connection.close()


def test_wrong_arguments_get_a_sentence_and_write_nothing(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        ledger.freeze("tran", "a", {}, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="JSON"):
        ledger.freeze("train", "a", {"x": object()}, {})
    assert not ledger.path.exists()
    run = ledger.freeze("train", "a", {}, {})
    with pytest.raises(InputError, match="Call freeze"):
        ledger.measure("nobody", {})
    with pytest.raises(ConfigError, match="status"):
        ledger.measure(run, {}, status="done")
    with pytest.raises(ConfigError, match="limit"):
        ledger.runs(limit=0)
    with pytest.raises(ConfigError, match="kind"):
        ledger.runs("trains")
    assert ledger.get(run).measurements == ()


def test_a_file_that_is_no_database_is_refused_and_left_alone(ledger: Ledger) -> None:
    ledger.path.write_bytes(b"dear diary, " * 100)
    for act in (ledger.runs, lambda: ledger.get("last"), lambda: ledger.freeze("train", "a", {}, {})):
        with pytest.raises(CorruptFileError, match="not a Twostroke ledger"):
            act()
    assert ledger.path.read_bytes() == b"dear diary, " * 100


@pytest.mark.parametrize("application_id", [0, 77])
def test_another_programs_database_is_refused_and_left_alone(ledger: Ledger, application_id: int) -> None:
    connection = sqlite3.connect(ledger.path)
    connection.execute(f"PRAGMA application_id = {application_id}")
    connection.execute("CREATE TABLE predictions (mine INTEGER)")
    connection.commit()
    connection.close()
    before = ledger.path.read_bytes()
    for act in (ledger.runs, lambda: ledger.freeze("train", "a", {}, {})):
        with pytest.raises(CorruptFileError, match="not a Twostroke ledger"):
            act()
    assert ledger.path.read_bytes() == before


def test_a_newer_ledger_is_refused_by_version(ledger: Ledger) -> None:
    ledger.freeze("train", "a", {}, {})
    connection = sqlite3.connect(ledger.path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(ConfigError, match="version 9"):
        ledger.runs()


def test_damage_is_found_before_writing_and_nothing_is_overwritten(ledger: Ledger) -> None:
    for i in range(40):
        ledger.freeze("train", "a", {"filler": "x" * 500, "i": i}, {})
    data = bytearray(ledger.path.read_bytes())
    assert len(data) > 5 * 4096  # so that the damage below lies inside pages of rows
    data[4096:] = b"\xa5" * (len(data) - 4096)
    ledger.path.write_bytes(bytes(data))
    fresh = Ledger(ledger.path)
    for act in (fresh.runs, lambda: fresh.freeze("train", "b", {}, {})):
        with pytest.raises(CorruptFileError, match="damaged"):
            act()
    assert ledger.path.read_bytes() == bytes(data)


def test_a_truncated_ledger_is_damaged(ledger: Ledger) -> None:
    for _ in range(20):
        ledger.freeze("train", "a", {"filler": "x" * 500}, {})
    data = ledger.path.read_bytes()
    ledger.path.write_bytes(data[: len(data) // 2 + 100])
    with pytest.raises(CorruptFileError, match="damaged"):
        Ledger(ledger.path).freeze("train", "b", {}, {})


def test_an_empty_file_becomes_a_ledger(ledger: Ledger) -> None:
    ledger.path.touch()  # what a process killed while creating it leaves
    assert ledger.runs() == []
    ledger.freeze("train", "a", {}, {})
    assert len(ledger.runs()) == 1


def test_a_folder_is_not_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder"):
        Ledger(tmp_path).runs()


def test_several_processes_create_and_write_one_ledger_at_once(tmp_path: Path) -> None:
    path, n_writers, n_runs = tmp_path / "shared.sqlite", 4, 10
    processes = [writer(path, n_runs) for _ in range(n_writers)]
    outputs = [p.communicate(timeout=60)[0] for p in processes]
    assert [p.returncode for p in processes] == [0] * n_writers
    said = {line for output in outputs for line in output.split()} - {"ready"}
    runs = Ledger(path).runs()
    assert {r.run_id for r in runs} == said
    assert len(runs) == n_writers * n_runs
    assert all(r.status == "finished" for r in runs)


def kill_writers(
    path: Path, n_rounds: int, rng: random.Random, longest_s: float = 0.2, rows_first: bool = True
) -> tuple[set[str], int]:
    """Two writers at once, killed at a random moment, ``n_rounds`` times on the same file: what they reported as stored, and
    how many were killed."""
    said: set[str] = set()
    for _ in range(n_rounds):
        processes = [writer(path, 100_000) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"  # imported: all that follows is writing
            if rows_first:  # however slow the disk is
                said.add(process.stdout.readline().strip())
        time.sleep(rng.uniform(0.0, longest_s))
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            assert process.stdout is not None
            # Not communicate(): it passes over what readline() has already taken from the pipe.
            said |= set(process.stdout.read().split("\n")[:-1])  # the last line may be torn
            process.wait(timeout=30)
            process.stdout.close()
    return said - {""}, 2 * n_rounds


def assert_only_rows_in_flight_are_lost(path: Path, said: set[str], n_killed: int) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    known = {run.run_id: run for run in Ledger(path).runs()}
    assert said <= set(known)
    assert all(known[run].status == "finished" for run in said)
    # A row that was stored and not yet reported is the only kind there may be beside those: at most one a killed writer.
    assert len(known) - len(said) <= n_killed
    after = Ledger(path)
    run_id = after.freeze("train", "after", {}, {})
    assert after.get("last").run_id == run_id


def test_kill_9_inside_writes_loses_at_most_the_row_being_written(tmp_path: Path) -> None:
    path = tmp_path / "killed.sqlite"
    said, n_killed = kill_writers(path, 4, random.Random(0))
    assert len(said) >= 8
    assert_only_rows_in_flight_are_lost(path, said, n_killed)


@pytest.mark.soak
def test_a_hundred_kills_lose_at_most_the_rows_being_written(tmp_path: Path) -> None:
    path = tmp_path / "killed.sqlite"
    said, n_killed = kill_writers(path, 50, random.Random(1))
    assert_only_rows_in_flight_are_lost(path, said, n_killed)


def test_a_kill_while_the_ledger_is_being_created_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    rng = random.Random(2)
    for i in range(4):
        path = tmp_path / f"new-{i}.sqlite"
        said, n_killed = kill_writers(path, 1, rng, longest_s=0.01, rows_first=False)
        assert all(run.status in ("frozen", "finished") for run in Ledger(path).runs())
        assert_only_rows_in_flight_are_lost(path, said, n_killed) if path.exists() else None


def test_a_full_disk_is_a_sentence_and_keeps_what_there_was(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ledger.freeze("train", "a", {}, {})
    connect = Ledger._connect

    def full(self: Ledger, read_only: bool) -> sqlite3.Connection:
        connection = connect(self, read_only)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to run out of room
        return connection

    monkeypatch.setattr(Ledger, "_connect", full)
    with pytest.raises(TwostrokeError, match=r"could not be written .*full.*Free space"):
        ledger.freeze("train", "b", {"filler": "x" * 100_000}, {})
    monkeypatch.undo()
    assert [run.run_id for run in ledger.runs()] == [first]
    ledger.freeze("train", "c", {"filler": "x" * 100_000}, {})
    assert len(ledger.runs()) == 2


LIMITED = """
import resource, signal, sys
from twostroke.core.errors import TwostrokeError
from twostroke.ledger.store import Ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
ledger = Ledger(sys.argv[1])
n = 0
try:
    while True:
        ledger.freeze("train", "a", {"filler": "x" * 20_000}, {})
        n += 1
except TwostrokeError as error:
    print(n, error)
"""


def test_writes_that_the_system_refuses_leave_a_whole_ledger(tmp_path: Path) -> None:
    path = tmp_path / "limited.sqlite"
    child = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True, timeout=60)
    stored, sentence = child.stdout.split(" ", 1)
    assert int(stored) >= 1
    assert "could not be written" in sentence
    assert len(Ledger(path).runs()) == int(stored)
    Ledger(path).freeze("train", "b", {}, {})
    assert len(Ledger(path).runs()) == int(stored) + 1


AS_A_GUEST = """
import os, sys
from twostroke.core.errors import TwostrokeError
from twostroke.ledger.store import Ledger
if os.geteuid() == 0:  # permissions do not hold back root
    os.setgid(65534)
    os.setuid(65534)
path = sys.argv[1]
print(len(Ledger(path).runs()))
for place in (path, path + ".d/new/ledger.sqlite"):
    try:
        Ledger(place).freeze("train", "b", {}, {})
        print("written")
    except TwostrokeError as error:
        print(error)
"""


def test_a_read_only_folder_can_be_read_and_is_a_sentence_to_write_to() -> None:
    with tempfile.TemporaryDirectory() as name:  # not pytest's: that is closed to others than its owner
        folder = Path(name)
        path = folder / "ledger.sqlite"
        Ledger(path).freeze("train", "a", {}, {})
        (folder / "ledger.sqlite.d").mkdir()
        path.chmod(0o444)
        (folder / "ledger.sqlite.d").chmod(0o555)
        folder.chmod(0o555)
        command = [sys.executable, "-c", AS_A_GUEST, str(path)]
        child = subprocess.run(command, capture_output=True, text=True, timeout=60)
        folder.chmod(0o755)
        assert child.returncode == 0, child.stderr
        count, into_file, into_folder = child.stdout.strip().split("\n")
        assert count == "1"
        assert "could not be opened" in into_file
        assert "cannot be made" in into_folder
        assert [run.subject for run in Ledger(path).runs()] == ["a"]


def test_a_lock_that_stays_is_a_sentence(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BUSY_TIMEOUT_S", 0.05)
    ledger.freeze("train", "a", {}, {})
    holder = sqlite3.connect(ledger.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(store.TwostrokeError, match="stayed locked"):
        ledger.freeze("train", "b", {}, {})
    assert len(ledger.runs()) == 1  # readers do not wait for writers
    holder.close()
