"""The benchmark of inference runs our engine and sums up what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from small_models import saved
from twostroke.kernels.native_library import library

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "inference"


@pytest.mark.alone
@pytest.mark.skipif(library() is None, reason="the native library was not built")
def test_our_engine_is_measured_beside_its_own_limits(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "m", max_positions=8192)[1]
    command = [sys.executable, str(BENCHMARK / "engines" / "twostroke_engine.py"), str(model), "--variant", "int8-head8"]
    command += ["--out", str(tmp_path / "out.json"), "--vocab-size", "97", "--repeats", "1", "--batches", "1", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert 0 < result["prefix_hit_share"][0] < 1
    assert 0 < result["decode_1_read_share"][0] < 1
    assert result["decode_1_beyond_products"][0] > 0  # a step does more than its products
    line = {"shape": "smollm-135m", "engine": "twostroke", "start_to_first_token_s": 1.0} | result
    (tmp_path / "raw.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    summed = subprocess.run(
        [sys.executable, str(BENCHMARK / "summary.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(BENCHMARK)},
        check=False,
    )
    assert summed.returncode == 0
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    for row in (
        "share of the bandwidth limit",
        "beyond its matrix products",
        "prefix hit",
        "peak memory",
        "bf16, head in int8",
    ):
        assert row in text
