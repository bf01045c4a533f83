"""benchmarks/planner/engines: a case for every row of the package's tables, and verdicts that know what a machine repeats."""

from __future__ import annotations

import pytest

from scripts import script
from twostroke.core.engines import METHODS, RECOMPUTATIONS, TRAINING_TYPES
from twostroke.core.families import FAMILIES
from twostroke.core.optimizers import TRAINED
from twostroke.core.recipe import ModelRecipe, spec_from_recipe
from twostroke.core.sampling_kinds import SAMPLING_KINDS
from twostroke.core.schemes import CACHE_TYPES, NATIVE, SCHEMES, WEIGHTS
from twostroke.planner.training.shape import TrainingShape
from twostroke.scheduling.sampling_params import SamplingParams

configurations = script("planner/engines/configurations.py")
score = script("planner/engines/score.py")
TRAINING, SERVING = configurations.TRAINING, configurations.SERVING


@pytest.mark.parametrize(
    ("names", "had"),
    [
        (FAMILIES, {case.sizes.family for case in TRAINING}),
        (FAMILIES, {case.sizes.family for case in SERVING}),
        (TRAINED, {case.optimizer for case in TRAINING}),
        (METHODS, {case.method for case in TRAINING}),
        (TRAINING_TYPES, {case.dtype for case in TRAINING}),
        (RECOMPUTATIONS, {case.recomputation for case in TRAINING}),
        (NATIVE, {case.scheme for case in SERVING}),
        ([name for name in NATIVE if SCHEMES[name].only_read], set(configurations.GGUF_PRECISIONS)),
        (WEIGHTS, {case.head_dtype for case in SERVING}),
        (CACHE_TYPES, {case.kv_dtype for case in SERVING}),
        (SAMPLING_KINDS, {kind for case in SERVING for kind in case.sampling}),
    ],
)
def test_every_row_of_a_table_has_a_case(names: object, had: set[str]) -> None:
    assert set(names) <= had  # type: ignore[call-overload]


def test_a_new_row_gets_a_case_of_its_own() -> None:
    made = configurations.default_cases(TRAINING, ("adamw", "newton"), lambda case: case.optimizer, lambda name: name)
    assert made == ["newton"]


def test_there_are_enough_cases_and_each_has_its_own_name() -> None:
    assert len(TRAINING) >= 25
    assert len(SERVING) >= 30
    for cases in (TRAINING, SERVING):
        assert len({case.name for case in cases}) == len(cases)


def test_batches_and_contexts_reach_the_ends() -> None:
    assert {1, 64} <= {case.batch for case in SERVING}
    assert max(case.prompt_tokens for case in SERVING) == 8192
    assert any(case.over_http for case in SERVING)
    assert any(case.runner == "torch" for case in SERVING)
    assert any(case.adapters for case in SERVING)


def test_every_training_case_can_be_planned() -> None:
    for case in TRAINING:
        sizes = case.sizes
        recipe = ModelRecipe(
            family=sizes.family, n_layers=sizes.n_layers, d_model=sizes.d_model, n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads, d_ff=sizes.feed_forward,
        )  # fmt: skip
        spec_from_recipe(recipe, sizes.vocab_size, case.sequence_length)
        method = "full" if case.method == "pretrain" else case.method
        TrainingShape(case.batch_size, case.sequence_length, dtype=case.dtype, optimizer=case.optimizer, method=method)


def test_what_a_request_asks_for_is_what_its_kind_is_called() -> None:
    for kind, params in configurations.SAMPLING.items():
        assert SamplingParams(**({"temperature": 0.0} | params)).kinds == (kind,)


def record(name: str, predicted: float, measured: float, number: int = 1, width: float = 1.2) -> dict:
    frozen = {"value": predicted, "low": predicted / width, "high": predicted * width}
    return {
        "name": name, "phase": "serve", "round": number, "predicted": {"tpot_s": frozen}, "measured": {"tpot_s": measured},
        "disturbed_share": 0.0, "case": {},
    }  # fmt: skip


def test_a_miss_within_what_the_machine_repeats_is_told_apart() -> None:
    steady = [record("a", 1.2, 1.0), record("a", 1.2, 1.01, 2)]
    restless = [record("a", 1.1, 1.0), record("a", 1.1, 1.3, 2)]
    assert "7 missed |" in score.summary(steady)
    assert "7 missed, within what the machine repeats" in score.summary(restless)
    assert "7 met" in score.summary([record("a", 1.05, 1.0)])


def test_the_summary_says_how_wide_decode_intervals_are_and_how_many_hold() -> None:
    text = score.summary([record("a", 1.0, 1.1, width=1.5), record("b", 1.0, 2.0, width=1.5)])
    assert "factor of 1.50 (median; aim 1.35, missed)" in text
    assert "Interval coverage over all predictions: 50.0% of 2 (aim 85 to 95%, missed)" in text


def test_the_scripts_find_each_other() -> None:
    run = script("planner/engines/run.py")
    assert {phase for phase, _ in run.chosen("")} == {"train", "serve", "http"}
    assert [case.name for _, case in run.chosen("^train/lora-small$")] == ["lora-small"]


def test_a_run_whose_compilation_failed_is_marked() -> None:
    compiled, failed = record("a", 1.0, 1.0), record("b", 1.0, 1.0)
    compiled |= {"case": {"compile": True}, "compiled": True}
    failed |= {"case": {"compile": True}, "compiled": False}
    text = score.summary([compiled, failed])
    assert "| b (compiling failed) |" in text
    assert "| a |" in text
