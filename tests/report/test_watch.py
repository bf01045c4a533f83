"""The live page: what its server answers, to whom, and what a browser makes of it."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_run_reader import append, begin_run, line

from browser import CONTRAST, FAULTS, SIZES, browser, pictures, shown
from twostroke.core.errors import InputError
from twostroke.ledger.store import Ledger
from twostroke.report.run_reader import RunReader
from twostroke.report.watch import WatchServer

__all__ = ["browser", "pictures"]

HOSTILE = '</script><script>document.title="taken"</script><img src=x onerror=document.title="taken">'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    begin_run(tmp_path / "run")
    append(tmp_path / "run", "".join(line(step) for step in range(1, 41)))
    made = WatchServer(tmp_path / "run", 0)
    yield made
    made.close()


def _get(server: WatchServer, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def test_page_and_state_are_served_and_nothing_else(server: WatchServer) -> None:
    status, html, headers = _get(server, "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", html)  # nothing comes from the network
    assert "/* watch" not in html  # style and script are in their places
    status, text, _ = _get(server, "/state")
    assert status == 200
    assert json.loads(text)["last"]["step"] == 40
    for path in ("/favicon.ico", "/../../etc/passwd", "/log.jsonl"):
        assert _get(server, path)[0] == 404


def test_a_page_from_elsewhere_is_refused(server: WatchServer) -> None:
    assert _get(server, "/state", Host="evil.example:80")[0] == 403
    assert _get(server, "/state", Host=f"localhost:{server.port}")[0] == 200


def test_a_port_in_use_is_a_sentence_and_without_one_another_is_found(server: WatchServer, tmp_path: Path) -> None:
    for port in (server.port, 70000):
        with pytest.raises(InputError, match=f"port {port}.*Name another port"):
            WatchServer(tmp_path / "run", port)
    others = [WatchServer(tmp_path / "run") for _ in range(2)]
    assert others[0].port != others[1].port
    for other in others:
        other.close()


def test_a_file_that_cannot_be_read_is_reported_and_the_server_goes_on(
    server: WatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunReader, "refresh", lambda self: (_ for _ in ()).throw(OSError("torn out")))
        status, text, _ = _get(server, "/state")
    assert (status, "torn out" in json.loads(text)["error"]) == (500, True)
    assert _get(server, "/state")[0] == 200


def test_nothing_is_read_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_run(tmp_path / "run")
    reads: list[str] = []
    refresh = RunReader.refresh
    monkeypatch.setattr(RunReader, "refresh", lambda self: (reads.append(threading.current_thread().name), refresh(self)))
    server = WatchServer(tmp_path / "run", 0)
    before = time.thread_time()
    time.sleep(0.6)
    assert reads == []
    assert time.thread_time() - before < 0.1
    _get(server, "/state")
    assert len(reads) == 1
    assert reads[0] != threading.main_thread().name
    server.close()


def test_hung_up_and_silent_clients_hold_up_nothing(server: WatchServer, capfd: pytest.CaptureFixture[str]) -> None:
    silent = socket.create_connection(("127.0.0.1", server.port))
    for _ in range(3):
        hasty = socket.create_connection(("127.0.0.1", server.port))
        hasty.sendall(b"GET /state HTTP/1.1\r\nHost: localhost\r\n\r\n")
        hasty.close()
    assert _get(server, "/state")[0] == 200
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 3
    silent.close()
    assert capfd.readouterr().err == ""


def test_an_open_page_is_given_the_last_state_and_a_closed_one_costs_nothing(tmp_path: Path) -> None:
    run_id = begin_run(tmp_path / "run")
    closed = WatchServer(tmp_path / "run", 0)
    began = time.monotonic()
    closed.close(linger_s=20.0)
    assert time.monotonic() - began < 3
    append(tmp_path / "run", line(1))
    watched = WatchServer(tmp_path / "run", 0)
    assert json.loads(_get(watched, "/state")[1])["status"] == "running"
    Ledger().measure(run_id, {}, "interrupted", "stopped at step 1")
    late: list[Any] = []
    page = threading.Timer(0.5, lambda: late.append(json.loads(_get(watched, "/state")[1])["status"]))
    page.start()
    watched.close(linger_s=20.0)
    page.join()
    assert late == ["interrupted"]  # however short ago the ledger was asked


def of_two_ranks(step: int) -> dict[str, Any]:
    """What a step's line has besides where ranks train: each sends for a tenth of it."""
    sent = 40_000_000
    return {
        "sent_bytes": sent, "peak_sent_5ms_bytes": sent // 10, "peak_sent_50ms_bytes": sent, "computing_s": 0.42,
        "wire_s": 0.05, "waiting_s": 0.03, "rank_compute_s": [0.4, 0.4 + 0.001 * step],
        "rank_waiting_s": [0.1, 0.1 - 0.001 * step],
    }  # fmt: skip


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchServer]:
    """A run of 61 steps of two ranks with everything a run can have, the last one refused, and a model that writes HTML."""
    run = tmp_path / "run"
    begin_run(run)
    for step in range(1, 61):
        append(
            run,
            line(
                step,
                **({"activations": {"mlp_dead_share": [0.0]}, "heldout_bits_per_byte": 2.0} if step % 20 == 0 else {}),
                **of_two_ranks(step),
            ),
        )
    append(run, line(61, loss=None, skipped=f"loss is nan {HOSTILE}"))
    (run / "checkpoints" / "step-00000040").mkdir(parents=True)
    sample = {"step": 60, "prompt": "def ", "greedy": HOSTILE, "sampled": "return"}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    server = WatchServer(run, 0)
    yield server
    server.close()


