"""Prompts that one engine computes for another: tokens are the joint engine's, and every fault is a page that is computed."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import ASKED, CACHE_TYPES
from twostroke.engine.core import EngineCore
from twostroke.kernels.native_library import library
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import wire
from twostroke.server.handover import borrower as borrower_module
from twostroke.server.handover.borrower import Borrower, Handover
from twostroke.server.handover.channel import Channel, be_greeted
from twostroke.server.handover.lender import Lender
from twostroke.server.handover.messages import Challenge, Compute, Hello, Page, Welcome, encode
from twostroke.server.handover.segment import Segment, mapped
from twostroke.server.handover.settings import HandoverSettings, address_of, handover_settings, read_key

KINDS = [("fp32", "auto", "torch")]
if library() is not None:
    KINDS += [(weights, "auto", "native") for weights in ASKED]
    KINDS += [("bf16", kv, "native") for kv in CACHE_TYPES]
SHARED = [5, 9, 3, 44, 7, 8, 90, 17, 33, 2, 60, 61, 62, 3, 4, 4, 4, 12, 13, 71] * 4
PROMPTS = [[*SHARED, 30, 31], [*SHARED[:40], *range(20, 60)], [*range(2, 70)], [3, 4, 5]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True, logprobs=1)
KEY = "a key of the test, long enough"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrower_module, "BACKOFF_S", (0.02,))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "llama")[1]


def engine(model: Path, **settings: Any) -> EngineCore:
    own = {"n_threads": 1, "dtype": "fp32", "kv_cache_bytes": 2**20}
    return EngineCore(model, EngineSettings(**{**own, **settings}))


class Loop:
    """The loop of an engine process, as far as prompts of others go. ``halted`` keeps it from its next turn."""

    def __init__(self, core: EngineCore, settings: HandoverSettings) -> None:
        self.core, self._woken, self.halted, self._over = core, threading.Event(), threading.Event(), False
        self.busy = 0.0
        self.lender = Lender(core, settings, self._woken.set, lambda: self.busy)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            if not self.halted.is_set():
                self.lender.turn(self.core.step() if self.core.has_work else ())
            if self.halted.is_set() or not self.core.has_work:
                self._woken.wait(0.01)
                self._woken.clear()

    @property
    def n_asked(self) -> int:
        """Prompts that wait for a turn."""
        return sum(len(peer.inbox) for peer in self.lender._peers)

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.lender.close()
        deadline = time.monotonic() + 5
        while not self.lender.is_idle and time.monotonic() < deadline:
            self.lender.turn()
            time.sleep(0.005)


def quick(**settings: Any) -> HandoverSettings:
    return HandoverSettings(**{"least_tokens": 16, "beat_s": 0.05, "timeout_s": 1.0, **settings})


@contextmanager
def lending(core: EngineCore, listen: str, **settings: Any) -> Iterator[Loop]:
    loop = Loop(core, quick(listen=listen, **settings))
    try:
        yield loop
    finally:
        loop.close()
        assert core.scheduler.pool.n_used == 0, "a page was leaked"


@contextmanager
def asking(core: EngineCore, *peers: str, ready: bool = True, **settings: Any) -> Iterator[Borrower]:
    borrower = Borrower(core, quick(peers=peers, **settings), lambda: None)
    try:
        if ready:
            until(lambda: borrower.counts().handover_peers == len(peers))
        yield borrower
    finally:
        borrower.close()
        assert core.scheduler.pool.n_used == 0, "a page was leaked"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run(core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams, borrower: Borrower | None = None) -> Any:
    """Tokens and log-probabilities of each answer, by native runners, else tokens alone. With ``borrower`` prompts are asked
    for first."""
    handovers: list[Handover | None] = []
    for i, prompt in enumerate(prompts):
        handovers.append(None if borrower is None else borrower.ask(wire.Add(str(i), list(prompt), params)))
    for handover in handovers:
        if handover is not None:
            handover.done.result(20)
    found: dict[str, tuple[list[int], list[Any]]] = {str(i): ([], []) for i in range(len(prompts))}
    for name, prompt in zip(found, prompts, strict=True):
        core.add_request(name, list(prompt), params)
    while core.has_work:
        for event in core.step():
            found[event.request_id][0].extend(event.token_ids)
            found[event.request_id][1].extend(event.logprobs or ())
    for handover in handovers:
        if handover is not None:
            handover.cancel()
    if borrower is not None:
        assert len(core.receive_pages()) == 0, "what was not loaded is dropped"
    return found if core.runner == "native" else {name: (tokens, []) for name, (tokens, _) in found.items()}


@pytest.fixture(params=["shared memory", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """An address to listen at, and settings that go with it."""
    if request.param == "shared memory":
        return str(tmp_path / "s"), {}
    (tmp_path / "key").write_text(KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return f"127.0.0.1:{port}", {"key_file": str(tmp_path / "key")}


@pytest.mark.parametrize(("weights", "kv", "runner"), KINDS)
def test_answers_are_those_of_the_joint_engine(tmp_path: Path, weights: str, kv: str, runner: str) -> None:
    model = saved("llama", tmp_path / "m", d_model=64, n_heads=4, head_dim=32, d_ff=128)[1]
    settings = {"dtype": weights, "kv_dtype": kv, "runner": runner}
    for params in (GREEDY, DRAWN):
        joint = run(engine(model, **settings), PROMPTS, params)
        prefills, decodes = engine(model, separate_prefixes=True, **settings), engine(model, **settings)
        with lending(prefills, str(tmp_path / "s")), asking(decodes, str(tmp_path / "s")) as borrower:
            assert run(decodes, PROMPTS, params, borrower) == joint
            counts = borrower.counts()
            assert counts.handover_requests == 3
            assert counts.handover_incomplete == counts.handover_damaged == 0
            assert decodes.stats().prefix_hit_tokens >= 16 * (5 + 4 + 4) - 32
            assert decodes.stats().prefill_tokens + decodes.stats().mixed_tokens <= sum(map(len, PROMPTS)) - 12 * 16
            assert prefills.stats().prefill_tokens > 0


def test_both_ways_count_bytes_and_seconds(llama: Path, where: tuple[str, dict[str, Any]]) -> None:
    address, settings = where
    joint = run(engine(llama), PROMPTS, GREEDY)
    decodes = engine(llama)
    with lending(engine(llama), address, **settings) as loop, asking(decodes, address, **settings) as borrower:
        assert run(decodes, PROMPTS, GREEDY, borrower) == joint
        counts = borrower.counts()
        record = decodes.pool.n_bytes // decodes.pool.n_pages + 72
        assert counts.handover_bytes == counts.handover_tokens // 16 * record
        assert loop.lender.counts().lent_bytes == loop.lender.counts().lent_pages * record >= counts.handover_bytes
        assert 0 < counts.handover_s < counts.handover_wait_s * 3
        assert borrower.n_slots_taken == 0
        again = run(decodes, PROMPTS, GREEDY, borrower)  # all is cached here: nothing is asked for
        assert again == joint
        assert borrower.counts().handover_requests == counts.handover_requests


@pytest.mark.parametrize("name", ["mistral", "gemma2", "olmoe", "deepseek_v3"])
def test_families_with_windows_experts_and_latents_answer_alike(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "m")[1]
    joint = run(engine(model), PROMPTS, DRAWN)
    decodes = engine(model)
    with lending(engine(model), str(tmp_path / "s")), asking(decodes, str(tmp_path / "s")) as borrower:
        assert run(decodes, PROMPTS, DRAWN, borrower) == joint
        assert borrower.counts().handover_requests == 3


def test_a_prompt_longer_than_the_waiting_pages_comes_in_part(llama: Path, tmp_path: Path) -> None:
    decodes, page = engine(llama), 0
    page = decodes.pool.n_bytes // decodes.pool.n_pages + 72
    joint = run(engine(llama), PROMPTS, GREEDY)
    small = {"memory_bytes": 3 * page}
    with lending(engine(llama), str(tmp_path / "s")), asking(decodes, str(tmp_path / "s"), **small) as borrower:
        for i, prompt in enumerate(PROMPTS[:3]):
            assert run(decodes, [prompt], GREEDY, borrower)["0"] == joint[str(i)]
        assert borrower.counts().handover_tokens == 16 * (3 + 2 + 3)
        # Three at once: two wait for slots until the first was loaded, or is dropped.
        other = engine(llama)
        with asking(other, str(tmp_path / "s"), **small) as second:
            handovers = [second.ask(wire.Add(str(i), prompt, GREEDY)) for i, prompt in enumerate(PROMPTS[:3])]
            assert handovers[0] is not None
            handovers[0].done.result(20)
            assert handovers[1] is not None
            assert not handovers[1].done.done()
            for handover in handovers:
                assert handover is not None
                handover.cancel()
            until(lambda: second.n_slots_taken == 0)


def test_the_peer_with_least_to_do_is_asked(llama: Path, tmp_path: Path) -> None:
    decodes = engine(llama)
    paths = [str(tmp_path / name) for name in "ab"]
    with ExitStack() as stack:
        loops = [stack.enter_context(lending(engine(llama), path)) for path in paths]
        borrower = stack.enter_context(asking(decodes, *paths))
        for loop in loops:
            loop.halted.set()
        handovers = [borrower.ask(wire.Add(str(i), [i + 2] * 80, GREEDY)) for i in range(4)]
        for loop in loops:
            loop.halted.clear()
        for handover in handovers:
            assert handover is not None
            handover.done.result(20)
            handover.cancel()
        assert [loop.lender.counts().lent_prompts for loop in loops] == [2, 2]


def test_a_peer_that_ends_is_replaced_by_computing_and_found_again(llama: Path, where: tuple[str, dict[str, Any]]) -> None:
    address, settings = where
    joint = run(engine(llama), PROMPTS, GREEDY)
    decodes = engine(llama)
    with asking(decodes, address, ready=False, **settings) as borrower:
        assert run(decodes, PROMPTS[:1], GREEDY, borrower)["0"] == joint["0"]  # nobody is there
        with lending(engine(llama), address, **settings) as loop:
            until(lambda: borrower.counts().handover_peers == 1)
            loop.halted.set()
            handover = borrower.ask(wire.Add("1", PROMPTS[1], GREEDY))
            assert handover is not None
            until(lambda: loop.n_asked == 1)
            assert not handover.done.done()
        handover.done.result(20)  # the peer's end ended it
        assert run(decodes, PROMPTS[1:2], GREEDY)["0"] == joint["1"]
        assert borrower.counts().handover_incomplete == 1
        with lending(engine(llama), address, **settings):
            until(lambda: borrower.counts().handover_peers == 1)
            assert run(decodes, PROMPTS[2:3], GREEDY, borrower)["0"] == joint["2"]
            assert borrower.counts().handover_requests == 1


def test_an_asking_engine_that_ends_holds_no_page(llama: Path, where: tuple[str, dict[str, Any]]) -> None:
    address, settings = where
    prefills = engine(llama)
    with lending(prefills, address, **settings) as loop:
        with asking(engine(llama), address, **settings) as borrower:
            loop.halted.set()
            for i, prompt in enumerate(PROMPTS[:3]):
                borrower.ask(wire.Add(str(i), prompt, GREEDY))
            until(lambda: loop.n_asked == 3)
            loop.halted.clear()
            until(lambda: loop.lender.counts().lent_prompts == 3)
        until(lambda: loop.lender.is_idle and loop.lender.counts().lent_peers == 0)
        assert not prefills.has_work
        assert prefills.scheduler.pool.n_used == 0


def test_cancelling_a_prompt_under_way_frees_both_sides(llama: Path, where: tuple[str, dict[str, Any]]) -> None:
    address, settings = where
    prefills, decodes = engine(llama, token_budget=16, max_running=16), engine(llama)
    with lending(prefills, address, **settings) as loop, asking(decodes, address, **settings) as borrower:
        for stop_after in range(5):
            loop.halted.set()
            prompt = [stop_after + 3, *range(2, 90)]
            handover = borrower.ask(wire.Add("x", prompt, GREEDY))
            assert handover is not None
            loop.halted.clear()
            until(lambda n=stop_after, h=handover: len(h.came) >= n)
            handover.cancel()
            assert handover.done.done()
            assert len(decodes.receive_pages()) == 0
            until(lambda: borrower.n_slots_taken == 0 and loop.lender.is_idle)
        assert not prefills.has_work
        joint = run(engine(llama), [prompt], GREEDY)
        assert run(decodes, [prompt], GREEDY, borrower) == joint


def test_pages_that_nobody_takes_are_given_up_when_their_lease_ends(llama: Path, tmp_path: Path) -> None:
    """An engine that asks and then reads nothing: the other pins pages for it no longer than it said."""
    (tmp_path / "key").write_text(KEY)
    prefills = engine(llama)
    settings = quick(listen="127.0.0.1:0", key_file=str(tmp_path / "key"), timeout_s=20.0)
    lender = Lender(prefills, settings, lambda: None, lambda: 0.0)
    with socket.create_connection(("127.0.0.1", lender.port)) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        channel = Channel(peer, 20.0)
        record = prefills.pool.n_bytes // prefills.pool.n_pages + 72
        borrower_module.greet(channel, Hello(1, record, 0), KEY.encode(), None)
        prompts = [[i, *range(2, 81)] for i in range(2, 60)]
        for i, prompt in enumerate(prompts):
            keys = [bytes(16)] * 5
            channel.send(Compute(i, prefills.identity, prompt, 0, [0] * 5, keys, "", 0, 0.2))
        deadline = time.monotonic() + 20
        most = 0
        while time.monotonic() < deadline:
            lender.turn(prefills.step() if prefills.has_work else ())
            most = max(most, lender.counts().lent_pinned)
            if lender.counts().lent_prompts == len(prompts) and lender.is_idle:
                break
            time.sleep(0.002)
        assert lender.is_idle
        assert prefills.scheduler.pool.n_used == 0
        lender.close()
    until(lambda: lender.turn() or not lender._peers)


def test_an_engine_that_falls_silent_is_given_up(llama: Path, tmp_path: Path) -> None:
    """It greets, takes what is asked for and says nothing more, as a stopped process or a cut cable."""
    decodes, path = engine(llama), str(tmp_path / "s")
    joint = run(engine(llama), PROMPTS, GREEDY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with asking(decodes, path, ready=False, timeout_s=0.3) as borrower:
            silent, _ = listener.accept()
            channel = Channel(silent, 5.0)
            record = decodes.pool.n_bytes // decodes.pool.n_pages + 72
            hello, fd = be_greeted(channel, None, record)
            assert hello.n_slots > 0
            assert fd is not None
            os.close(fd)
            until(lambda: borrower.counts().handover_peers == 1)
            began = time.monotonic()
            assert run(decodes, PROMPTS[:1], GREEDY, borrower)["0"] == joint["0"]
            assert time.monotonic() - began < 5
            assert borrower.counts().handover_incomplete == 1
            silent.close()


def test_an_engine_whose_loop_hangs_is_given_up(llama: Path, tmp_path: Path) -> None:
    decodes, path = engine(llama), str(tmp_path / "s")
    with lending(engine(llama), path) as loop, asking(decodes, path, step_timeout_s=2.0) as borrower:
        loop.halted.set()
        handover = borrower.ask(wire.Add("0", PROMPTS[0], GREEDY))
        assert handover is not None
        loop.busy = 3.0
        handover.done.result(20)
        assert borrower.counts().handover_peers == 0
        loop.busy = 0.0
        loop.halted.clear()
        until(lambda: borrower.counts().handover_peers == 1)


@pytest.mark.parametrize("part", ["length", "message", "record", "code", "noise"])
def test_bytes_that_changed_on_the_way_are_never_used(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    (tmp_path / "key").write_text(KEY)
    settings = {"key_file": str(tmp_path / "key")}
    joint = run(engine(llama), PROMPTS, GREEDY)
    decodes = engine(llama)
    loop = Loop(engine(llama), quick(listen="127.0.0.1:0", **settings))
    send, n = Channel.send, 0

    def damaging(self: Channel, message: Any, record: Any = None) -> None:
        nonlocal n
        if not isinstance(message, Page) or n:
            send(self, message, record)
            return
        n += 1
        sent = bytearray()
        plain, self.socket = self.socket, _Into(sent)  # type: ignore[assignment]
        send(self, message, record)
        self.socket = plain
        at = {"length": 1, "message": 9, "record": len(sent) // 2, "code": len(sent) - 3, "noise": 0}[part]
        sent[at] ^= 1
        plain.sendall(np.random.default_rng(0).bytes(5000) if part == "noise" else sent)

    monkeypatch.setattr(Channel, "send", damaging)
    with asking(decodes, f"127.0.0.1:{loop.lender.port}", **settings) as borrower:
        assert run(decodes, PROMPTS[:1], GREEDY, borrower)["0"] == joint["0"]
        assert n == 1
        assert borrower.counts().handover_tokens == 0  # the connection ended at once
        assert borrower.counts().handover_incomplete == 1
        until(lambda: borrower.counts().handover_peers == 1)  # and another began
        assert run(decodes, PROMPTS[1:3], GREEDY, borrower)["1"] == joint["2"]
    loop.close()


class _Into:
    def __init__(self, buffer: bytearray) -> None:
        self._buffer = buffer

    def send(self, data: Any) -> int:
        self._buffer += bytes(data)
        return len(data)


def test_a_damaged_page_of_shared_memory_is_computed(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = run(engine(llama), PROMPTS, GREEDY)
    decodes, path = engine(llama), str(tmp_path / "s")
    came = Borrower._came

    def damaging(self: Borrower, peer: Any, page: Page) -> None:
        if page.index == 2:
            handover = peer.jobs[page.job]
            peer.segment.record(handover.slots[2])[500] ^= 1
        came(self, peer, page)

    monkeypatch.setattr(Borrower, "_came", damaging)
    with lending(engine(llama), path), asking(decodes, path) as borrower:
        assert run(decodes, PROMPTS, GREEDY, borrower) == joint
        counts = borrower.counts()
        assert counts.handover_damaged == counts.handover_incomplete == 3
        assert borrower.n_slots_taken == 0


def test_a_page_of_other_tokens_is_computed(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, but not what was asked for, as from an engine with another idea of a prompt."""
    joint = run(engine(llama), PROMPTS, GREEDY)
    decodes, path = engine(llama), str(tmp_path / "s")
    take = Lender._take

    def other(self: Lender, peer: Any, message: Any) -> None:
        if isinstance(message, Compute):
            message.tokens = [token + 1 for token in message.tokens]
        take(self, peer, message)

    monkeypatch.setattr(Lender, "_take", other)
    with lending(engine(llama), path), asking(decodes, path) as borrower:
        assert run(decodes, PROMPTS, GREEDY, borrower) == joint
        assert borrower.counts().handover_tokens > 0
        assert decodes.stats().prefix_hit_tokens <= 48  # the prompts' own


