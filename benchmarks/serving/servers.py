"""The servers that are compared: how each is started, when it is ready, and how it keeps still while another is measured."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READY_S = 600
STOP_S = 60
SLOTS, CONTEXT = 32, 4352
"""Requests that are computed together and tokens that each may have: all peers are set up for both."""

VARIANTS = {
    "twostroke": ("bf16", "int8", "int8-head8"),
    "vllm": ("bf16", "int8"),
    "llama.cpp": ("bf16", "int8"),
}
"""int8 is W8A8 of ours and of vLLM's, and Q8_0 of llama.cpp; ``-head8`` holds the output head in int8 as well."""

ON_REQUEST = {"twostroke": ("bf16-unbounded",)}
"""Variants that are measured where ``--variants`` names them: ``-unbounded`` is without the bound of steps with prompts."""


@dataclass
class Model:
    """The same weights as each server reads them."""

    name: str
    bf16: Path
    int8: Path
    gguf: dict[str, Path]


@dataclass
class Server:
    """A server of one variant. It is stopped (SIGSTOP) while others are measured, so that it takes nothing of theirs."""

    engine: str
    variant: str
    command: list[str]
    environment: dict[str, str]
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    form: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.variant}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> float:
        """Seconds to the first answer. Raises RuntimeError with the end of the log where there is none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=os.environ | self.environment, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
        body = json.dumps({"model": "model", "prompt": "one two three", "max_tokens": 2}).encode()
        while time.perf_counter() - began < READY_S:
            if self.process.poll() is not None:
                break
            request = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answer.read()
                return time.perf_counter() - began
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.stop()
        raise RuntimeError((self.folder / "log").read_text(encoding="utf-8", errors="replace")[-1500:])

    def cpu_s(self) -> tuple[float, float]:
        """Seconds of processor time so far: of the process that was started, which has the HTTP side, and of its others."""
        front = rest = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, _, fields = stat.read_text().rpartition(")")
            except OSError:  # it has ended
                continue
            words = fields.split()
            if self.process is not None and int(words[2]) == self.process.pid:
                seconds = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
                front, rest = (front + seconds, rest) if int(pid.split()[0]) == self.process.pid else (front, rest + seconds)
        return front, rest

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is None:
            return
        self.resume()
        self._send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STOP_S)
        self._send(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _send(self, what: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, what)


def server(engine: str, variant: str, model: Model, peers: Path, folder: Path) -> Server:
    port = free_port()
    own = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    scheme = "int8" if variant.startswith("int8") else "bf16"
    directory = model.int8 if scheme == "int8" else model.bf16
    if engine == "twostroke":
        command = [sys.executable, "-P", "-m", "twostroke", "serve", str(directory), "--port", str(port), "--dtype", scheme]
        command += ["--served-name", "model", *(["--head-dtype", "int8"] if variant.endswith("head8") else [])]
        command += ["--max-step-ratio", "off"] if variant.endswith("unbounded") else []
        own = {"PYTHONPATH": str(ROOT / "src")}
    elif engine == "vllm":
        # Not the command ``vllm``: it looks for a package of that name, and the build for CPUs is called otherwise.
        command = [str(peers / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(directory), "--port", str(port), "--dtype", "bfloat16"]
        command += ["--served-model-name", "model", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)]
        own = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
        own |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PATH": f"{peers / 'vllm' / 'bin'}:{os.environ['PATH']}"}
    else:
        binary = peers / "llama-build" / "bin" / "llama-server"
        command = [str(binary), "-m", str(model.gguf[scheme]), "--port", str(port), "--threads", "2", "--threads-batch", "2"]
        command += ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT), "--no-webui", "--alias", "model"]
        own = {}
    schema = FORM if engine != "llama.cpp" else {"json_schema": SCHEMA}
    return Server(engine, variant, command, own, folder / f"{engine}-{variant}", port, form=schema)


SCHEMA = {
    "type": "array",
    "minItems": 400,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "price": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "price", "tags"],
        "additionalProperties": False,
    },
}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "goods", "schema": SCHEMA}}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processor_line(machine: Mapping[str, Any]) -> str:
    """What ``machine`` says, in words."""
    kind = f"family {machine['cpu_family']} model {machine['cpu_model']}"
    return f"{machine['cpu']}, {kind}, {machine['processors']} processors ({', '.join(machine['features'])})"


def machine() -> dict[str, Any]:
    """Which processor it was: its name, family and features that decide which kernels run."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")

    def first(key: str) -> str:
        found = re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE)
        return found[1] if found else ""

    features = set(first("flags").split())
    asked = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    return {
        "cpu": first("model name"), "cpu_family": first("cpu family"), "cpu_model": first("model"),
        "processors": os.cpu_count(), "features": [name for name in asked if name in features],
    }  # fmt: skip
