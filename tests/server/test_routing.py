"""Which engine a request goes to: predicted times, measured rates, and what is known of the engines' caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server.routing import FIRST_STEP_S, Known, Pace, first_token_s

BUDGET = 512


def seconds(waiting: int = 0, uncached: int = 100, decoding: int = 0, busy_s: float = 0.0) -> float:
    return first_token_s(Pace(1000.0, 0.02), waiting, uncached, decoding, BUDGET, busy_s)


def test_more_of_anything_is_a_later_first_token() -> None:
    assert seconds() == pytest.approx(0.1)
    assert seconds(uncached=200) > seconds()
    assert seconds(waiting=1) > seconds()
    assert seconds(decoding=1) > seconds()
    assert seconds(busy_s=1.0) > seconds()


def test_a_known_prefix_wins_until_the_queue_before_it_is_longer_than_what_it_saves() -> None:
    elsewhere = seconds(uncached=1000)
    assert seconds(waiting=800, uncached=100) < elsewhere
    assert seconds(waiting=1000, uncached=100) > elsewhere


def test_a_prompt_behind_many_decoding_answers_takes_more_steps() -> None:
    """With 500 of 512 tokens of a step taken, 100 tokens of a prompt need nine steps, each of which computes the 500 too."""
    assert seconds(decoding=500) == pytest.approx((100 + 9 * 500) / 1000 + 9 * 0.02)
    assert first_token_s(Pace(1000.0, 0.02), 0, 100, 600, BUDGET) < float("inf"), "more answers than a step has tokens"


def test_rates_follow_the_counters_and_survive_an_engine_that_starts_anew() -> None:
    pace = Pace()
    pace.look({"prefill_s": 1.0, "prefill_tokens": 5000.0})
    assert pace.prompt_tok_per_s == 5000.0
    assert pace.step_s == FIRST_STEP_S, "nothing decoded yet"
    pace.look({"prefill_s": 2.0, "prefill_tokens": 6000.0, "decode_s": 1.0, "decode_steps": 100.0})
    assert pace.prompt_tok_per_s == 3000.0, "half old, half new"
    assert pace.step_s == 0.01
    pace.look({"prefill_s": 0.5, "prefill_tokens": 1500.0, "decode_s": 1.0, "decode_steps": 100.0})
    assert pace.prompt_tok_per_s == 3000.0, "the counters began anew"
    pace.look({"prefill_s": 0.5, "prefill_tokens": 1500.0, "decode_s": 1.0, "decode_steps": 100.0})
    assert pace.prompt_tok_per_s == 3000.0, "no time has passed"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("routed"))[1]


@pytest.mark.parametrize("separate", [False, True])
def test_what_is_known_of_a_cache_is_what_the_engine_finds_there(model: Path, separate: bool) -> None:
    """Prefixes of 0 to 5 pages, in a cache that forgets some of them, by two clients."""
    settings = EngineSettings(separate_prefixes=separate, page_tokens=4, kv_cache_bytes=60_000, max_model_len=48, n_threads=1)
    core, known = EngineCore(model, settings), Known()
    known.change(core.watch_blocks(), [])
    removed = found = 0
    for i in range(120):
        base = i * 7 % 5
        prompt = [base + 1] * (4 * (i % 6)) + [40 + i % 3, 50, 60 + i % 20]
        client = "ab"[i % 2]
        expected = known.cached_tokens(prompt, 4, client if separate else None, None)
        core.add_request("r", prompt, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True), client=client)
        cached = 0
        while core.has_work:
            cached += sum(event.cached_tokens for event in core.step())
            changes = core.changed_blocks()
            known.change([k for k, stored in changes.items() if stored], [k for k, stored in changes.items() if not stored])
            removed += sum(not stored for stored in changes.values())
        assert expected <= cached < expected + 4, "the engine may also find a part of the next page"
        found += expected
    assert removed > 0
    assert found > 0
    assert known.cached_tokens([1], 4, None, None) == 0
    known.forget()
    assert len(known) == 0
