"""Environments of programs that open our exports, made once and kept: large, so only ``make soak`` asks for them.

``TWOSTROKE_PEERS`` names the folder that holds them, by name; without it ``runs/peers`` in the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_model import greedy_reference, make_model
from twostroke.interop.export_model import export_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "llama": ("llama-cpp-python==0.3.36",),
    "mlx": ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2"),
    "onnx": ("onnxruntime==1.32.0", "onnxruntime-genai==0.18.0", "onnx==1.23.2", "numpy"),
    "openvino": ("openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "numpy"),
}

Run = Callable[..., str]


def folder_of(name: str) -> Path:
    return Path(os.environ.get("TWOSTROKE_PEERS") or ROOT / "runs" / "peers") / name


def environment(name: str, install: Callable[[Path, Run], None]) -> Path:
    """The interpreter of ``name``; ``install`` fills a new one once. Raises CalledProcessError where pip cannot; its output
    holds pip's words."""
    folder = folder_of(name)
    python, whole = folder / "bin" / "python", folder / ".whole"
    if whole.exists():
        return python

    def run(*words: str | Path) -> str:
        done = subprocess.run(list(map(str, words)), check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.stdout

    run(sys.executable, "-m", "venv", "--clear", folder)
    install(python, run)
    whole.touch()
    return python


def peer_python(name: str) -> Path:
    """The interpreter of a row of ``PACKAGES``."""
    return environment(name, lambda python, run: run(python, "-m", "pip", "install", "--quiet", *PACKAGES[name]))


def ask(name: str, script: str, *words: str | Path) -> Any:
    """What ``script`` prints after "FOUND " in the environment ``name``, as JSON."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OMP_", "GOMP_"))}
    command = [str(peer_python(name)), "-c", script, *map(str, words)]
    done = subprocess.run(
        command, env=clean | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def assert_answers_as_we_do(name: str, script: str, folder: Path) -> None:
    """64 greedy tokens of a chat with a trained model, exported to the format ``name``, with our tokenizer and template:
    ``script`` finds [prompt ids, answer ids]."""
    source = make_model(folder / "source", "6M")
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    export_model(source, folder / "out", to=name, precision="fp32")
    prompt, tokens = ask(name, script, folder / "out")
    ours, _ = greedy_reference(source, prompt, 64)
    assert tokens == ours[: len(tokens)]
    assert len(tokens) == 64 or ours[len(tokens) - 1] == 0  # it stops at the end of the text
