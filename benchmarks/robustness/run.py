"""What strangers do to a server, measured on stories260K: each row a number beside its target.

    python benchmarks/robustness/run.py MODEL --out benchmarks/robustness/runs/NAME

MODEL is a model directory, or llama2.c's stories260K.bin beside its tok512.bin, which is imported first. How each row is
measured: README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
OVERLOAD_BODY = {"prompt": "Once upon a time there was a little", "max_tokens": 32, "temperature": 0}
PLACES = 128
MB = 10**6


@dataclass(frozen=True)
class Row:
    what: str
    value: float
    unit: str
    target: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass
class Server:
    url: str
    name: str
    process: subprocess.Popen[str]

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def cpu_s(self) -> tuple[float, float]:
        """Of the HTTP process and of the engine."""
        parent = psutil.Process(self.process.pid)
        engine = next(child for child in parent.children() if "engine_process" in " ".join(child.cmdline()))
        mine, its = (sum(process.cpu_times()[:2]) for process in (parent, engine))
        return mine, its

    def post(self, body: dict[str, Any], timeout_s: float = 120.0) -> httpx.Response:
        url = f"{self.url}/v1/completions"
        return httpx.post(url, json={"model": self.name} | body, timeout=timeout_s, trust_env=False)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        parts = urlsplit(self.url)
        peer = socket.socket()
        if receive_buffer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        peer.connect((parts.hostname, parts.port))
        return peer

    def request(self, body: dict[str, Any]) -> bytes:
        payload = json.dumps({"model": self.name} | body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload


@contextlib.contextmanager
def server(model: Path, home: Path, options: tuple[str, ...] = (), files: int | None = None) -> Iterator[Server]:
    """``twostroke serve`` from this source tree; ``files``: how many it may have open, as `ulimit -n` sets it."""
    command = [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0", "--json"]
    command += ["--max-concurrent", str(PLACES), *options]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "TWOSTROKE_HOME": str(home)}

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    with (home / "server.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, preexec_fn=limit)
    try:
        assert process.stdout is not None
        document = ""
        while not document.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server ended: {document}{(home / 'server.log').read_text()[-2000:]}")
            document += line
        ready = json.loads(document)
        if "error" in ready:
            raise SystemExit(ready["error"])
        yield Server(ready["url"], ready["model"], process)
        process.send_signal(signal.SIGTERM)
        process.wait(100)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def health_s(url: str) -> float:
    """Of a new connection: from before it is made to its answer."""
    began = time.perf_counter()
    parts = urlsplit(url)  # not by httpx, which reads its certificates for each new client
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    return time.perf_counter() - began


class Probe:
    """Asks ``/health`` twenty times a second, each time on a new connection, and keeps the longest wait."""

    def __init__(self, url: str) -> None:
        self.waits_s: list[float] = []
        self._url = url
        self._stop = threading.Event()

    def __enter__(self) -> Probe:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.waits_s.append(health_s(self._url))


def idle_connections(model: Path, home: Path) -> list[Row]:
    rows = []
    key_file = home / "keys"
    key_file.write_text("a-key\n")
    for kind, options, files in (
        ("", (), None),
        (", ulimit -n 1024", (), 1024),
        (", ulimit -n 1024 and a key file", ("--api-key-file", str(key_file)), 1024),
    ):
        with server(model, home, options, files) as served, contextlib.ExitStack() as held:
            for _ in range(1100):
                held.enter_context(served.connect())
            waits_s = [health_s(served.url) for _ in range(20)]
        rows.append(Row(f"/health beside 1,100 idle connections{kind}, longest of 20", 1e3 * max(waits_s), "ms", 100))
    return rows


def load(served: Server, clients: int, seconds: float) -> dict[str, Any]:
    """``load.py`` in a process of its own, with the share of a core that each side took."""
    command = [sys.executable, str(HERE / "load.py"), served.url, "--clients", str(clients), "--seconds", str(seconds)]
    command += ["--body", json.dumps({"model": served.name} | OVERLOAD_BODY)]
    before, began = served.cpu_s(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took_s = time.perf_counter() - began
    served_share, engine_share = ((after - start) / took_s for after, start in zip(served.cpu_s(), before, strict=True))
    return {"clients": clients, **json.loads(done.stdout), "http_cpu_share": served_share, "engine_cpu_share": engine_share}


def overload(model: Path, home: Path, raw: dict[str, Any]) -> list[Row]:
    with server(model, home) as served:
        raw["overload"] = [load(served, clients, 8.0) for clients in (32, 64)]
        # A machine's speed drifts by a third within a minute: each overload stands between two peaks, held to their mean.
        turns = [load(served, clients, 8.0) for clients in (*(PLACES, 10 * PLACES) * 3, PLACES)]
    below = max(run["answers_per_s"] for run in raw["overload"])
    raw["overload"] += turns
    peaks, overs = turns[::2], turns[1::2]
    peak = max(below, median(run["answers_per_s"] for run in peaks))
    ratio = median(
        2 * over["answers_per_s"] / (before["answers_per_s"] + after["answers_per_s"])
        for before, over, after in zip(peaks, overs, peaks[1:], strict=False)
    )
    refused_s = median(over["refusal_p99_s"] or 0.0 for over in overs)
    return [
        Row("answers a second at the peak of 32, 64 and 128 clients", peak, "1/s", 0, at_least=True),
        Row("goodput of 1,280 clients ÷ peak, median of three", ratio, "", 0.9, at_least=True),
        Row("429 under 1,280 clients, p99, median of three", 1e3 * refused_s, "ms", 50),
    ]


def long_prompts(model: Path, home: Path) -> list[Row]:
    text = "word " * 380_000
    with server(model, home) as served, Probe(served.url) as probe:
        posts = [threading.Thread(target=served.post, args=({"prompt": text},)) for _ in range(20)]
        for thread in posts:
            thread.start()
        for thread in posts:
            thread.join()
    return [Row("/health beside twenty prompts of 1.9 MB, longest", 1e3 * max(probe.waits_s), "ms", 200)]


def large_answers(model: Path, home: Path) -> list[Row]:
    body = {"prompt": "Once", "n": 128, "max_tokens": 190, "logprobs": 20, "ignore_eos": True}
    with server(model, home) as served, Probe(served.url) as probe:
        answer = served.post(body)
        answer.raise_for_status()
    what = f"/health beside an answer of {len(answer.content) / MB:.0f} MB, n=128 with 20 alternatives a token, longest"
    return [Row(what, 1e3 * max(probe.waits_s), "ms", 100)]


def chat_template(model: Path, home: Path) -> list[Row]:
    from twostroke.data.chat import ChatTemplate

    template = ChatTemplate((HERE / "qwen3_sized_template.jinja").read_text(encoding="utf-8"))
    template.start()
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"message {i}"} for i in range(5)]
    times_s, cpu_s = [], []
    for _ in range(1000):
        began, cpu = time.perf_counter(), time.process_time()
        template.render(messages)
        times_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - cpu)
    template.close()
    return [
        Row(
            "a chat template of Qwen3's size: the HTTP process's time for each request, median", 1e3 * median(cpu_s), "ms", 0.1
        ),
        Row("the same until the text is there, median", 1e3 * median(times_s), "ms", 1.0),
    ]


def gaps_s(served: Server) -> list[float]:
    """Between the events of one stream of 60 tokens."""
    body = {"model": served.name, "prompt": "Once upon", "max_tokens": 60, "stream": True, "ignore_eos": True}
    url = f"{served.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
        times = [time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")]
    return [later - sooner for sooner, later in itertools.pairwise(times)]


def biases(model: Path, home: Path, raw: dict[str, Any]) -> list[Row]:
    """The stream runs within the other request's 400 tokens; pairs in turn, so that a slow moment hits both."""
    every_token = {str(token): 1.0 for token in range(512)}
    found: dict[str, list[float]] = {"without": [], "with": []}
    with server(model, home) as served:
        for _ in range(5):
            for kind, bias in (("without", {}), ("with", every_token)):
                body = {"prompt": "One", "n": 100, "max_tokens": 400, "ignore_eos": True, "logit_bias": bias}
                other = threading.Thread(target=served.post, args=(body,))
                other.start()
                time.sleep(0.2)
                found[kind].append(median(gaps_s(served)))
                other.join()
    raw["stream_gaps_s"] = found
    ratio = median(found["with"]) / median(found["without"])
    return [Row("gaps of a stream beside n=100: with a bias on all 512 tokens ÷ without", ratio, "", 1.2)]


