"""An engine process whose engine is a few lines: each output token is the one before it plus one; the i-th answer
to a prompt starts 10·i further on. No model, no torch. With ``--caches`` it keeps the newest ``CACHED_PAGES`` pages
of prompts, as keys alone.

Run as a program, it takes the arguments of the real one. Some prompts make it misbehave, by their first token.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostroke.core.errors import CapacityError, InputError
from twostroke.scheduling.prefix_tree import ROOT, PrefixTree, chain_key
from twostroke.server import wire
from twostroke.server.engine_process import serve_engine

VOCAB = 300
PAGE_TOKENS = 4
CACHED_PAGES = 64

HELD_TOKENS = 3
"""How far answers come while they are held."""

REFUSE, TOO_LARGE, FAIL_IN_STEP, HANG_IN_STEP, EXIT, STOP_PROCESS, SLOW = range(VOCAB - 7, VOCAB)


@dataclass
class Event:
    request_id: str
    token_ids: list[int]
    logprobs: Any = None
    finish_reason: str | None = None
    index: int = 0
    prompt_logprobs: Any = None
    cached_tokens: int = 0
    embedding: Any = None
    fingerprint: str | None = None
    started_s: float | None = None


@dataclass
class Logprob:
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Stats:
    running: int
    pages_used: int
    pages_total: int
    steps: int
    output_tokens: int
    label: str = "not a number"


@dataclass
class Running:
    tokens: list[int]
    params: Any
    client: str = ""
    n_output: int = 0
    weights: str = ""
    told: str = ""
    script: list[int] = field(default_factory=list)
    cached: int = 0


@dataclass
class EchoEngine:
    requests: dict[tuple[str, int], Running] = field(default_factory=dict)  # by id and index of the answer
    steps: int = 0
    output_tokens: int = 0
    step_s: float = 0.0
    say: Path | None = None
    hold: Path | None = None
    max_running: int | None = None  # the others wait
    adapters: dict[str, Path] = field(default_factory=dict)
    caches: bool = False
    tree: PrefixTree = field(default_factory=PrefixTree)
    pages: list[int] = field(default_factory=lambda: list(range(CACHED_PAGES)))  # the one that is overwritten next first

    def watch_blocks(self) -> list[bytes]:
        return self.tree.watch()

    def changed_blocks(self) -> dict[bytes, bool]:
        return self.tree.changes()

    def described_block(self, key: bytes) -> tuple[bytes, list[int], str | None] | None:
        return self.tree.described(key)

    def cached(self, prompt_ids: list[int]) -> int:
        """Tokens of the prompt that are cached, without the last. It is cached whole afterwards."""
        key, n = ROOT, 0
        if not self.caches:
            return 0
        for i in range(0, len(prompt_ids) - PAGE_TOKENS, PAGE_TOKENS):
            tokens, before = prompt_ids[i : i + PAGE_TOKENS], key
            key = chain_key(before, tokens)
            if self.tree.held(key) is not None:
                n += PAGE_TOKENS
                continue
            page = self.pages.pop(0)
            self.pages.append(page)
            self.tree.remove(page)
            self.tree.insert(key, tokens, page, before)
        return n

    adds: int = 0
    fingerprint: str = "fp_echo"
    changed: bool = False
    is_empty: bool = False
    directory: Path = Path("/")
    weights_key: bytes = b""

    def prepare(self, params: Any) -> None:
        if params.constraint.text == "slow":
            time.sleep(0.5)
        if params.constraint.text == "refuse":
            raise InputError("the constraint is refused by the echo engine.")

    def load_adapter(self, name: str, directory: Path) -> bytes:
        if not directory.is_dir():
            raise InputError(f"{directory} has no adapter_config.json.", field="lora_path")
        self.adapters[name] = directory
        return name.encode()

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    def prepare_weights(self, directory: Path) -> str | None:
        """Weights of which the fingerprint has the directory's name."""
        if directory == self.directory:
            time.sleep(0.1)
            return ""
        while directory.name.startswith("slow") and self.hold is not None and self.hold.exists():
            time.sleep(0.01)
        if not directory.is_dir():
            raise InputError(f"model {directory} does not exist.")
        return None if f"fp_{directory.name}" == self.fingerprint else directory.name

    def use_weights(self, prepared: str, carry_on: bool) -> tuple[str, float, float, int]:
        self.is_empty = False
        if not prepared:
            return self.fingerprint, 0.1, 0.001, 0
        self.fingerprint, self.changed = f"fp_{prepared}", True
        for request in self.requests.values() if carry_on else ():
            request.weights = self.fingerprint
        return self.fingerprint, 0.5, 0.001, 0 if carry_on else len(self.requests)

    def sleep(self, level: int) -> int:
        if self.requests:
            raise InputError("requests are under way, says the echo engine.")
        self.is_empty = level == 2
        return 1000 * level

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: Any,
        priority: int,
        client: str,
        timeout_s: float | None,
        lora: str | None = None,
    ) -> None:
        if lora is not None and lora not in self.adapters:
            raise InputError(f"adapter {lora!r} is not loaded.")
        if prompt_ids[0] == REFUSE:
            raise InputError("prompt is refused by the echo engine.")
        if prompt_ids[0] == TOO_LARGE:
            raise CapacityError("prompt needs more pages than there are.")
        cached = self.cached(prompt_ids)
        for i in range(params.n):
            tokens = [*prompt_ids[:-1], prompt_ids[-1] + self.adds + 10 * i + 100 * (lora is not None)]
            self.requests[request_id, i] = Running(tokens, params, client, 0, self.fingerprint, cached=cached)
            if self.say is not None and self.say.exists():
                self.requests[request_id, i].script = json.loads(self.say.read_text())

    def abort(self, request_id: str, index: int | None = None) -> None:
        for name in [name for name in self.requests if name[0] == request_id and index in (None, name[1])]:
            del self.requests[name]

    def step(self) -> list[Event]:
        self.steps += 1
        time.sleep(self.step_s)
        events = []
        is_held = self.hold is not None and self.hold.exists()
        for (request_id, index), request in list(self.requests.items())[: self.max_running]:
            if is_held and request.n_output >= HELD_TOKENS:
                continue
            first = request.tokens[0]
            if request.params.pooling is not None and first != SLOW:
                # Of the echo model's 16 numbers: the mean of the tokens or the last one, and how many there are. A slow prompt
                # ends without a vector, as it would at a timeout.
                tokens = request.tokens if request.params.pooling == "mean" else request.tokens[-1:]
                vector = array("f", [sum(tokens) / len(tokens), len(request.tokens), *[0.25] * 14])
                events.append(Event(request_id, [], finish_reason="length", embedding=vector))
                del self.requests[request_id, index]
                continue
            if first == FAIL_IN_STEP:
                raise RuntimeError("as asked")
            if first == HANG_IN_STEP:
                time.sleep(3600)
            if first == EXIT:
                os._exit(7)
            if first == STOP_PROCESS:
                os.kill(os.getpid(), signal.SIGSTOP)
            if first == SLOW:
                time.sleep(0.05)
            token = (request.tokens[-1] + 1) % (VOCAB - 10)
            if request.script:
                token = request.script[request.n_output]
            request.tokens.append(token)
            request.n_output += 1
            self.output_tokens += 1
            finish = "length" if request.n_output >= request.params.max_tokens else None
            if request.n_output == len(request.script):
                finish = "stop"
            logprobs = None
            if request.params.logprobs is not None:
                top = [(i, -1.0 - i) for i in range(request.params.logprobs)]
                logprobs = [Logprob(-0.5, top)]
            scores = None
            if request.params.prompt_logprobs is not None and request.n_output == 1 and index == 0:
                top = [(i, -1.0 - i) for i in range(request.params.prompt_logprobs)]
                scores = [
                    Logprob(-0.5 - i, top) for i in range(request.params.prompt_logprobs_start - 1, len(request.tokens) - 2)
                ]
            cached = request.cached if request.n_output == 1 and index == 0 else 0
            events.append(Event(request_id, [token], logprobs, finish, index, scores, cached))
            if request.n_output == 1 and index == 0:
                events[-1].started_s = time.monotonic()
            if self.changed and request.told != request.weights:
                request.told = events[-1].fingerprint = request.weights
            if finish:
                del self.requests[request_id, index]
        return events

    def stats(self) -> Stats:
        pages = sum(-(-len(r.tokens) // PAGE_TOKENS) for r in self.requests.values())
        return Stats(len(self.requests), pages, 1000, self.steps, self.output_tokens)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--load-error", choices=("input", "crash", "exit"))
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--step-s", type=float, default=0.001)
    parser.add_argument("--say", type=Path, help="a file of token ids: while it is there, every answer is these")
    parser.add_argument("--hold", type=Path, help=f"while this file is there, no answer has more than {HELD_TOKENS} tokens")
    parser.add_argument("--caches", action="store_true")
    parser.add_argument("--hold-bytes", type=int, default=0, help="memory that its process takes")
    parser.add_argument("--adds", type=int, default=0, help="what the first token of an answer is greater by")
    parser.add_argument("--max-running", type=int)
    args = parser.parse_args()

    held = bytearray()

    def load() -> tuple[EchoEngine, wire.Ready]:
        held.extend(b"\1" * args.hold_bytes)
        time.sleep(args.load_s)
        if args.load_error == "input":
            raise InputError("the model cannot be used, says the echo engine.")
        if args.load_error == "crash":
            raise RuntimeError("as asked")
        if args.load_error == "exit":
            os._exit(9)
        engine = EchoEngine(step_s=args.step_s, say=args.say, hold=args.hold, caches=args.caches, max_running=args.max_running)
        engine.adds = args.adds
        return engine, wire.Ready("fp32", 4096, PAGE_TOKENS, 123, 456, 0.0, fingerprint="fp_echo")

    return serve_engine(args.socket, args.parent_pid, load)


if __name__ == "__main__":
    sys.exit(main())
