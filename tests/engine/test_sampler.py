from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.engine import sampler
from twostroke.engine.adjust import Adjusted
from twostroke.engine.sampler import sample, uniform
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

V = 20


def request(n_output: int = 0, eos: tuple[int, ...] = (), **params: Any) -> Request:
    made = Request("r", [0], SamplingParams(**{"max_tokens": 50} | params), eos_token_ids=eos)
    made.tokens += [0] * n_output
    return made


def logits(seed: int = 0, n: int = 1, vocab: int = V) -> torch.Tensor:
    return 2 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed))


def draws(row: torch.Tensor, n: int = 4000, **params: Any) -> Counter[int]:
    requests = [request(i, **params) for i in range(n)]
    return Counter(sample(row.expand(n, -1), requests, [7] * n).tokens)


def reference_filter(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """The distribution after all filters, by the definitions, one token at a time."""
    p = torch.softmax(row.double() / temperature, dim=0).tolist()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k:
        ranked = ranked[:top_k]
    total, kept, cumulative = sum(p[i] for i in ranked), [], 0.0
    for i in ranked:
        if cumulative >= top_p * total:
            break
        kept.append(i)
        cumulative += p[i]
    kept = [i for i in kept if p[i] >= min_p * p[ranked[0]]]
    norm = sum(p[i] for i in kept)
    return {i: p[i] / norm for i in kept}


def test_greedy_takes_the_largest() -> None:
    rows = logits(n=5)
    assert sample(rows, [request(temperature=0.0)] * 5, [0] * 5).tokens == rows.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.3, 0, 0.7, 0.0), (1.0, 0, 1.0, 0.2), (1.5, 6, 0.8, 0.1)],
)
def test_tokens_come_as_often_as_their_probability_says(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    row, n = logits(3)[0], 4000
    expected = reference_filter(row, temperature, top_k, top_p, min_p)
    found = draws(row, n, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(found) <= set(expected)
    for token, p in expected.items():
        # five standard deviations of a binomial: one in a million for each token
        assert abs(found[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.1, 5.0),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    head=st.sampled_from((4, 512)),
)
def test_the_filters_leave_what_their_definitions_say(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, head: int
) -> None:
    row = logits(seed)
    scaled = (row - row.max()) / temperature
    before, sampler._HEAD = sampler._HEAD, head
    try:
        kept = sampler._kept(scaled, [top_k], [top_p], [min_p])
    finally:
        sampler._HEAD = before
    found = set(range(V)) if kept is None else set(kept[0].nonzero().flatten().tolist())
    expected = set(reference_filter(row[0], temperature, top_k, top_p, min_p))
    assert found == expected


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert set(draws(row[0], 200, top_k=1)) == {1, 2, 3}


def test_a_request_draws_the_same_whatever_is_beside_it() -> None:
    rows = logits(n=6, vocab=300)
    kinds = [{"top_p": 0.9}, {"top_k": 5}, {}, {"min_p": 0.1, "top_k": 50}, {"temperature": 0.0}, {"temperature": 3.0}]
    requests = [request(i, **kind) for i, kind in enumerate(kinds)]
    together = sample(rows, requests, list(range(6))).tokens
    alone = [sample(rows[i : i + 1], requests[i : i + 1], [i]).tokens[0] for i in range(6)]
    backwards = sample(rows.flip(0), requests[::-1], list(range(6))[::-1]).tokens[::-1]
    assert together == alone == backwards


def test_streams_differ_by_seed_and_repeat_by_seed() -> None:
    a = [uniform(1, i) for i in range(1000)]
    assert a == [uniform(1, i) for i in range(1000)]
    assert not set(a) & {uniform(2, i) for i in range(1000)}
    assert all(0.0 <= u < 1.0 for u in a)
    assert abs(sum(a) / 1000 - 0.5) < 5 * math.sqrt(1 / 12 / 1000)


@pytest.mark.parametrize("temperature", [1e-9, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    row = 50 * logits(5)
    result = sample(row, [request(temperature=temperature)], [3])
    assert not result.failed
    if temperature < 0.01:
        assert result.tokens == row.argmax(dim=1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_own_row_only(bad: float, temperature: float) -> None:
    rows = logits(n=3)
    rows[1, 4] = bad
    result = sample(rows, [request(temperature=temperature, logprobs=1, seed=i) for i in range(3)], [0, 1, 2])
    assert result.failed == [1]
    assert result.logprobs[1] is None
    good = sample(rows[[0, 2]], [request(temperature=temperature, seed=i) for i in (0, 2)], [0, 2])
    assert [result.tokens[0], result.tokens[2]] == good.tokens


def test_end_tokens_are_held_off_until_min_tokens() -> None:
    row = torch.zeros(1, V)
    row[0, 4] = 9.0
    row[0, 7] = 5.0
    for n_output, expected in ((0, 7), (1, 7), (2, 4)):
        early = request(n_output, eos=(4,), temperature=0.0, min_tokens=2)
        assert sample(row, [early], [0]).tokens == [expected]
    assert row[0, 4] == 9.0  # the caller's logits are not changed


def test_logprobs_are_the_models_own_whatever_the_temperature() -> None:
    row = logits(2)
    expected = torch.log_softmax(row[0].double(), dim=0)
    result = sample(row, [request(temperature=0.3, top_k=2, logprobs=4)], [5])
    entry = result.logprobs[0]
    assert entry is not None
    assert entry.logprob == pytest.approx(float(expected[result.tokens[0]]), abs=1e-5)
    best = expected.topk(4)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_of_none_but_the_chosen_and_of_more_than_there_are() -> None:
    rows = logits(n=3, vocab=5)
    result = sample(rows, [request(logprobs=0), request(), request(logprobs=20)], [1, 2, 3])
    assert result.logprobs[0] is not None
    assert result.logprobs[0].top == []
    assert result.logprobs[1] is None
    assert result.logprobs[2] is not None
    assert len(result.logprobs[2].top) == 5


def _request(params: SamplingParams, prompt: list[int], output: list[int]) -> Request:
    request = Request("r", prompt, params)
    request.tokens += output
    return request


def _adjusted(logits: torch.Tensor, request: Request) -> torch.Tensor:
    rows = logits.clone()
    Adjusted(rows, [0], [request])
    return rows


def test_repetition_penalty_agrees_with_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 4
    prompt, output = [1, 5, 5, 9], [20, 21, 20]
    request = _request(SamplingParams(temperature=0.0, repetition_penalty=1.7), prompt, output)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    assert torch.equal(_adjusted(logits, request), expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.zeros(1, 8)
    request = _request(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [0, 1], [2, 3, 3, 3])
    assert _adjusted(logits, request)[0].tolist() == [0.0, 0.0, -0.75, -1.25, 0.0, 0.0, 0.0, 0.0]
    sample(logits, [request], [0])
    assert logits.abs().sum() == 0  # the model's own distribution is what logprobs are of


def test_a_bias_can_force_and_forbid_a_token() -> None:
    logits = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    forced = _request(SamplingParams(temperature=0.0, logit_bias={7: 100.0}), [0], [])
    best = int(logits[1].argmax())
    forbidden = _request(SamplingParams(temperature=0.0, logit_bias={best: -100.0, 99: 5.0}), [0], [])
    tokens = sample(logits, [forced, forbidden], [0, 0]).tokens
    assert tokens[0] == 7
    assert tokens[1] == int(logits[1].argsort(descending=True)[1])


def test_a_bias_on_tokens_that_the_model_has_not_changes_nothing() -> None:
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))
    request = _request(SamplingParams(logit_bias={16: 5.0, 10**6: 5.0}), [0], [])
    assert torch.equal(_adjusted(logits, request), logits)


def test_requests_without_penalties_beside_one_with_are_not_changed() -> None:
    logits = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    best = int(logits[0].argmax())
    logits[1] = logits[0]
    rows = [_request(SamplingParams(temperature=0.0, **p), [0], [best] * 9) for p in ({}, {"frequency_penalty": 2.0})]  # type: ignore[arg-type]
    first, second = sample(logits, rows, [0, 0]).tokens
    assert first == best != second
