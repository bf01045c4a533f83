"""Captured chats are those that were answered, whole, of those who consented, without what must not be kept, and train."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, echo_server

from twostroke.core.data_recipe import DataRecipe
from twostroke.core.errors import ConfigError, DataError
from twostroke.data.captured import RATINGS, choose_rated, conversation_files
from twostroke.data.prepare import prepare
from twostroke.server.capture import Capture
from twostroke.server.redaction import Redaction, read_patterns

CHAT, FEEDBACK = "/v1/chat/completions", "/v1/feedback"


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "max_tokens": 3, **fields}


def until(found: Callable[[], Any]) -> Any:
    """What ``found`` returns once it is true: writing is another thread's work."""
    deadline = time.monotonic() + 60
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result


def kept(folder: Path, n: int) -> list[dict[str, Any]]:
    """All captured records, once there are ``n``."""

    def records() -> list[dict[str, Any]]:
        lines = [line for path in conversation_files(folder) for line in path.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    return list(until(lambda: len(found := records()) >= n and found))


@pytest.fixture
def served(echo_model: Path, tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    (tmp_path / "patterns").write_text("# numbers of cards\n\\d{4} \\d{4}\n\n(?i)secret\\w*\n")
    options = ["--capture", str(tmp_path / "kept"), "--redact", str(tmp_path / "patterns")]
    with echo_server(echo_model, tmp_path, options) as served:
        yield served, tmp_path / "kept"


def test_chats_are_kept_redacted_and_rated(served: tuple[Served, Path]) -> None:
    server, folder = served
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as web:
        first = web.post(CHAT, json=asked("my card 1234 5678 is SECRETive", n=2)).json()
        text = web.post(CHAT, json=asked("the fox", stream=True)).text
        answers = web.post("/v1/messages", json=asked("the dog")).json()
        web.post("/v1/completions", json={"model": "echo", "prompt": "no chat", "max_tokens": 1})
        web.post(CHAT, json=asked("refused", temperature=-1))
        records = {(record["id"], record["choice"]): record for record in kept(folder, 4)}
        assert len(records) == 4
        for index in (0, 1):
            record = records[first["id"], index]
            assert record["messages"] == [
                {"role": "user", "content": "my card [redacted] is [redacted]"},
                {"role": "assistant", "content": first["choices"][index]["message"]["content"]},
            ]
            assert (record["finish_reason"], record["system_fingerprint"]) == ("length", "fp_echo")
        streamed = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed)
        assert records[streamed[0]["id"], 0]["messages"][-1]["content"] == said

        rating = {"id": first["id"], "choice": 1, "rating": 0.5, "comment": "it knows my secret"}
        assert web.post(FEEDBACK, json=rating).json() == {"id": first["id"], "recorded": True}
        assert web.post(FEEDBACK, json={"id": answers["id"], "rating": -1}).status_code == 200
        lines = until(lambda: len(found := (folder / RATINGS).read_text().splitlines()) == 2 and found)
        assert [json.loads(line)["rating"] for line in lines] == [0.5, -1]
        assert json.loads(lines[0])["comment"] == "it knows my [redacted]"
        for wrong, status in (
            ({"id": "chatcmpl-nobody", "rating": 1}, 404),
            ({"id": first["id"], "choice": 2, "rating": 1}, 404),
            ({"id": first["id"], "rating": 2}, 400),
            ({"id": first["id"], "rating": "good"}, 400),
            ({"id": first["id"]}, 400),
            ({"id": first["id"], "rating": 1, "stars": 5}, 400),
            ({"id": first["id"], "rating": 1, "comment": "x" * 4001}, 400),
        ):
            assert web.post(FEEDBACK, json=wrong).status_code == status, wrong
        metrics = web.get("/metrics").text
        assert "twostroke_captured_chats 4.0" in metrics
        assert "twostroke_captured_ratings 2.0" in metrics
        assert FEEDBACK in web.get("/openapi.json").json()["paths"]
    assert oct((folder / conversation_files(folder)[0]).stat().st_mode)[-3:] == "600"
    chosen = choose_rated(folder, folder.parent / "good.jsonl", 0.0)
    assert (chosen.read, chosen.written, chosen.unrated, chosen.rated_lower) == (4, 1, 2, 1)
    (line,) = (folder.parent / "good.jsonl").read_text().splitlines()
    assert (json.loads(line)["choice"], json.loads(line)["rating"]) == (1, 0.5)


def test_only_those_who_consented_are_captured_and_rate_their_own_answers(echo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one capture=yes\ntwo\nthree capture=yes\n")
    options = ["--capture", str(tmp_path / "kept"), "--api-key-file", str(tmp_path / "keys")]
    with echo_server(echo_model, tmp_path, options) as served:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:

            def post(path: str, key: str, body: dict[str, Any]) -> httpx.Response:
                return web.post(path, json=body, headers={"authorization": f"Bearer {key}"})

            ids = {key: post(CHAT, key, asked(f"says {key}")).json()["id"] for key in ("two", "one", "three")}
            records = kept(tmp_path / "kept", 2)
            assert [record["id"] for record in records] == [ids["one"], ids["three"]]
            assert len({record["key"] for record in records}) == 2
            assert "says two" not in json.dumps(records)
            assert post(FEEDBACK, "one", {"id": ids["one"], "rating": 1}).status_code == 200
            assert post(FEEDBACK, "three", {"id": ids["one"], "rating": -1}).status_code == 404
            assert post(FEEDBACK, "two", {"id": ids["two"], "rating": 1}).status_code == 404
            assert web.post(FEEDBACK, json={"id": ids["one"], "rating": 1}).status_code == 401


def test_without_the_option_nothing_is_kept_and_nothing_can_be_rated(echo: Served) -> None:
    with httpx.Client(base_url=echo.url, timeout=30, trust_env=False) as web:
        answer = web.post(CHAT, json=asked("the fox")).json()
        assert web.post(FEEDBACK, json={"id": answer["id"], "rating": 1}).status_code == 404


def test_a_killed_server_leaves_whole_lines_and_the_next_one_goes_on(echo_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    options = ["--capture", str(folder)]
    with echo_server(echo_model, tmp_path, options) as served:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:
            first = web.post(CHAT, json=asked("the fox")).json()["id"]
            kept(folder, 1)
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait(20)
    file = conversation_files(folder)[0]
    with file.open("ab") as torn:
        torn.write(b'{"messages": [{"role": "us')
    with echo_server(echo_model, tmp_path, options) as served:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as web:
            second = web.post(CHAT, json=asked("the dog")).json()["id"]
            assert web.post(FEEDBACK, json={"id": first, "rating": 1}).status_code == 200, (
                "answers before the kill can be rated"
            )
            assert [record["id"] for record in kept(folder, 2)] == [first, second]


def test_captured_chats_train(served: tuple[Served, Path], echo_model: Path, tmp_path: Path) -> None:
    server, folder = served
    words = ["quick", "brown", "fox", "jumps", "over", "lazy", "dog", "the"]
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as web:
        for word in words:
            assert web.post(CHAT, json=asked(word)).status_code == 200
    kept(folder, len(words))
    recipe = DataRecipe(sources=(str(folder),), layout="messages", tokenizer=str(echo_model), held_out_fraction=0.2)
    prepared = prepare(recipe, tmp_path / "cache")
    assert prepared.report["n_conversations"] == len(words)
    assert prepared.report["n_train_learned_tokens"] > 0


class Answered:
    """What the capture needs of a generation whose answer is plain text."""

    reasoning = call_format = None
    model, created, fingerprint, client = "m", 1, "fp", ""

    def __init__(self, id: str) -> None:
        self.id = id


def deltas(text: str) -> list[Any]:
    from twostroke.server.generation import TextDelta

    return [TextDelta(0, text, [1], None, None), TextDelta(0, ".", [2], None, "stop")]


def capture(folder: Path, redaction: Redaction | None = None, most_bytes: int = 2**20) -> Capture:
    return Capture(folder, redaction or Redaction([]), most_bytes)


def keep(made: Capture, name: str, text: str = "answer") -> None:
    made.keep(Answered(f"chatcmpl-{name}"), [{"role": "user", "content": name}], None, deltas(text))  # type: ignore[arg-type]


def test_the_folder_is_bounded_and_its_oldest_files_make_room(tmp_path: Path) -> None:
    made = capture(tmp_path / "kept", most_bytes=40_000)
    for i in range(200):
        keep(made, f"{i:03}", "word " * 100)
    made.close()
    files = conversation_files(tmp_path / "kept")
    assert len(files) > 2
    assert sum(file.stat().st_size for file in files) <= 40_000
    names = [json.loads(line)["id"] for file in files for line in file.read_text().splitlines()]
    assert names == [f"chatcmpl-{i:03}" for i in range(200 - len(names), 200)], "the newest are kept, in their order"


def test_what_cannot_be_written_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = capture(tmp_path / "kept")
    keep(made, "first")
    kept(tmp_path / "kept", 1)

    def full(descriptor: int, data: Any) -> int:
        written = real(descriptor, bytes(data)[:10])
        if written < 10:
            return written
        raise OSError(28, "No space left on device")

    real = os.write
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        keep(made, "second")
        until(lambda: made.counts.dropped)
    keep(made, "third")
    made.close()
    assert [record["id"] for record in kept(tmp_path / "kept", 2)] == ["chatcmpl-first", "chatcmpl-third"]
    assert (made.counts.written, made.counts.dropped) == (2, 1)


PROGRAM = """
import json, sys
for line in sys.stdin:
    record = json.loads(line)
    text = record["messages"][0]["content"]
    if text == "end":
        sys.exit(1)
    if text == "garbage":
        print("no JSON", flush=True)
        continue
    record["messages"][0]["content"] = text.upper()
    print("null" if text == "withhold" else json.dumps(record), flush=True)
"""


def test_a_program_decides_what_is_kept_and_what_it_spoils_is_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    redaction = Redaction([], f"{sys.executable} {tmp_path / 'program.py'}")
    made = capture(tmp_path / "kept", redaction)
    long = "long " * 40_000  # more than a pipe holds
    for name in ("first", "withhold", "garbage", "end", "last", long):
        keep(made, name)
    made.close()
    found = [record["messages"][0]["content"] for record in kept(tmp_path / "kept", 3)]
    assert found == ["FIRST", "LAST", long.upper()]
    assert (made.counts.written, made.counts.withheld) == (3, 3)


def test_a_folder_a_file_or_a_program_of_no_use_is_a_sentence(tmp_path: Path) -> None:
    made = capture(tmp_path / "kept")
    with pytest.raises(ConfigError, match="another server captures into"):
        capture(tmp_path / "kept")
    made.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be captured into"):
        capture(tmp_path / "file")
    for content, says in (("", "holds no regular expression"), ("good\n(bad", "line 2 of .* is not a regular expression")):
        (tmp_path / "patterns").write_text(content)
        with pytest.raises(ConfigError, match=says):
            read_patterns(tmp_path / "patterns")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_patterns(tmp_path / "nowhere")
    for command, says in (("", "is empty"), ("'open", "cannot be split"), ("/nowhere/program", "cannot be started")):
        with pytest.raises(ConfigError, match=says):
            Redaction([], command)


def test_a_chat_that_a_later_one_continues_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    turns = [{"role": role, "content": str(i)} for i, role in enumerate(("user", "assistant", "user", "assistant"))]
    records = [{"id": "a", "choice": 0, "messages": turns[:2]}, {"id": "b", "choice": 0, "messages": turns}]
    (folder / "conversations-000001.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = choose_rated(folder, tmp_path / "out.jsonl", None)
    assert (chosen.written, chosen.continued) == (1, 1)
    assert json.loads((tmp_path / "out.jsonl").read_text())["id"] == "b"
    (folder / "conversations-000002.jsonl").write_text("no JSON\n")
    with pytest.raises(DataError, match="line 1 is not valid JSON"):
        choose_rated(folder, tmp_path / "other.jsonl", None)
    assert not (tmp_path / "other.jsonl").exists()
    with pytest.raises(DataError, match="holds no captured conversations"):
        choose_rated(tmp_path, tmp_path / "other.jsonl", None)
