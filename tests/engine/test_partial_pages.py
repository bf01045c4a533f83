"""A prompt that parts from a known one within a page takes over what comes before, and answers as if it had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.schemes import CACHE_TYPES
from twostroke.engine.core import EngineCore
from twostroke.kernels.native_library import library
from twostroke.scheduling.sampling_params import SamplingParams

RUNNERS = ("torch", "native") if library() is not None else ("torch",)
PROMPT = [5, 9, 3, 44, 7, 8, 90, 17, 33, 2, 60, 61, 62, 3, 4, 4, 4, 12, 13, 71] * 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


def answer(core: EngineCore, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    core.add_request("r", prompt, params)
    return [token for _ in iter(lambda: core.has_work, False) for event in core.step() for token in event.token_ids]


def opened(model: Path, **settings: Any) -> EngineCore:
    return EngineCore(model, EngineSettings(**{"n_threads": 1, "dtype": "fp32", "kv_cache_bytes": 2**20, **settings}))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kv", CACHE_TYPES)
def test_a_prompt_takes_over_part_of_a_page(kv: str, runner: str, tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "m", d_model=64, n_heads=4, head_dim=32)[1]
    settings = {"kv_dtype": kv, "runner": runner, "page_tokens": 32}
    core = opened(model, **settings)
    first = answer(core, PROMPT)
    prompts = [[*PROMPT[:52], 80, 81, 82], [*PROMPT, *first, 50, 51], PROMPT[:52], [*PROMPT[:52], 80, 81, 85], PROMPT]
    hits = [52, 64, 51, 54, len(PROMPT) - 1]  # seven tokens of a page are not worth a copy
    for prompt, expected in zip(prompts, hits, strict=True):
        before = core.stats().prefix_hit_tokens
        assert answer(core, prompt) == answer(opened(model, **settings), prompt)
        assert core.stats().prefix_hit_tokens - before == expected
    assert core.stats().pages_used == 0


def test_a_step_that_was_lost_takes_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved("llama", tmp_path / "m")[1]
    core, other = opened(model), [*PROMPT[:25], 80, 81, 82, 83]
    answer(core, PROMPT)
    core.add_request("r", other, GREEDY)

    def fails(pairs: object) -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patched:
        patched.setattr(core.pool, "copy", fails)
        with pytest.raises(RuntimeError, match="lost"):
            core.step()
    assert core.stats().pages_used == 0
    tokens = [token for _ in iter(lambda: core.has_work, False) for event in core.step() for token in event.token_ids]
    assert tokens == answer(opened(model), other)
    assert answer(core, [*other, 84]) == answer(opened(model), [*other, 84])


def test_scored_prompts_and_other_clients_take_over_nothing(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "m")[1]
    core = opened(model, separate_prefixes=True)
    answer(core, PROMPT)
    answer(core, PROMPT[:25], SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0))
    core.add_request("r", [*PROMPT[:25], 80], GREEDY, client="another")
    while core.has_work:
        core.step()
    assert core.stats().prefix_hit_tokens == 0
