"""The lines of a batch and the file of its answers: faults are told with their line, a torn end is cut off, nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from twostroke.core.errors import InputError
from twostroke.server.batch import lines
from twostroke.server.batch.journal import Journal
from twostroke.server.batch.lines import Fault, Marks, read_input, told

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}


def faults_of(path: Path, *rows: object, most: int = 100, url: str | None = None) -> list[Fault]:
    texts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(texts) + b"\n")
    with path.open("rb") as stream:
        return read_input(stream, most, ["m"], url)[1]


@pytest.mark.parametrize(
    ("row", "code", "sentence"),
    [
        (b"{", "invalid_json_line", "truncated"),
        (b"[1]", "invalid_json_line", "Expected object"),
        (b'{"custom_id": "\xff"}', "invalid_json_line", ""),
        (b"[" * 100_000, "invalid_json_line", ""),
        ({k: v for k, v in GOOD.items() if k != "custom_id"}, "invalid_json_line", "missing required field custom_id"),
        (GOOD | {"custom_id": ""}, "invalid_json_line", "length >= 1"),
        (GOOD | {"custom_id": "x" * 513}, "invalid_json_line", "length <= 512"),
        (GOOD | {"more": 1}, "invalid_json_line", "unknown field more"),
        (GOOD | {"method": "GET"}, "invalid_method", "method 'GET' is not supported; POST is."),
        (GOOD | {"url": "/v1/embeddings"}, "invalid_url", "Use /v1/chat/completions, /v1/completions, /v1/score."),
        (GOOD | {"url": "/v1/score"}, "mismatched_url", "not the batch's endpoint /v1/completions"),
        (GOOD | {"body": [1]}, "invalid_body", "body must be a JSON object."),
        (GOOD | {"body": {"model": "other"}}, "model_not_found", "model 'other' is not served. Served: m."),
        (GOOD, "duplicate_custom_id", "custom_id 'a' is an earlier line's."),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_its_line(tmp_path: Path, row: object, code: str, sentence: str) -> None:
    found = faults_of(tmp_path / "in.jsonl", GOOD, b"  ", row, url="/v1/completions")
    assert [(fault.line, fault.code) for fault in found] == [(3, code)]
    assert sentence in told(found, "in.jsonl")
    assert told(found, "in.jsonl").startswith("in.jsonl, line 3: ")
    assert len(told(found, "in.jsonl")) < 400


def test_long_lines_many_lines_and_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    assert [f.code for f in faults_of(path, b"")] == ["empty_file"]
    many = [GOOD | {"custom_id": str(i)} for i in range(4)]
    assert [(f.line, f.code) for f in faults_of(path, *many, most=3)] == [(4, "too_many_requests")]
    assert not faults_of(path, *many, most=4)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    long = GOOD | {"custom_id": "b", "body": {"model": "m", "prompt": "x" * 1000}}
    assert [(f.line, f.code) for f in faults_of(path, long, GOOD, long)] == [(1, "request_too_large"), (3, "request_too_large")]
    assert len(faults_of(path, *[b"x"] * 50)) == lines.MOST_FAULTS
    assert "19 or more other lines are wrong too." in told(faults_of(path, *[b"x"] * 50), path)


def test_requests_are_read_again_from_their_places_and_a_change_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [GOOD | {"custom_id": name, "body": {"model": "m", "prompt": name * 5}} for name in ("é", "b", "c")]
    path.write_bytes(b"\r\n\n".join(json.dumps(row).encode() for row in rows))  # the last line has no end
    with path.open("rb") as stream:
        found, faults = read_input(stream, 10, None)
        assert not faults
        assert [json.loads(bytes(found.request(i).body)) for i in range(3)] == [row["body"] for row in rows]
        assert found.without({"b"}) == [0, 2]
        path.write_bytes(path.read_bytes().replace(b'"b"', b'"x"'))
        with pytest.raises(InputError, match="'b' is not in its place any more"):
            found.request(1)


IDS = [f"id-{i}" for i in range(6)]
MARKS = partial(Marks.of, "job")


def filled(path: Path) -> bytes:
    """A journal with an answer to each of ``IDS``, of lengths that differ."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    journal = Journal(descriptor, "out", IDS, MARKS)
    for i, name in enumerate(IDS):
        journal.append(name, MARKS(name).answered(200, [b'{"text":"', b"x" * (7 * i), b'"}']))
    journal.sync()
    os.close(descriptor)
    return path.read_bytes()


def test_an_answer_is_in_openais_form(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in filled(tmp_path / "out").splitlines()]
    assert [row["custom_id"] for row in rows] == IDS
    assert len({row["id"] for row in rows}) == len({row["response"]["request_id"] for row in rows}) == len(IDS)
    assert rows[1]["response"]["status_code"] == 200
    assert rows[1]["response"]["body"] == {"text": "x" * 7}
    assert rows[1]["error"] is None
    left = json.loads(MARKS("id-0").unanswered("batch_expired", "late."))
    assert left == rows[0] | {"response": None, "error": {"code": "batch_expired", "message": "late."}}


def test_what_is_torn_or_damaged_is_cut_off_and_the_rest_is_kept(tmp_path: Path) -> None:
    path, rng = tmp_path / "out", random.Random(0)
    whole = filled(path)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    cases = [whole[: rng.randrange(len(whole))] for _ in range(40)]  # killed there
    for _ in range(40):  # a power cut: bytes that were not synced
        at = rng.randrange(len(whole))
        cases.append(whole[:at] + bytes(rng.randrange(1, 40)) + whole[at + 40 :])
    other = Marks.of("another job", "id-0").answered(200, [b"{}"])
    cases += [whole + whole, whole + other, other + whole, whole + b"\n", b"\n" + whole, whole + b"{}\n"]
    for damaged in cases:
        path.write_bytes(damaged)
        descriptor = os.open(path, os.O_RDWR)
        journal = Journal(descriptor, "out", IDS, MARKS)
        kept = path.read_bytes()
        same = next((i for i, (a, b) in enumerate(zip(whole, damaged, strict=False)) if a != b), min(len(whole), len(damaged)))
        n_kept = sum(end <= same for end in ends)
        assert kept == whole[: ends[n_kept - 1] if n_kept else 0]
        assert journal.done == set(IDS[:n_kept])
        for name in IDS[n_kept:]:
            journal.append(name, MARKS(name).answered(200, [b'{"text":"', b"x" * (7 * IDS.index(name)), b'"}']))
        os.close(descriptor)
        assert path.read_bytes() == whole


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, written = tmp_path / "out", []
    real = os.pwrite

    def few(descriptor: int, data: Any, offset: int) -> int:
        """Writes ten bytes at a time, 250 in all, then finds the disk full."""
        if sum(written) >= 250:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(real(descriptor, bytes(data[:10]), offset))
        return written[-1]

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    journal = Journal(descriptor, "out", IDS, MARKS)
    line = MARKS("id-0").answered(200, [b"{}"])
    monkeypatch.setattr(os, "pwrite", few)
    journal.append("id-0", line)
    assert len(line) < 250 < 2 * len(line)
    with pytest.raises(OSError, match="No space left on device") as caught:
        journal.append("id-1", MARKS("id-1").answered(200, [b"{}"]))
    assert caught.value.filename == "out"
    assert path.read_bytes() == line
    assert journal.done == {"id-0"}
    monkeypatch.undo()
    journal.append("id-1", MARKS("id-1").answered(200, [b"{}"]))
    os.close(descriptor)
    assert path.read_bytes().count(b"\n") == 2
