from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.core.errors import ConfigError, Interrupted
from twostroke.core.recipe import ModelRecipe, spec_from_recipe
from twostroke.model.decoder import Decoder
from twostroke.training.samples import SAMPLES_FILE, continuation
from twostroke.training.start import train

NO_END = -1


def _decoder() -> Decoder:
    recipe = ModelRecipe(n_layers=2, d_model=16, n_heads=2, d_ff=24)
    return Decoder(spec_from_recipe(recipe, vocab_size=40, sequence_length=8))


def _samples(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / SAMPLES_FILE).read_text().splitlines()]


def test_greedy_is_the_likeliest_token_of_the_newest_context_each_time() -> None:
    decoder = _decoder()
    found = continuation(decoder, [1, 2, 3], n_tokens=10, context=8, eos_id=NO_END)
    ids = [1, 2, 3]
    for _ in range(10):
        with torch.no_grad():
            ids.append(int(decoder(torch.tensor([ids[-8:]]))[0, -1].argmax()))
    assert found == ids[3:]
    assert continuation(decoder, [1, 2, 3], 10, 8, eos_id=found[0]) == []  # ends before the end token


def test_drawn_texts_follow_from_their_seed_and_leave_the_random_state_alone() -> None:
    decoder, before = _decoder(), torch.get_rng_state()
    drawn = [continuation(decoder, [5], 12, 8, NO_END, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_writes_samples_ends_in_the_same_weights(make_recipe) -> None:
    said: list[str] = []
    plain = train(make_recipe("plain", steps=4))
    prompts = ["def f", "for x in\n"]
    watched = train(make_recipe("watched", steps=4, sample_every=2, sample_prompts=prompts), log=said.append)
    files = [result.model / "model.safetensors" for result in (plain, watched)]
    assert files[0].read_bytes() == files[1].read_bytes()
    samples = _samples(watched.directory)
    assert [(s["step"], s["prompt"]) for s in samples] == [(2, prompts[0]), (2, prompts[1]), (4, prompts[0]), (4, prompts[1])]
    assert all(s["greedy"] and s["sampled"] for s in samples)
    shown = [line for line in said if line.startswith("step 2 ")]
    assert len(shown) == 2
    assert "\n" not in "".join(shown)
    assert "for x in⏎" not in shown[0]


def test_a_resumed_run_has_each_sample_once_and_the_same(make_recipe) -> None:
    settings = {"steps": 6, "sample_every": 1, "sample_prompts": ["if a"]}
    recipe = make_recipe("resumed", checkpoint_every=2, **settings)

    class Killed(BaseException):
        pass

    def kill_at_five(record: Any, eta_s: float) -> None:
        if record.step == 5:
            raise Killed

    with pytest.raises(Killed):
        train(recipe, on_step=kill_at_five)
    with (Path(recipe.output) / SAMPLES_FILE).open("a") as stream:
        stream.write('{"step": 3, "pro')  # a line cut by the kill
    train(recipe, resume=True)
    whole = train(make_recipe("whole", **settings))
    assert _samples(Path(recipe.output)) == _samples(whole.directory)


def test_samples_that_cannot_be_written_are_said_once_and_come_later(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    recipe = make_recipe("full", steps=4, sample_every=1, sample_prompts=["if a"])
    folder = Path(recipe.output) / SAMPLES_FILE

    def block(step: int) -> bool:
        if step == 0:
            folder.mkdir(parents=True)  # a folder in the file's place
        if step == 3:
            folder.rmdir()
        return False

    result = train(recipe, log=said.append, should_stop=block)
    assert len([line for line in said if "cannot be written" in line]) == 1
    assert [s["step"] for s in _samples(result.directory)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sample_every": 2}, "go together"),
        ({"sample_prompts": ["a"]}, "go together"),
        ({"sample_every": 2, "sample_prompts": ["a", ""]}, "empty text"),
        ({"sample_every": -1}, "sample_every=-1 must be at least 0"),
        ({"diagnostics_every": -1}, "diagnostics_every=-1 must be at least 0"),
    ],
)
def test_recipes_that_cannot_be_meant_are_refused(make_recipe, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_recipe(**settings)


def test_what_is_shown_may_change_when_a_run_resumes(make_recipe) -> None:
    with pytest.raises(Interrupted):
        train(make_recipe(steps=3), should_stop=lambda step: step == 1)
    later = make_recipe(steps=3, sample_every=1, sample_prompts=["if a"], diagnostics_every=1)
    assert [s["step"] for s in _samples(train(later, resume=True).directory)] == [2, 3]
