"""Scores by the engine are those of the decoder, whatever shares a step, a page or a chunk with them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from small_models import SPECS, decoder_of, saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, EngineError, InputError
from twostroke.engine.core import EngineCore
from twostroke.engine.sampler import TokenLogprobs
from twostroke.engine.scoring import TokenScores, token_scores
from twostroke.model.decoder import Decoder
from twostroke.model.save import save_model
from twostroke.quantization.convert import quantize_model
from twostroke.scheduling.sampling_params import SamplingParams


def expected(decoder: Decoder, ids: list[int], first: int) -> TokenScores:
    """One sequence alone, all its logits at once: slow and obvious."""
    with torch.no_grad():
        logarithms = torch.log_softmax(decoder(torch.tensor([ids]))[0, :-1].float(), dim=-1)
    rows = range(first - 1, len(ids) - 1)
    nats = [-float(logarithms[i, ids[i + 1]]) for i in rows]
    return np.array(nats, np.float32), np.array([int(logarithms[i].argmax()) == ids[i + 1] for i in rows])


def some_sequences(n: int, longest: int, seed: int = 0) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    lengths = [2, 3, longest, *(rng.randint(2, longest) for _ in range(n - 3))]
    return [([rng.randrange(97) for _ in range(k)], rng.randint(1, k - 1)) for k in lengths]


@pytest.mark.parametrize("name", sorted(SPECS))
def test_scores_are_the_decoders_for_every_family(name: str, tmp_path: Path) -> None:
    decoder, directory = saved(name, tmp_path / name)
    engine = EngineCore(directory, EngineSettings(dtype="fp32", n_threads=1, page_tokens=4, max_running=5, token_budget=23))
    sequences = some_sequences(14, 60)
    found = token_scores(engine, sequences)
    for (ids, first), (nats, greedy) in zip(sequences, found, strict=True):
        want, most_probable = expected(decoder, ids, first)
        # fp32 sums in another order: errors of logits of size 10 are some 1e-6 of it.
        np.testing.assert_allclose(nats, want, atol=2e-4)
        assert greedy.tolist() == most_probable.tolist()
    assert engine.stats().pages_used == 0
    assert not engine.has_work


def test_a_greedy_continuation_is_all_greedy_and_its_logarithms_are_those_of_generating(tmp_path: Path) -> None:
    _, directory = saved("llama", tmp_path / "model")
    engine = EngineCore(directory, EngineSettings(dtype="fp32", n_threads=1, page_tokens=4))
    prompt, tokens, logprobs = [5, 9, 30], [], []
    engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0))
    while engine.has_work:
        for event in engine.step():
            tokens += event.token_ids
            logprobs += [entry.logprob for entry in event.logprobs or []]
    (nats, greedy), (_, other) = token_scores(engine, [(prompt + tokens, 3), (prompt + [(t + 1) % 97 for t in tokens], 3)])
    assert greedy.all()
    assert not other[0]
    np.testing.assert_allclose(-nats, logprobs, atol=2e-4)


def test_a_cache_of_few_pages_and_a_full_context_are_enough(tmp_path: Path) -> None:
    """The engine keeps a position free for an answer; a sequence that is only read may fill them all."""
    decoder, directory = saved("llama", tmp_path / "model", max_positions=64)
    page = 4 * 2 * 3 * 2 * 8 * 4  # 4 tokens · (K and V) · layers · KV heads · head dim · bytes of fp32
    config = EngineSettings(dtype="fp32", n_threads=1, page_tokens=4, kv_cache_bytes=17 * page)
    engine = EngineCore(directory, config)
    sequences = some_sequences(9, 65, seed=3)
    for (ids, first), (nats, _) in zip(sequences, token_scores(engine, sequences), strict=True):
        short = ids if len(ids) <= 64 else None
        if short:
            np.testing.assert_allclose(nats, expected(decoder, short, first)[0], atol=2e-4)
    longest = sequences[2][0]
    with torch.no_grad():
        last = torch.log_softmax(decoder(torch.tensor([longest[:-1]]))[0, -1].float(), -1)[longest[-1]]
    assert token_scores(engine, [(longest, 64)])[0][0].tolist() == pytest.approx([-float(last)], abs=2e-4)


def test_prefixes_that_requests_left_behind_change_nothing(tmp_path: Path) -> None:
    decoder, directory = saved("llama", tmp_path / "model")
    engine = EngineCore(directory, EngineSettings(dtype="fp32", n_threads=1, page_tokens=4))
    ids = list(range(10, 40))
    engine.add_request("a", ids, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()
    np.testing.assert_allclose(token_scores(engine, [(ids, 1)])[0][0], expected(decoder, ids, 1)[0], atol=2e-4)


def test_int8_scores_are_of_what_is_served(tmp_path: Path) -> None:
    """Within what rounding to int8 moves them, and not those of the unquantised model."""
    decoder, directory = saved("llama", tmp_path / "model")
    quantize_model(directory, tmp_path / "int8", "int8")
    engine = EngineCore(tmp_path / "int8", EngineSettings(n_threads=1))
    assert engine.dtype == "int8"
    sequences = some_sequences(8, 60)
    found = np.concatenate([nats for nats, _ in token_scores(engine, sequences)])
    want = np.concatenate([expected(decoder, ids, first)[0] for ids, first in sequences])
    assert np.abs(found - want).max() > 1e-3
    assert abs(found.mean() - want.mean()) < 0.05 * want.mean()


def test_bad_sequences_are_refused_with_a_sentence_and_the_engine_stays_usable(tmp_path: Path) -> None:
    decoder, directory = saved("llama", tmp_path / "model", max_positions=32)
    engine = EngineCore(directory, EngineSettings(dtype="fp32", n_threads=1, page_tokens=4))
    with pytest.raises(InputError, match="token 97 is not in the model's vocabulary of 97"):
        token_scores(engine, [([1, 97], 1)])
    with pytest.raises(InputError, match="first=0 must be at least 1"):
        token_scores(engine, [([1, 2], 0)])
    with pytest.raises(CapacityError, match="a sequence of 34 tokens has 33 to compute and max_model_len=32"):
        token_scores(engine, [([1] * 34, 1)])
    assert token_scores(engine, [([4], 1), ([], 1), ([4, 5], 2)])[0][0].tolist() == []
    engine.add_request("a", [3, 4], SamplingParams(max_tokens=2))
    with pytest.raises(EngineError, match="needs an idle engine"):
        token_scores(engine, [([1, 2], 1)])
    engine.abort("a")
    broken = decoder_of("llama", max_positions=32)
    with torch.no_grad():
        broken.embed.weight[7] = float("nan")
    engine = EngineCore(save_model(broken, broken.spec, tmp_path / "nan"), EngineSettings(dtype="fp32", n_threads=1))
    with pytest.raises(EngineError, match="not finite"):
        token_scores(engine, [([1, 7, 3], 1)])
    assert engine.stats().pages_used == 0
    np.testing.assert_allclose(token_scores(engine, [([1, 2, 3], 1)])[0][0], expected(decoder, [1, 2, 3], 1)[0], atol=2e-4)


def test_scores_are_the_prompt_logprobs_that_a_request_gets(tmp_path: Path) -> None:
    """Two ways through the engine: requests of the scheduler, and sequences without one."""
    _, directory = saved("qwen3", tmp_path / "model")
    engine = EngineCore(directory, EngineSettings(dtype="fp32", n_threads=1, page_tokens=4, max_running=4, token_budget=16))
    sequences = [(ids, 1) for ids, _ in some_sequences(6, 40, seed=5)]
    found = token_scores(engine, sequences)
    for i, (ids, _) in enumerate(sequences):
        engine.add_request(f"{i}", ids, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    told: dict[str, list[TokenLogprobs]] = {}
    while engine.has_work:
        for event in engine.step():
            told.setdefault(event.request_id, []).extend(event.prompt_logprobs or ())
    for i, (nats, _) in enumerate(found):
        np.testing.assert_allclose(-nats, [entry.logprob for entry in told[f"{i}"]], atol=2e-4)
