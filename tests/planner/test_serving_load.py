"""A served model under load behaves as a simulated server does, and SLOs are kept at the edge they were searched to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machines import machine, small_llama
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.drawn import Uniform
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape, Speculation
from twostroke.planner.serving.step_time import front_end_s
from twostroke.planner.serving.under_load import (
    Server,
    Slo,
    Stretch,
    at_rate,
    carried,
    largest_batch_within,
    largest_rate,
    latency_table,
    load_of,
    simulated,
    step_of_batch,
)


@pytest.fixture(scope="module")
def llama_8b() -> ModelSpec:
    return small_llama(
        vocab_size=128_256,
        n_layers=32,
        d_model=4096,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        d_ff=14_336,
        max_positions=131_072,
    )


@pytest.fixture
def plan(llama_8b: ModelSpec) -> ServingPlan:
    return plan_serving(llama_8b, ServingShape(batch=16, prompt_tokens=2048, output_tokens=256), load_hardware("h100"))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_the_formulas_of_a_rate_are_near_the_simulated_server(plan: ServingPlan, share: float) -> None:
    rate = share / plan.added_by_a_prompt_s
    bracket, found = carried(plan, rate, step_of_batch(plan)), at_rate(plan, rate)
    assert bracket is not None
    assert found is not None
    batch, tpot_s = bracket
    assert found.tpot_s == pytest.approx(tpot_s, rel=0.2)  # prompts come in bunches, and the batch varies
    assert found.batch == pytest.approx(batch, rel=0.25)


def test_littles_law_holds(plan: ServingPlan) -> None:
    found = at_rate(plan, 5.0)
    assert found is not None
    assert found.batch == pytest.approx(5.0 * 255 * found.tpot_s, rel=0.1)  # 5 a second is the mean of a thousand gaps
    assert found.e2e_s == pytest.approx(found.ttft_s + 255 * found.tpot_s)
    assert found.simulated is not None
    assert found.simulated.ttft_s.median <= found.simulated.ttft_s.p90 <= found.simulated.ttft_s.p99


def test_waits_grow_with_the_rate(plan: ServingPlan) -> None:
    waits = [at_rate(plan, share / plan.added_by_a_prompt_s) for share in (0.05, 0.4, 0.8)]
    ttft = [found.ttft_s for found in waits if found is not None]
    assert ttft == sorted(ttft)
    assert ttft[0] == pytest.approx(front_end_s() + plan.ttft_s + plan.added_by_a_prompt_s / 4, rel=0.5)


def test_the_plans_users_are_simulated_with_the_plans_steps(plan: ServingPlan) -> None:
    server = Server(replace(plan, shape=replace(plan.shape, batch=1)))
    found = server.serve(server.closed_loop())
    assert found.ttft_s.median == pytest.approx(front_end_s() + plan.ttft_s)
    one = plan_serving(plan.spec, replace(plan.shape, batch=1), plan.hardware)
    assert found.tpot_s.median == pytest.approx(one.tpot_s, rel=1e-3)
    assert found.e2e_s.median == pytest.approx(front_end_s() + one.e2e_s, rel=1e-3)


def test_longer_steps_are_longer_waits(plan: ServingPlan) -> None:
    server = Server(plan)
    found = simulated(server, server.closed_loop(0.5), Stretch(0.8, 0.9), Stretch(1.5, 2.0))
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        fast, expected, slow = (getattr(each, name).median for each in (found.fast, found.expected, found.slow))
        assert 0.75 * expected < fast < expected < slow < 2.1 * expected
    assert found.medians.ttft_s == found.expected.ttft_s.median


def test_speculation_shortens_the_steps_of_the_simulation(plan: ServingPlan) -> None:
    shape = replace(plan.shape, speculation=Speculation(4, 0.8, 0.05))
    server = Server(plan_serving(plan.spec, shape, plan.hardware))
    plain = Server(plan)
    ratio = server.serve(server.closed_loop()).itl_s.median / plain.serve(plain.closed_loop()).itl_s.median
    assert ratio == pytest.approx(server.plan.tpot_s / plan.tpot_s, rel=0.01)


def test_lengths_vary_around_the_plans_own_and_within_the_context(plan: ServingPlan) -> None:
    server = Server(plan)
    prompts, outputs = server.lengths(0.5)
    assert prompts == Uniform(1024, 3072)
    assert outputs == Uniform(128, 384)
    short = Server(replace(plan, shape=replace(plan.shape, max_model_len=2400)))
    prompts, outputs = short.lengths(0.5)
    assert isinstance(prompts, Uniform)
    assert isinstance(outputs, Uniform)
    assert prompts.most + outputs.most <= 2400
    with pytest.raises(ConfigError, match="spread"):
        server.lengths(1.0)


def test_a_rate_beyond_the_prompts_is_not_carried(plan: ServingPlan) -> None:
    assert at_rate(plan, 1.01 / plan.added_by_a_prompt_s) is None
    with pytest.raises(ConfigError, match="rate"):
        at_rate(plan, 0.0)


@pytest.mark.parametrize("slo", [Slo(tpot_s=0.012), Slo(ttft_s=0.2), Slo(ttft_s=0.25, tpot_s=0.02)])
def test_the_largest_rate_is_at_the_edge_of_its_slo(plan: ServingPlan, slo: Slo) -> None:
    found = largest_rate(plan, slo)
    assert found is not None
    assert slo.met(found.ttft_s, found.tpot_s)
    beyond = at_rate(plan, 1.25 * found.rate_per_s)  # bisected to 1/32, and 150 requests tell a mean within a tenth
    assert beyond is None or not slo.met(beyond.ttft_s, beyond.tpot_s)


def test_an_slo_below_one_request_alone_is_met_by_nothing(plan: ServingPlan) -> None:
    assert largest_rate(plan, Slo(tpot_s=1e-6)) is None
    with pytest.raises(CapacityError, match="no number of replicas"):
        load_of(plan, Slo(ttft_s=1e-6), 1.0)


def test_the_largest_batch_is_the_last_within_the_limit(plan: ServingPlan) -> None:
    most = largest_batch_within(plan, 0.015)
    for batch, holds in ((most, True), (most + 1, False)):
        one = plan_serving(plan.spec, replace(plan.shape, batch=batch), plan.hardware)
        # steps are interpolated between powers of two, on a curve that bends by less than 2% there
        assert (one.loaded.tpot_s <= 0.015 * (1.02 if holds else 1.0)) or holds is False
        assert holds or one.loaded.tpot_s > 0.015 * 0.98
    assert largest_batch_within(plan, 1e-6) == 0


def test_replicas_carry_the_rate_within_the_slo(plan: ServingPlan) -> None:
    slo = Slo(ttft_s=0.3, tpot_s=0.02)
    found = load_of(plan, slo, 100.0).service
    assert found is not None
    assert slo.met(found.each.ttft_s, found.each.tpot_s)
    assert found.replicas * found.capacity_per_s >= 100.0 > (found.replicas - 1) * found.capacity_per_s
    assert found.concurrency == pytest.approx(100.0 * found.each.e2e_s)
    assert found.devices == found.replicas
    assert found.usd_per_mtok == pytest.approx(found.usd_per_hour / (100.0 * 256 * 3600) * 1e6)


def test_more_devices_a_copy_keep_a_tighter_slo(llama_8b: ModelSpec) -> None:
    shape = ServingShape(batch=16, prompt_tokens=2048, output_tokens=256)
    rates = []
    for tensor in (1, 4):
        wide = plan_serving(llama_8b, replace(shape, tensor=tensor), load_hardware("h100"))
        best = largest_rate(wide, Slo(tpot_s=0.012))
        assert best is not None
        rates.append(best.rate_per_s)
    assert rates[1] > 2 * rates[0]


def test_separated_pools_keep_prompts_from_decoding(plan: ServingPlan) -> None:
    load = load_of(plan, Slo(tpot_s=0.012), 50.0, separated=True)
    pools, together = load.pools, load.service
    assert pools is not None
    assert together is not None
    assert pools.tpot_s <= 0.012 * 1.05  # and the transfer, once an answer
    assert pools.transfer_bytes == 2048 * 131_072
    assert pools.transfer_s == pytest.approx(2048 * 131_072 / plan.hardware.network.effective_bytes_per_s, rel=0.05)
    assert pools.prefill_instances + pools.decode_instances <= together.replicas + 2


def test_the_table_holds_the_plan_itself(plan: ServingPlan) -> None:
    table = latency_table(plan)
    assert plan.shape.context in table.contexts
    column = table.contexts.index(plan.shape.context)
    row = dict(table.rows)[16]
    assert row[column] == pytest.approx(plan.tpot_s, rel=1e-3)
    assert list(table.ttft_s) == sorted(table.ttft_s)
    for _, values in table.rows:
        known = [v for v in values if v is not None]
        assert known == sorted(known)
    assert dict(table.rows)[64][-1] is None  # 64 requests of 64 Ki tokens do not fit in 80 GB


def test_a_calibrated_machine_is_planned_under_load_too() -> None:
    small = plan_serving(small_llama(), ServingShape(batch=4, prompt_tokens=100, output_tokens=50), machine())
    assert small.added_by_a_prompt_s == small.ttft_s  # our engine computes a prompt in steps of its own
    # 512 tokens of a step hold all four prompts, which therefore come together and hold up nothing but each other
    assert small.loaded == pytest.approx((4 * small.ttft_s, small.tpot_s, 4 * small.ttft_s + 49 * small.tpot_s))
    found = at_rate(small, 0.3 / small.ttft_s)
    assert found is not None
    assert found.ttft_s > small.ttft_s
    assert latency_table(small).rows


def test_published_cache_sizes_hold(assets: Path) -> None:
    """Llama-3-8B at 8,192 tokens: 1.00 GiB in bf16. Without grouped-query heads it would be 4, without values 0.5."""
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    shape = ServingShape(prompt_tokens=8191, output_tokens=1)
    served = plan_serving(spec, shape, load_hardware("h100"))
    assert served.kv_bytes_per_token * 8192 == 2**30
    halved = plan_serving(spec, replace(shape, kv_dtype="fp8"), load_hardware("h100"))
    assert halved.kv_bytes_per_token * 8192 == 2**29
