"""llama.cpp in an environment of its own, made once and kept: only `make soak` asks for it.

``TWOSTROKE_PEERS`` names the folder that holds it (``llama`` in it); without it ``runs/peers`` in the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.3.36"


def llama_python() -> Path:
    """Its interpreter. Raises CalledProcessError where pip cannot install it."""
    folder = Path(os.environ.get("TWOSTROKE_PEERS") or ROOT / "runs" / "peers") / "llama"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"llama-cpp-python=={VERSION}", "gguf"], check=True)
    return python


def ask_llama(file: Path, **wanted: Any) -> dict[str, Any]:
    """What ``llama_peer.py`` answers for the GGUF file ``file``; ``logits`` as an array (tokens, vocabulary)."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMP_", "GOMP_"))}
    request = json.dumps({"file": str(file), **{key: str(v) if isinstance(v, Path) else v for key, v in wanted.items()}})
    peer = Path(__file__).with_name("llama_peer.py")
    done = subprocess.run(
        [llama_python(), peer], input=request, env=clean, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    answer: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    if "logits" in answer:
        answer["logits"] = np.load(answer["logits"])
    return answer
