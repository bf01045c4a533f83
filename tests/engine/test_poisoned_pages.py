"""What one request leaves in pages that it gives back, when its keys and values are not finite, harms nobody."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.engine.kv_pool import token_bytes
from twostroke.kernels.native_library import library
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams

BROKEN = 96
"""The token whose embedding is not finite; no innocent prompt has it, and nobody may choose it."""

SHARED = list(range(20, 40))
"""A whole page and more: what culprits, before their first broken token, and some others begin with."""

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias=((BROKEN, -100.0),))


@pytest.fixture(scope="module", params=["llama", "mistral"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, so that the broken embedding is in no logit. Mistral's window of 11 gives pages back while the culprit runs."""
    folder = tmp_path_factory.mktemp(request.param)
    decoder, _ = saved(request.param, folder / "healthy")
    assert not decoder.spec.tied_embeddings
    with torch.no_grad():
        decoder.embed.weight[BROKEN] = float("nan")
    return save_model(decoder, decoder.spec, folder / "broken")


def engine_of(directory: Path, runner: str, kv_dtype: str) -> EngineCore:
    """With few pages, so that those which the culprit had are in use again at once."""
    config = EngineSettings(
        dtype="fp32",
        kv_dtype=kv_dtype,
        runner=runner,
        n_threads=1,
        page_tokens=16,
        token_budget=40,
        max_running=8,
        max_model_len=96,
    )
    made = EngineCore(directory, config)
    n_pages = 14
    bytes_ = token_bytes(made.spec, kv_dtype) * 16 * n_pages
    return EngineCore(directory, EngineSettings(**{**vars(config), "kv_cache_bytes": bytes_}))


Culprit = Callable[[EngineCore, int], None]


def answers_of(engine: EngineCore, culprit: Culprit | None = None) -> list[tuple[list[int], str | None]]:
    """Of 60 prompts, four at a time, with a culprit before each four; every fifth prompt begins as the culprit's does."""
    rng = random.Random(3)
    found: dict[str, tuple[list[int], str | None]] = {}
    for i in range(60):
        if culprit is not None and i % 4 == 0:
            culprit(engine, i)
        prompt = [rng.randrange(3, BROKEN) for _ in range(rng.randrange(1, 60))]
        engine.add_request(str(i), SHARED + prompt if i % 5 == 0 else prompt, PARAMS)
        while i % 4 == 3 and engine.has_work:
            for event in engine.step():
                tokens, _ = found.get(event.request_id, ([], None))
                found[event.request_id] = (tokens + event.token_ids, event.finish_reason)
    return [found[str(i)] for i in range(60)]


def begin(engine: EngineCore, i: int, timeout_s: float | None = None) -> None:
    engine.add_request(f"bad{i}", [*SHARED, 3 + i, 8, BROKEN, *([9, 10, BROKEN] * 15)], PARAMS, timeout_s=timeout_s)
    assert engine.step() == []  # in the middle of its prompt


def aborted(engine: EngineCore, i: int) -> None:
    begin(engine, i)
    engine.abort(f"bad{i}")


def timed_out(engine: EngineCore, i: int) -> None:
    begin(engine, i, timeout_s=1000.0)
    later = time.monotonic() + 2000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        events = engine.step()
    assert [event.finish_reason for event in events] == ["timeout"]


def to_its_end(engine: EngineCore, i: int) -> None:
    begin(engine, i)
    while engine.has_work:
        engine.step()


@cache
def without_culprit(directory: Path, runner: str, kv_dtype: str) -> list[tuple[list[int], str | None]]:
    return answers_of(engine_of(directory, runner, kv_dtype))


@pytest.mark.parametrize("culprit", [aborted, timed_out, to_its_end, begin])
@pytest.mark.parametrize(
    ("runner", "kv_dtype"),
    [("native", "fp32"), ("native", "bf16"), ("native", "int8"), ("native", "int4"), ("torch", "fp32"), ("torch", "bf16")],
)
def test_innocent_requests_answer_as_without_a_culprit(directory: Path, runner: str, kv_dtype: str, culprit: Culprit) -> None:
    if runner == "native" and library() is None:
        pytest.skip("the native library was not built")
    control = without_culprit(directory, runner, kv_dtype)
    assert {reason for _, reason in control} == {"length"}
    assert answers_of(engine_of(directory, runner, kv_dtype), culprit) == control