def unread_answers(model: Path, home: Path) -> list[Row]:
    body = {"prompt": [5] * 480, "n": 48, "max_tokens": 1, "prompt_logprobs": 20}
    with server(model, home, ("--max-concurrent", "1024")) as served, contextlib.ExitStack() as held:
        whole = len(served.post(body).content)
        before = served.rss_bytes
        for _ in range(20):
            held.enter_context(served.connect(4096)).sendall(served.request(body))
        time.sleep(12)
        grown = served.rss_bytes - before
        began = time.perf_counter()
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(100)
        stopped_s = time.perf_counter() - began
    return [
        Row(f"memory of twenty unread answers of {whole / MB:.0f} MB", grown / MB, "MB", 160),
        Row("SIGTERM to exit beside them", stopped_s, "s", 15),
    ]


median = statistics.median


def imported(source: Path, home: Path) -> Path:
    if source.is_dir():
        return source
    directory = home / "stories260K"
    command = [sys.executable, "-m", "twostroke", "import", str(source), str(directory)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "TWOSTROKE_HOME": str(home)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return directory


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version()} | {
        name: version(name) for name in ("uvicorn", "httptools", "uvloop", "fastapi", "tokenizers")
    }


def summary(rows: list[Row], of: dict[str, Any]) -> str:
    lines = ["# What strangers do to a server", "", "| what | measured | target | |", "|---|---:|---:|---|"]
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        target = f"{sign} {row.target:g} {row.unit}".rstrip() if row.target else "–"
        lines.append(f"| {row.what} | {row.value:.3g} {row.unit} | {target} | {'' if row.met else 'missed'} |")
    about = ", ".join(f"{name} {value}" for name, value in of.items())
    return "\n".join([*lines, "", f"{about}.", ""])


MEASUREMENTS: dict[str, Callable[..., list[Row]]] = {
    "idle": idle_connections,
    "overload": overload,
    "prompts": long_prompts,
    "answers": large_answers,
    "template": chat_template,
    "biases": biases,
    "unread": unread_answers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), default=list(MEASUREMENTS))
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # this process holds the other ends of the connections
    conditions = recorded.conditions()
    rows: list[Row] = []
    raw: dict[str, Any] = {"versions": conditions | versions(), "files": [soft, hard]}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model = imported(args.model, home)
        for name in args.only:
            measure = MEASUREMENTS[name]
            began = time.perf_counter()
            found = measure(model, home, raw) if name in ("overload", "biases") else measure(model, home)
            rows += found
            raw.setdefault("seconds", {})[name] = time.perf_counter() - began
            for row in found:
                print(f"{row.what}: {row.value:.3g} {row.unit}{'' if row.met else '   MISSED'}", flush=True)
    raw["rows"] = [asdict(row) | {"met": row.met} for row in rows]
    recorded.write(args.out, {"raw.json": raw, "summary.md": summary(rows, raw["versions"])})


if __name__ == "__main__":
    main()
