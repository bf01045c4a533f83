"""Tokens a second with drafts and without, in pairs, on texts that repeat and texts that do not, beside what is aimed at.

    python benchmarks/speculation/run.py --corpora FOLDER --models DIR [--dtypes bf16 int8] [--draft DIR] [--out runs/NAME]

FOLDER holds ``books`` and ``instruction``, as ``corpora`` of the shared assets. A model of 4.2M parameters (``--layers``
and ``--width`` make a larger one) is trained on programs, passages with summaries and chats (``corpora.py``), unless DIR has it
already, and asked about held-out ones. Every round starts a new engine for each way to draft, so that no answer of an earlier
round is known, and every answer is compared with the one without drafts.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import corpora
import recorded

from twostroke.core.families import layout, read_spec
from twostroke.core.recipe import recipe_from_dict
from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.training.start import train

HERE = Path(__file__).parent
N_ALONE, N_TOGETHER = 6, 32
PROMPT_TOKENS = 512
"""Of a text that is continued. Questions are as long as they are."""

SAME = 0.98
"""An aim of 1, no fewer tokens than without drafts, counts as reached from here on: two equal engines differ by as much."""

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 1}

Prompts = Callable[[random.Random, int], list[list[int]]]


@dataclass(frozen=True)
class Case:
    """``alone`` and ``together``: times the tokens a second without drafts that are aimed at, one request after another and 32
    at once."""

    prompts: Prompts
    sampling: dict[str, Any]
    output_tokens: int = 256
    alone: float = 1.0
    together: float = 1.0


def windows(texts: Iterable[str], tokenizer: Any, length: int, most: int = 64) -> list[list[int]]:
    """Token ids of texts that are long enough, their beginnings left out."""
    found: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text[:60_000]).ids
        if len(ids) >= 2 * length:
            found.append(list(ids[100:]))
        if len(found) == most:
            break
    if len(found) < 2:
        raise SystemExit(f"{len(found)} texts have at least {2 * length} tokens; 2 are needed.")
    return found


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


def asked(questions: Sequence[str], tokenizer: Any, most_tokens: int) -> Prompts:
    """Whole questions, of at most ``most_tokens``."""

    def prompts(r: random.Random, n: int) -> list[list[int]]:
        found: list[list[int]] = []
        for question in r.sample(questions, len(questions)):
            ids = list(tokenizer.encode(question).ids)
            if len(ids) <= most_tokens:
                found.append(ids)
            if len(found) == n:
                return found
        raise SystemExit(f"{len(found)} questions have at most {most_tokens} tokens; {n} are needed.")

    return prompts


def noise(vocab_size: int, length: int) -> Prompts:
    """Tokens at random: nothing repeats."""
    return lambda r, n: [[r.randrange(3, vocab_size) for _ in range(length)] for _ in range(n)]


def cases_of(folder: Path, tokenizer: Any) -> dict[str, Case]:
    """What is asked, by name. The aims are those of speculation by n-grams and suffixes: 1.9 times the tokens a second for
    programs and summaries, 1.4 for chats, with 32 requests 1.3 where texts repeat, and nowhere fewer than without."""
    code = windows(corpora.held_out(folder, "programs"), tokenizer, PROMPT_TOKENS)
    summaries = asked(corpora.held_out(folder, "summaries"), tokenizer, 768)
    chats = asked(corpora.held_out(folder, "chats"), tokenizer, 768)
    return {
        "code": Case(continued(code, PROMPT_TOKENS), GREEDY, alone=1.9),
        "code, drawn at 0.8": Case(continued(code, PROMPT_TOKENS), DRAWN),
        "code again": Case(again(code, PROMPT_TOKENS), GREEDY, alone=1.9, together=1.3),
        "summarising": Case(summaries, GREEDY, 160, alone=1.9, together=1.3),
        "summarising, drawn at 0.8": Case(summaries, DRAWN, 160),
        "chat": Case(chats, GREEDY, 160, alone=1.4),
        "chat, drawn at 0.8": Case(chats, DRAWN, 160),
        "noise, drawn at 2": Case(noise(tokenizer.get_vocab_size(), PROMPT_TOKENS), {"temperature": 2.0, "seed": 1}),
    }


def trained(folder: Path, shared: Path, steps: int, n_layers: int, d_model: int) -> Path:
    """The model of ``folder``, which is trained there if it is missing."""
    model = folder / "trained" / "model"
    if not (model / "config.json").is_file():
        corpora.write(shared, folder)
        done = train(recipe_from_dict(corpora.recipe(folder, folder / "trained", steps, n_layers, d_model)), log=print)
        assert done.model == model
    return model


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


def measured(model: Path, dtype: str, name: str, case: Case, n: int, ways: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each way to draft but the first, which is off."""
    params = SamplingParams(max_tokens=case.output_tokens, ignore_eos=True, **case.sampling)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for i in range(rounds):
        prompts = case.prompts(random.Random(i), n)
        for way in ways if i % 2 == 0 else ways[::-1]:
            found[way].append(measure(model, dtype, way, prompts, params, n == N_ALONE))
        for way in ways[1:]:
            assert found[way][-1]["tokens"] == found["off"][-1]["tokens"], f"{way} changed an answer of {name}"
    rows = []
    for way in ways[1:]:
        row = {"dtype": dtype, "text": name, "requests": 1 if n == N_ALONE else n, "drafts": way.split(":")[0]}
        row |= {"aim": case.alone if n == N_ALONE else case.together}
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
        rows.append(row | {"steps_off": sum(r["steps"] for r in found["off"]), "start_s": found[way][0]["start_s"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True, help="Where the model is, or will be.")
    parser.add_argument("--steps", type=int, default=300, help="Of training, 8,192 tokens each.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="A multiple of 128.")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--texts", nargs="+", help="Only these cases.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "last")
    args = parser.parse_args()
    conditions = recorded.conditions()
    model = trained(args.models, args.corpora, args.steps, args.layers, args.width)
    cases = cases_of(args.models, LLM(model).tokenizer)
    ways = ["off", "ngram", *([f"draft:{args.draft}"] if args.draft else [])]
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for dtype in args.dtypes:
        for name in args.texts or cases:
            for n in (N_ALONE, N_TOGETHER):
                new = measured(model, dtype, name, cases[name], n, ways, args.rounds)
                rows += new
                for row in new:
                    print(line(row), flush=True)
    about = conditions | {
        "python": platform.python_version(), "steps": args.steps,
        "n_parameters": sum(math.prod(entry.shape) for entry in layout(read_spec(model))), "rounds": args.rounds,
        "seconds": time.perf_counter() - began, "rows": rows,
    }  # fmt: skip
    recorded.write(args.out, {"result.json": about, "summary.md": summary(about)})


def summary(about: dict[str, Any]) -> str:
    """The table of a run, with what is aimed at."""
    names = "weights", "text", "requests", "drafts", "tok/s off → on", "ratio (rounds)", "aim", "of decoding"
    trained_how = f"{about['n_parameters']:,} parameters, trained for {about['steps']} steps"
    head = [f"{about['machine']}; {about['rounds']} rounds. {trained_how}.", ""]
    head += ["| " + " | ".join((*names, "right of drafted", "steps")) + " |", "|" + "---|" * 10]
    missed = sum(not _met(row) for row in about["rows"])
    foot = ["", f"{len(about['rows']) - missed} of {len(about['rows'])} medians reach their aim."]
    return "\n".join([*head, *map(line, about["rows"]), *foot]) + "\n"


def _met(row: dict[str, Any]) -> bool:
    return round(row["tok_per_s_ratio"], 2) >= (SAME if row["aim"] == 1 else row["aim"])


def line(row: dict[str, Any]) -> str:
    ratios = row["tok_per_s_ratios"]
    return (
        f"| {row['dtype']} | {row['text']} | {row['requests']} | {row['drafts']} | {row['tok_per_s_off']:.0f} → "
        f"{row['tok_per_s']:.0f} | {row['tok_per_s_ratio']:.2f} ({min(ratios):.2f}–{max(ratios):.2f}) | "
        f"≥ {row['aim']:g}{'' if _met(row) else ' **missed**'} | {row['decode_tok_per_s_ratio']:.2f} | "
        f"{row['right'] / max(1, row['drafted']):.2f} of {row['drafted']} | {row['steps_off']} → {row['steps']} |"
    )


if __name__ == "__main__":
    main()
