"""Which server the router sends a request to: measured paces, work that waits, prompts' beginnings, models."""

from __future__ import annotations

import pytest

from twostroke.server.router.endpoint import (
    BASE,
    BLOCK_CHARS,
    FORGET_S,
    MAX_BLOCKS,
    Endpoint,
    Sent,
    block_keys,
    choose,
    prompt_text,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def endpoints(n: int, clock: Clock) -> list[Endpoint]:
    found = [Endpoint(f"http://{i}", clock) for i in range(n)]
    for each in found:
        each.up = True
    return found


def sent(
    all_: list[Endpoint], text: str = "x" * 100, model: str = "", owner: str = "", without: Endpoint | None = None
) -> Sent:
    found = choose(all_, model, len(text), block_keys(text, owner), without)
    assert found is not None
    return found


def answer(request: Sent, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    request.begun()
    request.ended()


def test_requests_at_once_are_spread_and_counted_down_again() -> None:
    all_ = endpoints(3, Clock())
    held = [sent(all_) for _ in range(6)]
    assert [each.in_flight for each in all_] == [2, 2, 2]
    for i, request in enumerate(held):
        if i % 2:
            request.begun()
        request.ended()
        request.ended()
    assert [(each.in_flight, each.work, each.begun) for each in all_] == [(0, 0, 0)] * 3


def test_a_server_that_is_twice_as_fast_gets_twice_the_work() -> None:
    clock = Clock()
    fast, slow = all_ = endpoints(2, clock)
    fast.measured(1.0, 1000, 1.0)
    slow.measured(2.0, 1000, 1.0)
    for _ in range(90):
        sent(all_)
    assert fast.in_flight == pytest.approx(60, abs=2)
    assert slow.in_flight == pytest.approx(30, abs=2)


def test_a_server_that_was_slow_once_is_tried_again_after_a_while() -> None:
    clock = Clock()
    fast, slow = all_ = endpoints(2, clock)
    fast.measured(0.1, 1000, 0.1)
    slow.measured(50.0, 1000, 0.1)
    busy = [sent(all_) for _ in range(20)]
    assert slow.in_flight == 0
    clock.now += 20 * FORGET_S
    assert sent(all_).endpoint is slow
    assert len(busy) == 20


def test_a_prompt_goes_where_its_beginning_went_until_more_waits_there_than_that_saves() -> None:
    clock = Clock()
    all_ = endpoints(2, clock)
    prefix = "".join(chr(97 + i * i % 26) for i in range(20 * BLOCK_CHARS))
    first = sent(all_, prefix + "one")
    answer(first, clock, 1.0)
    for tail in ("two", "three", "four"):
        again = sent(all_, prefix + tail)
        assert again.endpoint is first.endpoint
        answer(again, clock, 0.1)
    others = sent(all_, prefix + "mine", owner="another key")
    others.ended()
    assert others.predicted_s > again.predicted_s
    waiting = sent([first.endpoint], "y" * 40 * BLOCK_CHARS)
    assert sent(all_, prefix + "five").endpoint is not first.endpoint
    waiting.ended()


def test_a_refusal_teaches_nothing() -> None:
    clock = Clock()
    (one,) = all_ = endpoints(1, clock)
    request = sent(all_, "z" * 10 * BLOCK_CHARS)
    request.begun(served=False)
    request.ended()
    assert one.measured_pace_s is None
    assert one.seen_chars(block_keys("z" * 10 * BLOCK_CHARS, "")) == 0


def test_what_is_remembered_is_bounded_and_forgotten_with_the_server() -> None:
    (one,) = endpoints(1, Clock())
    one.remember([i.to_bytes(16, "big") for i in range(MAX_BLOCKS + 10)])
    assert one.seen_chars([(9).to_bytes(16, "big")]) == 0
    assert one.seen_chars([(10).to_bytes(16, "big")]) == BLOCK_CHARS
    one.forget()
    assert one.seen_chars([(10).to_bytes(16, "big")]) == 0


def test_a_model_goes_to_those_that_serve_it_and_an_unknown_one_to_any_that_is_up() -> None:
    a, b, c = all_ = endpoints(3, Clock())
    a.models, b.models, c.models = frozenset({"a"}), frozenset({"b"}), None

    def takers(model: str) -> set[Endpoint]:
        held = [sent(all_, model=model) for _ in range(8)]
        for request in held:
            request.ended()
        return {request.endpoint for request in held}

    assert takers("b") == {b, c}
    c.up = False
    assert takers("b") == {b}
    assert takers("other") == {a, b}
    assert sent(all_, model="b", without=b).endpoint is a, "it answers that it does not serve it"
    a.up = b.up = False
    assert choose(all_, "b", 1, []) is None


def test_equal_beginnings_of_prompts_are_equal_beginnings_of_texts() -> None:
    messages = [{"role": "system", "content": "s" * 600}, {"role": "user", "content": "one"}]
    more = [*messages, {"role": "assistant", "content": "x"}]
    first, second = (prompt_text({"model": "m", "messages": m, "temperature": i}) for i, m in enumerate((messages, more)))
    assert second.startswith(first)
    assert prompt_text({"model": "m", "prompt": "abc"}) == "m\0abc"
    assert prompt_text({"prompt": [1, 2, 3]}).endswith("1\x002\x003")
    assert prompt_text({"model": "m", "messages": messages, "tools": [{"a": 1}]}) != first
    for odd in ({}, {"messages": 5}, {"prompt": None}, {"prompt": {"a": []}}, {"model": ["m"]}, {"input": "\ud800"}):
        block_keys(prompt_text(odd) * 300, "")  # whatever a body holds, this is no error
    assert len(block_keys("a" * (BLOCK_CHARS - 1), "")) == 0
    assert BASE > 0
