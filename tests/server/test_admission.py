"""Keys and places."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError
from twostroke.server.admission import Admission, ApiKeys
from twostroke.server.errors import ApiError


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


def test_more_than_the_limit_is_429_with_a_time_to_come_back() -> None:
    admission = Admission(3)
    admission.enter(2)
    with pytest.raises(ApiError) as caught:
        admission.enter(2)
    assert caught.value.status == 429
    assert int(caught.value.headers["retry-after"]) >= 1
    assert admission.active == 2, "who is turned away holds nothing"
    admission.leave(2, 9.0)
    admission.enter(3)
    assert admission.retry_after_s() == 5


def test_a_request_that_could_never_fit_is_the_callers_fault() -> None:
    with pytest.raises(ApiError) as caught:
        Admission(3).enter(4)
    assert caught.value.status == 400
