"""A start is planned shorter where an earlier run has compiled the same graphs into the compiler's cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twostroke.core.profile import MachineProfile, save_profile
from twostroke.core.rates import TrainingRates, TrainingStep
from twostroke.training.compiled_before import mark_of, note_compiled, was_compiled
from twostroke.training.loop import execute
from twostroke.training.start import start

COMPILE_S, READ_S = 50.0, 2.0


def startup_s(run: Any) -> float:
    return float(run.entry.prediction["startup_s"] - run.entry.planned.hardware.process.import_s("train"))


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
def test_a_second_run_of_the_same_shapes_finds_its_graphs_compiled(make_recipe: Any, profile: MachineProfile) -> None:
    step = TrainingStep(64, 2, "fp32", "compiled", 0.1, 0.2, 0.1, COMPILE_S, compiled_start_s=READ_S)
    save_profile(replace(profile, training=TrainingRates(block_compile_s=COMPILE_S, steps=(step,))))
    how = {"compile": True, "dtype": "fp32", "steps": 2}
    first = start(make_recipe("first", **how))
    mark = mark_of(first.recipe, first.spec, first.resolved.environment)
    if was_compiled(mark):  # by an earlier run of this test
        mark.unlink()
        first = start(make_recipe("first-again", **how))
    assert startup_s(first) == pytest.approx(COMPILE_S)
    assert execute(first).summary["compiled"]
    assert was_compiled(mark)
    assert startup_s(start(make_recipe("second", **how))) == pytest.approx(READ_S)
    assert startup_s(start(make_recipe("longer", **how | {"steps": 9}))) == pytest.approx(READ_S)  # no graph depends on that
    assert startup_s(start(make_recipe("wider", **how, batch_size=3))) == pytest.approx(COMPILE_S)


def test_marks_are_of_shapes_and_environment_and_a_cache_that_refuses_them_is_no_error(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    run = start(make_recipe("run"))
    mark = mark_of(run.recipe, run.spec, {"n_threads": 1})
    assert mark == mark_of(run.recipe, run.spec, {"n_threads": 1})
    assert len({mark, mark_of(run.recipe, run.spec, {"n_threads": 2}), mark_of(make_recipe(dtype="fp32"), run.spec, {})}) == 3
    assert not was_compiled(mark)
    assert not mark.parent.parent.exists()
    note_compiled(mark)
    assert was_compiled(mark)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(mark))  # a file where a folder would be
    beyond = mark_of(run.recipe, run.spec, {"n_threads": 1})
    note_compiled(beyond)
    assert not was_compiled(beyond)
