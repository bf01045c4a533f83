"""Rows that leave early have the logits of their exit, and the layers above attend to the state in which they left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_drafts import GREEDY, PROMPTS, directory, run
from torch import Tensor

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.fitted_exits import FITTED_EXITS, NEVER, FittedExits
from twostroke.core.schemes import CACHE_TYPES
from twostroke.engine.core import EngineCore
from twostroke.engine.early_exit import confidence
from twostroke.engine.tiers.identity import weights_digest
from twostroke.kernels.native_library import library, why_absent
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.scheduling.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason=why_absent())

LAYERS = (1, 2)  # of three
FAMILIES = ["llama", "mistral", "gpt2", "gemma2", "cohere2", "olmo2", "olmoe", "deepseek_v3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def engine(path: Path, early_exit: str = "at:1", **settings: Any) -> EngineCore:
    return EngineCore(path, EngineSettings(**{"n_threads": 1, "page_tokens": 4, "early_exit": early_exit} | settings))


class Reference:
    """Early exit in a dense forward pass: a row that has left keeps its residual stream in all later layers."""

    def __init__(self, decoder: Decoder, layers: Sequence[int], threshold: float) -> None:
        self.decoder, self.layers, self.threshold = decoder, layers, threshold
        self.seen: list[float] = []  # of the last row at each exit
        self.depths: list[int] = []
        self.may_leave = False
        decoder.after_block = self._after_block

    def _after_block(self, layer: int, before: Tensor, after: Tensor) -> Tensor:
        passes = torch.tensor([layer < depth for depth in self.depths])[None, :, None]
        after = torch.where(passes, after, before)
        if self.may_leave and layer + 1 in self.layers and self.depths[-1] > layer:
            logits = self.decoder.logits(self.decoder.read_out(after[:, -1]))
            self.seen.append(float(confidence(logits)))
            if self.threshold < NEVER and self.seen[-1] >= self.threshold:
                self.depths[-1] = layer + 1
        return after

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and their log-probabilities."""
        n_layers = self.decoder.spec.n_layers
        tokens, logprobs = list(prompt), []
        self.depths = [n_layers] * (len(prompt) - 1)
        for i in range(n):
            self.depths.append(n_layers)
            self.may_leave = i > 0
            found = self.decoder(torch.tensor([tokens]))[0, -1].log_softmax(0)
            tokens.append(int(found.argmax()))
            logprobs.append(float(found.max()))
        return tokens[len(prompt) :], logprobs


def between(values: Sequence[float], share: float) -> float:
    """A number in the widest gap near the ``share`` quantile, so that rounding decides nothing."""
    ordered = sorted(values)
    i = max(1, int(share * len(ordered)))
    near = range(max(1, i - 5), min(len(ordered), i + 5))
    gap = max(near, key=lambda k: ordered[k] - ordered[k - 1])
    return (ordered[gap] + ordered[gap - 1]) / 2


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_the_references(models: Path, name: str) -> None:
    path = directory(models, name)
    never = Reference(load_model(path), LAYERS, NEVER)
    for prompt in PROMPTS:
        never.answer(prompt, 24)
    core = engine(path, "at:0", dtype="fp32")
    assert core.exits is not None
    assert core.exits.layers == LAYERS
    reference = Reference(load_model(path), LAYERS, between(never.seen, 0.6))
    core.exits.threshold = reference.threshold
    depths: list[int] = []
    expected = []
    for prompt in PROMPTS:
        expected.append(reference.answer(prompt, 24))
        depths += reference.depths[len(prompt) :]
    found = run(core, PROMPTS, replace(GREEDY, max_tokens=24, logprobs=1))
    for (tokens, logprobs), answer in zip(expected, found, strict=True):
        assert answer[0] == tokens
        torch.testing.assert_close([entry.logprob for entry in answer[1]], logprobs, atol=2e-4, rtol=1e-3)
    assert core.exits.histogram() == {layers: depths.count(layers) for layers in (*LAYERS, 3)}
    assert len(set(depths)) == 3
    assert core.stats().pages_used == 0


