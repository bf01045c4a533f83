"""Who belongs to which arm of an A/B test: as many as were asked for, always the same, told apart by what a request names."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from twostroke.server.callers import Caller
from twostroke.server.keys import ApiKeys
from twostroke.server.split import Rateable, Split, label_of


def of(person: str) -> bytes:
    return json.dumps({"user": person}).encode()


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9])
def test_the_share_is_that_of_clients_and_each_stays(share: float) -> None:
    n, split = 4000, Split("a", "b", share)
    arms = [split.arm_of(Caller("host"), of(f"person {i}"))[0] for i in range(n)]
    assert abs(arms.count("b") - n * share) < 4 * math.sqrt(n * share * (1 - share))  # once in 16,000 by chance
    again = Split("a", "b", share)  # as after a restart
    assert [again.arm_of(Caller("elsewhere"), of(f"person {i}"))[0] for i in range(n)] == arms


def test_a_larger_share_moves_clients_one_way_and_another_test_divides_them_anew() -> None:
    people = [of(f"person {i}") for i in range(500)]
    few, more, other = (
        {p for p in people if split.arm_of(Caller("h"), p)[0] != "a"}
        for split in (Split("a", "b", 0.2), Split("a", "b", 0.5), Split("a", "c", 0.5))
    )
    assert few < more
    assert 180 < len(more ^ other) < 320, "as if both were drawn by themselves"


def test_a_client_is_whom_the_request_names_else_its_key_else_its_address() -> None:
    assert label_of(b'{"user": "u", "safety_identifier": "s", "prompt_cache_key": "c"}') == "s"
    assert label_of(b'{"metadata": {"user_id": "m"}, "prompt_cache_key": "c"}') == "m"
    assert label_of(b'{"prompt_cache_key": "c", "user": null}') == "c"
    for nobody in (b"{}", b'{"user": {"id": 1}}', b'{"user": ""}', b'{"metadata": {"user_id": 7}}', b"[]", b"\xff"):
        assert label_of(nobody) is None
    keys, split = ApiKeys(["sk-1", "sk-2"]), Split("a", "b", 0.5)
    one, two = (Caller("x", account) for account in keys.accounts)
    units = [split.arm_of(caller, body)[1] for caller in (one, two, Caller("x")) for body in (of("u"), of("v"), b"{}")]
    assert len(set(units)) == 9
    assert split.arm_of(Caller("x"), of("u"))[1] == split.arm_of(Caller("y"), of("u"))[1], "without keys a name is one person"


def test_the_log_never_names_an_address_in_a_way_that_can_be_searched() -> None:
    first, second = (Split("a", "b", 0.5).arm_of(Caller("192.0.2.7"), b"{}") for _ in range(2))
    assert first[0] == second[0], "the arm stays"
    assert first[1] != second[1], "the name has a secret of the process in it"


def test_what_may_be_rated_is_read_again_from_the_end_of_the_log(tmp_path: Path) -> None:
    log, known = tmp_path / "usage.jsonl", Rateable()
    line = {"id": "chatcmpl-1f", "key": "ann", "finish_reasons": {"stop": 2}, "arm": "b", "unit": "u", "prompt_tokens": 3}
    other = {"id": "cmpl-2f", "key": None, "finish_reasons": {"stop": 1}}
    rating = {"id": "chatcmpl-3f", "key": "ann", "choice": 0, "rating": 1.0, "arm": "b", "unit": "u"}
    log.write_text("".join(json.dumps(each) + "\n" for each in (line, other, rating)) + '{"torn')
    known.read(log)
    known.read(tmp_path / "none")
    assert known.find("msg_1f", "ann", 1) == ("b", "u"), "under the name that its interface gave it"
    assert known.find("chatcmpl-1f", "ann", 2) is None
    assert known.find("chatcmpl-1f", "bob", 0) is None
    assert known.find("cmpl-2f", None, 0) is None
    assert known.find("chatcmpl-3f", "ann", 0) is None
