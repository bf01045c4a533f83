"""Drafts change how many steps an answer takes, and nothing else of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from lora_models import models as lora_models

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import ASKED, CACHE_TYPES
from twostroke.engine.core import EngineCore
from twostroke.engine.events import TokenEvent
from twostroke.engine.llm import LLM
from twostroke.engine.sampler import plain_draw
from twostroke.engine.speculation.draft_model import ModelDrafter
from twostroke.engine.speculation.drafter import Drafter
from twostroke.engine.speculation.lengths import StepTimes
from twostroke.engine.verification import verify
from twostroke.kernels.native_library import library, why_absent
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.step import ScheduledStep

pytestmark = pytest.mark.skipif(library() is None, reason=why_absent())

WORDS = [5, 9, 3, 44, 7, 8, 90, 17]
PROMPTS = [[*WORDS, 30, *WORDS, 31, *WORDS[:4]], [2, 6, 2, 6, 2, 6, 2, 6], [77, 12, 13, 14, 15, 16, 71, 60, 61, 62, 4]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def directory(models: Path, name: str = "llama", **changes: Any) -> Path:
    made = models / "-".join((name, *map(str, changes.values())))
    return made if made.exists() else saved(name, made, **changes)[1]


class Fixed(StepTimes):
    """Step times that no step corrects, so that a test does not depend on the machine's load."""

    def saw(self, rows: int, seconds: float) -> None:
        pass


