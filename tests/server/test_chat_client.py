"""``twostroke chat URL``: in front of the scripted engine through a terminal and a pipe, and of servers that do not behave."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from serving import Served, echo_server, environment

from twostroke.cli.chat import remote
from twostroke.cli.main import main


def _at_terminal() -> None:
    """In a new process: Ctrl-C is typed at its terminal, and comes also where the tests run behind a shell that ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """``twostroke chat`` with ``words``, at a terminal of its own."""

    def __init__(self, home: Path, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twostroke", "chat", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_at_terminal,
            env=environment(home) | {"TERM": "dumb", "COLUMNS": "400"},  # or paths of tests are folded
        )
        os.close(theirs)
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str, within_s: float = 60.0) -> str:
        """What was printed since the last call, up to and with ``text``."""
        deadline = time.monotonic() + within_s
        while text.encode() not in self._seen:
            left_s = deadline - time.monotonic()
            assert left_s > 0, self._seen.decode(errors="replace")
            if select.select([self._ours], [], [], left_s)[0]:
                piece = os.read(self._ours, 65536)
                assert piece, self._seen.decode(errors="replace")
                self._seen += piece
        before, _, self._seen = self._seen.partition(text.encode())
        return before.decode(errors="replace") + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextlib.contextmanager
def at_terminal(home: Path, *words: str) -> Iterator[Terminal]:
    terminal = Terminal(home, *words)
    try:
        yield terminal
    finally:
        terminal.close()