@pytest.mark.parametrize("kv", CACHE_TYPES)
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_without_an_exit_taken_every_bit_is_the_whole_models(models: Path, weights: str, kv: str) -> None:
    path = directory(models, d_model=64, n_heads=4, head_dim=32, d_ff=128)
    params = replace(GREEDY, max_tokens=20, logprobs=2, prompt_logprobs=1)
    settings = {"dtype": weights, "kv_dtype": kv, "token_budget": 128}
    plain = run(engine(path, "off", **settings), PROMPTS, params)
    assert run(engine(path, "at:1", **settings), PROMPTS, params) == plain


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_all_layers_as_without_exits(models: Path, name: str) -> None:
    path = directory(models, name)
    plain = run(engine(path, "off", dtype="fp32", n_threads=2), PROMPTS, GREEDY)
    assert run(engine(path, "at:1", dtype="fp32", n_threads=2), PROMPTS, GREEDY) == plain


def test_a_forced_exit_answers_as_a_model_of_the_first_layers_behind_the_prompt(models: Path) -> None:
    """The layers above wrote keys that nothing reads, since no later row comes to them."""
    path = directory(models)
    decoder = load_model(path)
    reference = Reference(decoder, (1,), 0.0)
    core = engine(path, "at:0", dtype="fp32")
    found = run(core, PROMPTS, replace(GREEDY, max_tokens=16))
    assert [answer[0] for answer in found] == [reference.answer(prompt, 16)[0] for prompt in PROMPTS]
    assert core.stats().exits == {1: 15 * len(PROMPTS), 2: 0, 3: 0}
    assert core.stats().exit_row_layers == core.stats().exit_rows == 15 * len(PROMPTS)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_an_answer_does_not_depend_on_what_runs_beside_it(models: Path, n_threads: int) -> None:
    """Alone, together, and beside prompts that are computed in pieces."""
    path = directory(models)
    threshold = between(_confidences(path), 0.5)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=30, ignore_eos=True, logprobs=1)

    def answers(prompts: Sequence[Sequence[int]], **settings: Any) -> list[Any]:
        core = engine(path, "at:1", dtype="fp32", n_threads=n_threads, **settings)
        assert core.exits is not None
        core.exits.threshold = threshold
        found = run(core, prompts, params)
        assert sum(core.stats().exits.values()) == 29 * len(prompts)
        return found

    together = answers([*PROMPTS, list(range(1, 60))], token_budget=8, max_running=4)
    assert [answers([prompt])[0] for prompt in PROMPTS] == together[:-1]


def _confidences(path: Path) -> list[float]:
    never = Reference(load_model(path), LAYERS, NEVER)
    for prompt in PROMPTS:
        never.answer(prompt, 16)
    return never.seen


def test_scored_prompts_and_answers_that_share_one_do_not_leave(models: Path) -> None:
    path = directory(models)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=9, n=3, ignore_eos=True, prompt_logprobs=1)
    plain = run(engine(path, "off", dtype="fp32"), PROMPTS, params)
    found = run(engine(path, "at:0", dtype="fp32"), PROMPTS, params)
    assert [answer[3] for answer in found] == [answer[3] for answer in plain]
    assert [answer[0][0] for answer in found] == [answer[0][0] for answer in plain]


def test_steps_of_exits_count_fewer_bytes_than_the_whole_model_reads(models: Path) -> None:
    path = directory(models, d_model=64, n_heads=4, head_dim=32, d_ff=256)
    params = replace(GREEDY, max_tokens=20)
    left, whole = engine(path, "at:0", dtype="fp32"), engine(path, "off", dtype="fp32")
    for core in (left, whole):
        run(core, PROMPTS[:1], params)
    assert left.stats().decode_steps == whole.stats().decode_steps
    assert left.stats().decode_bytes < 0.8 * whole.stats().decode_bytes


