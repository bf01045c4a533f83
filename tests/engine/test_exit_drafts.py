"""A model's own first layers draft for it: its answers stay the same, and its weights and cache stay its only ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lora_models import models as lora_models
from test_drafts import GREEDY, PROMPTS, Fixed, directory, run

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import CACHE_TYPES
from twostroke.engine.core import EngineCore
from twostroke.engine.speculation.draft_model import ModelDrafter
from twostroke.engine.speculation.drafter import Drafter
from twostroke.engine.speculation.early_exit import UNTRAINED, ExitDrafter, RepeatsOrExits, exit_layers
from twostroke.kernels.native_library import library, why_absent
from twostroke.model.load import load_model
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason=why_absent())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def early(models: Path, weight: float, **changes: Any) -> Path:
    """A model of three layers of which those behind the first count ``weight`` times: 0 leaves its exit always right."""
    made = models / f"early-{weight}-{'-'.join(map(str, changes.values()))}"
    if not made.exists():
        decoder = load_model(directory(models, "llama", **changes))
        with torch.no_grad():
            for block in decoder.blocks[1:]:
                block.get_submodule("attn.out").weight.mul_(weight)
                block.get_submodule("mlp.down").weight.mul_(weight)
        save_model(decoder, decoder.spec, made)
    return made


def drafting(path: Path, speculate: str = "exit:1", n: int = 3, **settings: Any) -> EngineCore:
    """An engine that drafts ``n`` tokens in each step."""
    core = EngineCore(path, EngineSettings(**settings, speculate=speculate))
    drafter = core._drafting.drafter.exits if isinstance(core._drafting.drafter, RepeatsOrExits) else core._drafting.drafter
    assert isinstance(drafter, ExitDrafter)
    drafter._ahead = lambda n_decoding, n_rows: n  # type: ignore[method-assign]
    return core


def both(
    path: Path,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    speculate: str = "exit:1",
    **settings: Any,
) -> EngineCore:
    """Runs with and without drafts, asserts that every answer is equal, and returns the engine that drafted."""
    settings = {"n_threads": 1, "page_tokens": 4} | settings
    plain = run(EngineCore(path, EngineSettings(**settings)), prompts, params, adapters)
    core = drafting(path, speculate, **settings)
    assert run(core, prompts, params, adapters) == plain
    stats = core.stats()
    assert stats.draft_tokens > 40
    assert stats.pages_used == 0
    return core


@pytest.mark.parametrize("kv", CACHE_TYPES)
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_greedy_answers_are_equal_for_weights_and_caches(models: Path, weights: str, kv: str) -> None:
    path = early(models, 0.4, d_model=64, n_heads=4, head_dim=32, d_ff=128)
    stats = both(path, replace(GREEDY, logprobs=2), dtype=weights, kv_dtype=kv).stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gpt2", "gemma2", "cohere2", "olmo2", "olmoe", "deepseek_v3"])
def test_families_with_windows_experts_and_latents_answer_alike(models: Path, name: str) -> None:
    both(directory(models, name), GREEDY, dtype="fp32", speculate="exit:2")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=4, max_tokens=40, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.7),
        SamplingParams(
            temperature=1.2, seed=6, max_tokens=30, n=3, min_tokens=9, presence_penalty=0.5, logit_bias=((7, 2.0),),
            stop_token_ids=(3, 5, 9), prompt_logprobs=1,
        ),
    ],
)  # fmt: skip
def test_drawn_answers_are_equal_too(models: Path, params: SamplingParams) -> None:
    core = both(early(models, 0.3), params, dtype="auto")
    assert core.stats().accepted_draft_tokens > 0


def test_an_exit_that_is_always_right_has_all_its_drafts_accepted(models: Path) -> None:
    """Also drawn ones, behind penalties: the exit sees the tokens that the whole model will have seen."""
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=41, ignore_eos=True, frequency_penalty=0.4)
    stats = both(early(models, 0.0), params, dtype="fp32").stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens
    assert stats.decode_tokens > 3 * stats.decode_requests


@pytest.mark.parametrize("kv", CACHE_TYPES)
def test_drafts_are_those_of_a_model_of_the_first_layers(models: Path, tmp_path: Path, kv: str) -> None:
    """That model has its own weights and cache; the exit has the whole one's."""
    path = early(models, 0.4, d_model=64, n_heads=4, head_dim=32, d_ff=128)
    decoder = load_model(path)
    state = {name: tensor for name, tensor in decoder.tensors.items() if not name.startswith("blocks.2.")}
    first = save_model(state, decoder.spec.with_(n_layers=2), tmp_path / "first")
    settings: dict[str, Any] = {"kv_dtype": kv, "n_threads": 1, "page_tokens": 4}
    exits = drafting(path, "exit:2", **settings)
    own = EngineCore(path, EngineSettings(**settings, speculate=f"draft:{first}"))
    assert isinstance(own._drafting.drafter, ModelDrafter)
    own._drafting.drafter._ahead = lambda n_decoding, n_rows: 3  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)
    assert run(exits, PROMPTS, params) == run(own, PROMPTS, params)
    found, wanted = exits.stats(), own.stats()
    assert 0 < found.accepted_draft_tokens < found.draft_tokens
    assert (found.accepted_draft_tokens, found.draft_tokens) == (wanted.accepted_draft_tokens, wanted.draft_tokens)


