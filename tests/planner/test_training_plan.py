"""Training plans add up, follow their formulas on a machine whose rates are round numbers, and refuse impossible shapes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import ideal_machine, machine, small_llama
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.core.matrices import block_matrices, layer_kinds
from twostroke.core.rates import BlockRates, Process, TrainingRates
from twostroke.core.recipe import LoraRecipe, ModelRecipe, TrainRecipe
from twostroke.core.spec import MoeSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.passes import matrices_of, newton_schulz
from twostroke.planner.training.plan import TrainingPlan, plan_training, steps_for_budget
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.flops import training_flops_per_token
from twostroke.planner.work.params import count_parameters

FORWARD, BACKWARD = (
    BlockRates("bf16", "compiled", "forward", 2e11, 1e10),
    BlockRates("bf16", "compiled", "backward", 3e11, 1e10),
)
RATES = TrainingRates(
    blocks=(FORWARD, BACKWARD), cross_entropy_logit_per_s={"compiled": 1e9}, adamw_bytes_per_s=2e10, block_compile_s=10.0
)


def calibrated(**changes: object) -> Hardware:
    """``machine()`` with ``RATES`` and ``changes`` of them, and 300 MB of a process that does nothing."""
    return machine(training=dataclasses.replace(RATES, **changes), process=Process(2.0, 3e8))  # type: ignore[arg-type]


def seconds(works: object, component: str) -> float:
    return sum(w.seconds for w in works if w.component == component)  # type: ignore[attr-defined]


def plan(**changes: object) -> TrainingPlan:
    return plan_training(small_llama(), TrainingShape(**changes), calibrated())  # type: ignore[arg-type]


def test_the_step_is_the_sum_of_its_parts() -> None:
    p = plan(grad_accumulation=3, steps=10)
    assert p.step_time_s == pytest.approx(p.forward_s + p.backward_s + p.optimizer_s + p.data_s)
    assert p.forward_s == pytest.approx(3 * sum(w.seconds for w in p.forward))
    assert p.tok_per_s == pytest.approx(3 * 16 * 512 / p.step_time_s)
    assert p.train_time_s == pytest.approx(p.startup_s + 10 * p.step_time_s)
    assert p.peak_memory_bytes == pytest.approx(sum(p.memory_bytes.values()))


def test_products_take_their_flops_over_the_rate() -> None:
    """One rate for everything: forward 2·rows·n·k, backward twice that."""
    spec = small_llama(positions="learned")
    p = plan_training(spec, TrainingShape(), ideal_machine())
    mlp = sum(x.n * x.k for x in block_matrices(spec) if x.component == "mlp")
    flops = 2 * 8192 * mlp * spec.n_layers
    # the activation moves 3F bf16 elements a token at 100 GB/s besides
    activation = spec.n_layers * 8192 * 3 * 704 * 2 / 1e11
    assert seconds(p.forward, "mlp") == pytest.approx(flops / 1e12 + activation)
    assert seconds(p.backward, "mlp") == pytest.approx(2 * flops / 1e12 + 2 * activation)


def test_attention_is_timed_over_the_keys_that_its_kernel_walks() -> None:
    spec = small_llama()
    walked = spec.n_layers * 4 * 4 * 64 * 320 * 8192  # four blocks of 128 queries see 128, 256, 384 and 512 keys
    faster = calibrated(blocks=(dataclasses.replace(FORWARD, attention_flop_per_s=4e11), BACKWARD))
    saved = seconds(plan().forward, "attention") - seconds(plan_training(spec, TrainingShape(), faster).forward, "attention")
    assert saved == pytest.approx(walked / 2e11 - walked / 4e11)


def test_model_flops_exclude_elementwise_work_and_recomputation() -> None:
    assert plan().flops_per_token == training_flops_per_token(small_llama(), 512)


def test_mfu_is_the_share_of_the_measured_peak() -> None:
    p = plan()
    assert p.mfu == pytest.approx(p.flops_per_token * p.tok_per_s / 880e9)
    assert 0 < p.mfu < 1


def test_rates_that_were_measured_are_used_and_missing_ones_fall_back() -> None:
    eager = plan(compile=False)  # nothing eager was measured: plain bandwidth
    assert eager.forward_s > 0
    slower = plan_training(small_llama(), TrainingShape(), calibrated(cross_entropy_logit_per_s={"compiled": 1e8}))
    assert slower.forward_s - plan().forward_s == pytest.approx(8192 * 4096 * (1 / 1e8 - 1 / 1e9))


def test_a_machine_without_a_compiler_uses_the_eager_rates() -> None:
    rates = TrainingRates(blocks=(BlockRates("bf16", "eager", "forward", 1e9, 1e8),))
    slow = plan_training(small_llama(), TrainingShape(), machine(training=rates))
    assert slow.forward_s > 10 * plan().forward_s


def test_muon_costs_products_and_saves_state() -> None:
    adamw, muon = plan(), plan(optimizer="muon")
    assert muon.optimizer_s > adamw.optimizer_s
    assert muon.memory_bytes["optimizer"] < adamw.memory_bytes["optimizer"]
    assert muon.checkpoint_bytes < adamw.checkpoint_bytes
    matrices = matrices_of(layer_kinds(small_llama())[0][0])
    assert sum(r * c for r, c in matrices) * 6 == count_parameters(small_llama()).block_matrices
    flops, at = newton_schulz(256, 704, ideal_machine())
    assert flops == 5 * 2 * (2 * 256**2 * 704 + 256**3)
    assert at == pytest.approx(flops / 1e12)


def test_prediction_has_the_ledgers_names() -> None:
    names = set(plan(steps=5).prediction())
    assert {"step_time_s", "peak_memory_bytes", "train_tok_per_s", "train_time_s", "mfu", "energy_kwh", "cost_usd"} <= names
    assert {"forward_s", "backward_s", "optimizer_s", "data_s", "weights_bytes", "gradients_bytes"} <= names
    assert {"optimizer_bytes", "activations_bytes", "checkpoint_bytes", "model_bytes", "startup_s"} <= names
    open_ended = set(plan().prediction())
    assert not {"train_time_s", "energy_kwh", "cost_usd"} & open_ended


def test_money_and_energy_follow_the_time() -> None:
    p = plan(steps=1000)
    assert p.cost is not None
    assert p.train_time_s is not None
    assert p.cost.usd == pytest.approx(p.train_time_s / 3600 * 0.08)  # two cores at 0.04 an hour
    assert p.cost.energy_kwh == pytest.approx(p.train_time_s / 3600 * p.watts / 1000)
    assert 0.17 * 8.4 < p.watts < 8.4


def test_one_device_would_send_a_ring_all_reduce_of_its_gradients_to_a_second() -> None:
    assert plan().network_bytes_per_step == 2 * count_parameters(small_llama()).total  # 2·(n−1)/n·2·N


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.sampled_from([64, 512, 2048]), st.sampled_from(["adamw", "muon"]), st.booleans())
def test_more_work_never_takes_less(batch: int, length: int, optimizer: str, compiled: bool) -> None:
    shape = TrainingShape(batch, length, optimizer=optimizer, compile=compiled)
    small = plan_training(small_llama(), shape, calibrated())
    for bigger in (
        plan_training(small_llama(), dataclasses.replace(shape, batch_size=2 * batch), calibrated()),
        plan_training(small_llama(n_layers=12), shape, calibrated()),
        plan_training(small_llama(d_ff=1408), shape, calibrated()),
    ):
        assert bigger.step_time_s > small.step_time_s
        assert bigger.peak_memory_bytes >= small.peak_memory_bytes  # rows beyond those computed at once wait


def test_a_cpu_moves_biased_outputs_and_routed_rows_once_more() -> None:
    shape, ideal = TrainingShape(), ideal_machine()
    plain, biased = (plan_training(small_llama(qkv_bias=bias), shape, ideal) for bias in (False, True))
    outputs = next(x.n for x in block_matrices(small_llama()) if x.name == "qkv")
    written = small_llama().n_layers * 8192 * outputs * 2 / 1e11  # bf16 at 100 GB/s
    assert seconds(biased.forward, "attention") - seconds(plain.forward, "attention") == pytest.approx(2 * written)
    assert seconds(biased.backward, "attention") - seconds(plain.backward, "attention") == pytest.approx(written)
    one, two = (small_llama(family="mixtral", moe=MoeSpec(8, n, 704 // n)) for n in (1, 2))  # as many operations
    rows = one.n_layers * 8192 * one.d_model * 2 / 1e11
    passes = [plan_training(spec, shape, ideal) for spec in (one, two)]
    for direction, moves in (("forward", 5), ("backward", 7)):
        more = [seconds(getattr(plan, direction), "mlp") for plan in passes]
        assert more[1] - more[0] == pytest.approx(moves * rows, rel=0.05)


def test_ranks_that_share_a_machine_have_equal_parts_of_it() -> None:
    spec, hardware, shape = small_llama(), calibrated(), TrainingShape(steps=10)
    one = plan_training(spec, dataclasses.replace(shape, grad_accumulation=2), hardware)
    two = plan_training(spec, shape, hardware, Layout(data=2, sharing=2))
    assert two.forward_s == pytest.approx(one.forward_s)  # as many micro-batches, each in twice the time
    assert two.backward_s == pytest.approx(one.backward_s)
    assert two.tokens_per_step == one.tokens_per_step
    assert two.mfu / one.mfu == pytest.approx(one.step_time_s / two.step_time_s)  # of one machine's peak
    assert two.room_bytes == hardware.memory_bytes / 2
    assert two.cost is not None
    assert two.cost.n_devices == 1
    apart = plan_training(spec, shape, hardware, Layout(data=2))
    assert two.optimizer_s == pytest.approx(2 * apart.optimizer_s)  # each updates all
    assert apart.cost is not None
    assert apart.cost.n_devices == 2
    assert plan_training(spec, shape, hardware, Layout(data=4, sharing=2)).layout.n_whole == 2


def test_runs_beside_each_other_cost_one_machine_together() -> None:
    """Each of two runs takes twice as long on half of the cores, and pays for half of the machine."""
    spec, hardware, shape = small_llama(), calibrated(), TrainingShape(steps=10)
    alone, half = (plan_training(spec, shape, hardware, Layout(sharing=n)) for n in (1, 2))
    assert alone.cost is not None
    assert half.cost is not None
    assert half.train_time_s is not None
    assert half.cost.n_devices == 0.5
    assert half.cost.usd == pytest.approx(half.train_time_s / 3600 * hardware.usd_per_hour.value / 2)
    assert half.cost.energy_kwh == pytest.approx(half.train_time_s * half.watts / 3.6e6 / 2)
    assert half.mfu / alone.mfu == pytest.approx(alone.step_time_s / half.step_time_s)  # of the whole machine's peak


def test_a_budget_becomes_steps_that_fit_in_it() -> None:
    spec, shape, hardware = small_llama(), TrainingShape(), calibrated()
    steps = steps_for_budget(spec, shape, hardware, 300)
    fitting = plan_training(spec, dataclasses.replace(shape, steps=steps), hardware)
    longer = plan_training(spec, dataclasses.replace(shape, steps=steps + 1), hardware)
    assert fitting.train_time_s is not None
    assert longer.train_time_s is not None
    assert fitting.train_time_s <= 300 < longer.train_time_s
    assert steps_for_budget(spec, shape, hardware, 0.001) == 1
    for budget in (0, -5, float("nan")):
        with pytest.raises(ConfigError, match="budget_s"):
            steps_for_budget(spec, shape, hardware, budget)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"sequence_length": 0},
        {"grad_accumulation": 0},
        {"steps": -1},
        {"batch_size": 1.5},
        {"batch_size": True},
        {"dtype": "int8"},
        {"optimizer": "lion"},
        {"method": "dora"},
        {"checkpointing": "some"},
        {"logits": "half"},
        {"lora_rank": 0},
        {"lora_targets": ()},
    ],
)
def test_impossible_shapes_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainingShape(**wrong)  # type: ignore[arg-type]


def test_a_recipes_settings_become_a_shape() -> None:
    settings_ = TrainSettings(steps=7, batch_size=3, sequence_length=32, grad_accumulation=2, optimizer="muon", compile=False)
    shape = TrainingShape.from_settings(settings_)
    assert (shape.steps, shape.tokens_per_step, shape.optimizer, shape.mode) == (7, 192, "muon", "eager")
    assert TrainingShape.from_settings(settings_, steps=9).steps == 9


def test_a_recipes_average_and_checkpointing_are_planned() -> None:
    settings_ = TrainSettings(steps=7, ema_decay=0.99, activation_checkpointing="selective", dtype="pure_bf16")
    shape = TrainingShape.from_settings(settings_)
    assert (shape.average, shape.checkpointing, shape.dtype) == (True, "selective", "pure_bf16")
    averaged, plain = (plan(average=average) for average in (True, False))
    n = averaged.trained_parameters
    assert averaged.memory_bytes["optimizer"] - plain.memory_bytes["optimizer"] == 4 * n
    assert averaged.checkpoint_bytes - plain.checkpoint_bytes == 4 * n
    assert plan(optimizer="sgd", dtype="pure_bf16", checkpointing="full").notes == ()  # all of it is what our trainer does


def test_a_recipes_adapters_are_planned() -> None:
    lora = LoraRecipe(rank=4, targets=("q_proj",))
    recipe = TrainRecipe(method="lora", model=ModelRecipe(init_from="base"), train=TrainSettings(steps=7), lora=lora)
    shape = TrainingShape.from_recipe(recipe, steps=9)
    assert (shape.steps, shape.method, shape.lora_rank, shape.lora_targets) == (9, "lora", 4, ("q_proj",))
    assert TrainingShape.from_recipe(dataclasses.replace(recipe, method="full", lora=LoraRecipe())).method == "full"


def test_datasheet_plans_say_what_they_are() -> None:
    p = plan_training(small_llama(), TrainingShape(), load_hardware("h100"))
    assert any("datasheet" in note for note in p.notes)
    assert plan().notes == ()


def test_plans_are_plain_data_and_repeatable() -> None:
    import json

    one, two = plain(plan(steps=3)), plain(plan(steps=3))
    assert json.dumps(one) == json.dumps(two)
    assert one["shape"]["steps"] == 3
    assert one["parameters"]["total"] == count_parameters(small_llama()).total


@pytest.mark.parametrize(
    ("dtype", "optimizer", "bytes_per_parameter"), [("bf16", "adamw", 12), ("fp32", "adamw", 12), ("pure_bf16", "adamw", 6)]
)
def test_checkpoints_in_the_background_take_a_copy_of_what_they_hold(
    dtype: str, optimizer: str, bytes_per_parameter: int
) -> None:
    without, copied = (plan(dtype=dtype, optimizer=optimizer, snapshot=snapshot) for snapshot in (False, True))
    assert copied.peak_memory_bytes - without.peak_memory_bytes == bytes_per_parameter * without.trained_parameters
    assert copied.memory_bytes["snapshot"] == copied.checkpoint_bytes
    assert "snapshot" not in without.memory_bytes
    settings = TrainSettings(steps=1, checkpoint_every=5)
    assert TrainingShape.from_settings(settings).snapshot
    assert not TrainingShape.from_settings(dataclasses.replace(settings, checkpoint_in_background=False)).snapshot
    assert not TrainingShape.from_settings(dataclasses.replace(settings, checkpoint_every=0)).snapshot
