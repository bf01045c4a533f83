"""Key files, and what a key may ask for."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.core.errors import ConfigError
from twostroke.server.errors import ApiError
from twostroke.server.keys import MINUTE_S, Account, ApiKeys, KeyLimits, KeyLine, Minute, read_key_lines, read_keys


def test_keys_of_a_file_are_accepted_and_no_others(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\nfirst\n\n  second  \n")
    keys = ApiKeys.read(file)
    for good in (b"Bearer first", b"bearer second"):
        assert keys.allow(good)
    for bad in (None, b"", b"Bearer", b"Bearer ", b"Bearer # a comment", b"Bearer firs", b"Basic first", b"first"):
        assert not keys.allow(bad)


def test_keys_are_not_held_as_text(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("open sesame")
    assert "sesame" not in repr(vars(ApiKeys.read(file)))


@pytest.mark.parametrize("content", [b"", b"\n# only a comment\n", b"\xff\xfe\x00", b"x" * (2**20 + 1)])
def test_a_key_file_without_usable_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError):
        ApiKeys.read(file)


def test_a_key_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.read(tmp_path)


def test_a_line_may_say_what_its_key_may_ask_for(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alpha name=ann concurrent=2\nbeta\topen   requests_per_minute=60 tokens_per_minute=5000\nc=d\n")
    assert read_key_lines(file) == [
        KeyLine("alpha", "ann", KeyLimits(concurrent=2)),
        KeyLine("beta\topen", None, KeyLimits(requests_per_minute=60, tokens_per_minute=5000)),
        KeyLine("c=d"),
    ]
    assert read_keys(file) == ["alpha", "beta\topen", "c=d"], "what is sent is the key alone"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("secret concurent=2", "line 1 .*'concurent' is not an option.*concurrent"),
        ("secret concurrent=0", "concurrent='0' must be a whole number from 1"),
        ("secret concurrent=two", "concurrent='two' must be"),
        ("secret concurrent=99999999999", "must be a whole number"),
        ("secret concurrent=1 concurrent=2", "concurrent is given twice"),
        ("secret name=a/b", "name='a/b' must be"),
        ("secret name=", "name='' must be"),
        ("secret name=a\nother name=a", "a name twice"),
        ("secret\nsecret concurrent=2", "a key twice"),
    ],
)
def test_a_line_that_cannot_be_meant_is_named_without_its_key(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(ConfigError, match=said) as caught:
        read_key_lines(file)
    assert "secret" not in str(caught.value)


def test_a_key_without_a_name_is_called_by_the_beginning_of_its_hash() -> None:
    keys = ApiKeys(["sesame", KeyLine("open", "ann")])
    shown = [account.name for account in keys.accounts]
    assert shown[1] == "ann"
    assert shown[0].startswith("key-")
    assert "sesame" not in shown[0]
    found = keys.account(b"Bearer sesame")
    assert found is keys.accounts[0] is keys.owned(ApiKeys.name(b"Bearer sesame"))
    with pytest.raises(ConfigError, match="two keys are called"):
        ApiKeys(["sesame", KeyLine("open", shown[0])])


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 50)), max_size=30), st.integers(0, 200))
def test_a_minute_counts_what_was_in_it_and_says_when_less_is(steps: list[tuple[float, int]], most: int) -> None:
    minute, seen, now_s = Minute(), deque[tuple[float, int]](), 0.0
    for later_s, amount in steps:
        now_s += later_s
        minute.add(amount, now_s)
        seen.append((now_s, amount))
        assert minute.left(now_s) == sum(n for at_s, n in seen if now_s - at_s < MINUTE_S)
    wait_s = minute.until(most, now_s)
    assert (wait_s == 0) == (minute.left(now_s) <= most)
    assert sum(n for at_s, n in seen if now_s + wait_s - at_s < MINUTE_S - 1e-6) <= most


def account_of(**limits: int) -> tuple[Account, list[float]]:
    now = [1000.0]
    return Account(KeyLine("k", None, KeyLimits(**limits)), lambda: now[0]), now


def wait_s(error: ApiError) -> float:
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert int(error.headers["retry-after"]) >= int(error.headers["retry-after-ms"]) / 1000
    return int(error.headers["retry-after-ms"]) / 1000


def test_a_key_may_send_its_requests_again_when_it_is_told() -> None:
    account, now = account_of(requests_per_minute=3)
    for _ in range(3):
        account.require()
        account.count_request()
        now[0] += 10
    with pytest.raises(ApiError) as caught:
        account.require()
    assert wait_s(caught.value) == 30.0
    now[0] += 30
    account.require()
    assert account.used.refused == 1


def test_places_of_a_key_come_back_when_answers_end() -> None:
    account, _ = account_of(concurrent=3)
    account.enter(2, "n")
    with pytest.raises(ApiError) as caught:
        account.enter(2, "n")
    assert caught.value.status == 429
    account.leave(2)
    account.enter(3, "n")
    with pytest.raises(ApiError):
        account.require()
    with pytest.raises(ApiError, match="this key may have 3 at once") as refused:
        account.enter(4, "n")
    assert (refused.value.status, refused.value.param) == (400, "n")


def test_tokens_of_prompts_count_before_and_those_of_answers_after() -> None:
    account, now = account_of(tokens_per_minute=100)
    account.charge_prompt(60, "prompt")
    with pytest.raises(ApiError) as caught:
        account.charge_prompt(50, "prompt")
    assert wait_s(caught.value) == MINUTE_S
    now[0] += 10
    account.charge_output(90)  # of an answer that was admitted while there was room
    with pytest.raises(ApiError) as caught:
        account.require()
    assert wait_s(caught.value) == 50.0, "then the prompt counts no longer"
    with pytest.raises(ApiError, match="this key may use 100 a minute") as refused:
        account.charge_prompt(101, "prompt")
    assert refused.value.status == 400
    now[0] += 60
    account.charge_prompt(100, "prompt")


def test_a_key_without_limits_keeps_nothing_and_is_never_refused() -> None:
    account, _ = account_of()
    for _ in range(1000):
        account.require()
        account.count_request()
        account.enter(9, "n")
        account.charge_prompt(10**9, "prompt")
        account.charge_output(10**9)
    assert (len(account._requests._counted), len(account._tokens._counted)) == (0, 0)