def test_other_weights_and_other_pages_are_refused_in_a_sentence(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = other_weights(llama, tmp_path / "other")
    larger = saved("qwen3", tmp_path / "larger")[1]
    joint = run(engine(llama), PROMPTS, GREEDY)
    decodes, path = engine(llama), str(tmp_path / "s")
    with lending(engine(other), path), asking(decodes, path) as borrower:
        assert run(decodes, PROMPTS, GREEDY, borrower) == joint
        assert borrower.counts().handover_tokens == 0
        assert "has other weights" in caplog.text
    with lending(engine(larger), path), asking(decodes, path, ready=False) as borrower:
        until(lambda: "has another model or cache" in caplog.text)
        assert borrower.ask(wire.Add("0", PROMPTS[0], GREEDY)) is None


def test_a_wrong_credential_is_refused_in_a_sentence(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "other").write_text(KEY + "!")
    decodes = engine(llama)
    loop = Loop(engine(llama), quick(listen="127.0.0.1:0", key_file=str(tmp_path / "key")))
    address = f"127.0.0.1:{loop.lender.port}"
    with asking(decodes, address, ready=False, key_file=str(tmp_path / "other")) as borrower:
        until(lambda: "it refuses: a frame does not prove" in caplog.text)
        assert borrower.ask(wire.Add("0", PROMPTS[0], GREEDY)) is None
        assert loop.lender.counts().lent_peers == 0
    for first in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), encode(Welcome())):
        with socket.create_connection(("127.0.0.1", loop.lender.port)) as stranger:
            stranger.sendall(first)
    with socket.create_connection(("127.0.0.1", loop.lender.port)) as stranger:  # a peer that sends back what it got
        channel = Channel(stranger, 5.0)
        challenge = channel.receive()
        assert isinstance(challenge, Challenge)
        channel.send(challenge)
        channel.send(Hello(1, 100, 0))
    assert loop.lender.counts().lent_peers == 0
    with asking(decodes, address, key_file=str(tmp_path / "key")):
        pass
    loop.close()


