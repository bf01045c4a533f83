"""What surrounds steps is planned from measured rates: preparing, quantising, scoring, choosing tokens, HTTP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines import machine, native, small_llama
from twostroke.core.errors import ConfigError
from twostroke.core.rates import FirstUses, HttpRates, Process, SamplingRate, TextRates, WeightRates
from twostroke.core.sampling_kinds import LOGPROBS, PENALTIES, SAMPLING_KINDS
from twostroke.planner.serving.first_answer import after_a_pause, as_first_answers
from twostroke.planner.serving.http import http_front_end, starts_over_http, step_beside_http_s, step_sharing_s
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.scoring import engine_token_s
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.preparing import prepare_s
from twostroke.planner.training.quantising import EXPECTED_PASSES, quantise_s
from twostroke.planner.training.scoring import decoder_token_s
from twostroke.planner.training.shape import TrainingShape
from twostroke.scheduling.sampling_params import SamplingParams

RATES = tuple(SamplingRate(kind, 1e-4, 1e-5, 1e-9) for kind in SAMPLING_KINDS)
WEIGHTS = WeightRates({"int8": 1e9, "int4": 1e8}, {}, 1e7, 1e9)


def test_penalties_and_logprobs_take_a_call_and_a_row_and_a_logit_each_in_every_decode_step() -> None:
    spec, hardware = small_llama(), native(sampling=RATES)
    asked = ServingShape(batch=8, prompt_tokens=64, output_tokens=8, sampling=(PENALTIES, LOGPROBS))
    plain = plan_serving(spec, replace(asked, sampling=()), hardware)
    more = plan_serving(spec, asked, hardware).tpot_s - plain.tpot_s
    assert more == pytest.approx(2 * (1e-4 + 8 * (1e-5 + spec.vocab_size * 1e-9)))
    assert plan_serving(spec, asked, hardware).ttft_s > plain.ttft_s


def test_a_machine_that_did_not_measure_sampling_plans_it_as_nothing() -> None:
    asked = ServingShape(batch=2, prompt_tokens=64, output_tokens=8, sampling=(PENALTIES,))
    found = [plan_serving(small_llama(), shape, native()).tpot_s for shape in (asked, replace(asked, sampling=()))]
    assert found[0] == found[1]


def test_an_unknown_way_to_choose_is_refused() -> None:
    with pytest.raises(ConfigError, match="beam"):
        ServingShape(sampling=("beam",))


@pytest.mark.parametrize(
    ("params", "kinds"),
    [
        (SamplingParams(temperature=0.0, top_p=0.5), ()),
        (SamplingParams(temperature=0.7), ("drawn",)),
        (SamplingParams(temperature=0.7, top_k=5), ("filtered",)),
        (SamplingParams(temperature=0.0, frequency_penalty=0.1, logprobs=0), ("penalties", "logprobs")),
    ],
)
def test_a_request_asks_for_what_its_parameters_say(params: SamplingParams, kinds: tuple[str, ...]) -> None:
    assert params.kinds == kinds


def test_http_adds_to_a_request_once_and_to_a_step_by_its_answers() -> None:
    hardware = native(http=HttpRates(3e-3, 1e-4, 1e-5, handling_s=1e-3))
    assert http_front_end(hardware) == pytest.approx((1e-3, 2e-3, 0.0))
    assert step_beside_http_s(hardware, 4) == pytest.approx(1.4e-4)
    assert http_front_end(native()) is None
    assert step_beside_http_s(native(), 4) == 0.0


def test_a_long_prompt_is_handled_longer_and_all_threads_delay_its_first_token() -> None:
    hardware = native(http=HttpRates(3e-3, 0.0, 0.0, handling_s=1e-3, prompt_token_s=4e-6, shared_first_s=5e-4))
    assert http_front_end(hardware, 500) == pytest.approx((3e-3, 2e-3, 0.0))
    assert http_front_end(hardware, 500, on_all_threads=True) == pytest.approx((3e-3, 2.5e-3, 0.0))


def test_http_takes_of_a_step_on_all_threads_by_step_answer_and_others_requests() -> None:
    hardware = native(http=HttpRates(0.0, 0.0, 0.0, shared_step_s=2e-4, shared_answer_s=3e-5, shared_request_s=1e-3))
    assert step_sharing_s(hardware, 1, 50) == pytest.approx(2.3e-4)  # nobody else asks
    assert step_sharing_s(hardware, 11, 50) == pytest.approx(2e-4 + 3.3e-4 + 2e-4)
    assert step_sharing_s(hardware, 11, 1) > step_sharing_s(hardware, 11, 50)
    assert step_sharing_s(native(), 11, 50) == 0.0


def test_a_batch_that_comes_at_once_waits_once_for_what_a_pause_left() -> None:
    usual = {"prefill_tok_per_s": 1000.0, "ttft_s": 0.1, "tpot_s": 1e-3, "e2e_s": 0.2, "output_tok_per_s": 500.0}
    found = after_a_pause(usual, 400, native(http=HttpRates(0.0, 0.0, 0.0, idle_s=0.1)))
    assert found == pytest.approx(
        {"prefill_tok_per_s": 800.0, "ttft_s": 0.2, "tpot_s": 1e-3, "e2e_s": 0.3, "output_tok_per_s": 500 * 2 / 3}
    )
    assert after_a_pause(usual, 400, native()) == usual


def test_handling_a_request_takes_no_longer_than_all_of_what_comes_before_a_first_token() -> None:
    assert http_front_end(native(http=HttpRates(1e-3, 0.0, 0.0, handling_s=4e-3))) == pytest.approx((1e-3, 0.0, 0.0))


def test_a_first_answer_takes_longer_and_a_long_one_no_more_than_a_short_one() -> None:
    hardware = native(first_uses=FirstUses(2e-3, 1e-3, 20, 0.0, 0.0))
    usual = {"prefill_tok_per_s": 1000.0, "ttft_s": 0.016, "tpot_s": 1e-3, "decode_tok_per_s": 1000.0, "e2e_s": 0.116}
    usual |= {"output_tok_per_s": 101 / 0.116, "cost_per_mtok_usd": 1.0}
    first = as_first_answers(usual, 16, 101, hardware)
    assert first["ttft_s"] == pytest.approx(0.018)
    assert first["prefill_tok_per_s"] == pytest.approx(16 / 0.018)
    assert first["tpot_s"] == pytest.approx(0.101 / 100)
    assert first["e2e_s"] == pytest.approx(0.119)
    assert first["output_tok_per_s"] == pytest.approx(101 / 0.119)
    assert as_first_answers(usual, 16, 11, hardware)["tpot_s"] == pytest.approx(0.0105 / 10)  # half of the 20 tokens
    assert as_first_answers(usual, 16, 1, hardware)["tpot_s"] == usual["tpot_s"]
    assert as_first_answers(usual, 16, 101, native()) == usual


def test_quantising_takes_a_start_and_a_little_for_each_layer() -> None:
    spec = small_llama()
    plain, first = (native(weights=WEIGHTS, **more) for more in ({}, {"first_uses": FirstUses(0.0, 0.0, 1, 0.02, 0.003)}))
    assert quantise_s(spec, "int8", first) == pytest.approx(quantise_s(spec, "int8", plain) + 0.02 + 0.003 * spec.n_layers)


def test_a_server_starts_later_than_torch_is_imported() -> None:
    planned = {"startup_s": 2.5, "warm_startup_s": 2.2}
    measured = native(http=HttpRates(0.0, 0.0, 0.0, start_s=5.0), process=Process(2.0, 0.0))
    assert starts_over_http(planned, measured) == pytest.approx({"startup_s": 5.5, "warm_startup_s": 5.2})
    assert starts_over_http(planned, native()) == planned


def test_scoring_computes_the_head_for_every_token_of_a_prompt() -> None:
    spec, hardware = small_llama(), native()
    shape = ServingShape(prompt_tokens=512, output_tokens=1)
    prompt_s = plan_serving(spec, shape, hardware).ttft_s
    head_s = 511 * 2 * spec.vocab_size * spec.d_model / 1e12  # all but the row that a prompt samples from
    assert 512 * engine_token_s(spec, shape, hardware, 512) >= prompt_s + 0.9 * head_s


def test_the_decoder_scores_at_the_rate_of_its_forward_pass() -> None:
    """Twice the layers take nearly twice as long: head and embedding are there once."""
    few, many = (decoder_token_s(small_llama(n_layers=n), "fp32", machine(), 512) for n in (4, 8))
    assert 1.2 * few < many < 2 * few


def test_preparing_trains_a_tokenizer_only_if_there_is_none() -> None:
    rates = TextRates(1e-8, 2e-7, 1e-11, 3e-7)
    assert prepare_s(rates, 1e6, None) == pytest.approx(1e6 * 3.1e-7)
    assert prepare_s(rates, 1e6, 4096, 0.1) == pytest.approx(1e6 * (3.1e-7 + 0.9 * (2e-7 + 4096e-11)))


def test_quantising_rounds_every_weight_or_fits_groups_to_text() -> None:
    spec, hardware = small_llama(), machine(weights=WEIGHTS)
    nearest = quantise_s(spec, "int4", hardware)
    assert quantise_s(spec, "int8", hardware) < nearest
    fitted = quantise_s(spec, "int4", hardware, 8192, 512)
    forwards_s = 2 * 8192 * decoder_token_s(spec, "fp32", hardware, 512)
    assert fitted > nearest + EXPECTED_PASSES * forwards_s


def test_quantising_to_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rate of rounding to fp8"):
        quantise_s(small_llama(), "fp8", machine(weights=WEIGHTS))


def test_steps_wait_for_a_copy_of_each_checkpoint_before_the_last_and_for_the_disk_without_a_background() -> None:
    hardware = machine(weights=WEIGHTS)

    def planned(**changes: object) -> TrainingPlan:
        return plan_training(small_llama(), TrainingShape(steps=100, **changes), hardware)  # type: ignore[arg-type]

    never, often = planned(), planned(checkpoint_every=10, snapshot=True)
    assert never.checkpoint_wait_s is None
    assert "checkpoint_wait_s" not in never.prediction()
    size = often.checkpoint_bytes
    assert often.checkpoint_wait_s == pytest.approx(size / 1e9 + 8 * 2 * size / hardware.bandwidth(2 * size))
    assert often.train_time_s == pytest.approx(never.train_time_s + often.checkpoint_wait_s)
    at_once = planned(checkpoint_every=10)
    assert at_once.checkpoint_wait_s == pytest.approx(9 * size / hardware.disk_write_bytes_per_s)
