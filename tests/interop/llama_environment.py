"""llama.cpp in an environment of its own (``peers``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from interop.peers import ask


def ask_llama(file: Path, **wanted: Any) -> dict[str, Any]:
    """What ``llama_peer.py`` answers for the GGUF file ``file``; ``logits`` as an array (tokens, vocabulary)."""
    script = Path(__file__).with_name("llama_peer.py").read_text(encoding="utf-8")
    answer: dict[str, Any] = ask("llama", script, json.dumps({"file": str(file), **wanted}))
    if "logits" in answer:
        answer["logits"] = np.load(answer["logits"])
    return answer
