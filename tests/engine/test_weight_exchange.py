"""Weights that replace others in a running engine answer as if it had started with them, and nothing of both is mixed."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lora_models import models as lora_models
from safetensors.torch import load_file, save_file

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, CorruptFileError, DataError, InputError, TwostrokeError
from twostroke.engine.core import EngineCore
from twostroke.engine.weights import Generations
from twostroke.kernels.native_library import library
from twostroke.scheduling.sampling_params import SamplingParams

NATIVE = library() is not None
KINDS = [("torch", "fp32", "fp32"), ("torch", "fp32", "int8")]
if NATIVE:
    KINDS += [
        ("native", weights, kv) for weights, kv in (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("bf16", "int4"))
    ]

PROMPT = [5, 9, 3, 44, 7, 8, 90, 17, 33, 2, 60, 61, 62, 3, 4, 4, 4, 12, 13, 71] * 3
OTHER = [*PROMPT[:40], 77, 78, 79]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "old")[1]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "new", seed=7)[1]


def engine(model: Path, runner: str = "native" if NATIVE else "torch", **settings: Any) -> EngineCore:
    own = {"n_threads": 1, "dtype": "fp32", "kv_cache_bytes": 2**20, "runner": runner}
    return EngineCore(model, EngineSettings(**{**own, **settings}))


class Answers:
    """Requests of one engine: the tokens of each answer, and what else its events had."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.fingerprints: dict[str, list[str]] = {}
        self.cached: dict[str, int] = {}
        self.scores: dict[str, list[float]] = {}
        self.vectors: dict[str, list[float]] = {}

    def ask(self, name: str, prompt: Sequence[int] = PROMPT, params: SamplingParams = GREEDY) -> None:
        self.core.add_request(name, list(prompt), params)

    def step(self, n: int) -> None:
        for _ in range(n):
            for event in self.core.step():
                self.tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
                if event.fingerprint is not None:
                    self.fingerprints.setdefault(event.request_id, []).append(event.fingerprint)
                if event.cached_tokens:
                    self.cached[event.request_id] = event.cached_tokens
                if event.prompt_logprobs is not None:
                    self.scores.setdefault(event.request_id, []).extend(entry.logprob for entry in event.prompt_logprobs)
                if event.embedding is not None:
                    self.vectors[event.request_id] = event.embedding.tolist()
                assert event.finish_reason != "error"

    def end(self) -> None:
        while self.core.has_work:
            self.step(1)

    def of(self, name: str, prompt: Sequence[int] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
        self.ask(name, prompt, params)
        self.end()
        return self.tokens[name, 0]


def replace_weights(core: EngineCore, directory: Path, carry_on: bool = False) -> None:
    prepared = core.prepare_weights(directory)
    assert prepared is not None
    core.use_weights(prepared, carry_on)


@pytest.mark.parametrize(("runner", "dtype", "kv_dtype"), KINDS)
def test_an_engine_whose_weights_were_replaced_answers_as_one_that_started_with_them(
    old: Path, new: Path, runner: str, dtype: str, kv_dtype: str
) -> None:
    settings = {"runner": runner, "dtype": dtype, "kv_dtype": kv_dtype}
    fresh, core = engine(new, **settings), engine(old, **settings)
    before = core.fingerprint
    answers, wanted = Answers(core), Answers(fresh)
    first = answers.of("old")
    replace_weights(core, new)
    assert answers.of("new") == wanted.of("new") != first
    assert core.fingerprint == fresh.fingerprint != before
    assert answers.fingerprints == {"new": [fresh.fingerprint]}
    assert core.stats().weight_changes == 1


@pytest.mark.parametrize(("runner", "dtype", "kv_dtype"), KINDS)
def test_requests_finish_on_the_weights_they_began_with_beside_others_on_new_ones(
    old: Path, new: Path, runner: str, dtype: str, kv_dtype: str
) -> None:
    settings = {"runner": runner, "dtype": dtype, "kv_dtype": kv_dtype}
    of_old, of_new = Answers(engine(old, **settings)), Answers(engine(new, **settings))
    core = engine(old, **settings)
    first = core.fingerprint
    answers = Answers(core)
    answers.ask("under way")
    answers.ask("another", OTHER)
    answers.step(5)
    replace_weights(core, new)
    assert isinstance(core._runner, Generations)
    answers.ask("after it")
    answers.step(4)
    answers.ask("later", OTHER)
    answers.end()
    assert answers.tokens["under way", 0] == of_old.of("a")
    assert answers.tokens["another", 0] == of_old.of("b", OTHER)
    assert answers.tokens["after it", 0] == of_new.of("a")
    assert answers.tokens["later", 0] == of_new.of("b", OTHER)
    assert "after it" not in answers.cached, "keys of other weights were found"
    assert answers.cached["later"] == 40 if runner == "native" else answers.cached["later"] >= 32
    assert not isinstance(core._runner, Generations)
    assert answers.fingerprints == {
        "under way": [first], "another": [first], "after it": [core.fingerprint], "later": [core.fingerprint],
    }  # fmt: skip


@pytest.mark.parametrize("runner", [runner for runner, dtype, kv in KINDS if (dtype, kv) == ("fp32", "fp32")])
def test_requests_that_carry_on_are_continued_by_the_new_weights_alone(old: Path, new: Path, runner: str) -> None:
    core = engine(old, runner)
    first = core.fingerprint
    answers = Answers(core)
    answers.ask("under way")
    answers.step(6)
    so_far = [*answers.tokens["under way", 0]]
    assert 0 < len(so_far) < 24
    replace_weights(core, new, carry_on=True)
    answers.end()
    rest = SamplingParams(temperature=0.0, max_tokens=24 - len(so_far), ignore_eos=True)
    wanted = Answers(engine(new, runner)).of("rest", [*PROMPT, *so_far], rest)
    assert answers.tokens["under way", 0] == so_far + wanted
    assert answers.fingerprints == {"under way": [core.fingerprint]}
    assert core.fingerprint != first
    assert core.stats().preemptions == 0, "they count those for lack of pages"


def test_every_kind_of_request_keeps_its_weights_through_two_changes(old: Path, new: Path, tmp_path: Path) -> None:
    third = saved("llama", tmp_path / "third", seed=11)[1]
    kinds = {
        "plain": GREEDY,
        "several": SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True),
        "beams": SamplingParams(temperature=0.0, use_beam_search=True, best_of=3, n=2, max_tokens=12, ignore_eos=True),
        "scored": SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, ignore_eos=True),
        "vector": SamplingParams(temperature=0.0, max_tokens=1, pooling="mean"),
    }
    settings: dict[str, Any] = {"token_budget": 32, "max_running": 32}
    if NATIVE:
        settings |= {"speculate": "ngram"}
    core = engine(old, **settings)
    answers = Answers(core)
    for place, directory in enumerate((old, new, third)):
        if place:
            replace_weights(core, directory)
        for name, params in kinds.items():
            answers.ask(f"{name} {place}", PROMPT, params)
        answers.step(7)  # the budget is small: when the weights change, prompts of some are half computed and others wait
    if NATIVE:
        assert len(core._runner.runners) > 1  # type: ignore[union-attr]
    answers.end()
    waited = {f"{name} {place}" for place in range(3) for name in kinds}
    assert {name for name, _ in answers.tokens} == waited
    for place, directory in enumerate((old, new, third)):
        alone = {other: Answers(engine(model, **settings)) for other, model in enumerate((old, new, third))}
        for name, params in kinds.items():
            found = f"{name} {place}"
            # One that had not begun when the weights changed was computed by the next ones.
            assert any(_same(answers, alone[other], found, f"{name} {other}", params) for other in range(place, 3)), (
                found,
                directory,
            )
    assert not isinstance(core._runner, Generations)
    assert core.scheduler.pool.n_used == 0


