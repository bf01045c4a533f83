"""Takes out of captured conversations what must not be kept: by regular expressions, and by a program of the operator's."""

from __future__ import annotations

import json
import re
import selectors
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.core.errors import ConfigError

REDACTED = "[redacted]"
MAX_FILE_BYTES = 2**20
ANSWER_S = 10.0
"""Longest time in which the program must answer to a record."""


def read_patterns(path: Path) -> list[re.Pattern[str]]:
    """The regular expressions of a file, one a line; blank lines and lines that begin with # are skipped. Raises
    ConfigError."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        lines = data.decode().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text. It holds one regular expression a line.") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is over {MAX_FILE_BYTES} bytes. It holds one regular expression a line.")
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            try:
                found.append(re.compile(line))
            except (re.error, RecursionError, OverflowError) as error:
                raise ConfigError(f"line {number} of {path} is not a regular expression: {error}. Correct it.") from None
    if not found:
        raise ConfigError(f"{path} holds no regular expression. Write one a line.")
    return found


class Redaction:
    """Applies ``patterns``, then the program ``command``, which gets each record as a line of JSON and answers with one: the
    record to keep, or null. What it does not answer in time, or not in this form, is not kept."""

    def __init__(self, patterns: list[re.Pattern[str]], command: str | None = None) -> None:
        self._patterns = patterns
        self._words: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        if command is not None:
            try:
                self._words = shlex.split(command)
            except ValueError as error:
                raise ConfigError(f"the command {command!r:.100} cannot be split into words: {error}.") from None
            if not self._words:
                raise ConfigError("the command is empty. Name a program that reads and writes lines of JSON.")
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._words, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
        except OSError as error:
            raise ConfigError(
                f"{self._words[0]!r} cannot be started: {error.strerror or error}. Name another program."
            ) from None
        return self._process

    def text(self, text: str) -> str:
        """``text`` with each match replaced."""
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def record(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """What is to be kept of ``record``; None for nothing."""
        for name in ("messages", "tools"):
            if name in record:
                record[name] = self._within(record[name])
        return self._answered(record) if self._words else record

    def _within(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self._within(each) for each in value]
        if isinstance(value, Mapping):
            return {key: value[key] if key == "role" else self._within(value[key]) for key in value}
        return value

    def _answered(self, record: dict[str, Any]) -> dict[str, Any] | None:
        try:
            process = self._process if self._process is not None and self._process.poll() is None else self._start()
            line = self._ask(process, json.dumps(record).encode() + b"\n")
            answer = json.loads(line)
            if answer is None:
                return None
            if not isinstance(answer, dict) or not isinstance(answer.get("messages"), list):
                raise ValueError("not a record")
        except (OSError, ValueError, RecursionError, ConfigError):
            self.close()
            return None
        return answer

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], line: bytes) -> bytes:
        """Its answer to ``line``. Raises OSError and TimeoutError. It reads while it is written to, so neither waits for the
        other."""
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                ready = selector.select(ANSWER_S)
                if not ready:
                    raise TimeoutError("no answer")
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        line = line[process.stdin.write(line[:4096]) or 0 :]  # a pipe takes so many without waiting
                        if not line:
                            selector.unregister(process.stdin)
                    elif part := process.stdout.read(2**16):
                        answer += part
                    else:
                        raise BrokenPipeError("it has ended")
        return answer

    def close(self) -> None:
        """End the program."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            process.wait()
