"""What clients and templates cannot do: keep the HTTP process from answering others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import Served, echo_server

from twostroke.server.text import ModelText

ENDLESS = (
    "{% for m in messages %}{{ m.content }}{% if m.content == 'magic' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
# As long as Qwen3's template, with its kind of control flow.
LONG_TEMPLATE = (
    "{%- set ns = namespace(multi=true, last=messages|length - 1) %}"
    + "".join(
        f"{{%- if messages[0].role == 'tool{i}' %}}{{{{- '<|im_start|>system\\n' + messages[0].content + '\\n' }}}}"
        f"{{%- elif messages[-1].content is string and messages[-1].content.startswith('<tool_response{i}>') %}}"
        "{%- set ns.multi = false %}{%- endif %}"
        for i in range(11)
    )
    + "{%- for message in messages %}{%- if message.role == 'user' or loop.first %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
N_LONG = 1_900_000
PLACES = ("--max-concurrent", "1024")


def model_with(source: Path, directory: Path, template: str, normalizer: dict[str, Any] | None = None) -> Path:
    shutil.copytree(source, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": template}))
    tokenizer = json.loads((directory / "tokenizer.json").read_text()) | {"normalizer": normalizer}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def chat(web: httpx.Client, content: str) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return web.post("/v1/chat/completions", json={"model": "echo", "messages": messages, "max_tokens": 2})


class Probe:
    """Asks /health all the time, and keeps the longest wait."""

    def __init__(self, url: str) -> None:
        self.longest_s, self.n = 0.0, 0
        self._url, self._stop = url, threading.Event()

    def __enter__(self) -> Probe:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as web:
            while not self._stop.is_set():
                begun = time.perf_counter()
                assert web.get("/health").status_code == 200
                self.longest_s, self.n = max(self.longest_s, time.perf_counter() - begun), self.n + 1
                time.sleep(0.005)


def helpers(served: Served) -> list[psutil.Process]:
    children = psutil.Process(served.process.pid).children()
    return [p for p in children if "twostroke.data.template_sandbox" in p.cmdline()]


def send_long(served: Served, n: int, body: dict[str, Any]) -> tuple[float, list[float]]:
    """The longest wait for /health while ``n`` such requests are sent at once, and how long each took to be refused."""
    content = json.dumps({"model": "echo", "max_tokens": 2} | body).encode()
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"

    def send(_: int) -> float:
        with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as web:
            begun = time.perf_counter()
            response = web.post(route, content=content, headers={"content-type": "application/json"})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
            return time.perf_counter() - begun

    with Probe(served.url) as probe, ThreadPoolExecutor(n) as pool:
        took = list(pool.map(send, range(n)))
    return probe.longest_s, took


TEXT = "the quick brown fox " * (N_LONG // 20)
LONG = {
    "text": {"prompt": TEXT},
    "texts": {"prompt": [TEXT[:50_000]] * 38},
    "ids": {"prompt": [7] * (N_LONG // 3)},
    "lists of ids": {"prompt": [[7] * 20_000] * 30},
    "chat": {"messages": [{"role": "user", "content": TEXT}]},
}


@pytest.fixture(scope="module")
def bounded(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with echo_server(echo_model, tmp_path_factory.mktemp("bounded"), PLACES) as served:
        yield served


@pytest.fixture(scope="module")
def unbounded(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its tokenizer strips white space, so that a text of any length may be few tokens: it must be tokenised to be refused."""
    home = tmp_path_factory.mktemp("unbounded")
    model = model_with(echo_model, home / "model", ENDLESS, {"type": "Strip", "strip_left": True, "strip_right": True})
    with echo_server(model, home, PLACES) as served:
        yield served


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["text", "lists of ids"])
def test_prompts_of_two_megabytes_do_not_hold_up_others(bounded: Served, unbounded: Served, kind: str) -> None:
    for served in (bounded, unbounded):
        longest_s, _ = send_long(served, 2, LONG[kind])
        # Tokenised with the interpreter held, two of them were 3 to 5 s. The bound leaves room for a machine that others use.
        assert longest_s < 2.0


ASK = """
import http.client, json, sys, threading, time
host, port, route, file, n, seconds = *sys.argv[1:5], *map(int, sys.argv[5:])
body = open(file, "rb").read() or None
waits = []
def ask(until):
    web = http.client.HTTPConnection(host, int(port), timeout=200)
    while True:
        begun = time.perf_counter()
        web.request("POST" if body else "GET", route, body, {"content-type": "application/json"})
        response = web.getresponse()
        response.read()
        waits.append((response.status, time.perf_counter() - begun))
        if time.monotonic() >= until:
            return
        time.sleep(0.005)
threads = [threading.Thread(target=ask, args=(time.monotonic() + seconds,)) for _ in range(n)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(waits))
"""


