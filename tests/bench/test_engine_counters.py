"""The engine's counters on ``/metrics`` and what follows from their growth."""

from __future__ import annotations

import pytest

from twostroke.bench.engine_counters import FORMULAS, engine_values, parse_counters

TEXT = """# HELP twostroke_engine_decode_seconds Time.
# TYPE twostroke_engine_decode_seconds gauge
twostroke_engine_decode_seconds 2.5
twostroke_engine_decode_steps 1e+03
twostroke_requests_running 3.0
twostroke_engine_broken x
"""


def counters(**changes: float) -> dict[str, float]:
    kinds = {f"{kind}_{what}": 0.0 for kind in ("prefill", "decode") for what in ("steps", "seconds", "tokens")}
    return kinds | {"decode_bytes": 0.0} | changes


def test_only_the_engines_samples_are_read() -> None:
    assert parse_counters(TEXT) == {"decode_seconds": 2.5, "decode_steps": 1000.0}


def test_values_follow_from_the_growth_between_readings() -> None:
    warm = counters(prefill_seconds=1.0, prefill_tokens=10)
    before = counters(
        prefill_seconds=1.5,
        prefill_tokens=110,
        decode_seconds=9.0,
        decode_steps=1,
        decode_tokens=1,
        decode_bytes=1,
        draft_tokens=0,
        accepted_draft_tokens=0,
        decode_requests=10,
    )
    after = before | {
        "prefill_seconds": 7.0,
        "decode_seconds": 11.0,
        "decode_steps": 101,
        "decode_tokens": 401,
        "decode_bytes": 8001,
        "draft_tokens": 40,
        "decode_requests": 330,
        "accepted_draft_tokens": 30,
        "peak_memory_bytes": 9e8,
        "http_peak_memory_bytes": 1e8,
    }
    values = engine_values(warm, before, after, n_idle=2)
    assert values == pytest.approx(
        {
            "prefill_s": 0.25,
            "prefill_tok_per_s": 200.0,
            "decode_step_s": 0.02,
            "decode_tok_per_s": 200.0,
            "draft_acceptance": 0.75,
            "drafts_per_step": 0.125,
            "tokens_per_step": 1.25,
            "decode_read_bytes_per_s": 4000.0,
            "peak_memory_bytes": 9e8,
            "http_peak_memory_bytes": 1e8,
        }
    )
    assert values.keys() == FORMULAS.keys()


def test_a_server_without_counters_and_an_engine_that_was_restarted_tell_nothing() -> None:
    assert engine_values({}, {}, {}, 2) == {}
    full = counters(prefill_seconds=5.0, decode_seconds=5.0, decode_steps=9)
    assert engine_values(full, counters(), counters(), 2) == {}


def test_what_rises_and_falls_as_an_engine_runs_is_no_sign_of_a_restart() -> None:
    before = counters(running=1.0, pages_used=9.0)
    after = counters(prefill_seconds=0.5, prefill_tokens=10, running=0.0, pages_used=2.0)
    assert engine_values(before, after, after, 1) == {"prefill_s": 0.5, "prefill_tok_per_s": 20.0}


def test_one_warm_up_request_is_no_idle_measurement() -> None:
    warm = counters(prefill_seconds=1.0)
    assert engine_values(warm, warm, warm, 0) == {}
