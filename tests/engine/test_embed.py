"""Embeddings are transformers' hidden states, the same bits in any company, and no request waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_models import V, save_reference
from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, EngineError, InputError
from twostroke.engine.core import EngineCore
from twostroke.engine.events import TokenEvent
from twostroke.engine.llm import LLM
from twostroke.kernels.native_library import library, why_absent
from twostroke.scheduling.sampling_params import SamplingParams

NATIVE = pytest.param("native", marks=pytest.mark.skipif(library() is None, reason=why_absent() or "there"))
BOTH = pytest.mark.parametrize("runner", ["torch", NATIVE])


def prompts(n: int, longest: int, vocab: int = 97, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size).tolist() for size in (1, longest, *rng.integers(1, longest, n - 2))]


def pooled(pooling: Any, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, **fields)


@BOTH
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3", "granite"])
def test_embeddings_are_the_hidden_states_of_transformers(case: str, runner: str, tmp_path: Path) -> None:
    theirs = save_reference(case, tmp_path / case)
    llm = LLM(tmp_path / case, dtype="fp32", runner=runner, n_threads=1, page_tokens=4, token_budget=13, max_running=5)
    texts = prompts(7, 30, V)
    for pooling in ("mean", "last"):
        found = llm.embed(texts, pooling)
        assert found.dtype == np.float32
        for ids, vector in zip(texts, found, strict=True):
            with torch.no_grad():
                states = theirs.base_model(torch.tensor([ids])).last_hidden_state[0].double()
            expected = states.mean(dim=0) if pooling == "mean" else states[-1]
            np.testing.assert_allclose(vector, expected / expected.norm(), atol=1e-4)


@pytest.mark.skipif(library() is None, reason=why_absent())
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_an_embedding_is_the_same_to_the_bit_however_its_prompt_is_cut_and_whatever_runs_beside_it(
    dtype: str, tmp_path: Path
) -> None:
    _, directory = saved("llama", tmp_path / "model")
    texts = prompts(9, 60)
    greedy, answered = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), [[5, 9, 30], [7]]
    alone = LLM(directory, dtype=dtype, runner="native", n_threads=1, token_budget=512, speculate="off")
    answers = [output.outputs[0].token_ids for output in alone.generate(answered, greedy)]
    for budget, n_running in ((17, 6), (512, 32)):  # few rows, whose outputs threads share out, and chunks of many rows
        crowd = LLM(
            directory, dtype=dtype, runner="native", n_threads=2, token_budget=budget, max_running=n_running, page_tokens=4,
            speculate="off",
        )  # fmt: skip
        for pooling in ("mean", "last"):
            expected = np.concatenate([alone.embed([ids], pooling) for ids in texts])
            outputs: list[Any] = []
            stream = crowd.stream(answered, greedy, outputs)
            next(stream)
            assert crowd.embed(texts, pooling).tobytes() == expected.tobytes()
            assert len(list(stream)) > 20
            assert [output.outputs[0].token_ids for output in outputs] == answers
            assert crowd.embed(texts, pooling).tobytes() == expected.tobytes(), "now the prefix cache knows the prompts"


def run(core: EngineCore) -> list[TokenEvent]:
    events = []
    while core.has_work:
        events += core.step()
    return events


@BOTH
def test_answers_beside_embeddings_are_as_they_are_alone_and_get_a_token_in_every_step(runner: str, tmp_path: Path) -> None:
    _, directory = saved("qwen3", tmp_path / "model")
    settings = EngineSettings(
        dtype="fp32", runner=runner, n_threads=1, page_tokens=4, token_budget=16, max_running=4, speculate="off"
    )
    core = EngineCore(directory, settings)
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=0)
    core.add_request("a", [3, 1, 4], greedy)
    expected = [token for event in run(core) for token in event.token_ids]
    core.add_request("b", [3, 1, 4], greedy)
    core.step()
    for i in range(6):
        core.add_request(f"e{i}", prompts(6, 50, seed=i)[i], pooled("mean" if i % 2 else "last"))
    tokens, ended, n_steps = [], {}, 0
    while core.has_work:
        events = core.step()
        mine = [event for event in events if event.request_id == "b"]
        n_steps += 1
        assert n_steps > 29 or len(mine) == 1, "each step has a token of the running answer"
        tokens += [token for event in mine for token in event.token_ids]
        ended |= {event.request_id: event for event in events if event.embedding is not None}
    assert tokens == expected[1:]
    assert sorted(ended) == [f"e{i}" for i in range(6)]
    assert all(event.token_ids == [] and event.finish_reason == "length" for event in ended.values())
    assert core.stats().pages_used == 0


def test_a_preempted_prompt_is_computed_again_and_added_once(tmp_path: Path) -> None:
    _, directory = saved("llama", tmp_path / "model", max_positions=64)
    ids = prompts(3, 40, seed=4)[1]
    expected = LLM(directory, dtype="fp32", runner="torch").embed([ids])
    page = 4 * 2 * 3 * 2 * 8 * 4  # 4 tokens · (K and V) · layers · KV heads · head dim · bytes of fp32
    settings = EngineSettings(
        dtype="fp32", runner="torch", n_threads=1, page_tokens=4, token_budget=8, max_running=2, kv_cache_bytes=17 * page
    )
    core = EngineCore(directory, settings)
    core.add_request("e", ids, pooled("mean"), priority=5)
    core.step()
    core.step()
    core.add_request("urgent", ids[:30], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    vectors = [event.embedding for event in run(core) if event.embedding is not None]
    assert core.stats().preemptions > 0
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_last_state_finds_its_prefix_in_the_cache_and_a_mean_computes_all(tmp_path: Path) -> None:
    _, directory = saved("llama", tmp_path / "model")
    core = EngineCore(directory, EngineSettings(dtype="fp32", runner="torch", n_threads=1, page_tokens=4))
    ids = prompts(2, 41)[1]
    cached = []
    for i, pooling in enumerate(["last", "last", "mean"]):
        core.add_request(str(i), ids, pooled(pooling))
        (event,) = run(core)
        cached.append(event.cached_tokens)
    assert cached == [0, 40, 0]


def test_what_cannot_be_embedded_is_said_and_the_engine_lives(tmp_path: Path) -> None:
    decoder, directory = saved("llama", tmp_path / "model", max_positions=64)
    llm = LLM(directory, dtype="fp32", runner="torch", n_threads=1)
    with pytest.raises(InputError, match="no tokens"):
        llm.embed([[]])
    with pytest.raises(InputError, match="not in the model's vocabulary"):
        llm.embed([[97]])
    with pytest.raises(CapacityError, match="max_model_len=64"):
        llm.embed([[1] * 64])
    with pytest.raises(InputError, match="must be 'mean' or 'last'"):
        llm.embed([[1]], "max")  # type: ignore[arg-type]
    for fields in ({"n": 2}, {"use_beam_search": True}, {"prompt_logprobs": 1}):
        with pytest.raises(InputError, match="goes with neither"):
            pooled("mean", **fields)
    assert llm.embed([]).shape == (0, decoder.spec.d_model)
    assert np.linalg.norm(llm.embed([[1, 2, 3]])) == pytest.approx(1.0, abs=1e-6)


@BOTH
def test_states_that_are_not_finite_fail_their_request_alone(runner: str, tmp_path: Path) -> None:
    from twostroke.model.save import save_model

    decoder, _ = saved("llama", tmp_path / "good")
    with torch.no_grad():
        decoder.embed.weight[7] = float("nan")
    directory = save_model(decoder, decoder.spec, tmp_path / "bad", dtype="fp32")
    llm = LLM(directory, dtype="fp32", runner=runner, n_threads=1)
    with pytest.raises(EngineError, match="not finite"):
        llm.embed([[1, 2], [3, 7]])
    assert not llm.engine.has_work
    assert np.isfinite(llm.embed([[1, 2]])).all()


def test_a_fingerprint_is_of_the_weights_and_of_how_they_are_computed(tmp_path: Path) -> None:
    _, first = saved("llama", tmp_path / "first")
    _, second = saved("llama", tmp_path / "second", seed=1)

    def of(directory: Path, **settings: Any) -> str:
        return EngineCore(directory, EngineSettings(runner="torch", n_threads=1, **settings)).fingerprint

    found = [
        of(first, dtype="fp32"),
        of(first, dtype="bf16"),
        of(first, dtype="fp32", kv_dtype="int8"),
        of(second, dtype="fp32"),
    ]
    assert len(set(found)) == 4
    assert of(first, dtype="fp32") == found[0]
    assert all(name.startswith("fp_") and len(name) == 19 for name in found)