def test_confidence_is_the_difference_of_the_two_largest_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.0, 0.0], [float("nan"), 1.0, 2.0], [500.0, 0.0, 0.0]])
    expected = logits.softmax(1).sort(dim=1, descending=True).values
    found = confidence(logits)
    torch.testing.assert_close(found[[0, 1, 3]], (expected[:, 0] - expected[:, 1])[[0, 1, 3]])
    assert not bool(found[2] >= 0.0)  # so it goes on to the last layer, which tells


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"speculate": "ngram"}, "speculate='ngram'"),
        ({"speculate": "auto"}, "speculate='auto'"),
        ({"deterministic": True}, "deterministic"),
        ({"runner": "torch"}, "runner='torch'"),
    ],
)
def test_what_it_does_not_go_with_is_named(models: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match="does not go with " + named):
        engine(directory(models), "at:0.5", **settings)


def test_beams_and_adapters_are_refused(models: Path, tmp_path: Path) -> None:
    core = engine(directory(models), "at:0.5")
    with pytest.raises(InputError, match="beam search"):
        core.add_request("a", [1, 2], SamplingParams(use_beam_search=True, best_of=2, n=2, temperature=0.0))
    with pytest.raises(ConfigError, match="adapters"):
        core.load_adapter("a", tmp_path)
    assert not core.has_work


@pytest.mark.parametrize("value", ["at:", "at:2", "at:-1", "at:nan", "at:1e0", "at:0x1", "on", "AT:0.5", "at:0.5 "])
def test_thresholds_are_shares(value: str) -> None:
    with pytest.raises(ConfigError, match="early_exit="):
        EngineSettings(early_exit=value)


def fitted(path: Path, **changes: Any) -> FittedExits:
    about = FittedExits((1,), 0.0, weights_digest(path), "fp32", 0.05, 0.95, 9, 0.0, 0.0, (1.0, 0.0), 1.5)
    return replace(about, **changes)


def test_the_fitted_threshold_is_of_the_model_as_it_is_held(models: Path) -> None:
    path = directory(models, vocab_size=89)
    with pytest.raises(ConfigError, match="twostroke exits"):
        engine(path, "auto", dtype="fp32")
    fitted(path).write(path)
    core = engine(path, "auto", dtype="fp32")
    assert core.exits is not None
    assert (core.exits.layers, core.exits.threshold) == ((1,), 0.0)
    with pytest.raises(ConfigError, match="held as fp32, not bf16"):
        engine(path, "auto", dtype="bf16")
    fitted(path, weights="0" * 64).write(path)
    with pytest.raises(ConfigError, match="other weights"):
        engine(path, "auto", dtype="fp32")
    for wrong in ("{", "[]", '{"layers": [1]}', '{"layers": 3}'):
        (path / FITTED_EXITS).write_text(wrong)
        with pytest.raises(CorruptFileError, match=FITTED_EXITS):
            engine(path, "auto", dtype="fp32")
    for layers in ((), (0,), (3,), (2, 1)):
        fitted(path, layers=layers).write(path)
        with pytest.raises(ConfigError, match="exits after layers"):
            engine(path, "auto", dtype="fp32")


def test_later_prompts_find_prompts_and_no_answers(models: Path) -> None:
    """So what is found has a prompt's keys and values, and prefixes on disk and sessions are as without exits."""
    path = directory(models)
    (answer,) = run(engine(path, "at:0", dtype="fp32"), PROMPTS[:1], replace(GREEDY, max_tokens=20))
    longer = [*PROMPTS[0], *answer[0], 7]
    core = engine(path, "at:0", dtype="fp32")
    run(core, PROMPTS[:1], replace(GREEDY, max_tokens=20))
    params = replace(GREEDY, max_tokens=1, logprobs=2, prompt_logprobs=None)
    (found,) = run(core, [longer], params)
    assert core.stats().prefix_hit_tokens == len(PROMPTS[0]) // 4 * 4
    assert (found,) == tuple(run(engine(path, "off", dtype="fp32"), [longer], params))
    (again,) = run(core, [longer], params)
    assert again == found
    assert core.stats().prefix_hit_tokens > len(longer)
    engines = [engine(path, value, dtype="fp32", page_tokens=16) for value in ("off", "at:0.5", "at:0.6")]
    assert len({core.identity for core in engines}) == 1
    assert len({core.fingerprint for core in engines}) == 3  # of answers, which differ
