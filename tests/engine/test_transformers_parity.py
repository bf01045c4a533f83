"""Greedy output against transformers' ``generate``, fp32, for every family."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import EVERY, transformers_model
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams

MAX_TOKENS = 24
TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token is right."""


@dataclass
class Reference:
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # between the two best logits at each token

    def assert_same(self, found: list[int]) -> None:
        for i, (ours, theirs) in enumerate(zip(found, self.tokens, strict=True)):
            if ours != theirs:
                assert self.gaps[i] < TIE, f"token {i} is {ours}, transformers says {theirs} by {self.gaps[i]}"
                return  # what follows has another history


@dataclass
class Family:
    directory: Path
    references: list[Reference]


def prompts() -> list[list[int]]:
    """Lengths around page, chunk and window sizes; the third and fourth share their first 17 tokens."""
    rng = random.Random(0)
    shared = [rng.randrange(2, 97) for _ in range(17)]
    return [
        [5],
        [rng.randrange(2, 97) for _ in range(11)],
        [*shared, 3, 4, 5],
        [*shared, 9, 8, 7, 6, 5, 4, 3, 2],
        [rng.randrange(2, 97) for _ in range(40)],
        [rng.randrange(2, 97) for _ in range(16)],
    ]


@pytest.fixture(scope="module", params=list(EVERY))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    model: Any = transformers_model(request.param, seed=2)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    references = []
    for prompt in prompts():
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=MAX_TOKENS,
                do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        best = torch.stack(made.logits)[:, 0].topk(2).values
        references.append(Reference(prompt, made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return Family(directory, references)


GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def test_the_references_are_not_one_token_repeated(family: Family) -> None:
    """Or the tests below would prove little."""
    assert len({token for r in family.references for token in r.tokens}) > 10


def test_alone(family: Family) -> None:
    llm = LLM(family.directory, dtype="fp32", n_threads=1)
    for reference in family.references:
        reference.assert_same(llm.generate([reference.prompt], GREEDY)[0].outputs[0].token_ids)


def test_in_a_mixed_batch_with_chunks_and_prefix_hits(family: Family) -> None:
    """Requests arrive two steps apart, so that prompts in chunks run beside decodes, over small pages that some share."""
    core = EngineCore(family.directory, EngineSettings("fp32", max_running=4, token_budget=13, page_tokens=4, n_threads=1))
    found: dict[str, list[int]] = {}
    arrivals = [*enumerate(family.references), *enumerate(family.references, start=len(family.references))]
    for i, reference in arrivals:
        core.add_request(str(i), reference.prompt, GREEDY)
        for _ in range(2):
            for event in core.step():
                found.setdefault(event.request_id, []).extend(event.token_ids)
    while core.has_work:
        for event in core.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
    stats = core.stats()
    assert stats.prefix_hit_tokens > 0
    assert stats.mixed_steps > 0
    assert stats.pages_used == 0
    for i, reference in arrivals:
        reference.assert_same(found[str(i)])


def test_preempted_requests_give_the_same_tokens(family: Family) -> None:
    spec_bytes = EngineCore(family.directory, EngineSettings("fp32", kv_cache_bytes=2**20, page_tokens=4, n_threads=1)).pool
    page_bytes = spec_bytes.n_bytes // spec_bytes.n_pages
    core = EngineCore(
        family.directory,
        EngineSettings("fp32", max_running=4, token_budget=32, page_tokens=4, kv_cache_bytes=20 * page_bytes, n_threads=1),
    )
    found: dict[str, list[int]] = {}
    for i, reference in enumerate(family.references):
        core.add_request(str(i), reference.prompt, GREEDY)
    while core.has_work:
        for event in core.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
    # Where every layer has a window, pages behind it are given back, and twenty are enough for all.
    assert core.stats().preemptions > 0 or core.scheduler.config.window is not None
    for i, reference in enumerate(family.references):
        reference.assert_same(found[str(i)])