def test_a_browser_draws_the_run_and_runs_no_text_of_the_model(browser: Any, watched: WatchServer) -> None:
    with shown(browser, watched.url, *SIZES[0]) as page:
        page.locator("#steps", has_text="step 61 of 100").wait_for()
        assert page.title() == "61% run – Twostroke"
        html = page.content()
    assert "step 61 of 100" in html
    drawn = re.findall(r'id="plot-(\w+)"><svg', html)
    assert drawn == ["loss", "norm", "rate", "strip", "speed", "parts", "memory", "wait", "ranks", "bursts", "held"]
    assert "seconds of waiting" in html, "by rank"
    assert "400 ms [300–600]" in html  # predicted, beside
    assert "&lt;/script&gt;&lt;script&gt;" in html


def test_without_a_prediction_a_phone_shows_what_was_measured(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_id = begin_run(run)
    (run / "recipe.json").write_text((run / "recipe.json").read_text().replace(run_id, "of-another-ledger"))
    append(run, "".join(line(step) for step in range(1, 9)))
    server = WatchServer(run, 0)
    with shown(browser, server.url, *SIZES[1]) as page:
        page.locator("#plot-wait svg").wait_for()
        assert page.locator("#table-title").inner_text() == "Measured"
        row = page.locator("#table tr", has_text="step_time_s")
        assert row.inner_text().split() == ["step_time_s", "500", "ms"]
        assert page.locator("#table-section .scroll").evaluate("node => node.scrollWidth <= node.clientWidth")
        assert page.locator("#plot-ranks").is_hidden()
        assert page.locator("#plot-bursts").is_hidden()
        assert page.locator("#plot-held").is_hidden()  # nothing was scored, and bytes that were sent are no score
    server.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_of_the_live_page_is_cut_off(
    browser: Any, pictures: Path, watched: WatchServer, width: int, height: int, scheme: str
) -> None:
    with shown(browser, watched.url, width, height, scheme) as page:
        page.locator("#plot-held svg").wait_for()  # the last to be drawn
        picture = pictures / f"watch-{width}-{scheme}.png"
        page.screenshot(path=picture, full_page=True)
        print(f"screenshot: {picture}")
        assert page.evaluate(FAULTS) == []
        assert page.evaluate(CONTRAST) == []
        measured = page.locator("#table td:nth-child(3)").first.bounding_box()
        assert measured["x"] + measured["width"] < width  # without scrolling the table
