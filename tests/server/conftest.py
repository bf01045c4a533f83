"""The echo server (real HTTP process, scripted engine) and how to talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from twostroke.core.families import config_from_spec
from twostroke.core.spec import ModelSpec
from twostroke.data.tokenizer import train_tokenizer

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def environment(home: Path) -> dict[str, str]:
    """Of a child that runs from this source tree, with a Twostroke home of its own."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "TWOSTROKE_HOME": str(home), "PYTHONWARNINGS": "default"}


@pytest.fixture(scope="session")
def echo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough of a model directory for the HTTP process: config, tokenizer, chat template. No weights."""
    directory = tmp_path_factory.mktemp("echo-model")
    train_tokenizer(iter(["the quick brown fox jumps over the lazy dog " * 3]), 300, directory / "tokenizer.json")
    spec = ModelSpec("llama", 300, 1, 16, 2, 2, 8, 32, 4096, eos_token_ids=(0,))
    (directory / "config.json").write_text(json.dumps(config_from_spec(spec)))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    return directory


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
def echo_server(model: Path, home: Path, options: Sequence[str] = ()) -> Iterator[Served]:
    command = [sys.executable, str(HERE / "echo_server.py"), str(model), *options]
    stderr = home / "stderr.txt"
    with stderr.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(home))
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


@pytest.fixture(scope="module")
def echo(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One echo server for the tests of a module that leave it as they found it."""
    with echo_server(echo_model, tmp_path_factory.mktemp("echo")) as served:
        yield served
