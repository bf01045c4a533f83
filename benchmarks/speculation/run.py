"""Tokens a second with drafts and without, in pairs, on texts that repeat and texts that do not.

    python benchmarks/speculation/run.py MODEL --code FOLDER --prose FOLDER [--draft DIR] [--dtypes bf16 int8] [--out runs/NAME]

FOLDER holds text that MODEL was not trained on (.py and .txt files). Every round starts a new engine for each way to draft, so
that no answer of an earlier round is known, and every answer is compared with the one without drafts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams

HERE = Path(__file__).parent
N_ALONE, N_TOGETHER = 6, 32

Prompts = Callable[[random.Random, int], list[list[int]]]


def windows(folder: Path, suffix: str, tokenizer: Any, length: int, most: int = 64) -> list[list[int]]:
    """Token ids of the folder's texts that are long enough, the beginnings of files left out."""
    found = []
    for path in sorted(folder.rglob(f"*{suffix}"))[: 4 * most]:
        ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="ignore")[:60_000]).ids
        if len(ids) >= 2 * length:
            found.append(list(ids[100:]))
    if len(found) < 2:
        raise SystemExit(f"{folder} has {len(found)} texts of at least {2 * length} tokens; 2 are needed.")
    return found[:most]


def continued(texts: Sequence[Sequence[int]], length: int) -> Prompts:
    """A text, to be continued."""

    def prompts(r: random.Random, n: int) -> list[list[int]]:
        chosen = [texts[i % len(texts)] for i in range(n)]
        return [list(text[(at := r.randrange(len(text) - length)) : at + length]) for text in chosen]

    return prompts


def again(texts: Sequence[Sequence[int]], length: int) -> Prompts:
    """A text and its beginning once more, as where a program is edited or a document quoted."""

    def prompts(r: random.Random, n: int) -> list[list[int]]:
        found = []
        for i in range(n):
            text = texts[i % len(texts)]
            at = r.randrange(len(text) - length)
            found.append(list(text[at : at + length - 48]) + list(text[at : at + 48]))
        return found

    return prompts


def noise(vocab_size: int, length: int) -> Prompts:
    """Tokens at random: nothing repeats."""
    return lambda r, n: [[r.randrange(3, vocab_size) for _ in range(length)] for _ in range(n)]


def measure(
    model: Path, dtype: str, speculate: str, prompts: list[list[int]], params: SamplingParams, alone: bool
) -> dict[str, Any]:
    """One engine, all prompts: one after another if ``alone``, else together."""
    began = time.perf_counter()
    llm = LLM(model, dtype=dtype, speculate=speculate)
    start_s = time.perf_counter() - began
    llm.generate([prompts[0][:16]], SamplingParams(temperature=0.0, max_tokens=2))  # the threads and the packed weights
    before, began = llm.stats(), time.perf_counter()
    outputs = [llm.generate([p], params)[0] for p in prompts] if alone else llm.generate(prompts, params)
    seconds, after = time.perf_counter() - began, llm.stats()
    tokens = [answer.token_ids for output in outputs for answer in output.outputs]
    return {
        "tokens": tokens,
        "start_s": start_s,
        "tok_per_s": sum(map(len, tokens)) / seconds,
        "decode_tok_per_s": (after.decode_tokens - before.decode_tokens) / (after.decode_s - before.decode_s),
        "drafted": after.draft_tokens - before.draft_tokens,
        "right": after.accepted_draft_tokens - before.accepted_draft_tokens,
        "steps": after.decode_steps - before.decode_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--prose", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--texts", nargs="+", help="Only these cases.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "last")
    args = parser.parse_args()
    tokenizer, length = LLM(args.model).tokenizer, args.prompt_tokens
    code, prose = windows(args.code, ".py", tokenizer, length), windows(args.prose, ".txt", tokenizer, length)
    greedy = {"temperature": 0.0}
    cases: dict[str, tuple[Prompts, dict[str, Any]]] = {
        "code": (continued(code, length), greedy),
        "code, drawn at 0.8": (continued(code, length), {"temperature": 0.8, "seed": 1}),
        "code again": (again(code, length), greedy),
        "prose": (continued(prose, length), greedy),
        "prose, drawn at 0.8": (continued(prose, length), {"temperature": 0.8, "seed": 1}),
        "noise, drawn at 2": (noise(tokenizer.get_vocab_size(), length), {"temperature": 2.0, "seed": 1}),
    }
    ways = ["off", "ngram", *([f"draft:{args.draft}"] if args.draft else [])]
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for name, (prompts_of, sampling) in cases.items():
            if args.texts and name not in args.texts:
                continue
            params = SamplingParams(max_tokens=args.output_tokens, ignore_eos=True, **sampling)
            for n in (N_ALONE, N_TOGETHER):
                found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
                for i in range(args.rounds):
                    prompts = prompts_of(random.Random(i), n)
                    for way in ways if i % 2 == 0 else ways[::-1]:
                        found[way].append(measure(args.model, dtype, way, prompts, params, n == N_ALONE))
                    for way in ways[1:]:
                        assert found[way][-1]["tokens"] == found["off"][-1]["tokens"], f"{way} changed an answer of {name}"
                for way in ways[1:]:
                    row = {"dtype": dtype, "text": name, "requests": 1 if n == N_ALONE else n, "drafts": way.split(":")[0]}
                    for rate in ("tok_per_s", "decode_tok_per_s"):
                        pairs = [(a[rate], b[rate]) for a, b in zip(found["off"], found[way], strict=True)]
                        row |= {
                            f"{rate}_off": statistics.median(a for a, _ in pairs),
                            rate: statistics.median(b for _, b in pairs),
                        }
                        row |= {
                            f"{rate}_ratio": statistics.median(b / a for a, b in pairs),
                            f"{rate}_ratios": [b / a for a, b in pairs],
                        }
                    drafted, right = (sum(r[field] for r in found[way]) for field in ("drafted", "right"))
                    row |= {"drafted": drafted, "right": right, "steps": sum(r["steps"] for r in found[way])}
                    row |= {"steps_off": sum(r["steps"] for r in found["off"]), "start_s": found[way][0]["start_s"]}
                    rows.append(row)
                    print(line(row), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=True).stdout.strip()
    about = {
        "commit": commit, "processor": _processor(), "python": platform.python_version(), "model": args.model.name,
        "prompt_tokens": length, "output_tokens": args.output_tokens, "rounds": args.rounds, "rows": rows,
    }  # fmt: skip
    (args.out / "result.json").write_text(json.dumps(about, indent=1) + "\n")
    head = ["| weights | text | requests | drafts | tok/s off → on | ratio | of decoding | rounds | right of drafted | steps |"]
    (args.out / "README.md").write_text(
        "\n".join([*head, "|---|---|---|---|---|---|---|---|---|---|", *map(line, rows)]) + "\n"
    )


def line(row: dict[str, Any]) -> str:
    ratios = row["decode_tok_per_s_ratios"]
    return (
        f"| {row['dtype']} | {row['text']} | {row['requests']} | {row['drafts']} | {row['tok_per_s_off']:.0f} → "
        f"{row['tok_per_s']:.0f} | {row['tok_per_s_ratio']:.2f} | {row['decode_tok_per_s_ratio']:.2f} | "
        f"{min(ratios):.2f}–{max(ratios):.2f} | {row['right'] / max(1, row['drafted']):.2f} of {row['drafted']} | "
        f"{row['steps_off']} → {row['steps']} |"
    )


def _processor() -> str:
    names = [part.split(":", 1)[1].strip() for part in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in part]
    return f"{len(names)} × {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
