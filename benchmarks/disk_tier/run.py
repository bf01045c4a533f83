"""The first token of a prompt whose pages are on disk beside that of one that is computed. See README.md."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inference"))

import recorded
from cases import SHAPES, Shape
from models import write_model

from twostroke.core.engine_settings import EngineSettings
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams

TINY = Shape("tiny-260k", 5, 64, 8, 4, 172, 512, True, (1,))
MODELS = {"tinyllama-1.1b": SHAPES["tinyllama-1.1b"], "smollm-135m": SHAPES["smollm-135m"], TINY.name: TINY}
LENGTHS = (100, 500, 2000)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PLACES = ("disk", "page cache")
NEVER_SLOWER = 2000
"""Tokens of a prompt that pages on disk must not make slower to answer, and at the 1.1B shape three times as fast."""


def opened(model: Path, folder: Path | None, cache_bytes: int) -> EngineCore:
    kv_dir = None if folder is None else str(folder)
    return EngineCore(model, EngineSettings(max_model_len=4096, kv_cache_bytes=cache_bytes, n_threads=2, kv_dir=kv_dir))


def first_token(core: EngineCore, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to it, and the whole answer."""
    began = time.perf_counter()
    core.add_request("r", prompt, GREEDY)
    tokens: list[int] = []
    seconds = 0.0
    while core.has_work:
        tokens += [token for event in core.step() for token in event.token_ids]
        seconds = seconds or (time.perf_counter() - began if tokens else 0.0)
    return seconds, tokens


def written(core: EngineCore) -> None:
    assert core._below.disk is not None
    core._below.disk.wait_written()


def put(folder: Path, place: str) -> None:
    """Have the pages' file on the disk alone, or in the system's page cache too."""
    for path in folder.glob("*.kv"):
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while place == "page cache" and stream.read(2**24):
                pass


def forget(core: EngineCore) -> None:
    core.scheduler.pool.discard_content(range(core.pool.n_pages))


def random_prompt(r: random.Random, shape: Shape, n: int) -> list[int]:
    return [r.randrange(shape.vocab_size) for _ in range(n)]


def times_of(shape: Shape, model: Path, repeats: int) -> dict[str, Any]:
    """Pairs of prompts of one length, one whose pages are in the file and one that is new, in turns and behind the same pause:
    by place of the file and length, milliseconds to the first token of both, and tokens that were loaded."""
    r = random.Random(0)
    prompts = {n: [random_prompt(r, shape, n) for _ in range(repeats)] for n in LENGTHS}
    cache_bytes = 2 * 2**30 if shape is not TINY else 64 * 2**20
    with tempfile.TemporaryDirectory(dir=model.parent) as name:
        folder = Path(name)
        core = opened(model, folder, cache_bytes)
        answers = {n: [first_token(core, prompt)[1] for prompt in of] for n, of in prompts.items()}
        written(core)
        core.close()
        began = time.perf_counter()
        core = opened(model, folder, cache_bytes)
        found: dict[str, Any] = {"page_bytes": core.pool.images().n_bytes, "start_s": time.perf_counter() - began}
        first_token(core, random_prompt(r, shape, 600))  # what the first steps do once

        def timed(prompt: list[int], place: str) -> tuple[float, list[int]]:
            written(core)
            forget(core)
            put(folder, place)
            return first_token(core, prompt)

        for place in PLACES:
            found[place] = {}
            for n, of in prompts.items():
                pairs, before = [], core.stats().disk_hit_tokens
                for i, (prompt, answer) in enumerate(zip(of, answers[n], strict=True)):
                    new = random_prompt(r, shape, n)
                    computed_s = timed(new, place)[0] if i % 2 else 0.0
                    seconds, tokens = timed(prompt, place)
                    computed_s = computed_s or timed(new, place)[0]
                    assert tokens == answer, "an answer from disk differs"
                    pairs.append((1e3 * computed_s, 1e3 * seconds))
                loaded = (core.stats().disk_hit_tokens - before) / repeats
                found[place][n] = {"computed_and_held_ms": pairs, "loaded_tokens": loaded}
        core.close()
    return found


