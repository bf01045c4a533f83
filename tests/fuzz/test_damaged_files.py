"""Damaged files of every kind: each loads, or is refused with a sentence, in little time and memory, and nothing crashes.

Files are read in a child process, so that a crash or a memory that runs away is a finding with its seed. To see one again:
``python tests/fuzz/worker.py FOLDER SEED 1 SUBJECT``. A small share of each kind is in the normal suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from subjects import PUBLISHED, SUBJECTS

import twostroke
from assets_folder import ASSETS, REPOSITORY

WORKER = Path(__file__).with_name("worker.py")
COUNTS = {
    **dict.fromkeys(("gguf", "gguf_model", "gguf_gemma3", "gguf_phi3", "gguf_gpt_oss", "gguf_deepseek"), 10_000),
    **dict.fromkeys(("gguf_first_part", "gguf_second_part", "kept_gguf_config", "kept_gguf_weights"), 5_000),
    **dict.fromkeys(("safetensors", "llama2c", "tok512", "tokenizer", "tokenizer_config", "model_config"), 10_000),
    **dict.fromkeys((f"{name}_{file}" for name in (*PUBLISHED, "int4") for file in ("config", "weights")), 5_000),
    **dict.fromkeys(("adapter_config", "adapter_own", "adapter_weights"), 4_000),
    "config": 30_000,
}
"""Of each kind of file: 10,000 of every format."""
OTHERS = 1_000
"""Of every kind that is no format of models."""

SHARE = 25
"""Of each kind, in the normal suite."""

PORTION, MOST_S = 1_000, 900.0
"""Files read by one child, and how long it may live on a machine that others use: alone a thousand take it ten seconds."""


def read_damaged(root: Path, first: int, count: int, names: list[str], most_s: float) -> None:
    """Fails, naming subjects and seeds, where a file ended the child or was not read as it should be."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = str(Path(twostroke.__file__).parents[1])
    command = [sys.executable, str(WORKER), str(root), str(first), str(count), *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=most_s, cwd=REPOSITORY)
        output, end = done.stdout, f"ended with {done.returncode}: {done.stderr[-2000:]}"
        whole = done.returncode == 0
    except subprocess.TimeoutExpired as expired:
        output, end, whole = (expired.stdout or b"").decode(), f"was still reading after {most_s:.0f} s", False
    findings = [json.loads(line) for line in output.splitlines()]
    assert not findings, "\n".join(f"{f['subject']} seed {f['seed']}: {f['wrong']}" for f in findings[:5])
    assert whole, f"the child that read {(root / 'current').read_text()} {end}"


def present(names: list[str]) -> list[str]:
    return [name for name in names if ASSETS.is_dir() or not SUBJECTS[name].needs_assets]


def test_a_share_of_damaged_files_of_every_kind(tmp_path: Path) -> None:
    read_damaged(tmp_path / "files", 0, SHARE, present(sorted(SUBJECTS)), 250)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_damaged_files_by_the_thousand(name: str, tmp_path: Path) -> None:
    if not present([name]):
        pytest.skip(f"the shared assets are not at {ASSETS}; set TWOSTROKE_ASSETS to their folder")
    count = COUNTS.get(name, OTHERS)
    for first in range(0, count, PORTION):
        read_damaged(tmp_path / str(first), first, min(PORTION, count - first), [name], MOST_S)
