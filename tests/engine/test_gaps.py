"""The gaps of a stream beside one request of a hundred answers: what that request asks for must not show in them.

`python tests/engine/test_gaps.py` prints them all. Counted work, which a busy machine does not change, is in test_adjust.py.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams

N_VOCAB = 2048
ASKED: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": dict.fromkeys(range(1012), 0.5)},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "held-off ends": {"stop_token_ids": tuple(range(1024)), "min_tokens": 200},
    "logprobs": {"logprobs": 20},
}


def gap_s(core: EngineCore, n_prompt: int, **asked: Any) -> float:
    """Median seconds of this thread between the tokens of a stream of 60 beside a request of 100 answers.

    The engine runs in one thread here, so other programs on the processor do not count."""
    stream = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    beside = SamplingParams(temperature=1.0, max_tokens=200, n=100, ignore_eos=True, seed=1, **asked)
    core.add_request("beside", [i % N_VOCAB for i in range(n_prompt)], beside)
    while core.scheduler.n_running < 100 or core.scheduler.n_waiting:
        core.step()
    core.add_request("stream", [1, 2, 3], stream)
    times: list[float] = []
    while len(times) < 60:
        times += [time.thread_time() for event in core.step() if event.request_id == "stream"]
    core.abort("beside")
    return statistics.median(b - a for a, b in pairwise(times))


def ratios(folder: Path, n_prompt: int = 100, rounds: int = 5) -> dict[str, float]:
    """Of each kind the gap over that beside the same answers without it: the least of several rounds, taken in turns."""
    shape = {"d_model": 64, "n_layers": 5, "n_heads": 8, "n_kv_heads": 4, "d_ff": 172}  # stories260K's
    directory = saved("llama", folder / "m", vocab_size=N_VOCAB, max_positions=8192, **shape)[1]
    core = EngineCore(directory, EngineSettings(n_threads=1, max_running=128))
    gaps: dict[str, list[float]] = {name: [] for name in ("nothing", *ASKED)}
    for _ in range(rounds):
        for name, found in gaps.items():
            found.append(gap_s(core, n_prompt, **ASKED.get(name, {})))
    return {name: min(found) / min(gaps["nothing"]) for name, found in gaps.items()}


@pytest.mark.soak
def test_a_thousand_biases_beside_a_stream_do_not_show_in_its_gaps(tmp_path: Path) -> None:
    found = ratios(tmp_path)
    assert found["biases"] <= 1.2
    assert found["held-off ends"] <= 1.2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for n in (100, 2000):
            print(f"prompt of {n}:", {name: round(ratio, 2) for name, ratio in ratios(Path(folder) / str(n), n).items()})
    sys.exit()
