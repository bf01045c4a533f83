"""Pages that plans count are those that the engine's scheduler takes and gives back."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines import machine, small_llama
from small_models import SPECS, saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.policy import MAX_PAGES, PAGE_TOKENS
from twostroke.engine.core import EngineCore
from twostroke.planner.serving.memory import (
    batch_pages,
    decoding_pages,
    largest_batch,
    request_pages,
    touched_pages,
    whole_pages,
)
from twostroke.planner.serving.plan import plan_serving, request_kv_bytes
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.weights import kv_bytes_per_token
from twostroke.scheduling.sampling_params import SamplingParams


def pages_used(directory: Path, prompt: int, output: int, prompts: int = 1, n: int = 1) -> list[int]:
    """Pages that are held after each step of the engine, all requests together."""
    engine = EngineCore(
        directory, EngineSettings(dtype="fp32", kv_cache_bytes=2**23, n_threads=1, max_running=32, token_budget=64)
    )
    for i in range(prompts):
        tokens = [(7 * i + j) % 90 + 2 for j in range(prompt)]
        engine.add_request(str(i), tokens, SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0, n=n))
    used = []
    while engine.has_work:
        step = engine.scheduler.schedule()
        used.append(engine.scheduler.pool.n_used)  # at most so many while it is computed
        engine.scheduler.update(step, [2 if step.samples(i) else None for i in range(len(step.requests))])
    return used


@pytest.mark.parametrize("window", [1, 16, 17, 33, 100, 500])
@pytest.mark.parametrize(("prompt", "output"), [(10, 200), (100, 100), (150, 40), (40, 3)])
def test_a_windows_pages_are_those_that_the_engine_holds(tmp_path: Path, window: int, prompt: int, output: int) -> None:
    _, directory = saved("mistral", tmp_path / "m", sliding_window=window)
    spec = SPECS["mistral"].with_(sliding_window=window)
    # The engine never computes the last token, so a plan's last page may be one that it does not take.
    shape = ServingShape(prompt_tokens=prompt, output_tokens=output - 1)
    used = pages_used(directory, prompt, output)
    assert max(used) == request_pages(spec, shape)
    if output >= 100:  # it has decoded for longer than a window of the prompt's pages lasts
        assert max(used[-60:]) == decoding_pages(spec, shape)


def test_requests_behind_a_window_hold_no_more_than_a_batch_is_planned_for(tmp_path: Path) -> None:
    _, directory = saved("mistral", tmp_path / "m", sliding_window=32)
    spec, shape = SPECS["mistral"].with_(sliding_window=32), ServingShape(batch=4, prompt_tokens=20, output_tokens=150)
    assert max(pages_used(directory, 20, 151, prompts=4)) == batch_pages(spec, shape, 4) == 4 * 3
    assert whole_pages(shape) == 11


def test_a_layer_that_sees_everything_keeps_every_page() -> None:
    spec = SPECS["qwen2"]  # a window in two of its three layers
    assert spec.window_of_every_layer is None
    shape = ServingShape(prompt_tokens=20, output_tokens=150)
    assert request_pages(spec, shape) == decoding_pages(spec, shape) == whole_pages(shape)


@pytest.mark.parametrize(("prompt", "n"), [(40, 8), (33, 3), (16, 4), (7, 2), (30, 1)])
def test_answers_to_one_prompt_share_its_pages_as_in_the_engine(tmp_path: Path, prompt: int, n: int) -> None:
    _, directory = saved("llama", tmp_path / "m")
    shape = ServingShape(batch=2 * n, prompt_tokens=prompt, output_tokens=29, answers=n)
    assert max(pages_used(directory, prompt, 30, prompts=2, n=n)) == batch_pages(SPECS["llama"], shape, 2 * n)
    assert touched_pages(SPECS["llama"], shape) == batch_pages(SPECS["llama"], shape, 2 * n)


@pytest.mark.parametrize("shape", [
    ServingShape(prompt_tokens=40, output_tokens=100),
    ServingShape(batch=8, prompt_tokens=40, output_tokens=100, answers=8),
    ServingShape(prompt_tokens=300, output_tokens=100),
])  # fmt: skip
@pytest.mark.parametrize("window", [None, 50])
def test_the_largest_batch_is_the_last_that_the_pages_hold(shape: ServingShape, window: int | None) -> None:
    spec = SPECS["mistral"].with_(sliding_window=window)
    for pages in (1, 9, 10, 11, 64, 1000):
        most = largest_batch(spec, shape, pages)
        assert most % shape.answers == 0
        assert most == 0 or batch_pages(spec, shape, most) <= pages
        assert batch_pages(spec, shape, most + shape.answers) > pages


def test_a_plan_of_a_window_holds_more_requests_than_one_that_keeps_everything() -> None:
    window, everything = (small_llama(sliding_window=w, max_positions=4096) for w in (256, None))
    shape = ServingShape(batch=4, prompt_tokens=128, output_tokens=3000)
    plans = [plan_serving(spec, shape, machine()) for spec in (window, everything)]
    assert plans[0].largest_batch > 10 * plans[1].largest_batch
    assert request_kv_bytes(window, shape) == 17 * PAGE_TOKENS * kv_bytes_per_token(window)


def test_a_plan_of_positions_that_a_config_only_tells_of_takes_the_pages_that_the_engine_takes() -> None:
    narrow = {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "d_model": 2, "d_ff": 2}
    plan = plan_serving(small_llama(max_positions=10**9, **narrow), ServingShape(), machine())
    assert plan.pages == MAX_PAGES


def test_eight_answers_to_one_prompt_are_one_prefill_and_eight_rows() -> None:
    """Neither eight prompts nor one answer."""
    spec = small_llama()
    one, eight = (ServingShape(batch=n, prompt_tokens=200, output_tokens=50) for n in (1, 8))
    answers = ServingShape(batch=8, prompt_tokens=200, output_tokens=50, answers=8)
    apart, alone, together = (plan_serving(spec, shape, machine()) for shape in (eight, one, answers))
    assert together.ttft_s == alone.ttft_s == together.loaded.ttft_s
    assert together.tpot_s == apart.tpot_s > alone.tpot_s
    assert together.output_tok_per_s == pytest.approx(8 * 50 / (alone.ttft_s + 50 * apart.tpot_s))
    assert batch_pages(spec, answers, 8) == 12 + 8 * 4  # 199 // 16 shared, of 16 each
    with pytest.raises(ConfigError, match="batch=8 must be a multiple of answers=3"):
        ServingShape(batch=8, answers=3)
