"""Prompts are scored in pieces: the logits of a long one never lie in memory together, and none of them stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.engine.sampler import TokenLogprobs
from twostroke.engine.scoring import token_scores
from twostroke.kernels.native_library import library
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.step import MIN_SCORED_ROWS, SCORED_LOGITS_BYTES, scored_rows

N_VOCAB = 151_936
PROMPT = [i * 997 % N_VOCAB for i in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"vocab_size": N_VOCAB, "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "d_ff": 16}
    return saved("llama", tmp_path_factory.mktemp("wide") / "m", max_positions=512, **shape)[1]


def engine(model: Path, **options: int) -> EngineCore:
    return EngineCore(model, EngineSettings(dtype="fp32", n_threads=1, runner="native", max_running=4, **options))


def scores(core: EngineCore) -> tuple[list[TokenLogprobs], list[int]]:
    """A prompt's scores, and what logits took after each step, in bytes."""
    core.add_request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2))
    found: list[TokenLogprobs] = []
    held: list[int] = []
    while core.has_work:
        for event in core.step():
            found += event.prompt_logprobs or []
        held.append(core._runner._logits.nbytes)  # type: ignore[union-attr]
    return found, held


@pytest.mark.skipif(library() is None, reason="the native library was not built")
def test_logits_of_a_long_prompt_take_bounded_memory_and_give_it_back(model: Path) -> None:
    core = engine(model)
    found, held = scores(core)
    assert len(found) == len(PROMPT) - 1
    assert max(held) <= core.logits_bytes <= SCORED_LOGITS_BYTES + 4 * 4 * N_VOCAB
    assert held[-1] <= 4 * 4 * N_VOCAB  # a row for each of at most four running requests
    assert len(held) == -(-len(PROMPT) // scored_rows(N_VOCAB)) + 1  # and in no more steps than that takes
    token_scores(core, [(PROMPT, 1)])
    assert core._runner._logits.nbytes <= 4 * 4 * N_VOCAB  # type: ignore[union-attr]


@pytest.mark.skipif(library() is None, reason="the native library was not built")
def test_scores_do_not_depend_on_the_pieces(model: Path) -> None:
    whole, pieces = scores(engine(model))[0], scores(engine(model, token_budget=32))[0]
    for one, other in zip(whole, pieces, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)  # sums of fp32 in another order
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(("n_vocab", "rows"), [(512, 32_768), (151_936, 110), (10**9, MIN_SCORED_ROWS)])
def test_rows_that_are_scored_at_once(n_vocab: int, rows: int) -> None:
    assert scored_rows(n_vocab) == rows


def test_the_engine_keeps_no_scores_and_a_request_cancelled_in_its_prompt_leaves_nothing(model: Path) -> None:
    core = engine(model, token_budget=32)
    for name in ("a", "b"):
        core.add_request(name, PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=20, ignore_eos=True))
    told = {"a": 0, "b": 0}
    for _ in range(4):
        for event in core.step():
            told[event.request_id] += len(event.prompt_logprobs or ())
    assert sum(told.values()) == 4 * 32
    assert not core._prompt_scores._new
    core.abort("a")
    while core.has_work:
        for event in core.step():
            told[event.request_id] += len(event.prompt_logprobs or ())
    assert told["b"] == len(PROMPT) - 1
    assert not core._prompt_scores._n_scored
