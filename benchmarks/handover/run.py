"""One engine beside one that prefills and one that decodes. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded

from twostroke.calibration.collectives import measure_between_processes
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.families import read_spec
from twostroke.planner.hardware.tables import ASSUMED_NETWORK_ALPHA_S, ASSUMED_NETWORK_BYTES_PER_S
from twostroke.planner.serving.under_load import transfer_s
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server.engine_client import EngineClient
from twostroke.server.handover.settings import HandoverSettings
from twostroke.server.launch import ServeSettings, launch_engine, shares
from twostroke.server.prefill import DecodingEngine
from twostroke.server.token_stream import TokenStream

PROMPT, OUTPUT = 512, 64
DRAWN = SamplingParams(temperature=0.8, seed=1, max_tokens=OUTPUT, ignore_eos=True)
SETTINGS = EngineSettings(max_model_len=1024, kv_cache_bytes=2**29)
WAYS = ("one engine", "shared memory", "tcp")


@asynccontextmanager
async def running(engine: EngineClient) -> AsyncIterator[None]:
    task = asyncio.create_task(engine.run())
    try:
        await engine.wait_loaded()
        yield
    finally:
        engine.close()
        await task


@asynccontextmanager
async def engines(way: str, model: Path, folder: Path) -> AsyncIterator[EngineClient]:
    settings = ServeSettings(model, SETTINGS, ("m",))
    async with AsyncExitStack() as stack:
        if way == "one engine":
            engine = EngineClient(settings.launches()[0])
        elif way == "shared memory":
            settings = replace(settings, prefill_at=(str(folder / "socket"),))
            engine = DecodingEngine(settings.launches()[0], None, {}, settings.prefill_launches())
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            (folder / "key").write_text(secrets.token_hex(32))
            roles = HandoverSettings(address, (), str(folder / "key")), HandoverSettings(None, (address,), str(folder / "key"))
            half, other = shares(2)
            prefills, decodes = (
                replace(
                    settings, handover=role, engine=replace(SETTINGS, replicas=2, separate_prefixes=role.listen is not None)
                )
                for role in roles
            )
            await stack.enter_async_context(running(EngineClient(lambda: launch_engine(prefills.engine_command(), half))))
            engine = EngineClient(lambda: launch_engine(decodes.engine_command(), other))
        await stack.enter_async_context(running(engine))
        while way != "one engine" and not (await engine.stats()).get("handover_peers"):
            await asyncio.sleep(0.05)
        yield engine


async def answer(engine: EngineClient, prompt: list[int], at: float) -> tuple[list[int], list[float]]:
    """Tokens and when they came, in seconds after ``at``, the scheduled time."""
    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    wake = asyncio.Event()
    stream: TokenStream
    (stream,) = engine.submit(prompt, DRAWN, wake)
    tokens: list[int] = []
    times: list[float] = []
    while True:
        await wake.wait()
        wake.clear()
        for delta in stream.take():
            tokens += delta.token_ids
            times += [time.perf_counter() - at] * len(delta.token_ids)
            if delta.finish_reason is not None:
                return tokens, times


async def measured(way: str, model: Path, n: int, every_s: float, seed: int) -> tuple[dict[str, Any], list[list[int]]]:
    r, vocab = random.Random(seed), read_spec(model).vocab_size
    prompts = [[r.randrange(vocab) for _ in range(PROMPT)] for _ in range(n)]
    with tempfile.TemporaryDirectory() as name:
        async with engines(way, model, Path(name)) as engine:
            await answer(engine, [5] * PROMPT, 0.0)
            before = await engine.stats()
            began = time.perf_counter() + 0.1
            found = await asyncio.gather(*(answer(engine, each, began + i * every_s) for i, each in enumerate(prompts)))
            after = await engine.stats()
    gaps = sorted(b - a for _, times in found for a, b in itertools.pairwise(times))
    first = [times[0] for _, times in found]
    row: dict[str, Any] = {
        "way": way,
        "ttft_ms": {"median": 1e3 * statistics.median(first), "largest": 1e3 * max(first)},
        "itl_ms": {"median": 1e3 * statistics.median(gaps), "p99": 1e3 * gaps[int(0.99 * len(gaps))]},
        "tpot_ms": 1e3 * statistics.mean((times[-1] - times[0]) / (OUTPUT - 1) for _, times in found),
    }
    if way != "one engine":
        spent = {name: after[name] - before[name] for name in after if name.startswith("handover_")}
        requests = spent["handover_requests"]
        row["handover"] = {
            "requests": requests,
            "incomplete": spent["handover_incomplete"],
            "tokens": spent["handover_tokens"] / requests,
            "bytes": spent["handover_bytes"] / requests,
            "ms": 1e3 * spent["handover_s"] / requests,
            "wait_ms": 1e3 * spent["handover_wait_s"] / requests,
        }
    return row, [tokens for tokens, _ in found]


def predicted(model: Path, tokens: float) -> dict[str, Any]:
    """Of a prompt's ``tokens``: bytes by the model's shape, milliseconds by two links."""
    spec = read_spec(model)
    per_token = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * 2.0  # keys and values in bf16
    ring = measure_between_processes(2, "cpu")
    assumed = transfer_s(tokens, per_token, ASSUMED_NETWORK_ALPHA_S, ASSUMED_NETWORK_BYTES_PER_S)
    found = {"bytes": tokens * per_token, "ms": {"1 Gbit/s, assumed": 1e3 * assumed}}
    if ring is not None:
        name = f"between two processes, measured {ring.bytes_per_s / 1e9:.2f} GB/s"
        found["ms"][name] = 1e3 * transfer_s(tokens, per_token, ring.alpha_s, ring.bytes_per_s)
    return found


def summary(results: dict[str, Any]) -> str:
    lines = [
        f"{results['machine']}, torch {results['torch']}, "
        f"Twostroke {results['twostroke']}, load {results['load_average_at_start']:.1f} at the start. "
        f"{results['requests']} requests of {PROMPT} + {OUTPUT} tokens, one every {results['every_s']:g} s, "
        f"{results['rounds']} rounds; medians of the rounds:",
        "",
        "| | TTFT ms | largest | ITL ms | p99 | TPOT ms |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        rows = [row for row in results["rows"] if row["way"] == way]
        cells = [
            statistics.median(get(row) for row in rows)
            for get in (
                lambda row: row["ttft_ms"]["median"], lambda row: row["ttft_ms"]["largest"],
                lambda row: row["itl_ms"]["median"], lambda row: row["itl_ms"]["p99"], lambda row: row["tpot_ms"],
            )
        ]  # fmt: skip
        lines.append(f"| {way} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    lines += ["", "A request's handover:", "", "| | tokens | bytes | ms | waited ms |", "|---|---|---|---|---|"]
    for way in WAYS[1:]:
        rows = [row["handover"] for row in results["rows"] if row["way"] == way]
        mean = {name: statistics.median(row[name] for row in rows) for name in ("tokens", "bytes", "ms", "wait_ms")}
        lines.append(f"| {way} | {mean['tokens']:.0f} | {mean['bytes']:,.0f} | {mean['ms']:.1f} | {mean['wait_ms']:.0f} |")
    for name, ms in results["predicted"]["ms"].items():
        lines.append(f"| predicted, {name} | {PROMPT - PROMPT % 16 - 16} | {results['predicted']['bytes']:,.0f} | {ms:.1f} | |")
    lines += ["", f"All answers have the same tokens in every setting: {results['same_tokens']}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--every-s", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    conditions, rows, answers = recorded.conditions(), [], []
    for i in range(arguments.rounds):
        for way in WAYS if i % 2 == 0 else WAYS[::-1]:
            row, tokens = asyncio.run(measured(way, arguments.model, arguments.requests, arguments.every_s, i))
            rows.append(row | {"round": i})
            answers.append((i, tokens))
            print(json.dumps(row), file=sys.stderr)
    results = conditions | {
        "requests": arguments.requests,
        "every_s": arguments.every_s,
        "rounds": arguments.rounds,
        "rows": rows,
        "same_tokens": all(tokens == next(t for j, t in answers if j == i) for i, tokens in answers),
        "predicted": predicted(arguments.model, PROMPT - 16),
    }
    text = summary(results)
    if arguments.out is not None:
        recorded.write(arguments.out, {"results.json": results, "summary.md": text})
    print(text)


if __name__ == "__main__":
    main()
