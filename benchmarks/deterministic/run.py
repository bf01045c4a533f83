"""Whether log-probabilities of serving and of scoring are the same bits, and what that costs. See README.md."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inference"))

import recorded
from cases import SHAPES
from models import write_model

from twostroke.core.engine_settings import EngineSettings
from twostroke.engine import scoring
from twostroke.engine.core import EngineCore
from twostroke.engine.scoring import token_scores
from twostroke.evaluation.decoder_scorer import DecoderScorer
from twostroke.kernels.native_library import target
from twostroke.model.load import load_model
from twostroke.scheduling.sampling_params import SamplingParams

N_SERVED, N_OUTPUT = 12, 24
N_DECODING, N_STEPS, N_PREFILL, N_SCORED = 16, 8, 256, 256


def engine(model: Path, weights: str, **settings: Any) -> EngineCore:
    return EngineCore(model, EngineSettings(dtype=weights, kv_cache_bytes=2**28, **settings))


def served(core: EngineCore) -> list[tuple[list[int], int, list[float]]]:
    """(ids, first of the answer, ln p of the answer's tokens) of requests that arrive one by one and share beginnings."""
    r = random.Random(0)
    shared = [r.randrange(3, core.spec.vocab_size) for _ in range(200)]
    prompts = [
        shared[: r.randrange(200)] + [r.randrange(3, core.spec.vocab_size) for _ in range(r.randrange(1, 300))]
        for _ in range(N_SERVED)
    ]
    tokens: dict[str, list[int]] = {f"{i}": [] for i in range(N_SERVED)}
    logprobs: dict[str, list[float]] = {name: [] for name in tokens}
    waiting = list(enumerate(prompts))
    while waiting or core.has_work:
        if waiting:
            i, prompt = waiting.pop(0)
            params = SamplingParams(temperature=1.0, seed=i, max_tokens=N_OUTPUT, ignore_eos=True, logprobs=0)
            core.add_request(f"{i}", prompt, params)
        for event in core.step():
            tokens[event.request_id] += event.token_ids
            logprobs[event.request_id] += [entry.logprob for entry in event.logprobs or ()]
    return [(prompt + tokens[f"{i}"], len(prompt), logprobs[f"{i}"]) for i, prompt in enumerate(prompts)]


def bits(model: Path, weights: str) -> dict[str, Any]:
    """How far the served log-probabilities are from those of another engine's scoring, and of the decoder's in bf16."""
    serving = engine(model, weights, n_threads=2, token_budget=200, deterministic=True)
    answers = served(serving)
    sequences, told = [(ids, first) for ids, first, _ in answers], np.concatenate([found for *_, found in answers])
    hits = serving.stats().prefix_hit_tokens
    del serving
    other = engine(model, weights, n_threads=1, page_tokens=32, deterministic=True)
    read = -np.concatenate([nats for nats, _ in token_scores(other, sequences)])
    del other
    decoder = DecoderScorer(load_model(model, "bf16"), None)  # type: ignore[arg-type]  # it scores ids, and needs no tokenizer
    trained = -np.concatenate([nats for nats, _ in decoder.token_scores(sequences)]).astype(np.float64)
    return {
        "tokens": len(told),
        "prefix_hit_tokens": hits,
        "other_bits": int((read != told).sum()),
        "decoder_other_bits": int((trained != told).sum()),
        "decoder_mean_difference": float(np.abs(trained - told).mean()),
        "decoder_largest_difference": float(np.abs(trained - told).max()),
        "decoder_kl": float((told - trained).mean()),  # E[ln p − ln q] over tokens that the server drew
    }


def seconds(work: Callable[[], None]) -> float:
    """Of one thread's processor time: what others do on the machine delays it, and is not counted."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def cross_entropy(core: EngineCore, step: Any, rows: Any, targets: Any) -> Any:
    """Scores as torch computes them, in fp32: what scoring was before it took the sampler's arithmetic."""
    logits, wanted = core.compute(step, torch.from_numpy(rows)), torch.from_numpy(targets)
    nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    return nats.numpy(), (logits.argmax(dim=-1) == wanted).numpy()


def cost(model: Path, weights: str, rounds: int) -> dict[str, Any]:
    """Times of the same work with the setting and without, and of scoring by either arithmetic, turn about, on one thread."""
    cores = {on: engine(model, weights, n_threads=1, deterministic=on) for on in (False, True)}
    r, own = random.Random(1), scoring._scores
    found: dict[str, dict[str, list[float]]] = {kind: {"without": [], "with": []} for kind in ("decode", "prefill", "score")}

    def ids(n: int) -> list[int]:
        return [r.randrange(3, cores[True].spec.vocab_size) for _ in range(n)]

    def steps(core: EngineCore, n: int) -> Callable[[], None]:
        return lambda: [core.step() for _ in range(n)] and None

    for i in range(rounds + 1):  # the first warms up
        for on in (False, True) if i % 2 else (True, False):
            core, name = cores[on], "with" if on else "without"
            for k in range(N_DECODING):
                core.add_request(f"{k}", ids(24), SamplingParams(temperature=0.0, max_tokens=N_STEPS + 4, ignore_eos=True))
            core.step()
            decode_s = seconds(steps(core, N_STEPS))
            while core.has_work:
                core.step()
            core.add_request("long", ids(N_PREFILL), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
            prefill_s = seconds(steps(core, 1))
            sequences = [(ids(N_SCORED // 2), 1) for _ in range(2)]
            scoring._scores = own if on else cross_entropy
            score_s = seconds(lambda core=core, sequences=sequences: token_scores(core, sequences) and None)  # type: ignore[misc]
            scoring._scores = own
            if i:
                for kind, took in (("decode", decode_s), ("prefill", prefill_s), ("score", score_s)):
                    found[kind][name].append(took)
    return {
        kind: {
            "ms": {name: 1e3 * statistics.median(each) for name, each in times.items()},
            "ratio": ratio(times["with"], times["without"]),
        }
        for kind, times in found.items()
    }


def ratio(times: Sequence[float], of: Sequence[float]) -> dict[str, float]:
    """The median of the pairs' quotients, less 1, and the 95% interval of a median by order statistics."""
    quotients = sorted(a / b - 1 for a, b in zip(times, of, strict=True))
    n = len(quotients)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return {"median": statistics.median(quotients), "low": quotients[low], "high": quotients[n - 1 - low]}


def summary(results: dict[str, Any]) -> str:
    lines = [
        "# Log-probabilities of serving and scoring",
        "",
        f"{results['machine']}, instructions {results['target']}, torch {results['torch']}, "
        f"Twostroke {results['twostroke']}, load {results['load_average_at_start']:.1f} at the start",
        "",
        "| weights | served | scored: other bits | decoder in bf16: other bits | mean difference | largest | KL |",
        "|---|---|---|---|---|---|---|",
    ]
    for weights, found in results["bits"].items():
        decoder = [found[f"decoder_{name}"] for name in ("other_bits", "mean_difference", "largest_difference", "kl")]
        lines.append(
            f"| {weights} | {found['tokens']} | {found['other_bits']} | {decoder[0]} | {decoder[1]:.2e} | {decoder[2]:.2e} | "
            f"{decoder[3]:+.1e} |"
        )
    lines += ["", "| weights | work | time without | with | more | 95% of the median |", "|---|---|---|---|---|---|"]
    for weights, kinds in results["cost"].items():
        for kind, found in kinds.items():
            more = found["ratio"]
            lines.append(
                f"| {weights} | {kind} | {found['ms']['without']:.1f} ms | {found['ms']['with']:.1f} ms | "
                f"{more['median']:+.1%} | {more['low']:+.1%} to {more['high']:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--models", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-deterministic", help="kept models"
    )
    parser.add_argument("--weights", default="bf16,int8,int4")
    parser.add_argument("--timed", default="bf16,int8", help="of these, those whose cost is measured")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    model = write_model(SHAPES["smollm-135m"], arguments.models / "smollm-135m")
    weights, timed = arguments.weights.split(","), arguments.timed.split(",")
    results = recorded.conditions() | {
        "target": target(),
        "cost": {name: cost(model, name, arguments.rounds) for name in weights if name in timed},
        "bits": {name: bits(model, name) for name in weights},
    }
    recorded.write(arguments.out, {"results.json": results, "summary.md": summary(results)})
    print(summary(results))


if __name__ == "__main__":
    main()
