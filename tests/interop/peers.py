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

import torch

from real_model import greedy_reference, make_model
from twostroke.interop.export_model import export_model
from twostroke.interop.export_targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "coreml": ("torch==2.13.0", "coremltools==9.0", "numpy", "tokenizers", "jinja2"),
    "executorch": ("torch==2.13.0", "executorch==1.5.1", "tokenizers", "jinja2"),
    "litert": ("torch==2.13.0", "litert-torch==0.10.0", "tokenizers", "jinja2"),
    "llama": ("llama-cpp-python==0.3.36",),
    "mlx": ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2"),
    "onnx": ("onnxruntime==1.32.0", "onnxruntime-genai==0.18.0", "onnx==1.23.2", "numpy"),
    "openvino": ("openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "numpy"),
}

Run = Callable[..., str]

EXPORT = """
import json, sys
sys.path.append(sys.argv[2])  # after our own packages
from twostroke.interop.export_model import export_model
for source, out, precision in json.loads(sys.argv[1]):
    export_model(source, out, to=sys.argv[3], precision=precision)
"""


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


def export_with_packages(name: str, exports: list[tuple[str, str, str]]) -> None:
    """Exports (source, out, precision) to the format ``name`` by its packages from the environment of that name."""
    (site,) = peer_python(name).parents[1].glob("lib/python*/site-packages")
    command = [sys.executable, "-W", "ignore", "-c", EXPORT, json.dumps(exports), str(site), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def error(got: Any, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, as a share of that of the logits."""
    return float((torch.tensor(got) - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())


def assert_answers_as_we_do(name: str, script: str, folder: Path, size: str = "6M") -> None:
    """64 greedy tokens of a chat with a trained model, exported to the format ``name``, with our tokenizer and template:
    ``script`` finds [prompt ids, answer ids]."""
    source = make_model(folder / "source", size)
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    if TARGETS[name].packages:
        export_with_packages(name, [(str(source), str(folder / "out"), "fp32")])
    else:
        export_model(source, folder / "out", to=name, precision="fp32")
    prompt, tokens = ask(name, script, folder / "out")
    ours, _ = greedy_reference(source, prompt, 64)
    assert tokens == ours[: len(tokens)]
    assert len(tokens) == 64 or ours[len(tokens) - 1] == 0  # it stops at the end of the text