class Oracle(Drafter):
    """Drafts the answers of an earlier run, of which some tokens were replaced: whatever is checked, right and wrong."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int) -> None:
        super().__init__(vocab_size, StepTimes(lambda rows: 1.0, 64), past_outputs=False)
        self.answers, self.n_asked = answers, 0

    def propose(self, decoding: Sequence[Request], n_rows: int, room: int) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {}
        for i, request in enumerate(decoding):
            self.n_asked += 1
            answer = self.answers[(*request.tokens[: request.n_prompt], request.params.seed or 0)]
            draft = list(answer[request.n_output : request.n_output + 1 + self.n_asked % 6])
            if draft and self.n_asked % 3 == 0:
                draft[-1] = (draft[-1] + 1) % 97
            if draft and len(draft) <= room:
                drafts[i] = draft
                room -= len(draft)
        return drafts


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    adapters: Mapping[str, Path] = MappingProxyType({}),
) -> list[tuple[Any, ...]]:
    """Of every answer, in order of prompt and index: tokens, log-probabilities, reason; and the prompt's. Adapters are named
    in turns, from the last to none."""
    for name, path in adapters.items():
        core.load_adapter(name, path)
    loras = [*reversed(adapters), None]
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), list(prompt), params, priority=i % 2, lora=loras[i % len(loras)])
    found: dict[tuple[str, int], list[TokenEvent]] = {}
    while core.has_work:
        for event in core.step():
            found.setdefault((event.request_id, event.index), []).append(event)
    return [
        (
            [token for event in events for token in event.token_ids],
            [entry for event in events for entry in event.logprobs or ()],
            events[-1].finish_reason,
            [entry for event in events for entry in event.prompt_logprobs or ()],
        )
        for _, events in sorted(found.items())
    ]


def both(
    path: Path,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    **settings: Any,
) -> EngineCore:
    """Runs with and without drafts, asserts that every answer is equal, and returns the engine that drafted."""
    settings = {"n_threads": 1, "page_tokens": 4} | settings
    plain = run(EngineCore(path, EngineSettings(**settings)), prompts, params, adapters)
    core = EngineCore(path, EngineSettings(**settings, speculate="ngram"))
    answers = {(*prompt, params.seed or 0): answer[0] for prompt, answer in zip(prompts, plain[:: params.n], strict=True)}
    for i in range(1, params.n):
        answers |= {
            (*prompt, params.of_fork(i).seed or 0): answer[0]
            for prompt, answer in zip(prompts, plain[i :: params.n], strict=True)
        }
    core._drafting.drafter = Oracle(answers, core.spec.vocab_size)
    assert run(core, prompts, params, adapters) == plain
    stats = core.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.pages_used == 0
    return core


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("kv", CACHE_TYPES)
@pytest.mark.parametrize("weights", ASKED)
def test_greedy_answers_are_equal_for_every_scheme_and_cache(models: Path, weights: str, kv: str) -> None:
    path = directory(models, d_model=64, n_heads=4, head_dim=32, d_ff=128)
    core = both(path, replace(GREEDY, logprobs=2), dtype=weights, kv_dtype=kv)
    assert core.stats().decode_steps < 40 * len(PROMPTS) / 2


def test_drafts_move_with_their_requests_when_rows_are_grouped_by_adapter(tmp_path: Path) -> None:
    base, (a, b), _ = lora_models("llama", tmp_path, 2)
    both(base, GREEDY, adapters={"a": a, "b": b}, dtype="fp32")


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gpt2", "gemma2", "gpt_oss", "olmoe", "deepseek_v3"])
def test_families_with_windows_experts_and_latents_answer_alike(models: Path, name: str) -> None:
    sizes = {"gpt_oss": {"d_model": 64, "moe": None}}.get(name, {})
    both(directory(models, name, **{k: v for k, v in sizes.items() if v is not None}), GREEDY, dtype="fp32")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=4, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40, min_tokens=20, stop_token_ids=tuple(range(40)), logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.7),
        SamplingParams(
            temperature=1.2, seed=6, max_tokens=30, min_tokens=9, presence_penalty=0.5, logit_bias=((7, 2.0),), logprobs=0,
            stop_token_ids=(3, 5, 9),
        ),
        SamplingParams(temperature=1.0, seed=7, max_tokens=25, n=3, ignore_eos=True, prompt_logprobs=1, logprobs=1),
    ],
)  # fmt: skip
def test_sampled_answers_are_equal_too_with_their_log_probabilities(models: Path, params: SamplingParams) -> None:
    both(directory(models), params, dtype="fp32")


def test_chunks_prefixes_and_preemption_change_nothing(models: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=50, ignore_eos=True)
    prompts = [[*PROMPTS[0], *([i] * (7 * i))] for i in range(6)]
    core = both(directory(models), params, prompts, dtype="fp32", token_budget=13, max_running=6)
    page = core.pool.n_bytes // core.pool.n_pages
    tight = both(
        directory(models), params, prompts, dtype="fp32", token_budget=13, max_running=6, kv_cache_bytes=page * 30,
        max_model_len=110,
    )  # fmt: skip
    assert tight.stats().preemptions > 0
    assert tight.stats().prefix_hit_tokens > 0


def test_text_that_repeats_is_drafted_without_help(models: Path) -> None:
    """A cycle that greedy decoding falls into; then the same prompt again, whose answer is a past output."""
    llm = LLM(directory(models), dtype="fp32", n_threads=1, speculate="auto")
    assert isinstance(llm.engine._drafting.drafter, Drafter)
    llm.engine._drafting.drafter.times = Fixed(lambda rows: 1.0, 64)
    plain = LLM(directory(models), dtype="fp32", n_threads=1).generate(PROMPTS, replace(GREEDY, max_tokens=120))
    for _ in range(2):
        drafted = llm.generate(PROMPTS, replace(GREEDY, max_tokens=120))
        assert [r.outputs[0].token_ids for r in drafted] == [r.outputs[0].token_ids for r in plain]
    assert llm.stats().accepted_draft_tokens > 60


def test_the_draft_keeps_the_distribution() -> None:
    """χ² of 20,000 verified rows against the target distribution, for a likely, an unlikely and an impossible draft; and of the
    token behind an accepted one."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 12, generator=generator) * 1.5
    params = SamplingParams(temperature=0.9, top_k=8, max_tokens=50)
    n = 20_000
    kept = [plain_draw(logits[row].expand(n, -1).clone(), [params] * n, [(i + 0.5) / n for i in range(n)]) for row in range(2)]
    expected = [np.bincount(tokens, minlength=12) / n for tokens in kept]
    for draft in (
        int(expected[0].argmax()),
        int(np.where(expected[0] > 0, expected[0], 2).argmin()),
        int(expected[0].argmin()),
    ):
        first: Counter[int] = Counter()
        second: Counter[int] = Counter()
        requests = [Request(str(seed), [1, 2], params) for seed in range(n)]
        step = ScheduledStep(0, requests, [2] * n, [1] * n, n, [], [], [], {i: [draft] for i in range(n)})
        for tokens in verify(logits.repeat(n, 1), step, range(n), range(n), None).tokens:
            assert (len(tokens) == 2) == (tokens[0] == draft)
            first[tokens[0]] += 1
            if len(tokens) == 2:
                second[tokens[1]] += 1
        assert all(request.tokens == [1, 2] for request in requests)
        for counts, shares in ((first, expected[0]), (second, expected[1])):
            total = sum(counts.values())
            if total < 500:
                continue
            assert not any(counts[i] for i in range(12) if shares[i] == 0)
            support = [i for i in range(12) if shares[i] > 0]
            chi2 = sum((counts[i] - total * shares[i]) ** 2 / (total * shares[i]) for i in support)
            assert chi2 < 30  # 7 degrees of freedom: one run in 10,000 has more


def test_a_row_that_is_not_finite_fails_only_the_request_that_reaches_it() -> None:
    logits = torch.zeros(3, 8)
    logits[0, 5], logits[1] = 1.0, float("nan")
    params = SamplingParams(temperature=0.0, max_tokens=9)
    for draft, expected in (([5, 1], [5]), ([4, 1], [5])):
        request = Request("r", [1, 2], params)
        step = ScheduledStep(0, [request], [3], [1], 1, [], [], [], {0: draft})
        assert verify(logits, step, [0], [0], None).tokens == [expected]
    logits[0] = float("nan")
    assert verify(logits, step, [0], [0], None).tokens == [[]]


