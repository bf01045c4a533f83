"""What a beam search costs beside as many separate requests. See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inference"))

import recorded
from cases import SHAPES
from models import write_model

from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams

BEAMS, PROMPT, OUTPUT = 4, 256, 256
WAYS = ("beams", "answers", "together", "one by one")


def rate(core: EngineCore, way: str, seed: int) -> float:
    """Tokens a second of four sequences behind one prompt, from the first request to the last token. The prompt is new each
    time, so that none finds its prefix of an earlier round."""
    prompt = [(31 * i + 977 * seed) % core.spec.vocab_size for i in range(PROMPT)]
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    search = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, use_beam_search=True, n=BEAMS)
    answers = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, n=BEAMS)
    began, n_tokens = time.perf_counter(), 0
    for i in range(1 if way in ("beams", "answers") else BEAMS):
        # A separate request's prompt is its own from the first token on.
        own = [(token + i) % core.spec.vocab_size for token in prompt]
        core.add_request(str(i), own, {"beams": search, "answers": answers}.get(way, greedy))
        while core.has_work and (way == "one by one" or i == BEAMS - 1 or way in ("beams", "answers")):
            n_tokens += sum(len(event.token_ids) for event in core.step())
    assert n_tokens == BEAMS * OUTPUT
    return n_tokens / (time.perf_counter() - began)


def measured(base: Path, scheme: str, rounds: int) -> dict[str, Any]:
    core = EngineCore(base, EngineSettings(dtype=scheme, max_model_len=1024, n_threads=2))
    rate(core, "beams", 0)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(rounds):
        for way in WAYS if i % 2 == 0 else WAYS[::-1]:
            rates[way].append(rate(core, way, 1 + i * len(WAYS) + WAYS.index(way)))
    found: dict[str, Any] = {"tok_per_s": {way: statistics.median(values) for way, values in rates.items()}}
    for way in WAYS[1:]:
        found[f"over {way}"] = statistics.median(a / b for a, b in zip(rates["beams"], rates[way], strict=True))
    return found


def summary(results: dict[str, Any]) -> str:
    lines = [
        f"{results['machine']}, 2 threads, torch {results['torch']}, Twostroke {results['twostroke']}, "
        f"load {results['load_average_at_start']:.1f} at the start",
        "",
        f"Tokens a second of {BEAMS} sequences of {OUTPUT} tokens behind {PROMPT}, and how many times those "
        "of the other ways the search reaches:",
        "",
        "| weights | search | answers (`n`) | together | one by one | over answers | over together | over one by one |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for scheme, found in results["schemes"].items():
        rates = " | ".join(f"{found['tok_per_s'][way]:.0f}" for way in WAYS)
        ratios = " | ".join(f"{found[f'over {way}']:.2f}" for way in WAYS[1:])
        lines.append(f"| {scheme} | {rates} | {ratios} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-beams", help="kept models")
    parser.add_argument("--schemes", default="bf16,int8")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    base = write_model(SHAPES["smollm-135m"], arguments.models / "smollm-135m")
    results = recorded.conditions() | {
        "schemes": {scheme: measured(base, scheme, arguments.rounds) for scheme in arguments.schemes.split(",")},
    }
    recorded.write(arguments.out, {"results.json": results, "summary.md": summary(results)})
    print(summary(results))


if __name__ == "__main__":
    main()
