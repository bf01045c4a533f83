"""What every engine's script shares: its arguments, its prompts, and how a case becomes numbers.

An engine gives one function, ``generate(prompts, n_output) -> seconds``: the time to answer all prompts greedily with exactly
``n_output`` tokens each. From it, the same for all:

- decode tok/s of a batch of B = B · 64 / (time of 65 output tokens − time of 1), prompts of 64 tokens, so that prefill, queues
  and start of the batch cancel;
- prefill tok/s = 512 / time of 1 output token after a prompt of 512.

Prompts are random and never repeat, so that no prefix cache helps. Standard library only: it runs in every environment.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

PROMPT_TOKENS, OUTPUT_TOKENS, PREFILL_TOKENS = 64, 64, 512

Generate = Callable[[list[list[int]], int], float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--start-only", action="store_true", help="End after the first token.")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


class Bench:
    """Times ``generate`` case by case and writes the results as they come, so that a crash keeps what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.random = random.Random(0)
        self.result: dict[str, object] = {"variant": args.variant}

    def prompts(self, n: int, length: int) -> list[list[int]]:
        return [[self.random.randrange(10, self.args.vocab_size - 10) for _ in range(length)] for _ in range(n)]

    def first_token(self, generate: Generate) -> None:
        """Wall-clock time of the first answer: the caller knows when the process was started."""
        generate(self.prompts(1, 8), 1)
        self.record("first_token_unix_s", time.time())

    def run(self, generate: Generate) -> None:
        for batch in self.args.batches:
            generate(self.prompts(batch, PROMPT_TOKENS), 4)
            rates = []
            for _ in range(self.args.repeats):
                short = generate(self.prompts(batch, PROMPT_TOKENS), 1)
                long = generate(self.prompts(batch, PROMPT_TOKENS), OUTPUT_TOKENS + 1)
                rates.append(batch * OUTPUT_TOKENS / max(long - short, 1e-9))
            self.record(f"decode_{batch}_tok_per_s", rates)
        generate(self.prompts(1, PREFILL_TOKENS), 1)
        rates = [PREFILL_TOKENS / generate(self.prompts(1, PREFILL_TOKENS), 1) for _ in range(self.args.repeats + 2)]
        self.record(f"prefill_{PREFILL_TOKENS}_tok_per_s", rates)
        self.record("peak_rss_bytes", peak_rss_bytes())

    def record(self, name: str, value: object) -> None:
        self.result[name] = value
        self.args.out.write_text(json.dumps(self.result), encoding="utf-8")
