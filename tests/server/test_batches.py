"""Files and batches over HTTP: OpenAI's own client, restarts after kill -9, keys, bounds, and the requests beside them."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from attacks import answer_of, connect, status_of
from serving import Served, echo_server, metric
from test_batch_kills import requests


def lines(rows: list[dict[str, Any]]) -> io.BytesIO:
    stream = io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())
    stream.name = "my requests.jsonl"
    return stream


def completions(n: int, n_tokens: int = 3) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "echo", "prompt": [40 + i % 200], "max_tokens": n_tokens}}
        for i in range(n)
    ]  # fmt: skip


def client_of(served: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=20)


def created(client: openai.OpenAI, rows: list[dict[str, Any]], endpoint: Any = "/v1/completions") -> Any:
    file = client.files.create(file=lines(rows), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def until(client: openai.OpenAI, batch_id: str, wanted: Callable[[Any], bool], within_s: float = 60) -> Any:
    deadline = time.monotonic() + within_s
    while True:
        found = client.batches.retrieve(batch_id)
        if wanted(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def over(batch: Any) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, bytes]:
    """Lines by custom_id, none of which comes twice."""
    text = b"" if file_id is None else client.files.content(file_id).content
    rows = [(json.loads(line)["custom_id"], line) for line in text.splitlines()]
    assert len({name for name, _ in rows}) == len(rows)
    return dict(rows)


@pytest.fixture(scope="module")
def served(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("files")
    with echo_server(echo_model, folder, ["--files-dir", str(folder / "kept")]) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as found:
        yield found


def test_openais_client_has_a_batch_computed(client: openai.OpenAI) -> None:
    rows = [row for row in requests() if row["url"] == "/v1/chat/completions"]
    failing = {row["custom_id"] for row in rows if "nonsense" in row["body"]}
    batch = created(client, rows, "/v1/chat/completions")
    assert (batch.object, batch.status in ("validating", "in_progress"), batch.metadata) == ("batch", True, {"a": "b"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = until(client, batch.id, over)
    assert done.status == "completed"
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(rows), len(rows) - len(failing), len(failing))
    good, bad = answers(client, done.output_file_id), answers(client, done.error_file_id)
    assert good.keys() == {row["custom_id"] for row in rows} - failing
    assert bad.keys() == failing
    assert json.loads(bad[min(failing)])["response"]["body"]["error"]["param"] == "nonsense"
    for row in rows:
        if row["custom_id"] not in failing:  # the very answer that the request has alone
            body = json.loads(good[row["custom_id"]])["response"]["body"]
            alone = client.chat.completions.create(**row["body"]).model_dump(exclude_unset=True)
            del alone["usage"]["prompt_tokens_details"]  # what was cached is no part of a batch's answer
            assert {**body, "id": "", "created": 0} == {**alone, "id": "", "created": 0}
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.bytes) == ("batch_output", sum(len(line) + 1 for line in good.values()))
    assert client.files.retrieve(done.input_file_id).filename == "my requests.jsonl"


def test_files_and_batches_are_listed_page_by_page_and_files_are_deleted(client: openai.OpenAI) -> None:
    batches = [created(client, completions(2)) for _ in range(3)]
    done = [until(client, batch.id, over) for batch in batches]
    listed = [batch.id for batch in client.batches.list(limit=2)]  # the client asks for the next page itself
    assert listed[:3] == [batch.id for batch in reversed(batches)]
    files = [file.id for file in client.files.list(purpose="batch", limit=2)]
    assert files[:3] == [batch.input_file_id for batch in reversed(done)]
    assert files[1] not in [file.id for file in client.files.list(order="asc", after=files[1])]
    for batch in done:
        assert client.files.delete(batch.output_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.output_file_id)
    for call in (
        lambda: client.files.retrieve("file-../../etc/passwd"),
        lambda: client.files.content("file-" + "0" * 32),
        lambda: client.batches.retrieve("batch_x"),
        lambda: client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h"),
        lambda: created(client, completions(1)) and client.batches.cancel("batch_x"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    for call in (
        lambda: client.batches.list(limit=0),
        lambda: client.batches.list(after="batch_x"),
        lambda: client.batches.list(limit=2, extra_query={"sort": "up"}),
        lambda: client.files.list(order="sideways"),  # type: ignore[arg-type]
        lambda: client.batches.cancel(done[0].id),
        lambda: client.batches.create(input_file_id=files[0], endpoint="/v1/embeddings", completion_window="24h"),
        lambda: client.batches.create(input_file_id=files[0], endpoint="/v1/completions", completion_window="1h"),  # type: ignore[arg-type]
        lambda: client.files.create(file=b"x", purpose="fine-tune"),
        lambda: client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}),
    ):
        with pytest.raises(openai.BadRequestError):
            call()


def test_a_file_with_faults_is_refused_as_a_whole_with_its_lines(client: openai.OpenAI) -> None:
    rows = completions(5)
    rows[1]["custom_id"] = "r0"
    rows[3]["url"] = "/v1/score"
    failed = until(client, created(client, rows).id, over)
    assert (failed.status, failed.output_file_id, failed.error_file_id) == ("failed", None, None)
    assert [(e.line, e.code, e.param) for e in failed.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"), (4, "mismatched_url", "url"),
    ]  # fmt: skip
    empty = client.files.create(file=b"", purpose="batch")
    batch = client.batches.create(input_file_id=empty.id, endpoint="/v1/completions", completion_window="24h")
    assert until(client, batch.id, over).errors.data[0].code == "empty_file"


def form(*parts: tuple[str, bytes]) -> dict[str, Any]:
    body = b"".join(
        b"--b\r\ncontent-disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts
    )
    return {"content": body + b"--b--\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}


FILE, PURPOSE = ('name="file"; filename="f"', b"x"), ('name="purpose"', b"batch")


def test_bad_uploads_get_a_sentence_and_leave_nothing(served: Served, client: openai.OpenAI) -> None:
    kept = served.stderr.parent / "kept"
    for batch in client.batches.list():  # one that another test left running still writes its files
        until(client, batch.id, over)
    before = sorted(os.listdir(kept))
    with httpx.Client(base_url=served.url, trust_env=False) as web:
        for request, status in (
            (form(FILE), 400), (form(PURPOSE), 400), (form(), 400), (form(FILE, FILE, PURPOSE), 400),
            (form(FILE, PURPOSE, ('name="more"', b"")), 400), (form(FILE, ('name="purpose"', b"x" * 2000)), 400),
            ({"json": {"purpose": "batch"}}, 415), (form(FILE, PURPOSE) | {"content": b"--b\r\n"}, 400),
        ):  # fmt: skip
            answer = web.post("/v1/files", **request)  # type: ignore[arg-type]
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"]
        given = form(FILE, PURPOSE)
        given["headers"]["origin"] = "https://evil.example"
        assert web.post("/v1/files", **given).status_code == 403
    with connect(served.url) as peer:  # refused by its headers: the body is not waited for
        peer.sendall(b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 300000000\r\n\r\n")
        assert status_of(answer_of(peer, to_the_end=True)) == 413
    assert sorted(os.listdir(kept)) == before


def test_without_a_directory_there_are_no_files(echo: Served) -> None:
    with httpx.Client(base_url=echo.url, trust_env=False) as web:
        assert web.get("/v1/files").status_code == web.post("/v1/batches", json={}).status_code == 404


def running(served: Served) -> float:
    with httpx.Client(base_url=served.url, trust_env=False, timeout=20) as web:
        return metric(web, "twostroke_requests_running")


def wait_for_running(served: Served, n: int) -> None:
    """Until ``n`` answers are computed, and see that they do not become more."""
    deadline = time.monotonic() + 60
    while running(served) != n:
        assert time.monotonic() < deadline
    assert max(running(served) for _ in range(5)) <= n


def test_batches_keep_behind_other_requests_and_survive_a_kill(echo_model: Path, tmp_path: Path) -> None:
    options = ["--files-dir", str(tmp_path / "kept"), "--engine=--step-s", "--engine=0.005"]
    rows = completions(80, 20)
    with echo_server(echo_model, tmp_path, options) as served, client_of(served) as client:
        cancelled = created(client, completions(2000, 20))
        until(client, cancelled.id, lambda batch: batch.request_counts.completed > 3)
        wait_for_running(served, 8)
        stream = client.completions.create(model="echo", prompt=[40], max_tokens=2000, stream=True)
        next(iter(stream))
        wait_for_running(served, 2)  # those that ran before it end; then one of the batch, and the stream
        stream.close()
        with pytest.raises(openai.BadRequestError, match="Cancel it first"):
            client.files.delete(cancelled.input_file_id)
        waiting = created(client, completions(1))
        assert client.batches.cancel(waiting.id).status == "cancelled"
        assert client.batches.cancel(cancelled.id).status in ("cancelling", "finalizing", "cancelled")
        end = until(client, cancelled.id, over)
        assert end.status == "cancelled"
        assert end.cancelling_at <= end.cancelled_at
        assert 3 < len(answers(client, end.output_file_id)) == end.request_counts.completed < 2000
        batch = created(client, rows)
        until(client, batch.id, lambda found: found.request_counts.completed > 10)
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait()
    partial = max((tmp_path / "kept").glob("file-*.jsonl"), key=lambda path: path.stat().st_mtime_ns).read_bytes()
    partial = partial[: partial.rfind(b"\n") + 1]
    assert partial.count(b"\n") > 10
    (tmp_path / "kept" / f"file-{'0' * 32}.jsonl.partial").write_bytes(b"an upload that was cut off")
    with echo_server(echo_model, tmp_path, options) as served, client_of(served) as client:
        done = until(client, batch.id, over)
        text = client.files.content(done.output_file_id).content
        assert text.startswith(partial), "what was done is kept as it is"
        assert answers(client, done.output_file_id).keys() == {row["custom_id"] for row in rows}
        assert (done.status, done.created_at, done.request_counts.completed) == ("completed", batch.created_at, len(rows))
        assert client.batches.retrieve(cancelled.id).status == "cancelled"
        assert served.stop() == 0
    assert not list((tmp_path / "kept").glob("*.partial"))


def test_a_key_sees_its_own_files_alone_and_late_requests_expire(echo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alpha\nbeta\n")
    options = ["--files-dir", str(tmp_path / "kept"), "--api-key-file", str(tmp_path / "keys"), "--engine=--step-s",
               "--engine=0.01", "--set", "batch.batches.WINDOW_S=2", "--set", "batch.store.MAX_FILE_BYTES=60000"]  # fmt: skip
    with echo_server(echo_model, tmp_path, options) as served, client_of(served, "alpha") as client:
        batch = created(client, completions(200, 20))
        with client_of(served, "beta") as other:
            assert not list(other.files.list())
            assert not list(other.batches.list())
            for call in (
                lambda: other.files.content(batch.input_file_id),
                lambda: other.files.delete(batch.input_file_id),
                lambda: other.batches.retrieve(batch.id),
                lambda: other.batches.cancel(batch.id),
                lambda: other.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    call()
        with pytest.raises(openai.APIStatusError, match="at most 60000 bytes") as caught:
            client.files.create(file=b"x" * 60_001, purpose="batch")
        assert caught.value.status_code == 413
        found = until(client, batch.id, over)
        assert (found.status, found.request_counts.total) == ("expired", 200)
        good, late = answers(client, found.output_file_id), answers(client, found.error_file_id)
        assert 0 < len(good) == found.request_counts.completed < 200
        assert good.keys() | late.keys() == {f"r{i}" for i in range(200)}
        assert not good.keys() & late.keys()
        line = json.loads(next(iter(late.values())))
        assert (line["response"], line["error"]["code"]) == (None, "batch_expired")
        assert served.stop() == 0
    assert "alpha" not in served.stderr.read_text()
