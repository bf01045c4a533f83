"""Serving plans follow their formulas, count pages whole, and refuse what cannot fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import ideal_machine, machine, small_llama
from twostroke.core.described import plain
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.families import read_spec
from twostroke.core.policy import PAGE_TOKENS
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import ServingPlan, plan_serving, request_kv_bytes
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes


def plan(**changes: object) -> ServingPlan:
    return plan_serving(small_llama(), ServingShape(**changes), machine())  # type: ignore[arg-type]


def test_rates_follow_from_latencies() -> None:
    p = plan(batch=4, prompt_tokens=100, output_tokens=50)
    assert p.decode_tok_per_s == pytest.approx(4 / p.tpot_s)
    assert p.prefill_tok_per_s == pytest.approx(100 / p.ttft_s)
    assert p.e2e_s == pytest.approx(p.ttft_s + 49 * p.tpot_s)
    assert p.output_tok_per_s == pytest.approx(4 * 50 / (4 * p.ttft_s + 50 * p.tpot_s))
    assert p.usd_per_mtok == pytest.approx(p.hardware.usd_per_hour.value * 1e6 / 3600 / p.output_tok_per_s)


def test_a_decode_step_reads_weights_and_cache_once() -> None:
    """A machine with boundless arithmetic: only bytes count, and each of them once."""
    fast = ideal_machine(kind="gpu", peak_flop_per_s={"bf16": 1e21})
    spec = small_llama()
    p = plan_serving(spec, ServingShape(batch=4, prompt_tokens=500, output_tokens=1), fast)
    read = {w.component: w.bytes for w in p.decode}
    assert sum(w.seconds for w in p.decode) == pytest.approx(sum(read.values()) / 1e11)
    assert read["head"] == 2 * spec.vocab_size * spec.d_model  # the tied embedding
    needed = weights_bytes(spec, "bf16") + 4 * 501 * kv_bytes_per_token(spec)
    assert sum(read.values()) == pytest.approx(needed, rel=1e-3)  # norms are not counted


def test_int8_reads_fewer_bytes_than_bf16() -> None:
    slow_memory = ideal_machine()
    spec = small_llama(n_layers=24, d_model=1024, n_heads=16, n_kv_heads=16, d_ff=4096)
    times = {s: plan_serving(spec, ServingShape(scheme=s, prompt_tokens=16, output_tokens=16), slow_memory).tpot_s
             for s in ("fp32", "bf16", "int8")}  # fmt: skip
    assert times["int8"] < 0.65 * times["bf16"] < 0.65 * 0.65 * times["fp32"]


def test_pages_are_counted_whole() -> None:
    spec, per_token = small_llama(), kv_bytes_per_token(small_llama())
    assert request_kv_bytes(spec, ServingShape(prompt_tokens=15, output_tokens=1)) == PAGE_TOKENS * per_token
    assert request_kv_bytes(spec, ServingShape(prompt_tokens=16, output_tokens=1)) == 2 * PAGE_TOKENS * per_token
    p = plan(kv_cache_bytes=int(10.5 * PAGE_TOKENS * per_token), prompt_tokens=16, output_tokens=16)
    assert p.pages == 10
    assert p.memory_bytes["kv_cache"] == 10 * PAGE_TOKENS * per_token


def test_a_cache_that_holds_fewer_than_the_batch_is_said() -> None:
    small = plan(
        batch=8, prompt_tokens=16, output_tokens=16, kv_cache_bytes=3 * 2 * 16 * int(kv_bytes_per_token(small_llama()))
    )
    assert any("fewer than batch=8" in note for note in small.notes)
    assert not any("batch=8" in note for note in plan(batch=8).notes)


def test_the_largest_batch_fills_the_memory(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    shape = ServingShape(batch=1, prompt_tokens=7168, output_tokens=1024)
    p = plan_serving(spec, shape, load_hardware("h100"))
    # (0.9·85.9 GB − 16.06 GB) / 1 GiB a request of 8,192 tokens
    assert p.largest_batch == int((0.9 * 85899345920 - 16_060_522_496) / 2**30) == 57


def test_kv_of_a_request_is_what_a_second_machine_would_be_sent() -> None:
    assert plan(prompt_tokens=100).kv_request_bytes == 100 * kv_bytes_per_token(small_llama())


def test_a_sliding_window_bounds_decode_attention() -> None:
    spec = small_llama(max_positions=8192)
    windowed = spec.with_(sliding_window=256)
    shape = ServingShape(batch=8, prompt_tokens=4096, output_tokens=128)
    attention = [
        sum(w.bytes for w in plan_serving(s, shape, machine()).decode if w.component == "attention") for s in (spec, windowed)
    ]
    assert attention[1] < 0.2 * attention[0]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.integers(1, 400), st.sampled_from(["fp32", "bf16", "int8"]))
def test_more_work_never_takes_less(batch: int, prompt: int, scheme: str) -> None:
    small = plan(batch=batch, prompt_tokens=prompt, scheme=scheme)
    more = plan(batch=2 * batch, prompt_tokens=prompt, scheme=scheme)
    longer = plan(batch=batch, prompt_tokens=2 * prompt, scheme=scheme)
    assert more.tpot_s >= small.tpot_s
    assert more.decode_tok_per_s >= small.decode_tok_per_s * (1 - 1e-9)  # batching never costs throughput here
    assert longer.ttft_s >= small.ttft_s
    assert longer.tpot_s >= small.tpot_s


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"prompt_tokens": -1}, {"output_tokens": 0}, {"kv_cache_bytes": -1}, {"scheme": "int3"}, {"batch": 1.0}],
)
def test_impossible_shapes_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServingShape(**wrong)  # type: ignore[arg-type]


def test_a_type_of_cache_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp9"):
        ServingShape(kv_dtype="fp9")


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="1025 tokens; the context holds 1024"):
        plan(prompt_tokens=1000, output_tokens=25)
    with pytest.raises(ConfigError, match="max_positions=1024"):
        plan(max_model_len=2048)


def test_weights_that_do_not_fit_are_refused(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/meta-llama--Meta-Llama-3.1-405B_config.json")
    with pytest.raises(CapacityError, match="DOES NOT FIT: bf16 weights take 756 GiB"):
        plan_serving(spec, ServingShape(), load_hardware("h100"))


def test_prediction_has_the_ledgers_names() -> None:
    names = {"ttft_s", "tpot_s", "decode_tok_per_s", "prefill_tok_per_s", "weights_bytes", "kv_cache_bytes", "model_bytes"}
    assert names <= set(plan().prediction())
    assert all(isinstance(v, int | float) and v >= 0 for v in plan().prediction().values())


def test_plans_are_plain_data() -> None:
    import json

    assert json.loads(json.dumps(plain(plan())))["shape"]["scheme"] == "bf16"


def test_a_cache_that_holds_no_request_or_more_than_the_memory_is_refused() -> None:
    page = PAGE_TOKENS * int(kv_bytes_per_token(small_llama()))
    with pytest.raises(
        ConfigError, match=r"kv_cache_bytes=1 holds 0 pages of \d+ bytes, and one request needs 2\. Use at least"
    ):
        plan(prompt_tokens=16, output_tokens=16, kv_cache_bytes=1)
    assert plan(prompt_tokens=16, output_tokens=16, kv_cache_bytes=2 * page).largest_batch
    with pytest.raises(CapacityError, match="are more than the"):
        plan_serving(small_llama(), ServingShape(kv_cache_bytes=10**12), load_hardware("h100"))
