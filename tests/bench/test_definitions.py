"""Every latency and rate on timestamps made by hand, against numbers worked out by hand."""

from __future__ import annotations

import random

import pytest

from twostroke.bench.definitions import (
    FORMULAS,
    LoadSummary,
    RequestRecord,
    Slo,
    peak_concurrency,
    summarise,
)
from twostroke.core.described import plain
from twostroke.core.distribution import Distribution
from twostroke.core.errors import ConfigError


def record(
    index: int = 0,
    scheduled: float = 1.0,
    sent: float = 1.5,
    chunks: tuple[float, ...] = (2.0, 3.0, 5.0),
    output: int = 5,
    error: str | None = None,
) -> RequestRecord:
    return RequestRecord(index, scheduled, sent, chunks, (chunks or (sent + 1,))[-1] + 0.25, 10, output, error)


def test_latencies_count_from_the_scheduled_time() -> None:
    r = record()
    assert (r.ttft_s, r.e2e_s) == (1.0, 4.0)
    assert r.tpot_s == (4.0 - 1.0) / 4
    assert r.itl_s == [1.0, 2.0]


@pytest.mark.parametrize("output", [0, 1])
def test_time_per_output_token_is_undefined_for_one_token(output: int) -> None:
    assert record(chunks=(2.0,), output=output).tpot_s is None


def test_chunks_of_several_tokens_change_the_gaps_and_not_the_time_per_token() -> None:
    many = record(chunks=(2.0, 2.75, 3.5, 4.25, 5.0))
    few = record(chunks=(2.0, 5.0))
    assert many.tpot_s == few.tpot_s == 0.75
    assert (many.itl_s, few.itl_s) == ([0.75] * 4, [3.0])


def test_rates_divide_by_the_time_from_first_scheduled_to_last_chunk() -> None:
    records = [record(0), record(1, scheduled=3.0, sent=3.0, chunks=(4.0, 11.0), output=2)]
    s = summarise(records)
    assert s.duration_s == 10.0
    assert (s.requests_per_s, s.output_tok_per_s, s.total_tok_per_s) == pytest.approx((0.2, 0.7, 2.7))
    assert s.peak_concurrency == 2
    assert s.goodput_per_s is None


def test_failures_are_counted_by_reason_and_enter_no_latency() -> None:
    records = [
        record(0),
        record(1, error="http 429", chunks=()),
        record(2, error="http 429", chunks=()),
        record(3, error="timeout"),
    ]
    s = summarise(records)
    assert (s.n_requests, s.n_completed) == (4, 1)
    assert s.failures == {"http 429": 2, "timeout": 1}
    assert s.ttft_s.n == s.e2e_s.n == 1
    assert s.output_tokens == 5


def test_goodput_counts_requests_that_meet_every_term() -> None:
    fast = record(0)  # TTFT 1, TPOT 0.75, E2E 4
    late = record(1, chunks=(2.6, 3.0, 5.0))  # TTFT 1.6
    slow = record(2, chunks=(2.0, 9.0))  # TPOT 1.75
    failed = record(3, error="timeout")
    records = [fast, late, slow, failed]
    for slo, met in [
        (Slo(ttft_s=1.0), 2),
        (Slo(tpot_s=0.75), 2),
        (Slo(e2e_s=4.0), 2),
        (Slo(ttft_s=1.0, tpot_s=0.8), 1),
        (Slo(ttft_s=0.9), 0),
    ]:
        s = summarise(records, slo)
        assert s.slo_met == met, slo
        assert s.goodput_per_s == pytest.approx(met / s.duration_s)


def test_one_token_answers_meet_any_bound_on_time_per_token() -> None:
    assert Slo(tpot_s=1e-9).met_by(record(chunks=(2.0,), output=1))


def test_a_request_that_ends_as_another_begins_does_not_overlap_it() -> None:
    first = RequestRecord(0, 0.0, 0.0, (1.0,), 2.0, 1, 1)
    second = RequestRecord(1, 0.0, 2.0, (3.0,), 4.0, 1, 1)
    overlapping = RequestRecord(2, 0.0, 1.5, (3.0,), 3.5, 1, 1)
    assert peak_concurrency([first, second]) == 1
    assert peak_concurrency([first, second, overlapping]) == 2


def test_a_distribution_of_nothing_is_written_as_null() -> None:
    assert plain(Distribution.of([])) == {"n": 0, "mean": None, "median": None, "p90": None, "p95": None, "p99": None}


def test_an_empty_load_has_no_rates() -> None:
    s = summarise([])
    assert (s.n_requests, s.duration_s, s.requests_per_s) == (0, 0.0, 0.0)


def test_order_of_records_changes_nothing() -> None:
    records = [record(i, scheduled=i, sent=i, chunks=(i + 1.0, i + 2.5), output=3) for i in range(10)]
    shuffled = random.Random(0).sample(records, 10)
    assert summarise(records) == summarise(shuffled)


def test_every_number_of_a_summary_has_a_formula() -> None:
    shown = {"n_requests", "n_completed", "failures", "prompt_tokens", "output_tokens", "slo_met", "engine"}  # plain counts
    assert set(LoadSummary.__dataclass_fields__) - shown == set(FORMULAS)


def test_an_slo_is_read_from_text() -> None:
    assert Slo.parse("ttft=0.5, tpot=0.05,e2e=10") == Slo(0.5, 0.05, 10.0)
    assert Slo.parse("e2e=1") == Slo(e2e_s=1.0)


@pytest.mark.parametrize("text", ["", "ttf=1", "ttft", "ttft=x", "ttft=0", "ttft=-1", "ttft=inf", "ttft=nan"])
def test_an_slo_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        Slo.parse(text)