def _same(answers: Answers, alone: Answers, found: str, name: str, params: SamplingParams) -> bool:
    if (name, 0) not in alone.tokens:
        alone.of(name, PROMPT, params)
    same_tokens = all(answers.tokens[found, i] == alone.tokens[name, i] for i in range(params.n))
    close = pytest.approx(alone.scores.get(name, []), abs=1e-4) == answers.scores.get(found, [])
    return same_tokens and close and pytest.approx(alone.vectors.get(name, []), abs=1e-4) == answers.vectors.get(found, [])


def test_weights_that_come_back_find_the_pages_they_had_computed(old: Path, new: Path) -> None:
    core = engine(old)
    answers = Answers(core)
    first = answers.of("first")
    replace_weights(core, new)
    answers.of("between")
    assert "between" not in answers.cached
    replace_weights(core, old)
    assert answers.of("again") == first
    assert answers.cached["again"] >= 48


def test_weights_come_back_while_their_requests_still_run(old: Path, new: Path) -> None:
    core = engine(old)
    answers = Answers(core)
    answers.ask("first")
    answers.step(4)
    for directory in (new, old):
        replace_weights(core, directory)
        answers.ask(directory.name)
        answers.step(3)
    answers.end()
    assert answers.tokens["first", 0] == answers.tokens["old", 0] == Answers(engine(old)).of("a")
    assert answers.tokens["new", 0] == Answers(engine(new)).of("a")


