"""Greedy output against transformers' ``generate``, fp32, for every family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parity import GREEDY, Reference, alone, mixed, references_of
from small_models import EVERY, transformers_model
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore


@dataclass
class Family:
    directory: Path
    references: list[Reference]


@pytest.fixture(scope="module", params=list(EVERY))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    model: Any = transformers_model(request.param, seed=2)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return Family(directory, references_of(model))


def test_the_references_are_not_one_token_repeated(family: Family) -> None:
    """Or the tests below would prove little."""
    assert len({token for r in family.references for token in r.tokens}) > 10


def test_alone(family: Family) -> None:
    for reference, found in zip(family.references, alone(family.directory, family.references), strict=True):
        reference.assert_same(found)


def test_in_a_mixed_batch_with_chunks_and_prefix_hits(family: Family) -> None:
    found, stats = mixed(family.directory, family.references)
    assert stats.prefix_hit_tokens > 0
    assert stats.mixed_steps > 0
    assert stats.pages_used == 0
    for reference, tokens in zip(family.references * 2, found, strict=True):
        reference.assert_same(tokens)


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