def cost_of_writing(shape: Shape, model: Path, rounds: int) -> dict[str, Any]:
    """Seconds of the same traffic with a folder and without, in turns: requests that come one after another, so that pages of
    those that have ended are written while others decode."""
    ratios, longest = [], {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=model.parent) as name:
        cores = {way: opened(model, Path(name) if way else None, 2**30) for way in (False, True)}
        r = random.Random(1)
        for i in range(rounds + 1):
            prompts = [[r.randrange(shape.vocab_size) for _ in range(200)] for _ in range(8)]
            seconds: dict[bool, float] = {}
            for way in (False, True) if i % 2 else (True, False):
                core, steps = cores[way], []
                began = time.perf_counter()
                for j, prompt in enumerate(prompts):  # every tenth step one comes, and after 40 tokens it ends
                    core.add_request(str(j), prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
                    for _ in range(10):
                        at = time.perf_counter()
                        core.step()
                        steps.append(time.perf_counter() - at)
                while core.has_work:
                    core.step()
                seconds[way] = time.perf_counter() - began
                if i:
                    longest[way].append(max(steps))
                if way:
                    written(core)
            if i:
                ratios.append(seconds[True] / seconds[False] - 1)
        stats = cores[True].stats()
        cores[True].close()
    return {
        "longer": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "longest_step_ms": {str(way): 1e3 * statistics.median(of) for way, of in longest.items()},
        "pages_written": stats.disk_pages_written,
        "requests_dropped": stats.disk_requests_dropped,
    }


def compression(model: Path, text: Path | None) -> dict[str, Any]:
    """What zlib makes of the pages of a text, or of random tokens: bytes as they are, and the upper and lower bytes of numbers
    apart."""
    core = EngineCore(model, EngineSettings(kv_cache_bytes=2**28, n_threads=2))
    r = random.Random(2)
    tokens = [r.randrange(core.spec.vocab_size) for _ in range(2000)]
    if text is not None:
        tokens = load_tokenizer(model).encode(text.read_text(encoding="utf-8")[:20_000]).ids
    tokens = tokens[: min(2000, core.max_model_len - GREEDY.max_tokens) // 16 * 16]
    seconds, _ = first_token(core, tokens)
    images, page = core.pool.images(), np.zeros(core.pool.images().n_bytes, np.uint8)
    pages = [core.scheduler.pool.tree.held(key) for key in core.scheduler.page_lists.keys_of(tokens)[1:]]
    found: dict[str, Any] = {"cache": core.pool.dtype, "compute_us_per_token": 1e6 * seconds / len(tokens)}
    began = time.perf_counter()
    for held in pages:
        assert held is not None
        images.copy_out(held[0], page)
    found["copy_us_per_token"] = 1e6 * (time.perf_counter() - began) / len(tokens)
    for way in ("as they are", "bytes apart"):
        n_in = n_out = 0
        pack_s = unpack_s = 0.0
        for held in pages[:: max(1, len(pages) // 20)]:
            assert held is not None
            images.copy_out(held[0], page)
            data = (page if way == "as they are" else np.concatenate((page[1::2], page[::2]))).tobytes()
            began = time.perf_counter()
            packed = zlib.compress(data, 1)
            between = time.perf_counter()
            assert zlib.decompress(packed) == data
            pack_s, unpack_s = pack_s + between - began, unpack_s + time.perf_counter() - between
            n_in, n_out = n_in + len(data), n_out + len(packed)
        n_tokens = n_in / len(page) * core.scheduler.config.page_tokens
        found[way] = {
            "share": n_out / n_in,
            "pack_us_per_token": 1e6 * pack_s / n_tokens,
            "unpack_us_per_token": 1e6 * unpack_s / n_tokens,
        }
    return found


def summary(results: dict[str, Any]) -> str:
    lines = [
        f"{results['machine']}, 2 threads, torch {results['torch']}, Twostroke {results['twostroke']}, "
        f"load {results['load_average_at_start']:.1f} at the start. Milliseconds to the first token of pairs, medians:",
        "",
        "| model | prompt | pages in | computed | held | faster (least to most) | loaded of each | aim |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results["times"].items():
        for place in PLACES:
            for n in LENGTHS:
                pairs, loaded = found[place][n]["computed_and_held_ms"], found[place][n]["loaded_tokens"]
                computed, held = (statistics.median(of) for of in zip(*pairs, strict=True))
                ratios = [a / b for a, b in pairs]
                aim = "" if n != NEVER_SLOWER else "≥ 3" if name == "tinyllama-1.1b" else "≥ 1"
                lines.append(
                    f"| {name} | {n:,} | {place} | {computed:.1f} | {held:.1f} | {statistics.median(ratios):.1f} "
                    f"({min(ratios):.2f} to {max(ratios):.2f}) | {loaded:.0f} | {aim} |"
                )
    for name, found in results["times"].items():
        lines += ["", f"{name}: a page takes {found['page_bytes']:,} bytes."]
    for name, found in results["writing"].items():
        low, high = found["quartiles"]
        most = found["longest_step_ms"]
        lines += [
            "",
            f"{name}: traffic with a folder takes {found['longer']:+.1%} time (middle half {low:+.1%} to {high:+.1%}); the "
            f"longest step {most['True']:.1f} ms, without {most['False']:.1f}; {found['pages_written']:,} pages written, "
            f"{found['requests_dropped']} requests dropped.",
        ]
    lines += ["", "zlib, level 1, on pages in bf16; microseconds a token:", ""]
    lines += ["| model | bytes | size | packing | unpacking | copying a page | computing |", "|---|---|---|---|---|---|---|"]
    for name, found in results["compression"].items():
        for way in ("as they are", "bytes apart"):
            of = found[way]
            lines.append(
                f"| {name} | {way} | {of['share']:.0%} | {of['pack_us_per_token']:.1f} | {of['unpack_us_per_token']:.1f} | "
                f"{found['copy_us_per_token']:.1f} | {found['compute_us_per_token']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-disk-tier", help="kept models")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--real", type=Path, help="a trained model, whose pages are compressed")
    parser.add_argument("--text", type=Path, help="the text that it reads")
    parser.add_argument("--repeats", type=int, default=5, help="pairs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only-write-models", action="store_true")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    models = {name: write_model(MODELS[name], arguments.folder / name) for name in names}
    if arguments.only_write_models:
        for model in models.values():
            EngineCore(model).close()  # and its packed weights
        return
    results = recorded.conditions() | {
        "times": {name: times_of(MODELS[name], model, arguments.repeats) for name, model in models.items()},
        "writing": {
            name: cost_of_writing(MODELS[name], models[name], arguments.rounds) for name in names if name == "smollm-135m"
        },
        "compression": {name: compression(models[name], None) for name in names if name == "smollm-135m"}
        | ({} if arguments.real is None else {f"{arguments.real.name}, text": compression(arguments.real, arguments.text)}),
    }
    text = summary(results)
    if arguments.out is not None:
        recorded.write(arguments.out, {"results.json": results, "summary.md": text})
    print(text)


if __name__ == "__main__":
    main()
