"""The lines that say how near a run came to the machine's limits."""

from __future__ import annotations

from twostroke.bench.offline import OfflinePoint, offline_text
from twostroke.cli.rates import phase_text, without_limits
from twostroke.engine.achieved import Achieved, PhaseRates

PREFILL = PhaseRates(1, 128, 0.025, 164_000_000, 27_000_000_000, 40e9, 2.4e12)
DECODE = PhaseRates(10, 10, 0.05, 1_640_000_000, 2_700_000_000, 40e9, 2.4e12)


def test_a_line_has_rates_and_shares() -> None:
    assert phase_text("prefill", PREFILL, "native_int8") == (
        "prefill  128 tokens, 5.12k tok/s, 25 ms a step: 6.56 GB/s read, 16% of what this machine reads at 164 MB; "
        "1.08 TFLOP/s, 45% of its int8 products"
    )
    assert without_limits(Achieved(PREFILL, DECODE, "native_int8")) == []


def test_without_limits_there_are_rates_and_the_remedy() -> None:
    unknown = PhaseRates(10, 10, 0.05, 1_640_000_000, 2_700_000_000)
    line = phase_text("decode", unknown, "native_int8")
    assert "32.8 GB/s read; 54 GFLOP/s" in line
    assert "%" not in line
    (remedy,) = without_limits(Achieved(unknown, unknown, "native_int8"))
    assert "twostroke calibrate" in remedy


def test_a_phase_that_was_not_has_no_line() -> None:
    nothing = PhaseRates(0, 0, 0.0, 0, 0)
    assert phase_text("decode", nothing, "native_bf16") == ""
    assert without_limits(Achieved(nothing, nothing, "native_bf16")) == []


def test_the_table_of_the_engine_alone_has_both_shares() -> None:
    point = OfflinePoint(1, 0.025, 5120.0, 0.05, 200.0, 190.0, 0.005, Achieved(PREFILL, DECODE, "native_int8"))
    row = offline_text([point]).splitlines()[1].split()
    assert row == ["1", "25", "ms", "5,120", "1.08T", "45%", "5", "ms", "200.0", "32.8", "82%"]
    assert point.values()["decode_read_share"] == DECODE.read_share