def test_the_first_layers_are_the_whole_models_own(models: Path) -> None:
    whole = EngineCore(directory(models), EngineSettings(dtype="fp32")).plan
    first = whole.first(2)
    assert all(a is b for a, b in zip(first.ops[:-2], whole.ops, strict=False))
    assert first.ops[-2:] == whole.ops[-2:]
    assert first.step_bytes < whole.step_bytes


def test_adapters_draft_with_their_own_layers(tmp_path: Path) -> None:
    base, (a, b), _ = lora_models("llama", tmp_path, 2)
    both(base, GREEDY, adapters={"a": a, "b": b}, dtype="fp32", speculate="exit:2")


def test_chunks_prefixes_and_preemption_change_nothing(models: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=50, ignore_eos=True)
    prompts = [[*PROMPTS[0], *([i] * (7 * i))] for i in range(6)]
    settings: dict[str, Any] = {"dtype": "fp32", "token_budget": 13, "max_running": 6}
    core = both(early(models, 0.3), params, prompts, **settings)
    page = core.pool.n_bytes // core.pool.n_pages
    tight = both(early(models, 0.3), params, prompts, **settings, kv_cache_bytes=page * 30, max_model_len=110)
    assert tight.stats().preemptions > 0


def test_interrupted_drafts_lose_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the first layers draft: pages were taken, tokens stand behind a request, prompts were admitted."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, frequency_penalty=0.4)
    settings: dict[str, Any] = {"dtype": "fp32", "n_threads": 1, "page_tokens": 4, "token_budget": 16, "max_running": 4}
    path = early(models, 0.3)
    prompts = [[*PROMPTS[0], i] for i in range(9)]  # share pages, of which copies are due when a draft is interrupted
    plain = run(EngineCore(path, EngineSettings(**settings)), prompts, params)
    core = drafting(path, **settings)
    step, n_calls = ExitDrafter._step, 0

    def interrupted(self: ExitDrafter, *args: Any) -> list[int]:
        nonlocal n_calls
        n_calls += 1
        left = step(self, *args)
        if n_calls % 4 == 2:
            raise KeyboardInterrupt
        return left

    monkeypatch.setattr(ExitDrafter, "_step", interrupted)
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), prompt, params)
    found: dict[str, list[int]] = {}
    n_interrupted = 0
    while core.has_work:
        try:
            events = core.step()
        except KeyboardInterrupt:
            n_interrupted += 1
            continue
        for event in events:
            found.setdefault(event.request_id, []).extend(event.token_ids)
    assert n_interrupted > 5
    assert [found[str(i)] for i in range(len(prompts))] == [answer[0] for answer in plain]
    assert core.stats().pages_used == 0


