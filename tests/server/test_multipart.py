"""Forms with files: the same parts however the body is cut, and what is no form is refused."""

from __future__ import annotations

import random

import httpx
import pytest

from twostroke.server.batch.multipart import END, MAX_HEAD_BYTES, FormReader, Head
from twostroke.server.errors import ApiError

Parts = list[tuple[Head, bytes]]


def parts_of(content_type: str, body: bytes, cuts: list[int]) -> tuple[Parts, bool]:
    reader, found = FormReader(content_type), list[tuple[Head, bytes]]()
    head, data = None, b""
    for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        for event in reader.feed(body[begin:end]):
            if isinstance(event, Head):
                head, data = event, b""
            elif event is END:
                assert head is not None
                found.append((head, data))
            else:
                assert event
                data += event
    return found, reader.complete


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b"a\r\n--b\r\n\r\n--bound\r\n\r", b"\r\n" * 300, bytes(range(256)) * 9])
def test_a_form_of_httpx_is_read_however_it_is_cut(content: bytes) -> None:
    name = 'a "b"/../é.jsonl'
    request = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": (name, content)})
    kind, body, rng = request.headers["content-type"], request.read(), random.Random(0)
    expected = parts_of(kind, body, [])
    assert expected[1]
    assert [(head.name, data) for head, data in expected[0]] == [("purpose", b"batch"), ("file", content)]
    assert expected[0][0][0].filename is None
    assert "jsonl" in (expected[0][1][0].filename or "")
    for _ in range(30):
        cuts = sorted(rng.randrange(len(body)) for _ in range(rng.randrange(1, 40)))
        assert parts_of(kind, body, cuts) == expected
    assert parts_of(kind, body + b"\r\nwhatever follows", []) == expected
    assert parts_of(kind, b"before\r\n" + body, []) == expected
    for cut in rng.sample(range(len(body) - 4), 20):
        assert not parts_of(kind, body[:cut], [])[1], "it is not complete"


HEAD = b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"", 415),
        ("multipart/form-data", b"", 415),
        ("multipart/mixed; boundary=b", b"", 415),
        ("multipart/form-data; boundary=", b"", 400),
        (f"multipart/form-data; boundary={'b' * 71}", b"", 400),
        ("multipart/form-data; boundary=b", b"--bc\r\n", 400),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\n\r\n", 400),
        ("multipart/form-data; boundary=b", b"--b\r\ncontent-type: text/plain\r\n\r\nx", 400),
        ("multipart/form-data; boundary=b", b"--b\r\ncontent-disposition: attachment; name=x\r\n\r\nx", 400),
        ("multipart/form-data; boundary=b", b"--b\r\nx: " + b"y" * MAX_HEAD_BYTES, 400),
        ("multipart/form-data; boundary=b", b"\r\n".join([HEAD] * 17) + b"\r\n--b--", 400),
    ],
)
def test_what_is_no_form_is_refused(kind: str, body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        parts_of(kind, body, [])
    assert caught.value.status == status