def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``twostroke chat`` with ``text`` on its stdin."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    with pytest.raises(SystemExit) as ended:
        main(["chat", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(ended.value.code or 0), out, err


def test_a_conversation_at_a_terminal(echo: Served, tmp_path: Path) -> None:
    saved = tmp_path / "said.json"
    with at_terminal(tmp_path, echo.url, "--max-tokens", "4") as terminal:
        terminal.until("echo. /help lists the commands")
        terminal.until("> ")
        terminal.type("the fox\n")
        terminal.until("?@AB")
        terminal.until("[4 tokens, first after ")
        terminal.until("cut at max_tokens]")
        terminal.type("\n")
        terminal.until("The message is empty.")
        terminal.type("/set temperature 9x\n")
        terminal.until("error: temperature='9x' must be a number.")
        terminal.type("/sat\n")
        terminal.until("there is no command '/sat'. Did you mean '/set'?")
        terminal.type("/system Be brief.\n")
        terminal.until("The system prompt is set.")
        terminal.type("/set max_tokens default\n")
        terminal.until("max_tokens = default")
        terminal.type("go on\\\nand on\n")
        terminal.until("?@ABCDEFG")
        terminal.type("\x03")
        terminal.until("stopped]")
        terminal.until("> ")
        terminal.type("\x03")
        terminal.until("Ctrl-D or /quit ends.")
        terminal.type(f"/save {saved}\n")
        terminal.until("Saved to ")
        terminal.type(f"/save {saved}\n")
        terminal.until("said.json exists. Name a new file.")
        terminal.type("/reset\n/save other\n")
        terminal.until("nothing was said yet")
        terminal.until("> ")  # between two prompts Ctrl-D is the kernel's
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[i]["content"] for i in (0, 1, 2, 3)] == ["Be brief.", "the fox", "?@AB", "go on\nand on"]
    assert messages[4]["content"].startswith("?@ABCDEFG")


def test_a_server_that_goes_in_the_middle_of_an_answer_ends_the_answer_alone(echo_model: Path, tmp_path: Path) -> None:
    with echo_server(echo_model, tmp_path, ["--engine=--step-s=0.02"]) as served:
        with at_terminal(tmp_path, served.url) as terminal:
            terminal.until("> ")
            terminal.type("at length\n")
            terminal.until("?@AB")
            served.process.kill()
            terminal.until("error: the server ended in the middle of its answer.")
            served.process.wait(60)
            terminal.type("again\n")
            terminal.until("error: nothing answers at http://127.0.0.1:")
            terminal.type("/quit\n")
            assert terminal.process.wait(60) == 0


def test_lines_of_a_pipe_are_one_conversation(
    echo: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "one\n\n//two\n/set max_tokens 2\nthree"
    code, out, err = piped(monkeypatch, capsys, lines, echo.url, "--max-tokens", "4")
    assert (code, out, err) == (0, "?@AB\n?@AB\n?@\n", "max_tokens = 2\n")
    code, out, _ = piped(monkeypatch, capsys, lines, echo.url, "--max-tokens", "4", "--system", "s", "--json")
    document = json.loads(out)
    said = [message["content"] for message in document["messages"]]
    assert said == ["s", "one", "?@AB", "/two", "?@AB", "three", "?@"]
    assert [(a["output_tokens"], a["finish_reason"]) for a in document["answers"]] == [
        (4, "length"),
        (4, "length"),
        (2, "length"),
    ]


def test_a_conversation_that_outgrows_the_context_is_a_sentence(
    echo: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = piped(monkeypatch, capsys, "hi\n" + "fox " * 5000, echo.url, "--max-tokens", "2")
    assert (code, out) == (2, "?@\n")
    assert "this model's context is 4096 tokens" in err
    assert "/reset" in err


@pytest.mark.parametrize(
    ("words", "text", "sentence"),
    [
        (["URL"], "", "there is no message on stdin."),
        (["URL"], " \n\n", "there is no message on stdin."),
        (["ftp://127.0.0.1:1"], "x", "must look like http://127.0.0.1:8000"),
        (["http://127.0.0.1:99999"], "x", "must look like"),
        (["http://[::1/"], "x", "must look like"),
        (["127.0.0.1:8000"], "x", "A server is named by its URL: http://127.0.0.1:8000."),
        (["URL/elsewhere"], "x", "there is no route /elsewhere/v1/models."),
        (["URL", "--served-name", "other"], "x", "does not serve 'other'. Served: echo."),
        (["URL", "--dtype", "int8"], "x", "the engine's options belong to `twostroke serve`."),
        (["URL", "--temperature", "-1"], "x", "must be a number from 0 to 100."),
        (["nowhere", "--served-name", "m"], "x", "are for a server's URL."),
        (["nowhere"], "x", "does not exist"),
    ],
)
def test_bad_input_is_one_sentence(
    echo: Served,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    text: str,
    sentence: str,
) -> None:
    code, out, err = piped(monkeypatch, capsys, text, *(word.replace("URL", echo.url) for word in words))
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


MODELS = b'{"data": [{"id": "m", "chat_template": false}]}'
START = b'data: {"choices": [{"delta": {"content": "a\\u001b[2Jb"}}]}\n\n'


class Scripted(BaseHTTPRequestHandler):
    """Lists one model to holders of the key, and answers chats with ``body``."""

    models, body, key = MODELS, b"", ""
    asked: list[dict[str, object]]

    def do_GET(self) -> None:
        allowed = not self.key or self.headers.get("Authorization") == f"Bearer {self.key}"
        self._send(200 if allowed else 401, self.models)

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(200, self.body)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has left
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def scripted(**script: object) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """The URL of such a server, and the chats that it was asked for."""
    asked: list[dict[str, object]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Scripted,), {**script, "asked": asked}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ({"models": b"<html>"}, "not as an OpenAI-compatible server"),
        ({"models": b"[" * 100_000}, "not as an OpenAI-compatible server"),
        ({"models": b'{"data": []}'}, "lists no model"),
        ({"key": "sesame"}, "wants an API key that it knows"),
        ({"body": START}, "ended in the middle of its answer"),
        ({"body": b"data: {\n\n"}, "an event that is not JSON"),
        ({"body": b'data: {"choices": [7]}\n\n'}, "another form than OpenAI's"),
        ({"body": b'data: {"error": {"message": "the engine was lost."}}\n\n'}, "the engine was lost."),
        ({"body": b"data: " + b"a" * (remote.MAX_LINE_BYTES + 2**17)}, "an event of over"),
    ],
)
def test_a_server_that_does_not_behave_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: dict[str, object], sentence: str
) -> None:
    with scripted(**script) as (url, _):
        code, _, err = piped(monkeypatch, capsys, "hello\n", url)
    assert code in (1, 2)
    assert sentence in err.splitlines()[-1]


def test_a_key_comes_from_the_file_or_the_environment_and_a_template_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# comment\nsesame\n")
    with scripted(key="sesame", body=START + b"data: [DONE]\n\n") as (url, asked):
        code, out, err = piped(monkeypatch, capsys, "hello\n", url, "--api-key-file", str(key_file))
        assert (code, out) == (0, "a\x1b[2Jb\n")  # a pipe gets the text as it is
        assert "without a chat template" in err
        assert asked[0]["stop"] == ["\nUser:"]
        monkeypatch.setenv(remote.KEY_VARIABLE, "sesame")
        assert piped(monkeypatch, capsys, "hello\n", url)[0] == 0
        monkeypatch.setenv(remote.KEY_VARIABLE, "ses\name")
        code, _, err = piped(monkeypatch, capsys, "hello\n", url)
        assert (code, "an HTTP header cannot carry" in err) == (2, True)


def test_a_terminal_is_not_obeyed_by_a_models_text(tmp_path: Path) -> None:
    with scripted(body=START + b"data: [DONE]\n\n") as (url, _), at_terminal(tmp_path, url) as terminal:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("a\ufffd[2Jb")
