from __future__ import annotations

import ctypes
import gc
import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from twostroke.core.errors import InputError
from twostroke.engine import adjust
from twostroke.engine.adjust import Adjusted, adjuster_of, plain_adjust
from twostroke.engine.grammars import Matcher
from twostroke.engine.sampler import sample
from twostroke.kernels.native_library import library
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

V = 300


def any_request(rng: random.Random) -> Request:
    biased = rng.sample(range(V + 20), rng.choice((0, 1, 40)))
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        logit_bias={token: rng.uniform(-100, 100) for token in biased},
        repetition_penalty=rng.choice((1.0, 1.3, 0.5)),
        presence_penalty=rng.choice((0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, -0.3, 1.1)),
        stop_token_ids=tuple(rng.sample(range(V + 5), rng.choice((0, 3)))),
        min_tokens=rng.choice((0, 5)),
        max_tokens=99,
    )
    request = Request("r", [rng.randrange(V) for _ in range(rng.randint(1, 40))], params)
    request.tokens += [rng.randrange(rng.choice((4, V))) for _ in range(rng.randint(0, 30))]
    return request


class AnyForm:
    """Allows tokens at random, in words of which many are all or nothing."""

    def __init__(self, rng: random.Random) -> None:
        self.words = np.array([rng.choice((0, 2**32 - 1, rng.getrandbits(32))) for _ in range(-(-V // 32))], np.uint32)

    def unsafe_compute_mask_ptr(self, address: int, n_bytes: int) -> None:
        assert n_bytes == self.words.nbytes
        ctypes.memmove(address, self.words.ctypes.data, n_bytes)

    def consume_tokens(self, tokens: list[int]) -> bool:
        return True

    def is_error(self) -> bool:
        return False


@pytest.mark.skipif(library() is None, reason="the native library was not built")
@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_library_changes_rows_as_the_reference_does_and_puts_them_back(n_threads: int) -> None:
    rng = random.Random(n_threads)
    for _ in range(60):
        requests = [any_request(rng) for _ in range(rng.randint(1, 9))]
        for request in requests:
            if rng.random() < 0.4:
                request.matcher = Matcher(AnyForm(rng), request.n_prompt, V, frozenset())
        logits = torch.randn(12, V, generator=torch.Generator().manual_seed(rng.randrange(99))) * 4
        before, rows = logits.clone(), rng.sample(range(12), len(requests))
        expected = logits.clone()
        for row, request in zip(rows, requests, strict=True):
            adjuster = adjuster_of(request, V)
            adjuster.see(request)
            plain_adjust(expected.numpy()[row], request, adjuster)
        adjusted = Adjusted(logits, rows, requests, n_threads)
        assert torch.equal(logits, expected)  # to the bit
        assert adjusted.tokens == expected[rows].argmax(dim=1).tolist()
        assert adjusted.best == expected[rows].amax(dim=1).tolist()
        adjusted.restore()
        assert torch.equal(logits, before)


@pytest.mark.parametrize("native", [True, False])
def test_what_is_kept_from_step_to_step_is_what_would_be_made_anew(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(adjust, "library", lambda: None)
    elif library() is None:
        pytest.skip("the native library was not built")
    rng = random.Random(7)
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    for _ in range(15):
        growing = any_request(rng)
        for _ in range(40):
            fresh = Request("f", growing.tokens[: growing.n_prompt], growing.params)
            fresh.tokens = growing.tokens.copy()
            found, expected = logits.clone(), logits.clone()
            Adjusted(found, [0], [growing])
            Adjusted(expected, [0], [fresh])
            assert torch.equal(found, expected)
            growing.tokens.append(rng.randrange(rng.choice((3, V))))


@pytest.mark.parametrize("n_logprobs", [None, 2])
def test_logprobs_are_of_the_rows_as_they_were_also_in_a_runners_own_memory(n_logprobs: int | None) -> None:
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(temperature=0.0, logit_bias={7: 100.0}, logprobs=n_logprobs)
    rows, before = [Request("r", [1], params), Request("s", [1], SamplingParams(logprobs=1))], logits.clone()
    known = logits.max(dim=1)
    found = sample(logits, rows, [0, 0], (known.values, known.indices))
    assert found.tokens[0] == 7
    assert torch.equal(logits[1], before[1])
    expected = before.double().log_softmax(dim=1)
    for i, entry in enumerate(found.logprobs):
        assert entry is None or entry.logprob == pytest.approx(float(expected[i, found.tokens[i]]), abs=1e-5)
    assert (found.logprobs[0] is None) == (n_logprobs is None)


def test_overflow_of_a_penalty_fails_its_own_row_only() -> None:
    logits = torch.full((2, 8), 3e38)
    params = [SamplingParams(temperature=0.0, repetition_penalty=penalty) for penalty in (0.01, 1.0)]
    assert sample(logits, [Request("r", [1], p) for p in params], [0, 0]).failed == [0]
    assert torch.equal(logits, torch.full((2, 8), 3e38))


def lines_of(call: Any) -> int:
    """Lines of Python that ``call`` runs: its work in the interpreter, whatever else the machine does."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection in between would run finalisers of other tests' objects, and count their lines
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("penalised", [False, True])
def test_a_step_costs_python_the_same_whatever_the_length_of_lists_prompt_and_output(penalised: bool) -> None:
    penalties: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.1} if penalised else {}

    def lines(n: int) -> int:
        params = SamplingParams(
            temperature=0.0, logit_bias=dict.fromkeys(range(n), 1.0), stop_token_ids=tuple(range(n)), min_tokens=50_000,
            max_tokens=50_000, **penalties,
        )  # fmt: skip
        requests = []
        for _ in range(4):
            requests.append(Request("r", list(range(20 * n)), params, fork_of=requests[0] if requests else None))
            requests[-1].tokens += [i % (3 * n) for i in range(6 * n)]
        logits = torch.zeros(4, 40_000)
        sample(logits, requests, [0] * 4)  # the first step makes the arrays
        for request in requests:
            request.tokens.append(1)
        return lines_of(lambda: sample(logits, requests, [0] * 4))

    assert lines(1000) == lines(10)


def test_answers_to_one_prompt_share_what_does_not_change() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0), repetition_penalty=1.1, n=100)
    first = Request("r", list(range(500)), params)
    forks = [Request("r", list(range(500)), params.of_fork(i), fork_of=first) for i in range(1, 100)]
    fixed = {id(adjuster_of(request, 2000).fixed) for request in (*forks, first)}
    assert len(fixed) == 1
    assert all(fork.params.logit_bias is params.logit_bias for fork in forks)


def test_a_token_is_biased_once_and_within_its_bounds() -> None:
    with pytest.raises(InputError, match="twice"):
        SamplingParams(logit_bias=((5, 100.0), (5, 100.0)))
    tokens, biases = SamplingParams(logit_bias={5: 1.5, 7: -100.0}).bias_arrays
    assert (list(tokens), list(biases)) == ([5, 7], [1.5, -100.0])
    assert np.asarray(tokens).dtype == np.int64
