"""vLLM's build for CPUs reads our exports and quantised directories as they are, and finds in them the model that we find."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner
from vllm_environment import vllm_python

from real_model import spread_model
from twostroke.cli.main import app
from twostroke.engine.llm import LLM
from twostroke.interop.export_model import export_model
from twostroke.scheduling.sampling_params import SamplingParams

IDS = [random.Random(1).randrange(1, 500) for _ in range(64)]

SCORE = """
import json, sys
from vllm import LLM, SamplingParams
ids = json.loads(sys.argv[2])
llm = LLM(model=sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4, enforce_eager=True)
params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
(answer,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
found = [row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
print("FOUND", json.dumps(found))
"""
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def ours(directory: Path) -> npt.NDArray[np.float64]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scores = LLM(directory).generate([IDS], params)[0].prompt_logprobs
    assert scores is not None
    return np.array([score.logprob for score in scores])


def theirs(directory: Path) -> npt.NDArray[np.float64]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMP_", "GOMP_"))}
    command = [str(vllm_python()), "-c", SCORE, str(directory), json.dumps(IDS)]
    done = subprocess.run(command, env=clean | QUIET, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return np.array(json.loads(line.removeprefix("FOUND ")))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["int8", "int4", "plain"])
def test_vllm_finds_the_model_that_we_find(scheme: str, tmp_path: Path) -> None:
    """vLLM rounds to bf16 between products, where we keep fp32: 0.07 nats a token on this model (measured, both schemes). A
    third of what another model of this shape differs by, some 0.1, lies above that and below a scale or zero point misread."""
    made, other = (spread_model(tmp_path / name, "6M", seed) for seed, name in enumerate(("model", "other")))
    directory = tmp_path / scheme
    if scheme == "plain":
        export_model(made, directory, to="hf", precision="bf16")
    else:
        nearest = ["--rounding", "nearest"] if scheme == "int4" else []
        done = CliRunner().invoke(app, ["quantize", str(made), str(directory), "--scheme", scheme, *nearest])
        assert done.exit_code == 0, done.output
    we = ours(directory)
    assert np.abs(theirs(directory) - we).mean() < np.abs(ours(other) - we).mean() / 3
