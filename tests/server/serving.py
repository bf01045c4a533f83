"""How tests start the echo server and stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from twostroke.server.token_stream import TokenStream

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"


def environment(home: Path) -> dict[str, str]:
    """Of a child that runs from this source tree, with a Twostroke home of its own."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "TWOSTROKE_HOME": str(home), "PYTHONWARNINGS": "default"}


def echo_command(model: Path, options: Sequence[str] = ()) -> list[str]:
    return [sys.executable, str(HERE / "echo_server.py"), str(model), *options]


@dataclass
class Served:
    """A server process that has said that it is ready."""

    process: subprocess.Popen[str]
    url: str
    engine_pid: int
    stderr: Path

    def stop(self, timeout_s: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def echo_server(
    model: Path, home: Path, options: Sequence[str] = (), preexec: Callable[[], None] | None = None
) -> Iterator[Served]:
    stderr = home / "stderr.txt"
    with stderr.open("w") as log:
        process = subprocess.Popen(
            echo_command(model, options),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(home),
            preexec_fn=preexec,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, stderr.read_text()
        yield Served(process, stderr=stderr, **json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def metric(web: httpx.Client, name: str) -> float:
    for line in web.get("/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def until(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    """Wait for what is to come. The limit is a machine's that others use."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_open(url: str) -> bool:
    """Whether connections are accepted. One that came in the moment before the end is closed without an answer."""
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=20).status_code == 200
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return False


@contextlib.contextmanager
def held(file: Path) -> Iterator[None]:
    """Answers of an echo engine with ``--hold file`` do not end meanwhile, so that as many run as were asked for."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def named_events(text: str) -> list[dict[str, Any]]:
    """Server-sent events, each of whose names is its data's type."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@contextlib.contextmanager
def real_server(model: Path, home: Path, options: Sequence[str] = (), name: str = "echo") -> Iterator[Served]:
    """``twostroke serve`` of a model with weights."""
    stderr = home / "stderr.txt"
    words = [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0", "--json", "--served-name", name, *options]
    with stderr.open("w") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(home))
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] not in ("", "}\n"):
            lines.append(process.stdout.readline())
        assert lines[-1], stderr.read_text()
        yield Served(process, json.loads("".join(lines))["url"], 0, stderr)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def serve_command(model: Path, home: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`twostroke serve MODEL --json`, and the address that it announces. It must end well on SIGTERM."""
    command = [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0", "--json", *options]
    with (home / "stderr").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(home))
    try:
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            with contextlib.suppress(ValueError):
                json.loads(text)
                break
        assert text, (home / "stderr").read_text()
        yield process, json.loads(text)["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def tokens_of(stream: TokenStream, wake: asyncio.Event) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(40):
        while True:
            await wake.wait()
            wake.clear()
            for delta in stream.take():
                found += delta.token_ids
                if delta.finish_reason is not None:
                    return found