def test_what_cannot_be_handed_over_is_not_asked_for(llama: Path, tmp_path: Path) -> None:
    decodes, path = engine(llama), str(tmp_path / "s")
    with lending(engine(llama), path), asking(decodes, path, least_tokens=48) as borrower:
        long = PROMPTS[0]
        for command in (
            wire.Add("0", long[:48], GREEDY),  # two whole pages, and the last token is computed anyway
            wire.Add("0", long, SamplingParams(prompt_logprobs=1)),
            wire.Add("0", long, SamplingParams(pooling="mean")),
            wire.Add("0", long, GREEDY, lora="a"),
            wire.Add("0", [*long[:60], -1], GREEDY),
            wire.Add("0", [*long[:60], 10**30], GREEDY),
        ):
            assert borrower.ask(command) is None
        handover = borrower.ask(wire.Add("0", long, GREEDY))
        assert handover is not None
        handover.cancel()


def test_clients_that_are_kept_apart_stay_so(llama: Path, tmp_path: Path) -> None:
    prefills, decodes, path = engine(llama, separate_prefixes=True), engine(llama, separate_prefixes=True), str(tmp_path / "s")
    with lending(prefills, path), asking(decodes, path) as borrower:
        for client in ("ann", "bob"):
            handover = borrower.ask(wire.Add("0", PROMPTS[0], GREEDY, client=client))
            assert handover is not None
            handover.done.result(20)
            handover.cancel()
        assert prefills.stats().prefix_hit_tokens == 0


