"""A server's settings for an SLO: they keep to it, leave what was set by hand, and take no type that nobody measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machines import machine, native, small_llama
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.policy import MAX_KL_NATS
from twostroke.core.rates import StepPrices
from twostroke.ledger.store import Ledger
from twostroke.planner.choosing.quality import Quality, quality_seen, survey_values
from twostroke.planner.choosing.server_settings import (
    BUDGETS,
    LATENCY_TPOT,
    LATENCY_TTFT,
    RUNNING,
    Fixed,
    ServerChoice,
    choose_server,
    choose_settings,
    ways_to_serve,
)
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import Slo
from twostroke.planner.text.server_settings import choice_lines
from twostroke.quantization.survey import SurveyRow

SPEC = small_llama(max_positions=512)
SHAPE = ServingShape(prompt_tokens=200, output_tokens=24)
MEASURED = Quality({"int8": MAX_KL_NATS / 2, "int4-g64": 2 * MAX_KL_NATS}, {"int8": 0.0})


@pytest.fixture(scope="module")
def here() -> Hardware:
    prices = [StepPrices(phase, step_s=1e-4, row_s=2e-5, element_s=1e-10, key_s=1e-11) for phase in ("prefill", "decode")]
    return native(2e10, prices=tuple(prices))


def chosen(here: Hardware, slo: Slo, **options: object) -> ServerChoice:
    return choose_settings(SPEC, [SHAPE], here, slo, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(here: Hardware) -> tuple[float, float]:
    """TTFT and TPOT of one request by itself."""
    (row,) = chosen(here, Slo(1e-9)).considered
    return row.alone_ttft_s, row.alone_tpot_s


def test_what_is_expected_keeps_to_the_slo_and_more_time_carries_more(here: Hardware, alone: tuple[float, float]) -> None:
    rates = []
    for factor in (1.5, 3.0):
        slo = Slo(factor * alone[0], factor * alone[1])
        found = chosen(here, slo)
        assert found.chosen is not None
        assert found.expected is not None
        assert slo.met(found.expected.ttft_s, found.expected.tpot_s)
        assert found.chosen.token_budget in BUDGETS
        assert found.chosen.max_running in RUNNING
        assert [level.users for level in found.levels] == [n for n in RUNNING if n <= min(64, found.chosen.max_running)]
        rates.append(found.expected.rate_per_s)
    assert rates[0] < rates[1]


def test_what_was_set_by_hand_stays(here: Hardware, alone: tuple[float, float]) -> None:
    found = chosen(here, Slo(3 * alone[0]), fixed=Fixed(300, 3, 2**22))
    assert found.chosen is not None
    assert (found.chosen.token_budget, found.chosen.max_running, found.chosen.kv_cache_bytes) == (300, 3, 2**22)


def test_a_step_has_a_token_for_each_request_that_may_run(here: Hardware, alone: tuple[float, float]) -> None:
    small = chosen(here, Slo(20 * alone[0]), fixed=Fixed(token_budget=50)).chosen
    assert small is not None
    assert small.token_budget == 50 >= small.max_running
    large = chosen(here, Slo(20 * alone[0]), fixed=Fixed(max_running=3000)).chosen
    assert large is not None
    assert large.max_running == 3000 <= large.token_budget
    with pytest.raises(ConfigError, match="at least max_running=60"):
        chosen(here, Slo(1.0), fixed=Fixed(50, 60))


def test_what_cannot_be_met_says_the_best_there_is(here: Hardware, alone: tuple[float, float]) -> None:
    found = chosen(here, Slo(0.5 * alone[0]))
    assert found.chosen is found.expected is None
    assert "nothing keeps to a TTFT of" in found.refusal
    assert "at best (bf16 weights)" in found.refusal
    assert choice_lines(found) == [found.refusal]


def test_only_types_that_were_measured_to_be_good_enough_are_tried(here: Hardware) -> None:
    shapes, notes = ways_to_serve(SHAPE, here, MEASURED)
    assert [(s.scheme, s.kv_dtype) for s in shapes] == [(w, k) for w in ("bf16", "int8") for k in ("auto", "int8")]
    assert notes == ["weights in int4-g64: measured above the KL that is kept to, or not served here."]
    shapes, notes = ways_to_serve(SHAPE, here, Quality({}, {}))
    assert shapes == [SHAPE]
    assert "--survey" in notes[0]
    assert "--kv-dtype TYPE" in notes[1]
    assert ways_to_serve(SHAPE, here, MEASURED, own_weights=False, own_cache=False) == ([SHAPE], [])
    coded = replace(SHAPE, scheme="int8")  # as the checkpoint is
    assert [s.scheme for s in ways_to_serve(coded, here, MEASURED, own_cache=False)[0]] == ["int8"]


def test_of_two_types_that_carry_as_much_the_checkpoints_own_is_taken(here: Hardware, alone: tuple[float, float]) -> None:
    twice = [SHAPE, replace(SHAPE, kv_cache_bytes=0, kv_dtype="bf16")]
    found = choose_settings(SPEC, twice, here, Slo(3 * alone[0]))
    assert found.considered[0].requests_per_s == found.considered[1].requests_per_s
    assert found.chosen is not None
    assert found.chosen.scheme == "bf16"


def test_modes_are_presets_of_the_slo_and_limits_come_before_them(here: Hardware, alone: tuple[float, float]) -> None:
    found = chosen(here, Slo(), mode="latency")
    assert (found.slo.ttft_s, found.slo.tpot_s) == pytest.approx((LATENCY_TTFT * alone[0], LATENCY_TPOT * alone[1]))
    assert chosen(here, Slo(7.0), mode="latency").slo.ttft_s == 7.0
    free = chosen(here, Slo(), mode="throughput")
    assert free.slo.is_free
    assert free.chosen is not None
    assert free.chosen.max_running == RUNNING[-1]
    assert found.expected is not None
    assert free.expected is not None
    assert found.expected.rate_per_s < free.expected.rate_per_s


def test_where_nothing_can_be_chosen_a_sentence_says_so(here: Hardware) -> None:
    with pytest.raises(ConfigError, match="twostroke calibrate"):
        choose_settings(SPEC, [SHAPE], load_hardware("h100"), Slo(1.0))
    with pytest.raises(ConfigError, match="latency, throughput"):
        chosen(here, Slo(1.0), mode="fast")
    with pytest.raises(CapacityError, match="DOES NOT FIT"):
        choose_settings(small_llama(d_ff=2**24), [SHAPE], here, Slo(1.0))
    assert chosen(machine(), Slo(100.0)).chosen is not None  # without the native library


def row(scheme: str, kl: float | None, rounding: str = "", in_int8: int = 0) -> SurveyRow:
    return SurveyRow(scheme, scheme, rounding, in_int8, 1.0, 8.0, kl, None, None, None)


def test_quality_is_what_the_newest_survey_and_comparisons_with_itself_measured(tmp_path: Path) -> None:
    ledger, model = Ledger(tmp_path / "ledger.sqlite"), tmp_path / "model"
    assert quality_seen(model, ledger) == Quality({}, {})
    rows = [row("bf16", None), row("int8", 0.001), row("int4-g64", 0.5, "nearest"), row("int4-g64", 0.01, "gptq")]
    for name, values in ((model, survey_values([row("int8", 9.0)])), (model, survey_values(rows)), (tmp_path / "other", {})):
        run = ledger.freeze("quantize", "m", {"model": str(name), "survey": True}, {})
        ledger.measure(run, {**values, "int4-g32_kl_nats": "?"})
    for beside, cache, ratio in ((model, "int8", 1.001), (tmp_path, "int4", 1.0)):
        run = ledger.freeze("evaluate", "m", {"model": str(model), "beside": str(beside), "kv_dtype": cache}, {})
        ledger.measure(run, {"perplexity_ratio": ratio})
    found = quality_seen(model, ledger)
    assert found.weights == {"int8": 0.001, "int4-g64": 0.5}
    assert found.cache == {"int8": pytest.approx(0.0009995)}
    assert found.passing("weights") == ("int8",)
    assert found.passing("cache") == ("int8",)


def test_a_model_that_is_not_here_is_served_as_it_is(here: Hardware, alone: tuple[float, float]) -> None:
    found = choose_server(None, SPEC, SHAPE, here, Slo(3 * alone[0]))
    assert len(found.considered) == 1
    assert found.left_out == ()
