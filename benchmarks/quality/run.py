"""Perplexity and KL divergence of every scheme, through the engine, against the engine in bf16. See README.md."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded

from twostroke.core.described import plain
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.schemes import written_scheme
from twostroke.data.tokenizer import eos_id_of, load_tokenizer
from twostroke.engine.core import EngineCore
from twostroke.evaluation.held_out import held_out_to_score, tokenize
from twostroke.model.load import load_model
from twostroke.quantization.calibration_text import calibration_batches
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.fitting import MAX_KL_NATS, fit_codes
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

LIMITS = {8: 1.001, 4: 1.03}
E4M3_LIMIT = 1.01
"""Three bits of mantissa round weights by 2.5% of their norm, int8 by 0.7%."""

CACHE_LIMIT = 1.01
"""Of keys and values in 4 bits."""

EIGHT_BITS = {"head_dtype": "int8", "kv_dtype": "int8"}


@dataclass(frozen=True)
class Candidate:
    """``limit``: the greatest ratio that passes. ``made`` names a directory that was quantised for it, else the model's own;
    ``max_kl``: what int4 may cost there before matrices go to int8, none where that is infinite."""

    name: str
    limit: float
    options: dict[str, Any]
    made: str = ""
    max_kl: float = math.inf


CANDIDATES = (
    Candidate("fp32", 1.001, {"dtype": "fp32"}),
    Candidate("int8 (W8A8)", LIMITS[8], {"dtype": "int8"}),
    Candidate("int8, weights only", LIMITS[8], {"dtype": "int8_weight_only"}),
    Candidate("fp8 (E4M3, expanded to bf16)", E4M3_LIMIT, {"dtype": "fp8"}),
    Candidate("bf16, head in int8", LIMITS[8], {"dtype": "bf16", "head_dtype": "int8"}),
    Candidate("bf16, head in int4", LIMITS[4], {"dtype": "bf16", "head_dtype": "int4"}),
    Candidate("bf16, cache in int8", LIMITS[8], {"dtype": "bf16", "kv_dtype": "int8"}),
    Candidate("bf16, cache in int4", CACHE_LIMIT, {"dtype": "bf16", "kv_dtype": "int4"}),
    Candidate("int8 (W8A8), head and cache in int8", LIMITS[8], {"dtype": "int8", **EIGHT_BITS}),
    Candidate("int4, nearest, groups of 64", LIMITS[4], {"dtype": "auto"}, "int4-nearest"),
    Candidate("int4 alone, fitted, groups of 64", LIMITS[4], {"dtype": "auto"}, "int4-g64"),
    Candidate("int4 alone, fitted, groups of 32", LIMITS[4], {"dtype": "auto"}, "int4-g32"),
    Candidate("int4 as `quantize` makes it", LIMITS[4], {"dtype": "auto"}, "int4", MAX_KL_NATS),
    Candidate("the same, head and cache in int8", LIMITS[4], {"dtype": "auto", **EIGHT_BITS}, "int4", MAX_KL_NATS),
)


def logprobs(engine: EngineCore, ids: list[int]) -> torch.Tensor:
    """(T, V) log-probabilities of the next token after each of ``ids``, every row computed."""
    engine.scheduler.add(Request("window", ids, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    step = engine.scheduler.schedule()
    assert step.n_tokens == len(ids)
    logits = engine.compute(step, torch.arange(len(ids)))
    result = torch.log_softmax(logits.float(), dim=-1).clone()
    engine.scheduler.update(step, [0])
    return result


def windows_of(model: Path, data: list[str], length: int, n: int) -> list[list[int]]:
    """``n`` windows spread evenly over the text."""
    tokenizer = load_tokenizer(model)
    text = held_out_to_score(model, data)
    ids = tokenize(text, tokenizer, eos_id_of(tokenizer, model)).ids
    starts = np.linspace(0, len(ids) - length - 1, min(n, len(ids) // length)).astype(int)
    return [[int(i) for i in ids[s : s + length]] for s in starts]


def quantised(model: Path, folder: Path, text: list[str], candidates: Sequence[Candidate]) -> dict[str, dict[str, Any]]:
    """Directories for the candidates that need one, fitted to what the run trained on, or to ``text``; what is told of each."""
    needed = sorted({(c.made, c.max_kl) for c in candidates if c.made})
    if not needed:
        return {}
    decoder = load_model(model)
    batches = calibration_batches(model, decoder.spec, text)
    reports = {}
    for name, max_kl in needed:
        scheme = "int4-g64" if name == "int4-nearest" else name
        group = written_scheme(scheme).group
        assert group is not None
        began = time.perf_counter()
        fitted = None if name == "int4-nearest" else fit_codes(decoder, batches, group, max_kl)
        report = plain(quantize_model(model, folder / name, scheme, fitted=fitted))
        in_int8 = [] if fitted is None else sorted(fitted.int8)
        reports[name] = report | {"seconds": time.perf_counter() - began, "matrices_in_int8": in_int8}
    return reports


def score(candidate: Candidate, engine: EngineCore, windows: list[list[int]], reference: list[torch.Tensor]) -> dict[str, Any]:
    differences, divergences = [], []
    for ids, exact in zip(windows, reference, strict=True):
        found = logprobs(engine, ids)
        targets = torch.tensor(ids[1:])[:, None]
        own, others = (t[:-1].gather(1, targets)[:, 0] for t in (found, exact))
        differences.append(float((others - own).mean()))  # nats a token worse than bf16
        divergences.append(float((exact.exp() * (exact - found)).sum(dim=1).mean()))
    mean = float(np.mean(differences))
    error = float(np.std(differences, ddof=1) / math.sqrt(len(differences)))
    return {
        "scheme": candidate.name,
        "perplexity_ratio": math.exp(mean),
        "ratio_low": math.exp(mean - 1.96 * error),
        "ratio_high": math.exp(mean + 1.96 * error),
        "kl_nats": float(np.mean(divergences)),
        "limit": candidate.limit,
        "passes": math.exp(mean) <= candidate.limit,
        "weights_bytes": engine.weights_bytes,
        "runner": engine.runner,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", nargs="*", default=[], help="text to score; default: what the model's run held out")
    parser.add_argument("--calibration", nargs="*", default=[], help="text to fit int4 to; default: what the run trained on")
    parser.add_argument("--name", help="of the model, in the record; default: its folder's")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--only", default="", help="candidates with this in their name")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    conditions = recorded.conditions()
    model = args.model / "model" if (args.model / "model" / "config.json").is_file() else args.model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        candidates = [candidate for candidate in CANDIDATES if args.only in candidate.name]
        made = quantised(model, folder, args.calibration, candidates)
        windows = windows_of(model, args.data, args.length, args.windows)
        common = {"token_budget": args.length, "max_model_len": args.length + 1 if args.data else args.length, "max_running": 1}
        windows = [ids[: common["max_model_len"] - 1] for ids in windows]

        def engine(directory: Path, options: dict[str, Any]) -> EngineCore:
            return EngineCore(directory, EngineSettings(**common | options))

        exact = engine(model, {"dtype": "bf16"})
        reference = [logprobs(exact, ids) for ids in windows]
        nats = float(
            np.mean(
                [-float(r[:-1].gather(1, torch.tensor(i[1:])[:, None]).mean()) for r, i in zip(reference, windows, strict=True)]
            )
        )
        rows = []
        for candidate in candidates:
            rows.append(
                score(
                    candidate,
                    engine(folder / candidate.made if candidate.made else model, candidate.options),
                    windows,
                    reference,
                )
            )
            print(rows[-1], flush=True)
    document = conditions | {
        "model": args.name or args.model.name,
        "n_tokens": sum(len(ids) - 1 for ids in windows),
        "bf16_perplexity": math.exp(nats),
        "schemes": rows,
        "quantised": made,
    }
    recorded.write(args.out, {"raw.json": document, "summary.md": table(document)})
    print(table(document))


def table(document: dict[str, Any]) -> str:
    lines = [
        f"# Quality of each scheme through the engine: {document['model']}, *measured*",
        "",
        f"{document['n_tokens']} held-out tokens; perplexity {document['bf16_perplexity']:.3f} in bf16.",
        "",
        "| scheme | perplexity ratio (95%) | KL, nats a token | limit | |",
        "|---|---|---|---|---|",
    ]
    for row in document["schemes"]:
        spread = f"{row['perplexity_ratio']:.5f} ({row['ratio_low']:.5f} to {row['ratio_high']:.5f})"
        verdict = "passes" if row["passes"] else "fails"
        lines.append(f"| {row['scheme']} | {spread} | {row['kl_nats']:.2e} | {row['limit']} | {verdict} |")
    fitted = document["quantised"].get("int4")
    if fitted is not None:
        lines += [
            "",
            f"`quantize --scheme int4` holds {fitted['n_int8_matrices']} of {fitted['n_matrices']} matrices in int8, "
            f"{fitted['bytes'] / fitted['source_bytes']:.2f} of the bytes; took {fitted['seconds']:.0f} s; said KL "
            f"{fitted['kl_nats']:.4f} and a ratio of {fitted['perplexity_ratio']:.4f} of its own judged text.",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