def test_weights_that_are_served_already_are_not_packed(old: Path, tmp_path: Path) -> None:
    core = engine(old)
    shutil.copytree(old, tmp_path / "copy")
    assert core.prepare_weights(tmp_path / "copy") is None


def test_files_that_were_overwritten_in_place_are_other_weights(old: Path, new: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(old, place)
    core = engine(place)
    first = Answers(core).of("a")
    shutil.rmtree(place)
    shutil.copytree(new, place)
    replace_weights(core, place)
    assert Answers(core).of("b") == Answers(engine(new)).of("a") != first


def damaged(model: Path, made: Path, how: str) -> Path:
    if how == "missing":
        return made
    if how == "shape":
        return saved("llama", made, d_ff=96)[1]
    if how == "family":
        return saved("qwen3", made)[1]
    shutil.copytree(model, made)
    if how == "empty":
        for file in made.iterdir():
            file.unlink()
    elif how == "tokenizer":
        (made / "tokenizer.json").write_text('{"another": 1}')
    elif how == "truncated":
        file = next(made.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "tensor":
        file = next(made.glob("*.safetensors"))
        tensors = load_file(file)
        del tensors["model.norm.weight"]
        save_file(tensors, file)
    elif how == "config":
        (made / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return made


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("missing", DataError, "does not exist"),
        ("empty", DataError, "holds no config.json"),
        ("shape", ConfigError, "has d_ff=96, and the served model 80"),
        ("family", ConfigError, "has family='qwen3', and the served model 'llama'"),
        ("tokenizer", ConfigError, "has another tokenizer.json"),
        ("truncated", CorruptFileError, "safetensors"),
        ("tensor", CorruptFileError, "norm"),
        ("config", ConfigError, "bert"),
    ],
)
def test_a_directory_that_is_of_no_use_changes_nothing(
    old: Path, new: Path, tmp_path: Path, how: str, error: type[TwostrokeError], says: str
) -> None:
    served = tmp_path / "served"
    shutil.copytree(old, served)
    (served / "tokenizer.json").write_text("{}")
    core = engine(served)
    answers = Answers(core)
    first = answers.of("first")
    answers.ask("under way")
    answers.step(3)
    with pytest.raises(error, match=says):
        core.prepare_weights(damaged(new, tmp_path / "damaged", how))
    answers.end()
    assert answers.tokens["under way", 0] == first == answers.of("after")
    assert core.stats().weight_changes == 0


def test_weights_are_not_replaced_below_adapters(tmp_path: Path) -> None:
    base, adapters, _ = lora_models("llama", tmp_path, 1)
    core = engine(base)
    core.load_adapter("a", adapters[0])
    with pytest.raises(ConfigError, match="adapters are loaded"):
        core.prepare_weights(base)
    core.unload_adapter("a")
    assert core.prepare_weights(base) is None


@pytest.mark.skipif(not NATIVE, reason="early exits need the native library")
def test_weights_are_not_replaced_below_exits_that_were_fitted_to_them(old: Path, new: Path) -> None:
    core = engine(old, early_exit="at:0.5")
    with pytest.raises(ConfigError, match="was fitted to the weights"):
        core.prepare_weights(new)
    with pytest.raises(ConfigError, match="was fitted to the weights"):
        core.sleep(2)


@pytest.mark.skipif(not NATIVE, reason="early exits need the native library")
def test_drafts_of_early_exits_are_those_of_the_new_weights(old: Path, new: Path) -> None:
    core = engine(old, speculate="exit:1")
    answers = Answers(core)
    answers.ask("under way")
    answers.step(4)
    replace_weights(core, new)
    assert core._first_layers is not None
    assert core._first_layers.runner is not None
    assert core._first_layers.runner.plan.ops[0].table is core.plan.ops[0].table  # type: ignore[union-attr]
    assert answers.of("new") == Answers(engine(new)).of("a")
    assert answers.tokens["under way", 0] == Answers(engine(old)).of("a")


def test_pages_on_disk_are_those_of_the_weights_that_wrote_them(old: Path, new: Path, tmp_path: Path) -> None:
    settings = {"kv_dir": str(tmp_path / "kv")}
    plain = Answers(engine(new)).of("a")
    core = engine(old, **settings)
    answers = Answers(core)
    answers.of("old")
    answers.ask("under way", OTHER)
    answers.step(3)
    replace_weights(core, new)
    assert answers.of("new") == plain
    assert core._below.disk is not None
    core._below.disk.wait_written()
    core.close()
    for directory, prompt in ((old, PROMPT), (new, PROMPT), (old, OTHER)):
        later = engine(directory, **settings)
        assert Answers(later).of("a", prompt) == Answers(engine(directory)).of("a", prompt)
        later.close()


@pytest.mark.parametrize(("runner", "dtype", "kv_dtype"), KINDS)
def test_an_engine_that_slept_answers_as_before(old: Path, runner: str, dtype: str, kv_dtype: str) -> None:
    core = engine(old, runner=runner, dtype=dtype, kv_dtype=kv_dtype)
    answers, before = Answers(core), core.fingerprint
    first = answers.of("first")
    core.sleep(1)
    assert answers.of("level 1") == first
    assert "level 1" not in answers.cached, "the cache was given back"
    core.sleep(2)
    assert core.is_empty
    core.stats()
    core.sleep(2)
    prepared = core.prepare_weights(core.directory)
    assert prepared is not None
    core.use_weights(prepared)
    assert not core.is_empty
    assert answers.of("level 2") == first
    assert (core.fingerprint, core.stats().weight_changes) == (before, 0)


def test_an_engine_with_requests_or_adapters_does_not_sleep(old: Path, tmp_path: Path) -> None:
    core = engine(old)
    core.add_request("under way", PROMPT, GREEDY)
    with pytest.raises(InputError, match="requests are under way"):
        core.sleep(1)
    base, adapters, _ = lora_models("llama", tmp_path, 1)
    core = engine(base)
    core.load_adapter("a", adapters[0])
    core.sleep(1)
    with pytest.raises(ConfigError, match="adapters are loaded"):
        core.sleep(2)


def test_sleep_gives_the_memory_of_cache_and_weights_back(tmp_path: Path) -> None:
    size = {"vocab_size": 2048, "d_model": 1024, "d_ff": 4096, "n_heads": 8, "n_kv_heads": 8, "head_dim": 128}
    model = saved("llama", tmp_path / "large", **size)[1]
    core = engine(model, kv_cache_bytes=2**26)
    answers = Answers(core)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    first = answers.of("first", PROMPT[:50], params)
    written = 240 * core.pool.n_bytes // (core.scheduler.config.n_pages * core.scheduler.config.page_tokens)
    assert core.sleep(1) > written / 2
    held = core.weights_bytes
    for thread in threading.enumerate():
        if thread.name == "packed-weights":  # it writes the matrices to a file, and holds them until then
            thread.join()
    freed = core.sleep(2)
    assert freed > held / 2 or not NATIVE, (freed, held)
    assert core.weights_bytes == 0
    prepared = core.prepare_weights(model)
    assert prepared is not None
    core.use_weights(prepared)
    assert answers.of("again", PROMPT[:50], params) == first