def test_greedy_requests_take_at_once_what_they_take_one_by_one() -> None:
    r = random.Random(5)
    for _ in range(200):
        drafts = {i: [r.randrange(3) for _ in range(r.randrange(1, 5))] for i in r.sample(range(4), r.randrange(1, 5))}
        logits = torch.tensor([[float(r.randrange(3)) for _ in range(3)] for _ in range(4 + sum(map(len, drafts.values())))])
        logits[r.randrange(len(logits))] *= r.choice((1.0, float("nan"), float("inf")))
        texts = SamplingParams(temperature=0.0, max_tokens=9), SamplingParams(temperature=0.0, max_tokens=9, logprobs=0)
        known = logits.max(dim=1)
        at_once, one_by_one = (
            verify(logits.clone(), step, range(4), range(4), (known.values, known.indices)).tokens
            for params in texts
            for step in [
                ScheduledStep(0, [Request(str(i), [1, 2], params) for i in range(4)], [2] * 4, [1] * 4, 4, [], [], [], drafts)
            ]
        )
        assert at_once == one_by_one


def test_an_interrupted_check_counts_no_token_twice(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the check and the scheduler: penalties have seen drafts that are drawn again."""
    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, frequency_penalty=0.4, min_tokens=7, stop_token_ids=(2,)
    )
    plain = run(EngineCore(directory(models), EngineSettings(dtype="fp32", n_threads=1)), PROMPTS, params)
    core = EngineCore(directory(models), EngineSettings(dtype="fp32", n_threads=1, speculate="ngram"))
    core._drafting.drafter = Oracle({(*p, 0): a[0] for p, a in zip(PROMPTS, plain, strict=True)}, core.spec.vocab_size)
    n_calls = 0

    def interrupted(*args: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        taken = verify(*args)
        if n_calls % 3 == 0:
            raise KeyboardInterrupt
        return taken

    monkeypatch.setattr("twostroke.engine.core.verify", interrupted)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(str(i), prompt, params)
    found: dict[str, list[int]] = {}
    while core.has_work:
        try:
            events = core.step()
        except KeyboardInterrupt:
            continue
        for event in events:
            found.setdefault(event.request_id, []).extend(event.token_ids)
    assert [found[str(i)] for i in range(3)] == [answer[0] for answer in plain]
    assert core.stats().accepted_draft_tokens > 0


def test_torch_products_are_refused_by_name(models: Path) -> None:
    with pytest.raises(ConfigError, match="runner='native'"):
        EngineCore(directory(models), EngineSettings(runner="torch", speculate="ngram"))
    core = EngineCore(directory(models), EngineSettings(runner="torch", speculate="auto", dtype="fp32"))
    assert core.scheduler.config.draft_rows == 0


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, logprobs=1),
        SamplingParams(
            temperature=1.0, seed=7, max_tokens=30, n=3, min_tokens=9, frequency_penalty=0.5, stop_token_ids=(3, 5, 9)
        ),
    ],
)
def test_a_draft_model_changes_no_token(models: Path, params: SamplingParams) -> None:
    """Another model, which is mostly wrong, and the very model, which is always right: it draws with the same numbers."""
    path, other = directory(models), directory(models, "llama", n_layers=1)
    settings: dict[str, Any] = {"dtype": "auto", "n_threads": 1, "page_tokens": 4, "token_budget": 21, "max_running": 9}
    plain = run(EngineCore(path, EngineSettings(**settings)), PROMPTS, params)
    for draft in (other, path):
        core = EngineCore(path, EngineSettings(**settings, speculate=f"draft:{draft}"))
        drafter = core._drafting.drafter
        assert isinstance(drafter, ModelDrafter)
        drafter._ahead = lambda n_decoding, n_rows: 3  # type: ignore[method-assign]
        assert run(core, PROMPTS, params) == plain
        stats = core.stats()
        assert stats.draft_tokens > 40
        if draft == path:
            assert stats.accepted_draft_tokens == stats.draft_tokens
            assert stats.decode_tokens > 1.5 * stats.decode_requests
        else:
            assert stats.accepted_draft_tokens < stats.draft_tokens
        assert drafter._draft.scheduler.pool.n_used == 0
        assert len(drafter._slots) == 9


def test_a_draft_model_of_another_vocabulary_is_refused(models: Path) -> None:
    other = directory(models, "llama", vocab_size=98)
    with pytest.raises(ConfigError, match="98 tokens"):
        EngineCore(directory(models), EngineSettings(dtype="fp32", speculate=f"draft:{other}"))


def test_a_draft_model_that_is_mostly_wrong_is_hardly_asked(models: Path) -> None:
    other = directory(models, "llama", n_layers=2)
    core = EngineCore(directory(models), EngineSettings(dtype="fp32", n_threads=1, speculate=f"draft:{other}"))
    assert isinstance(core._drafting.drafter, ModelDrafter)
    core._drafting.drafter.times = core._drafting.drafter.draft_times = Fixed(lambda rows: 1.0 + 0.1 * rows, 64)
    run(core, [[i] for i in range(4)], SamplingParams(temperature=1.0, seed=1, max_tokens=200, ignore_eos=True))
    stats = core.stats()
    assert 0 < stats.draft_tokens < stats.output_tokens / 2