def test_pages_of_weights_that_were_replaced_meanwhile_are_not_loaded(llama: Path, tmp_path: Path) -> None:
    decodes, path = engine(llama), str(tmp_path / "s")
    with lending(engine(llama), path), asking(decodes, path) as borrower:
        handover = borrower.ask(wire.Add("0", PROMPTS[0], GREEDY))
        assert handover is not None
        handover.done.result(20)
        assert len(handover.came) == 5
        prepared = decodes.prepare_weights(other_weights(llama, tmp_path / "other"))
        assert prepared is not None
        decodes.use_weights(prepared)
        fresh = run(engine(tmp_path / "other"), PROMPTS[:1], GREEDY)
        assert run(decodes, PROMPTS[:1], GREEDY) == fresh
        assert decodes.stats().prefix_hit_tokens == 0
        handover.cancel()
        # The other engine still has the weights before: it refuses, and the prompt is computed here.
        assert run(decodes, PROMPTS[2:3], GREEDY, borrower) == run(engine(tmp_path / "other"), PROMPTS[2:3], GREEDY)
        assert borrower.counts().handover_incomplete == 1


def other_weights(model: Path, directory: Path) -> Path:
    """A model of the same shape whose weights are twice as large."""
    shutil.copytree(model, directory)
    tensors = {name: tensor * 2 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_shared_memory_that_could_shrink_is_not_mapped(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="not sealed"):
        mapped(fd, 1, 4096)
    segment = Segment(3, 4096, shared=True)
    assert segment.fd is not None
    seen = mapped(os.dup(segment.fd), 3, 4096)
    seen[1, 7] = 9
    assert segment.record(1)[7] == 9
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.fd, 10)
    with pytest.raises(ValueError, match="another size"):
        mapped(os.dup(segment.fd), 4, 4096)
    segment.close_fd()


