"""What compression sends and leaves out: against plain references, on one process and over ranks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import RankRunner, values_of

from twostroke.core.compressions import COMPRESSIONS, factored_elements
from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.compression import compressed_sums, decoded, encoded, hadamard
from twostroke.training.exchanges import SENT
from twostroke.training.start import train

WAYS = [name for name in COMPRESSIONS if name != "none"]
CODED = [name for name in WAYS if not COMPRESSIONS[name].low_rank]


def reference(block: torch.Tensor, bits: int, rotated: bool) -> torch.Tensor:
    """A block of 256, in float64, by the definition: rotate, one scale, round to an integer, rotate back."""
    matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(256)] for i in range(256)], dtype=torch.float64) / 16
    values = matrix @ block.double() if rotated else block.double()
    most = 2 ** (bits - 1) - 1
    scale = (values.abs().max() / most).to(torch.bfloat16).double()
    codes = (values / scale).round().clamp(-most, most)
    return matrix @ (codes * scale) if rotated else codes * scale


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codes_are_those_of_the_definition(name: str) -> None:
    way = COMPRESSIONS[name]
    rows = torch.randn(2, 768, generator=torch.Generator().manual_seed(0))
    rows[0, 5] = 30.0
    rows[1, 256:512] = 0.0
    messages = encoded(rows, way)
    assert messages.dtype == torch.uint8
    assert messages.numel() == rows.numel() * way.bytes_per_element
    found = decoded(messages, way)
    for row, came in zip(rows, found, strict=True):
        for block, got in zip(row.split(256), came.split(256), strict=True):
            wanted = block * 0 if not block.any() else reference(block, way.bits, way.rotated).float()
            # fp32 may round a value that lies between two codes to the other one: one step of the scale, of few values
            step = float((reference(block, way.bits, way.rotated) - block).abs().max()) * 2 + 1e-6 if block.any() else 0.0
            assert (got - wanted).abs().max() <= step
            assert ((got - wanted).abs() > 1e-5).float().mean() < (0.02 if not way.rotated else 1.0)


def test_a_rotation_spreads_an_outlier() -> None:
    rows = torch.randn(1, 256, generator=torch.Generator().manual_seed(1))
    rows[0, 7] = 40.0
    plain = dataclasses.replace(COMPRESSIONS["int4"], rotated=False)
    error = {
        way: float((decoded(encoded(rows, w), w) - rows).norm())
        for way, w in (("plain", plain), ("rotated", COMPRESSIONS["int4"]))
    }
    assert error["rotated"] < error["plain"] / 3
    matrix = hadamard(torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix, torch.eye(256))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    rows = torch.ones(1, 512)
    rows[0, 300] = bad
    found = decoded(encoded(rows, COMPRESSIONS[name]), COMPRESSIONS[name])[0]
    assert not found.isfinite().all()
    assert found[:256].isfinite().all()


def _summed(ranks: Any, name: str, n_steps: int, refused: int) -> Any:
    """(Σ sums that came out, Σ own gradients, residuals, bytes of a step, the last sum) of ``n_steps`` of random tensors."""
    ranks.lay_out(ParallelRecipe(data=ranks.n, exact=False, compress=name))
    sums = compressed_sums(ranks)
    shapes = {"matrix": (40, 33), "vector": (37,), "stack": (24, 4, 9)}
    generator = torch.Generator().manual_seed(ranks.rank)
    out = {k: torch.zeros(s, dtype=torch.float64) for k, s in shapes.items()}
    given = {k: torch.zeros(s, dtype=torch.float64) for k, s in shapes.items()}
    for step in range(n_steps):
        tensors = {k: torch.randn(s, generator=generator) for k, s in shapes.items()}
        own = {k: t.clone() for k, t in tensors.items()}
        before = SENT.total()
        sums.sum(tensors)
        if step == refused:
            continue
        sums.accept()
        for k in shapes:
            out[k] += tensors[k].double()
            given[k] += own[k].double()
    state = sums.state(list(shapes), shapes)
    left = {
        k: state[f"residual::{k}"].local.double() if f"residual::{k}" in state else torch.zeros(s) for k, s in shapes.items()
    }
    plain = [{k: v.numpy() for k, v in t.items()} for t in (out, given, left, tensors)]
    return *plain, SENT.total() - before


@pytest.mark.parametrize("name", ["int8", "int4", "powersgd"])
@pytest.mark.parametrize("n", [2, 3])
def test_what_came_out_is_what_went_in_but_for_the_last_residuals(runner: RankRunner, name: str, n: int) -> None:
    """The identity of error feedback, over 6 steps of which the fourth is refused. One step without the residuals does not have
    it by orders of magnitude."""
    answers = [what for _, what, _ in runner.call(_summed, n, name, 6, 3)]
    for key in ("matrix", "vector", "stack"):
        out = torch.from_numpy(answers[0][0][key])
        for other in answers[1:]:
            assert torch.equal(torch.from_numpy(other[3][key]), torch.from_numpy(answers[0][3][key]))  # the same on all ranks
        went_in = sum(torch.from_numpy(answer[1][key]) for answer in answers)
        left = sum(torch.from_numpy(answer[2][key]) for answer in answers)
        torch.testing.assert_close(out, went_in - left, rtol=0, atol=2e-5)
        if key == "matrix":
            assert left.norm() > 1e-3 * went_in.norm()


@pytest.mark.parametrize("name", WAYS)
def test_bytes_are_those_of_the_row(runner: RankRunner, name: str) -> None:
    n, shapes = 2, [(40, 33), (37,), (24, 4, 9)]
    sent = runner.call(_summed, n, name, 1, -1)[0][1][-1]
    elements = sum(torch.Size(s).numel() for s in shapes)
    way = COMPRESSIONS[name]
    if way.low_rank:
        assert factored_elements(shapes[0], 4) == 4 * 73
        rows = [shape[0] * 4 if factored_elements(shape, 4) else torch.Size(shape).numel() for shape in shapes]
        columns = [torch.Size(shape[1:]).numel() * 4 for shape in shapes if factored_elements(shape, 4)]
        # One sum of left factors and vectors, one of right factors; each is filled up for the ranks to share.
        assert sent == 4 * sum(-(-sum(elements) // n) * n for elements in (rows, columns))
    else:
        own = -(-elements // (n * way.multiple)) * way.multiple
        assert sent == 2 * (n - 1) * own * way.bytes_per_element


def laid_out(recipe: TrainRecipe, name: str, **parallel: Any) -> TrainRecipe:
    return dataclasses.replace(recipe, output=f"{recipe.output}-{name}", parallel=ParallelRecipe(exact=False, **parallel))


def end_of(recipe: TrainRecipe) -> tuple[Any, ...]:
    directory = Path(recipe.output)
    end = load_checkpoint(list_checkpoints(directory / "checkpoints")[-1][1])
    return [(k, t.numpy().tobytes()) for part in (end.weights, end.optimizer) for k, t in sorted(part.items())], values_of(
        directory
    )


def sent_of(recipe: TrainRecipe) -> list[int]:
    return [json.loads(line)["sent_bytes"] for line in (Path(recipe.output) / "log.jsonl").read_text().splitlines()]


BIG = {"family": "llama", "n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 160}

APART = {"bf16": 1e-4, "fp16": 1e-4, "int8": 1e-3, "int4": 2e-2, "powersgd": 6e-2}
"""How far the mean loss of the last four of 24 steps on Python source may be from that of fp32 sums, relatively."""


def test_runs_learn_as_without_and_send_what_is_planned(make_recipe: Any, runner: RankRunner) -> None:
    recipe = make_recipe("run", BIG, dtype="fp32", steps=24, grad_accumulation=4, learning_rate=3e-3)
    text = dataclasses.replace(recipe.data, sources=(str(Path(asyncio.__file__).parent),))
    recipe = dataclasses.replace(recipe, data=text)
    found = {}
    for name in COMPRESSIONS:
        one = laid_out(recipe, name, compress=name)
        assert [kind for kind, *_ in runner.train(2, one)] == ["done"] * 2
        lines = values_of(Path(one.output))
        found[name] = sum(line[1] for line in lines[-4:]) / 4
        assert found[name] < 0.8 * lines[0][1]
        assert sent_of(one)[-1] == pytest.approx(planned_bytes(one), rel=0.01)
        measured = json.loads((Path(one.output) / "summary.json").read_text())["measurement"]
        assert measured["sent_bytes_per_step"] == pytest.approx(sent_of(one)[-1])
    for name, apart in APART.items():
        assert found[name] == pytest.approx(found["none"], rel=apart), found
        assert found[name] != found["none"]


def planned_bytes(recipe: TrainRecipe, replicas: int = 2) -> float:
    """What the plan of so many replicas says that a rank sends in a step, on any machine."""
    assert recipe.parallel is not None
    recipe = dataclasses.replace(recipe, parallel=dataclasses.replace(recipe.parallel, data=replicas))
    resolved = json.loads((Path(recipe.output) / "recipe.json").read_text())["resolved"]
    shape = dataclasses.replace(TrainingShape.from_recipe(recipe), dtype=resolved["dtype"])
    hardware = load_hardware("h100-sxm", "train")
    spec = ModelSpec.from_dict(resolved["spec"])
    plan = plan_training(spec, shape, hardware, layout_of(recipe.parallel, spec))
    return sum(traffic.sent_bytes for traffic in plan.traffic)


@pytest.mark.parametrize("parallel", [{"compress": "int4"}, {"compress": "powersgd"}, {"compress": "int8", "shard": 2}])
def test_a_resumed_run_ends_in_the_same_bits(make_recipe: Any, runner: RankRunner, parallel: dict[str, Any]) -> None:
    recipe = make_recipe("run", dtype="bf16", steps=6, grad_accumulation=4, checkpoint_every=2)
    whole, stopped = laid_out(recipe, "whole", **parallel), laid_out(recipe, "stopped", **parallel)
    runner.train(2, whole)
    assert {kind for kind, *_ in runner.train(2, stopped, stop_after=3)} == {"Interrupted"}
    assert [kind for kind, *_ in runner.train(2, stopped, resume=True)] == ["done"] * 2
    assert end_of(stopped) == end_of(whole)
    if "shard" not in parallel:
        residual = next(v for k, v in load_last(whole).items() if k.startswith("residual::"))
        assert len(residual) == 2
        assert not torch.equal(residual[0], residual[1])


def load_last(recipe: TrainRecipe) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(list_checkpoints(Path(recipe.output) / "checkpoints")[-1][1]).optimizer)


def test_shards_send_codes_too(make_recipe: Any, runner: RankRunner) -> None:
    recipe = make_recipe("run", BIG, dtype="fp32", steps=8, grad_accumulation=4, learning_rate=3e-3)
    plain = laid_out(recipe, "plain", shard=2)
    coded = {name: laid_out(recipe, name, shard=2, compress=name) for name in ("int8", "int4")}
    for one in (plain, *coded.values()):
        assert runner.train(2, one)[0][0] == "done"
    losses = values_of(Path(plain.output))[-1][1]
    for name, one in coded.items():
        assert values_of(Path(one.output))[-1][1] == pytest.approx(losses, rel={"int8": 5e-3, "int4": 5e-2}[name])
        assert sent_of(one)[-1] < sent_of(plain)[-1] * {"int8": 0.77, "int4": 0.73}[name]  # weights are gathered as before


def test_another_number_of_replicas_keeps_the_sum_of_residuals(make_recipe: Any, runner: RankRunner) -> None:
    recipe = laid_out(make_recipe("run", steps=4, grad_accumulation=4, checkpoint_every=2), "int8", compress="int8")
    runner.train(2, recipe, stop_after=2)
    assert runner.train(4, recipe, resume=True)[0][0] == "done"
    assert len(next(v for k, v in load_last(recipe).items() if k.startswith("residual::"))) == 4


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"compress": "int8"}, 'parallel.compress="int8" rounds what ranks send, and exact=true promises the same bits'),
        (
            {"compress": "int2", "exact": False},
            "parallel.compress='int2' is not a way to send gradients. Use one of none, bf16",
        ),
        ({"compress": "powersgd", "exact": False, "shard": 2}, "needs whole matrices, and shard=2 cuts them"),
        ({"compress_rank": 0}, "parallel.compress_rank=0 must be from 1 to 1024"),
        ({"outer_every": 4}, "parallel.outer_every=4 lets replicas train apart, and exact=true"),
        ({"outer_every": -1}, "parallel.outer_every=-1 must be at least 0"),
        ({"outer_every": 4, "exact": False, "shard": 2}, "keeps a whole model on each rank, and parallel.shard=2 cuts it"),
        ({"outer_every": 4, "exact": False, "fragments": 5}, "parallel.fragments=5 must be from 1 to outer_every=4"),
        ({"outer_momentum": 1.0}, "parallel.outer_momentum=1.0 must be at least 0 and less than 1"),
        ({"outer_learning_rate": 0.0}, "parallel.outer_learning_rate=0.0 must be above 0"),
    ],
)
def test_what_cannot_be_is_a_sentence(parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ParallelRecipe(**parallel)
    assert words in str(error.value)


def test_replicas_of_shards_are_not_compressed(make_recipe: Any) -> None:
    layout = ParallelRecipe(shard=2, exact=False, compress="int8")
    with pytest.raises(ConfigError, match=r"4 ranks with shard=2 are 2 replicas\. Use shard=1 or shard=4\."):
        layout.on(4, 8)
    with pytest.raises(ConfigError, match=r'train\.dtype="fp16" changes the scale'):
        laid_out(make_recipe(dtype="fp16"), "x", compress="int8")
    with pytest.raises(ConfigError, match=r"train\.ema_decay=0\.9 averages weights"):
        laid_out(make_recipe(ema_decay=0.9), "x", outer_every=2)


def test_a_run_cannot_change_its_compression(make_recipe: Any, runner: RankRunner) -> None:
    recipe = laid_out(make_recipe(steps=4, grad_accumulation=2, checkpoint_every=2), "int8", compress="int8")
    runner.train(2, recipe, stop_after=2)
    for parallel in (ParallelRecipe(), None):
        with pytest.raises(ConfigError, match=r"parallel\.compress='none' in the recipe differs from 'int8'"):
            train(dataclasses.replace(recipe, parallel=parallel), resume=True)
