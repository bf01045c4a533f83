"""The native sampler beside its plain reference: the same sets of tokens, and the same token but where two meet."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from twostroke.core.errors import EngineError
from twostroke.engine import native_sampling, sampler
from twostroke.kernels.native_library import holding, library, set_target, target
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="the native library was not built")


@pytest.fixture(params=holding())
def each_target(request: pytest.FixtureRequest) -> Iterator[None]:
    before = target()
    set_target(request.param)
    yield
    set_target(before)


def any_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((1e-6, 0.3, 1.0, 2.0, 50.0)),
        top_k=rng.choice((0, 0, 1, 5, 50, 3000, 100_000)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.5, 1e-4)),
        min_p=rng.choice((0.0, 0.0, 0.05, 0.9)),
    )


def any_logits(rng: random.Random, n_vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    row = torch.randn(n_vocab, generator=generator) * rng.choice((0.0, 0.01, 1.0, 4.0, 30.0))
    if rng.random() < 0.3:
        row = (row * 2).round() / 2  # many ties
    if rng.random() < 0.3 and n_vocab > 1:
        row[rng.sample(range(n_vocab), n_vocab // 2)] = float("-inf")
    return row


def interval(row: torch.Tensor, params: SamplingParams, token: int) -> tuple[float, float]:
    """Where the random number lies for which the reference draws ``token``; empty where it is filtered out."""
    scaled = (row - row.max()) / max(params.temperature, 1e-30)
    kept = sampler._kept(scaled[None], [params.top_k], [params.top_p], [params.min_p])
    weights = scaled.double().exp()
    if kept is not None:
        weights = weights * kept[0]
    cumulative = weights.cumsum(0) / weights.sum()
    return float(cumulative[token] - weights[token] / weights.sum()), float(cumulative[token])


def test_draws_are_those_of_the_reference(each_target: None) -> None:
    rng = random.Random(7)
    n_same = n_all = 0
    for _ in range(120):
        n_vocab = rng.choice((1, 2, 17, 64, 1000, 5003, 20_001))
        rows = torch.stack([any_logits(rng, n_vocab) for _ in range(4)])
        params = [any_params(rng) for _ in range(4)]
        numbers = [rng.choice((0.0, 1 - 2**-53, rng.random(), rng.random())) for _ in range(4)]
        requests = [Request("r", [1], p) for p in params]
        draws = np.empty(4, native_sampling.DRAW)
        draws["row"], draws["number"] = range(4), numbers
        for name in ("temperature", "top_p", "min_p", "top_k"):
            draws[name] = [getattr(p, name) for p in params]
        found = native_sampling.draw(rows, draws, n_threads=rng.choice((1, 2)))
        expected = sampler.plain_draw(rows, params, numbers)
        for i, (token, reference) in enumerate(zip(found, expected, strict=True)):
            n_all += 1
            n_same += token == reference
            if token != reference:
                # Sums in another order and 2e-7 in an exponential: the number may fall on the other side of a border.
                low, high = interval(rows[i], params[i], token)
                assert low - 1e-5 <= numbers[i] <= high + 1e-5, (params[i], requests[i])
                assert high > low or params[i].top_p < 1, "a token that the filters took out"
    assert n_same > 0.98 * n_all


def test_the_most_probable_tokens_are_those_of_the_reference(each_target: None) -> None:
    rng = random.Random(8)
    for _ in range(60):
        n_vocab, k = rng.choice((1, 3, 64, 1000, 5003)), rng.choice((0, 1, 5, 20))
        logits = torch.stack([any_logits(rng, n_vocab) for _ in range(5)])
        rows = [4, 0, 2]
        found, expected = native_sampling.top(logits, rows, k, 2), sampler.plain_top(logits, rows, k)
        np.testing.assert_allclose(found[0], expected[0], atol=2e-6)  # exponentials of 2e-7 each
        np.testing.assert_array_equal(found[1], expected[1])
        for row, values, tokens in zip(rows, found[1], found[2], strict=True):
            assert len(set(tokens.tolist())) == min(k, n_vocab)
            np.testing.assert_array_equal(logits[row].numpy()[tokens], values)
            pairs = list(zip((-values).tolist(), tokens.tolist(), strict=True))
            assert pairs == sorted(pairs), "ties stand in order of their tokens"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_refused_and_nothing_is_read_past_them(each_target: None, bad: float) -> None:
    """A row of −∞ alone has no largest; one −∞ among others is a token that cannot be chosen."""
    for n_vocab in (1, 5, 64, 500, 20_001):
        for everywhere in (False, True):
            logits = torch.randn((3, n_vocab), generator=torch.Generator().manual_seed(n_vocab))
            logits[1, slice(None) if everywhere else n_vocab // 2] = bad
            if bad == -float("inf") and not everywhere and n_vocab > 1:
                native_sampling.top(logits, [1], 1)
                continue
            for k in (0, 1, 5, 20, n_vocab):
                with pytest.raises(EngineError, match="holds NaN"):
                    native_sampling.top(logits, [0, 1, 2], k, n_threads=2)
                assert native_sampling.top(logits, [0, 2], k)[1].shape == (2, min(k, n_vocab))
            for params in (
                SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
                for t in (0.5, 9)
                for k in (0, 3)
                for p in (1, 0.4)
                for m in (0, 0.2)
            ):
                draws = np.zeros(2, native_sampling.DRAW)
                draws["row"], draws["number"] = [0, 1], 0.7
                for name in ("temperature", "top_p", "min_p", "top_k"):
                    draws[name] = getattr(params, name)
                with pytest.raises(EngineError, match="holds NaN"):
                    native_sampling.draw(logits, draws)


def test_the_threads_change_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((7, 5000), generator=generator)
    requests = [Request(str(i), [1], SamplingParams(temperature=0.9, top_p=0.9, top_k=100)) for i in range(7)]
    alone = [sampler.draw_tokens(logits, [i], [requests[i]], [i])[0] for i in range(7)]
    for n_threads in (1, 2):
        assert sampler.draw_tokens(logits, range(7), requests, list(range(7)), n_threads) == alone


def test_without_the_library_the_reference_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((3, 100), generator=torch.Generator().manual_seed(2))
    requests = [Request(str(i), [1], SamplingParams(temperature=1.0, logprobs=3)) for i in range(3)]
    with_library = sampler.sample(logits, requests, [5, 6, 7])
    monkeypatch.setattr(sampler, "library", lambda: None)
    without = sampler.sample(logits, requests, [5, 6, 7])
    assert with_library.tokens == without.tokens
    for a, b in zip(with_library.logprobs, without.logprobs, strict=True):
        assert a is not None
        assert b is not None
        assert [i for i, _ in a.top] == [i for i, _ in b.top]
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