def test_settings_travel_as_json_and_bad_ones_are_named(tmp_path: Path) -> None:
    settings = HandoverSettings(None, ("/a", "b:1"), lease_s=3.0)
    assert handover_settings(settings.to_json()) == settings
    assert address_of("[::1]:80") == ("::1", 80)
    for text in ("host", "host:", ":1", "host:x", "host:70000", ""):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            address_of(text)
    (tmp_path / "short").write_text("short")
    with pytest.raises(ConfigError, match="must have 16 to"):
        read_key(tmp_path / "short")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path / "missing")


def test_an_address_without_a_key_or_that_is_taken_is_refused(llama: Path, tmp_path: Path) -> None:
    core = engine(llama)
    with pytest.raises(ConfigError, match="must prove who they are"):
        Lender(core, quick(listen="127.0.0.1:0"), lambda: None, lambda: 0.0)
    (tmp_path / "key").write_text(KEY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = quick(listen=f"127.0.0.1:{taken.getsockname()[1]}", key_file=str(tmp_path / "key"))
        with pytest.raises(ConfigError, match="cannot be listened to"):
            Lender(core, settings, lambda: None, lambda: 0.0)
    (tmp_path / "file").write_text("a file of somebody's")
    with pytest.raises(ConfigError, match="cannot be listened to"):
        Lender(core, quick(listen=str(tmp_path / "file")), lambda: None, lambda: 0.0)
    assert (tmp_path / "file").read_text() == "a file of somebody's"