def test_drafts_that_are_never_right_are_hardly_made(models: Path) -> None:
    core = EngineCore(directory(models), EngineSettings(dtype="fp32", n_threads=1, speculate="exit:2"))
    drafter = core._drafting.drafter
    assert isinstance(drafter, ExitDrafter)
    drafter.times = drafter.draft_times = Fixed(lambda rows: 1.0 + 0.1 * rows, 64)
    run(core, [[i] for i in range(4)], SamplingParams(temperature=1.0, seed=1, max_tokens=200, ignore_eos=True))
    stats = core.stats()
    assert 0 < stats.draft_tokens < stats.output_tokens / 2


def test_auto_drafts_by_exit_where_nothing_repeats_if_the_model_was_trained_for_it(models: Path) -> None:
    path = early(models, 0.3)
    assert isinstance(EngineCore(path, EngineSettings(dtype="fp32", speculate="auto"))._drafting.drafter, Drafter)
    trained = models / "trained"
    decoder = load_model(path)
    save_model(decoder, decoder.spec.with_(early_exit=True), trained)
    assert json.loads((trained / "config.json").read_text())["early_exit"] is True
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    core = both(trained, params, dtype="fp32", speculate="auto")
    assert isinstance(core._drafting.drafter, RepeatsOrExits)
    assert core.spec.early_exit
    assert UNTRAINED not in core.spec.notes
    assert core._drafting.drafter.exits.times is core._drafting.drafter.repeats.times


def test_a_model_that_was_not_trained_for_it_is_served_with_a_note(models: Path) -> None:
    core = EngineCore(directory(models), EngineSettings(dtype="fp32", speculate="exit"))
    assert core.spec.notes == (UNTRAINED,)
    assert core._exit_layers == 1  # a quarter of three
    quiet = EngineCore(directory(models), EngineSettings(dtype="fp32", speculate="auto"))
    assert quiet.spec.notes == ()


def test_a_quarter_of_the_layers_drafts_unless_a_number_is_given(models: Path) -> None:
    spec = load_model(directory(models)).spec
    assert exit_layers(spec.with_(n_layers=32), "exit") == 8
    assert exit_layers(spec.with_(n_layers=32), "exit:31") == 31
    assert exit_layers(spec.with_(n_layers=32), "auto") is None
    assert exit_layers(spec.with_(n_layers=32, early_exit=True), "auto") == 8
    assert exit_layers(spec.with_(n_layers=1, early_exit=True), "auto") is None
    assert exit_layers(spec, "ngram") is exit_layers(spec, "draft:x") is None


@pytest.mark.parametrize("value", ["exit:", "exit:0", "exit:-1", "exit:two", "exit:1.5", "exit:999999", "exit:²"])
def test_what_is_no_number_of_layers_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"speculate={value!r} is not known. Use one of auto, off, ngram, exit")):
        EngineSettings(speculate=value)


def test_a_layer_that_the_model_does_not_have_before_its_last_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a layer before the last, and the model has 3. Use exit:1 to exit:2"):
        EngineCore(directory(models), EngineSettings(speculate="exit:3"))
    with pytest.raises(ConfigError, match="Use speculate='off'"):
        EngineCore(directory(models, "llama", n_layers=1), EngineSettings(speculate="exit"))
    with pytest.raises(ConfigError, match="runner='native'"):
        EngineCore(directory(models), EngineSettings(runner="torch", speculate="exit:1"))
    core = EngineCore(directory(models), EngineSettings(dtype="fp32"))
    for layers in (0, 3):
        with pytest.raises(ConfigError, match="must be from 1 to 2"):
            core.plan.first(layers)
