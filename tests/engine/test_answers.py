"""Several answers to one prompt, log-probabilities of prompts, deadlines and windows, through the engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import InputError
from twostroke.engine.core import EngineCore
from twostroke.engine.llm import LLM
from twostroke.model.load import load_model
from twostroke.scheduling.sampling_params import SamplingParams

PROMPT = [3, 7, 1, 9, 4, 4, 2, 8, 30, 11, 12, 5, 6, 17, 21, 22, 40, 3, 3, 2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "llama")[1]


def make(directory: Path, **changes: int) -> LLM:
    return LLM(directory, **{"dtype": "fp32", "n_threads": 1, "page_tokens": 8, "max_running": 8} | changes)  # type: ignore[arg-type]


def test_n_answers_are_those_of_n_requests_with_their_seeds(llama: Path) -> None:
    params = SamplingParams(temperature=1.5, seed=5, n=4, max_tokens=12, ignore_eos=True)
    together = make(llama).generate(PROMPT, params)[0]
    assert [o.index for o in together.outputs] == [0, 1, 2, 3]
    alone = make(llama)
    first = SamplingParams(temperature=1.5, seed=5, max_tokens=12, ignore_eos=True)
    for i, output in enumerate(together.outputs):
        own = first if i == 0 else params.of_fork(i)
        assert output.token_ids == alone.generate(PROMPT, own)[0].outputs[0].token_ids
    assert len({tuple(o.token_ids) for o in together.outputs}) == 4


def test_the_prompt_of_n_answers_is_computed_once(llama: Path) -> None:
    llm = make(llama)
    llm.generate(PROMPT, SamplingParams(n=5, max_tokens=4, seed=1, ignore_eos=True))
    stats = llm.stats()
    assert stats.prefill_tokens + stats.mixed_tokens + stats.decode_tokens == len(PROMPT) + 4 + 5 * 3
    assert stats.pages_used == 0


def test_answers_survive_too_few_pages(llama: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=2, n=4, max_tokens=30, ignore_eos=True)
    roomy = make(llama).generate(PROMPT, params)[0]
    page_bytes = make(llama).engine.pool.n_bytes // make(llama).engine.pool.n_pages
    llm = make(llama, kv_cache_bytes=page_bytes * 12, max_model_len=60)
    tight = llm.generate(PROMPT, params)[0]
    assert llm.stats().preemptions > 0
    assert [o.token_ids for o in tight.outputs] == [o.token_ids for o in roomy.outputs]


def test_one_answer_may_end_before_the_others_and_all_are_aborted_together(llama: Path) -> None:
    core = EngineCore(llama, EngineSettings(dtype="fp32", n_threads=1))
    core.add_request("a", PROMPT, SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    for _ in range(3):
        core.step()
    core.abort("a", 1)
    assert {e.index for e in core.step()} == {0, 2}
    core.abort("a")
    assert not core.has_work
    assert core.stats().pages_used == 0
    core.add_request("a", PROMPT, SamplingParams(max_tokens=2))  # the id is free again


@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_are_those_of_the_decoder(llama: Path, budget: int) -> None:
    llm = make(llama, token_budget=budget)
    llm.generate(PROMPT, SamplingParams(max_tokens=1))  # its pages are known, and must be computed again all the same
    output = llm.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3, n=2))[0]
    decoder = load_model(llama, "fp32")
    with torch.inference_mode():
        expected = torch.log_softmax(decoder(torch.tensor([PROMPT]))[0].float(), dim=-1)
    scores = output.prompt_logprobs
    assert scores is not None
    assert len(scores) == len(PROMPT) - 1
    for i, entry in enumerate(scores):
        assert entry.logprob == pytest.approx(float(expected[i, PROMPT[i + 1]]), abs=1e-4)  # sums in another order
        assert [token for token, _ in entry.top] == expected[i].topk(3).indices.tolist()


def test_a_request_ends_at_its_deadline(llama: Path) -> None:
    core = EngineCore(llama, EngineSettings(dtype="fp32", n_threads=1))
    core.add_request("slow", PROMPT, SamplingParams(max_tokens=10_000 if core.max_model_len > 10_000 else 40), timeout_s=0.05)
    core.step()
    time.sleep(0.06)
    (event,) = core.step()
    assert (event.request_id, event.finish_reason, event.token_ids) == ("slow", "timeout", [])
    assert not core.has_work
    with pytest.raises(InputError, match="timeout_s"):
        core.add_request("bad", PROMPT, SamplingParams(), timeout_s=-1.0)


def test_pages_behind_the_window_are_free_and_the_text_is_the_same(tmp_path: Path) -> None:
    directory = saved("mistral", tmp_path / "m")[1]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    llm = make(directory)
    window = llm.engine.scheduler.config.window
    assert window is not None
    assert window < len(PROMPT) + 40
    expected = PROMPT.copy()
    decoder = load_model(directory, "fp32")
    with torch.inference_mode():
        for _ in range(40):
            expected.append(int(decoder(torch.tensor([expected]))[0, -1].argmax()))
    assert PROMPT + llm.generate(PROMPT, params)[0].outputs[0].token_ids == expected
    core = llm.engine
    core.add_request("a", PROMPT, params)
    most = 0
    while core.has_work:
        core.step()
        most = max(most, core.scheduler.pool.n_used)
    assert most < -(-(len(PROMPT) + 40) // 8)
