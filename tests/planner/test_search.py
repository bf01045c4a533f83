"""Searching: the winner is the one that planning every candidate by itself finds, and limits only ever narrow."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace

import pytest

from machines import machine as calibrated_machine
from machines import small_llama
from twostroke.core.described import plain
from twostroke.core.engines import RECOMPUTATIONS
from twostroke.core.errors import ConfigError
from twostroke.core.rates import Correction, Corrections, TrainingRates, TrainingStep
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.planner.choosing.candidates import OBJECTIVES, Objective
from twostroke.planner.choosing.search import (
    MICRO_BATCHES,
    Search,
    ServeLimits,
    ServeWork,
    Space,
    TrainLimits,
    TrainWork,
    search_serving,
    search_training,
    serve_placements,
    train_layouts,
)
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import hardware_names, load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.text.search import nothing_found, search_text, verdict_text
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape

SERVED = ServeWork(prompt_tokens=512, output_tokens=128)


def llama_8b() -> ModelSpec:
    """Llama-3-8B by its config.json."""
    return small_llama(
        vocab_size=128256, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14336, max_positions=8192,
        tied_embeddings=False,
    )  # fmt: skip


def machines(*names: str) -> tuple[Hardware, ...]:
    return tuple(load_hardware(name) for name in names)


def found(search: Search) -> float:
    assert search.winner is not None
    return search.winner.score(search.objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_winner_is_what_planning_each_by_itself_finds(objective: Objective) -> None:
    """Brute force: ``plan_serving`` of every (device, scheme, batch), with no cache, no pruning and no order."""
    spec, those, batches = llama_8b(), machines("l40s", "h100-sxm", "l4"), (1, 8, 64, 256)
    schemes = ("bf16", "int8")
    search = search_serving(spec, SERVED, Space(those, 1, schemes, batches), ServeLimits(ttft_s=0.4), objective)
    scores = []
    for machine, scheme, batch in itertools.product(those, schemes, batches):
        plan = plan_serving(spec, ServingShape(scheme, batch, 512, 128), machine)
        if plan.largest_batch >= batch and plan.loaded.ttft_s <= 0.4:
            rated = {"cost": plan.usd_per_mtok, "time": plan.loaded.e2e_s, "energy": plan.kwh_per_mtok}
            scores.append((rated.get(objective, -plan.output_tok_per_s), machine.name, scheme, batch))
    winner = search.winner
    assert winner is not None
    best = min(scores)
    assert found(search) == pytest.approx(best[0], rel=1e-9)
    assert (winner.device, winner.precision, winner.batch) == best[1:]
    assert search.kept == len(scores)


def test_several_devices_are_planned_as_plan_serve_does() -> None:
    """Brute force over tensor, pipeline and expert parallel, of a mixture of experts: what ``plan_serving`` says of each, with
    the latencies of users who ask again at once."""
    spec = llama_8b().with_(moe=MoeSpec(n_experts=8, top_k=2, d_expert=14336))
    machine, batches = load_hardware("h200"), (4, 128)
    search = search_serving(spec, SERVED, Space((machine,), 4, ("fp8",), batches), ServeLimits(tpot_s=0.02), "time")
    placements = {(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1)}
    placements |= {(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 4)}  # experts on more devices than attention
    assert set(serve_placements(spec, 4, 8)) == placements
    best = None
    kept = 0
    for (tensor, pipeline, expert), batch in itertools.product(sorted(placements), batches):
        shape = ServingShape("fp8", batch, 512, 128, tensor=tensor, pipeline=pipeline, expert=expert)
        plan = plan_serving(spec, shape, machine)
        if plan.largest_batch >= batch and plan.loaded.tpot_s <= 0.02:
            kept += 1
            best = min(best or (plan.loaded.e2e_s, plan), (plan.loaded.e2e_s, plan), key=lambda pair: pair[0])
    assert best is not None
    winner, plan = search.winner, best[1]
    assert winner is not None
    assert search.kept == kept
    assert winner.n_devices == plan.devices
    for name, value in {
        "e2e_s": best[0],
        "loaded_ttft_s": plan.loaded.ttft_s,
        "loaded_tpot_s": plan.loaded.tpot_s,
        "output_tok_per_s": plan.output_tok_per_s,
        "cost_per_mtok_usd": plan.usd_per_mtok,
        "energy_per_mtok_kwh": plan.kwh_per_mtok,
    }.items():
        assert winner.values[name] == pytest.approx(value, rel=1e-9), name


def test_more_devices_never_find_a_worse_one() -> None:
    """A larger space contains the smaller one."""
    spec = llama_8b()
    times = [found(search_serving(spec, SERVED, Space(machines("l40s"), n), ServeLimits(), "time")) for n in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_every_candidate_is_accounted_for() -> None:
    search = search_serving(
        llama_8b(), SERVED, Space(machines("l4", "h100-sxm"), 1, (), (1, 64, 512)), ServeLimits(tpot_s=0.05)
    )
    for result in search.results:
        lost = sum(result.rejected.values()) + sum(result.outranked.values())
        assert lost + (search.winner is result.best) == result.enumerated
    assert sum(r.enumerated for r in search.results) == search.enumerated
    assert search.out_of_memory + search.timed == search.enumerated
    l4 = next(r for r in search.results if r.device == "l4")
    assert l4.rejected["memory"] >= 1  # 512 requests of 640 tokens take 42.9 GB


def test_a_tighter_limit_never_finds_a_cheaper_one() -> None:
    spec, space = llama_8b(), Space(machines("l4", "l40s", "h100-sxm"), 1)
    costs = [found(search_serving(spec, SERVED, space, ServeLimits(tpot_s=slo))) for slo in (0.2, 0.05, 0.03, 0.02, 0.015)]
    assert costs == sorted(costs)
    assert costs[-1] > costs[0]


def test_more_money_never_finds_a_worse_one() -> None:
    spec, space = llama_8b(), Space(machines("l4", "l40s", "h100-sxm"), 1)
    times = [found(search_serving(spec, SERVED, space, ServeLimits(usd_per_hour=usd), "time")) for usd in (0.8, 1.6, 3.0, 9.0)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_a_search_is_deterministic_whatever_the_order_of_devices() -> None:
    spec, those = llama_8b(), machines("l4", "l40s", "h100-sxm")
    first = plain(search_serving(spec, SERVED, Space(those, 1)))
    second = plain(search_serving(spec, SERVED, Space(tuple(reversed(those)), 1)))
    assert json.dumps(first) == json.dumps(second)


def test_replicas_serve_the_rate_that_is_asked_for() -> None:
    work = replace(SERVED, requests_per_s=40.0)
    winner = search_serving(llama_8b(), work, Space(machines("l40s"), 64)).winner
    assert winner is not None
    alone = plan_serving(llama_8b(), ServingShape(winner.precision, winner.batch, 512, 128), load_hardware("l40s"))
    assert (winner.n_devices - 1) * alone.output_tok_per_s < 40 * 128 <= winner.n_devices * alone.output_tok_per_s
    assert winner.values["cost_per_mtok_usd"] == pytest.approx(winner.usd_per_hour * 1e6 / 3600 / (40 * 128))


def test_a_rate_beyond_the_devices_is_a_miss_of_devices() -> None:
    search = search_serving(llama_8b(), replace(SERVED, requests_per_s=4000.0), Space(machines("l4"), 2))
    assert search.winner is None
    assert search.nearest is not None
    assert search.nearest.misses[0].limit == "devices"
    assert "--max-devices" in nothing_found(search)


def test_nothing_found_says_the_nearest_miss_and_what_would_do() -> None:
    """The relief that is named does admit a candidate when it is given."""
    spec, space = llama_8b(), Space(machines("l4", "l40s"), 1)
    search = search_serving(spec, SERVED, space, ServeLimits(tpot_s=0.002))
    assert search.winner is None
    sentence = nothing_found(search)
    assert "nearest" in sentence
    raised = float(sentence.partition("--slo-tpot-ms ")[2].split()[0])
    assert search_serving(spec, SERVED, space, ServeLimits(tpot_s=raised / 1e3)).winner is not None
    assert search_serving(spec, SERVED, space, ServeLimits(tpot_s=0.95 * raised / 1e3)).winner is None


def test_a_precision_without_arithmetic_is_a_reason() -> None:
    search = search_serving(llama_8b(), SERVED, Space(machines("a100-sxm-80gb", "h100-sxm"), 1, ("fp8",)))
    a100 = next(r for r in search.results if r.device == "a100-sxm-80gb")
    assert a100.rejected == {"type": 1}
    assert search.winner is not None
    assert search.winner.device == "h100-sxm"
    trained = search_training(
        small_llama(), TrainWork(1e8, 512, 2**15), Space(machines("a100-sxm-80gb", "h100-sxm"), 1, ("fp8",))
    )
    assert [each.rejected.get("type") for each in trained.results if each.device == "a100-sxm-80gb"] == [1]
    assert trained.winner is not None
    assert trained.winner.device == "h100-sxm"


def test_pure_bf16_trains_where_bf16_is_multiplied() -> None:
    work = TrainWork(1e8, 512, 2**15)
    search = search_training(small_llama(), work, Space(machines("a100-sxm-80gb"), 1, ("pure_bf16",)))
    assert search.winner is not None
    assert search.winner.precision == "pure_bf16"


def test_of_a_calibrated_machine_there_is_one() -> None:
    """A laptop is not bought eight times, and its engine serves three ways to hold weights."""
    spec, here = small_llama(), calibrated_machine()
    served = search_serving(spec, SERVED, Space((here,), 8))
    assert {c.n_devices for c in served.best} == {1}
    assert served.results[0].rejected["type"] == 2  # fp8 and int4
    assert served.winner is not None
    plan = plan_serving(spec, ServingShape(served.winner.precision, served.winner.batch, 512, 128), here)
    assert served.winner.values["loaded_tpot_s"] == pytest.approx(plan.loaded.tpot_s)
    assert served.winner.values["cost_per_mtok_usd"] == pytest.approx(plan.usd_per_mtok)
    trained = search_training(spec, TrainWork(1e8, 512, 2**15), Space((here,), 8))
    assert {c.n_devices for c in trained.best} == {1}


# -- training -------------------------------------------------------------------------------------------------------------

TRAINED = TrainWork(160e9, 4096, 2**18)


def test_the_training_winner_is_what_planning_each_by_itself_finds() -> None:
    """Brute force: ``plan_training`` of every layout, micro-batch and policy on two devices, the whole run priced by it."""
    spec, those = llama_8b(), machines("a100-sxm-80gb", "h100-sxm")
    search = search_training(spec, TRAINED, Space(those, 4))
    runs = []
    steps = -(-int(TRAINED.tokens) // TRAINED.batch_tokens)
    for machine, n_devices in itertools.product(those, (1, 2, 4)):
        layouts = train_layouts(spec, n_devices, machine.devices_per_node)
        for layout, micro, policy in itertools.product(layouts, MICRO_BATCHES, RECOMPUTATIONS):
            shape = TrainingShape(micro, 4096, 64 // (layout.data * micro), steps=steps, checkpointing=policy)
            plan = plan_training(spec, shape, machine, layout)
            if plan.peak_memory_bytes <= machine.memory_bytes:
                assert plan.cost is not None
                runs.append((plan.cost.usd, machine.name, layout, micro, policy, plan.step_time_s, plan.cost.energy_kwh))
    best = min(runs, key=lambda run: run[0])
    winner = search.winner
    assert winner is not None
    assert search.kept == len(runs)
    assert found(search) == pytest.approx(best[0], rel=1e-9)
    assert winner.values["step_time_s"] == pytest.approx(best[5], rel=1e-9)
    assert winner.values["energy_kwh"] == pytest.approx(best[6], rel=1e-9)
    assert (winner.device, winner.batch, winner.settings["checkpointing"]) == (best[1], best[3], best[4])


def taught_machine() -> Hardware:
    """A calibrated machine whose whole steps were measured at one width, and whose own runs taught factors."""
    steps = tuple(TrainingStep(256, n, "bf16", "compiled", n * 0.01, n * 0.02, n * 0.003, first_step_s=5.0) for n in (2, 6))
    learned = tuple(
        Correction(name, factor, 9, 3, 2, 20.0, 5.0) for name, factor in (("update", 1.5), ("data", 3.0), ("forward", 1.2))
    )
    rates = TrainingRates(adamw_bytes_per_s=2e10, block_compile_s=10.0, steps=steps)
    return calibrated_machine(training=rates, corrections=Corrections(learned))


@pytest.mark.parametrize(
    ("machine", "precision", "optimizer"),
    [(taught_machine(), "bf16", "adamw"), (taught_machine(), "bf16", "muon"), (load_hardware("b200-sxm"), "mxfp8", "adamw")],
    ids=["calibrated", "calibrated-muon", "datasheet-mxfp8"],
)
def test_the_best_way_to_train_has_the_numbers_of_its_own_plan(machine: Hardware, precision: str, optimizer: str) -> None:
    spec, work = small_llama(), TrainWork(1e8, 512, 2**15, optimizer)
    winner = search_training(spec, work, Space((machine,), 1, (precision,))).winner
    assert winner is not None
    steps = -(-int(work.tokens) // work.batch_tokens)
    shape = TrainingShape(
        winner.batch, 512, winner.settings["grad_accumulation"], precision, optimizer, steps=steps,
        checkpointing=winner.settings["checkpointing"],
    )  # fmt: skip
    plan = plan_training(spec, shape, machine)
    assert plan.cost is not None
    own = {name: getattr(plan, name, None) for name in winner.values} | {
        "train_tok_per_s": plan.tok_per_s, "cost_usd": plan.cost.usd, "energy_kwh": plan.cost.energy_kwh,
    }  # fmt: skip
    assert winner.values == pytest.approx(own, rel=1e-9)
    assert winner.memory_bytes == pytest.approx(plan.memory_bytes, rel=1e-9)


def test_training_layouts_are_all_that_divide() -> None:
    """8 devices, by hand: tensor·pipeline·data = 8 has ten splits; ZeRO 0–3 without a pipeline and 0–1 with one, none alone."""
    layouts = train_layouts(llama_8b(), 8, 8)
    assert len({(v.tensor, v.pipeline, v.data) for v in layouts}) == 10
    assert len(layouts) == len(set(layouts)) == 3 * 4 + 1 + 3 * 2 + 3
    assert all(v.n_devices == 8 for v in layouts)
    assert Layout(data=8, zero=3) in {replace(v, devices_per_node=None) for v in layouts}
    assert max(v.tensor for v in train_layouts(llama_8b(), 8, 4)) == 4  # tensor parallel stays in a node


def test_more_money_or_more_days_never_find_a_worse_run() -> None:
    spec, space = llama_8b(), Space(machines("a100-sxm-80gb", "h100-sxm", "l40s"), 8)
    by_days = [found(search_training(spec, TRAINED, space, TrainLimits(days=days))) for days in (25.0, 40.0, 80.0, 400.0)]
    assert by_days == sorted(by_days, reverse=True)
    by_budget = [
        found(search_training(spec, TRAINED, space, TrainLimits(usd_per_hour=usd), "time")) for usd in (6.0, 12.0, 20.0, 50.0)
    ]
    assert by_budget == sorted(by_budget, reverse=True)
    assert by_budget[-1] < by_budget[0]


def test_a_budget_for_the_run_rejects_and_says_so() -> None:
    search = search_training(llama_8b(), TRAINED, Space(machines("l40s"), 8), TrainLimits(run_usd=100.0))
    assert search.winner is None
    assert search.nearest is not None
    assert search.nearest.misses[0].limit == "run_usd"
    sentence = nothing_found(search)
    assert "--budget-usd" in sentence
    assert "more memory" not in sentence  # those that do not fit would be too dear as well


def test_a_model_too_large_for_every_count_misses_by_memory() -> None:
    huge = llama_8b().with_(n_layers=128, d_model=16384, d_ff=57344, n_heads=128)
    search = search_training(huge, TRAINED, Space(machines("l40s"), 2))
    assert search.timed == 0
    assert search.nearest is not None
    assert search.nearest.misses[0].limit == "memory"
    assert search.nearest.misses[0].ratio > 10
    assert "--max-devices" in nothing_found(search)


def test_ten_thousand_layouts_take_at_most_five_seconds_of_one_core() -> None:
    """The bar is 5 s; CPU time, so that neighbours on the machine do not count."""
    those = tuple(load_hardware(name) for name in hardware_names())
    started = time.process_time()
    search = search_training(llama_8b(), TrainWork(160e9), Space(those, 8))
    assert search.enumerated >= 10_000
    assert (time.process_time() - started) * 10_000 / search.enumerated <= 5


# -- the interconnect -----------------------------------------------------------------------------------------------------


def test_an_8b_model_on_one_device_leaves_the_fast_link_idle() -> None:
    """H100 SXM against L40S: the link is 450 against 32 GB/s, and one device of either sends nothing over it."""
    (finding,) = search_serving(llama_8b(), SERVED, Space(machines("h100-sxm", "l40s"), 1)).links
    assert (finding.rich.device, finding.plain.device) == ("h100-sxm", "l40s")
    assert finding.rich.link_use == 0.0
    h100, l40s = machines("h100-sxm", "l40s")
    difference = h100.usd_per_hour.value - l40s.usd_per_hour.value
    assert finding.difference_usd == pytest.approx(difference)
    assert 0 < finding.idle_usd < difference
    assert finding.idle_usd == finding.link_usd  # all of it idle
    # By hand: ln of the ratios 85.9/48.3 GB, 3.35/0.864 TB/s, 989/362 TFLOP/s and 450/32 GB/s is 0.576, 1.355, 1.005, 2.644.
    assert finding.link_usd / difference == pytest.approx(2.644 / (0.576 + 1.355 + 1.005 + 2.644), rel=0.01)


def test_the_break_even_price_makes_the_tokens_cost_the_same() -> None:
    (finding,) = search_serving(llama_8b(), SERVED, Space(machines("h100-sxm", "l40s"), 1)).links
    cheaper = replace(
        load_hardware("h100-sxm"), usd_per_hour=replace(load_hardware("h100").usd_per_hour, value=finding.break_even_usd)
    )
    search = search_serving(llama_8b(), SERVED, Space((cheaper, load_hardware("l40s")), 1))
    costs = [r.best.score("cost") for r in search.results if r.best is not None]
    assert costs[0] == pytest.approx(costs[1], rel=1e-6)
    assert finding.wasted == (finding.price_usd > finding.break_even_usd)


def test_a_loser_that_pays_for_an_idle_link_lost_by_it() -> None:
    """An L40S and the same with NVLink at twice the price: nothing else differs, so the link is the whole reason."""
    plain = load_hardware("l40s")
    price = replace(plain.usd_per_hour, value=2 * plain.usd_per_hour.value)
    rich = replace(plain, name="l40s-nvlink", usd_per_hour=price, link=load_hardware("h100").link)
    search = search_serving(llama_8b(), SERVED, Space((plain, rich), 1))
    loser = search.results[1]
    assert (loser.device, search.winner and search.winner.device) == ("l40s-nvlink", "l40s")
    assert loser.behind is not None
    assert loser.behind.cause == "interconnect"
    assert loser.behind.factors["interconnect"] == pytest.approx(2.0)
    assert loser.behind.factors["price"] == pytest.approx(1.0)
    assert loser.outranked["interconnect"] >= 1
    assert "2× idle link" in search_text(search, "8B")
    (finding,) = search.links
    assert finding.wasted
    assert finding.excess_usd == pytest.approx(plain.usd_per_hour.value)
    trained = search_training(llama_8b(), TRAINED, Space((plain, rich), 8)).results
    used = next(r for r in trained if r.device == "l40s-nvlink")
    assert used.best is not None
    assert used.best.link_use > 0
    assert used.behind is not None
    assert "interconnect" not in used.behind.factors  # training sends over it


# -- what people see ------------------------------------------------------------------------------------------------------


def test_the_text_keeps_to_120_columns_and_names_reasons() -> None:
    those = tuple(load_hardware(name) for name in hardware_names())
    text = search_text(search_serving(llama_8b(), SERVED, Space(those, 8), ServeLimits(tpot_s=0.03)), "an 8B model", 60)
    assert max(map(len, text.split("\n"))) <= 120
    for words in ("does not fit in memory", "tokens too slow", "interconnect", "pruned by memory", "behind", "$/Mtok"):
        assert words in text


def test_a_search_for_little_energy_shows_it() -> None:
    text = search_text(search_serving(llama_8b(), SERVED, Space(machines("h100-sxm", "l40s"), 1), objective="energy"), "8B")
    assert "kWh/Mtok" in text
    assert "hosts, cooling and supply (PUE) are not in it" in text


def test_two_winners_are_set_side_by_side() -> None:
    space = Space(machines("h100-sxm", "l40s"), 8)
    both = [search_training(llama_8b(), TRAINED, space), search_serving(llama_8b(), SERVED, Space(space.machines, 1))]
    text = verdict_text(both)
    assert text.startswith("Training wants NVIDIA H100")
    assert "serving wants" in text
    assert "uses no link" in text
    assert verdict_text(both[:1]) == ""


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ServeLimits(tpot_s=0.0), "tpot_s=0 must be above 0"),
        (lambda: TrainLimits(days=-3.0), "days=-3 must be above 0"),
        (lambda: ServeWork(prompt_tokens=0), "prompt_tokens=0"),
        (lambda: ServeWork(requests_per_s=float("inf")), "requests_per_s"),
        (lambda: TrainWork(1e9, 4096, 5000), "Use 4096"),
        (lambda: TrainWork(0.0), "tokens=0"),
        (lambda: Space(()), "no device"),
        (lambda: Space((load_hardware("l4"),), 0), "max_devices=0"),
        (lambda: ServeWork(requests_per_s=1e308), r"requests_per_s=1e\+308 must be from 0 to 1e\+12"),
        (lambda: ServeWork(requests_per_s=float("nan")), "requests_per_s=nan must be"),
        (lambda: Space((load_hardware("l4"),), 8, (), (0,)), "batch=0"),
        (lambda: search_serving(llama_8b(), ServeWork(8000, 8000), Space((load_hardware("l4"),))), "context holds 8192"),
    ],
)
def test_impossible_inputs_get_a_sentence(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]
