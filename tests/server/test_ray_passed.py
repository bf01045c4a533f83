"""Which replica a request goes to, without Ray: prefixes, load, readiness, and what travels."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

from twostroke.server.ray_serve.passed import Fleet, Passed, Question
from twostroke.server.router.endpoint import block_keys

PASSED = Passed("POST", "/v1/completions", b"", [(b"host", b"localhost")], "127.0.0.1", b"{}")


def asked(fleet: Fleet, text: str = "", been_at: str | None = None) -> Question:
    return Question(fleet, PASSED, len(text), block_keys(text, "ann"), been_at)


def go(fleet: Fleet, names: Iterable[str], text: str) -> Question:
    """Send a prompt where it should go, as Ray's router does."""
    question = asked(fleet, text)
    question.routed(question.ranked(dict.fromkeys(names, True))[0])
    return question


def answered(fleet: Fleet, question: Question) -> None:
    fleet.begun(question.sent, True)
    fleet.ended(question.sent)


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    fleet, names = Fleet(), ("a", "b")
    one, two = "one " * 400, "two " * 400
    first, second = go(fleet, names, one), go(fleet, names, two)
    assert {first.at, second.at} == {"a", "b"}  # under way together, they share the replicas
    for question in (first, second):
        answered(fleet, question)
    for text, where in ((one, first.at), (two, second.at)) * 3:
        question = go(fleet, names, text + "and more")
        assert question.at == where
        answered(fleet, question)


def test_a_full_queue_outweighs_a_known_beginning() -> None:
    fleet, names = Fleet(), ("a", "b")
    text = "one " * 100
    first = go(fleet, names, text)
    answered(fleet, first)
    places = {go(fleet, names, f"{i} other " * 2000).at for i in range(2)}
    assert places == {"a", "b"}
    many = [go(fleet, (first.at or "",), f"{i} long " * 2000) for i in range(3)]
    assert all(each.at == first.at for each in many)
    assert go(fleet, names, text).at != first.at


def test_replicas_that_take_nothing_come_after_those_that_do_and_the_one_that_failed_comes_last() -> None:
    fleet = Fleet()
    assert asked(fleet).ranked({"a": False, "b": True}) == ["b", "a"]
    assert fleet.has_other("a")
    assert not fleet.has_other("b")
    assert asked(fleet, been_at="b").ranked({"a": False, "b": True}) == ["a", "b"]


def test_a_replica_that_has_ended_is_forgotten_with_what_it_held() -> None:
    fleet = Fleet()
    first = go(fleet, ("a",), "one " * 400)
    asked(fleet).ranked({"b": True})
    assert [each.url for each in fleet.endpoints] == ["b"]
    fleet.ended(first.sent, failed=True)  # its last request ends after it


def test_a_request_that_ray_sends_again_is_counted_where_it_is() -> None:
    fleet = Fleet()
    question = asked(fleet)
    question.ranked({"a": True, "b": True})
    question.routed("a")
    question.routed("b")
    assert {each.url: each.in_flight for each in fleet.endpoints} == {"a": 0, "b": 1}


def test_only_the_request_itself_travels_to_a_replica() -> None:
    assert pickle.loads(pickle.dumps(asked(Fleet(), "text " * 100))) == PASSED