def ask(served: Served, route: str, file: Path, n: int, seconds: int) -> subprocess.Popen[str]:
    """A process that asks in ``n`` threads for ``seconds``, at least once each: what it prints does not wait for this one."""
    host, port = served.url.removeprefix("http://").split(":")
    command = [sys.executable, "-c", ASK, host, port, route, str(file), str(n), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.soak
@pytest.mark.parametrize("kind", LONG)
def test_twenty_prompts_of_two_megabytes_at_once(bounded: Served, unbounded: Served, kind: str, tmp_path: Path) -> None:
    """Others wait 200 ms at most, and one alone is refused within 100 ms where its length tells. Of a machine that others use,
    the worst of twenty waits is left out of the one, and the best of five times is taken for the other."""
    file, nothing = tmp_path / "body", tmp_path / "nothing"
    file.write_text(json.dumps({"model": "echo", "max_tokens": 2} | LONG[kind]))
    nothing.touch()
    route = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    for name, served in (("bounded", bounded), ("unbounded", unbounded)):
        alone = [json.loads(ask(served, route, file, 1, 0).communicate()[0])[0] for _ in range(5)]
        health = ask(served, "/health", nothing, 1, 6)
        time.sleep(0.5)
        refused = json.loads(ask(served, route, file, 20, 0).communicate()[0])
        waits = json.loads(health.communicate()[0])
        most_s, longest_s = sorted(wait for _, wait in waits)[-1 - len(waits) // 20], max(wait for _, wait in waits)
        alone_s = min(wait for _, wait in alone)
        print(
            f"{name} {kind}: /health {most_s * 1e3:.0f} ms, at most {longest_s * 1e3:.0f} of {len(waits)}, "
            f"alone {alone_s * 1e3:.0f} ms, "
            f"of twenty the last {max(wait for _, wait in refused) * 1e3:.0f} ms"
        )
        assert {status for status, _ in alone + refused} == {400}
        assert most_s <= 0.2
        assert longest_s <= 2.0
        # Each of many texts would fit by its bytes, so that they are tokenised as well.
        assert alone_s <= 0.1 or (name == "unbounded" and kind in ("text", "chat")) or kind == "texts"


@pytest.mark.alone
def test_an_endless_template_holds_up_nobody_for_long_and_the_server_stops(echo_model: Path, tmp_path: Path) -> None:
    model = model_with(echo_model, tmp_path / "model", ENDLESS)
    with echo_server(model, tmp_path) as served, httpx.Client(base_url=served.url, timeout=60, trust_env=False) as web:
        with Probe(served.url) as probe, ThreadPoolExecutor(2) as pool:
            magic = pool.submit(chat, web, "magic")
            time.sleep(0.5)
            assert chat(web, "fox").status_code == 200
            refused = magic.result()
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert "it takes over 2 s" in refused.json()["error"]["message"]
        assert probe.longest_s < 1.5, "the template has 2 s"
        (helper,) = helpers(served)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(chat, web, "magic")
            time.sleep(0.5)
            assert served.stop(30) == 0
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.wait(60)
        assert not helper.is_running()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_templates_process_ends_with_the_server(echo_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    with echo_server(echo_model, tmp_path) as served, httpx.Client(base_url=served.url, timeout=60, trust_env=False) as web:
        assert chat(web, "fox").status_code == 200
        (helper,) = helpers(served)
        assert os.getsid(helper.pid) != os.getsid(served.process.pid), "a Ctrl-C in the server's terminal does not reach it"
        served.process.send_signal(number)
        assert served.process.wait(30) == (0 if number == signal.SIGINT else -number)
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.wait(60)
        assert not helper.is_running()
        assert "Traceback" not in served.stderr.read_text()


def test_a_long_template_takes_the_event_loop_little_time(echo_model: Path, tmp_path: Path) -> None:
    """Compiled for each request it took 16 ms of the loop. The thread's own processor time is counted, not the wait."""
    model = ModelText(model_with(echo_model, tmp_path / "model", LONG_TEMPLATE))
    assert len(LONG_TEMPLATE) > 2_900
    messages = [{"role": "user", "content": "hello " * 20}, {"role": "assistant", "content": "yes"}] * 3

    async def scenario() -> float:
        await model.render(messages)
        begun, asked = time.thread_time(), time.perf_counter()
        for _ in range(300):
            await model.render(messages)
        print(f"{(time.perf_counter() - asked) / 300 * 1e6:.0f} µs a request until its text is there")
        return (time.thread_time() - begun) / 300

    took_s = asyncio.run(scenario())
    print(f"{took_s * 1e6:.0f} µs of the event loop a request")
    # 0.05 ms where nothing else runs; the goal is 0.1.
    assert took_s < 1e-3
