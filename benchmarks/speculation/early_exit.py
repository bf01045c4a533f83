"""What training with an exit loss costs and what drafts by early exit then gain, on two models that differ in that alone.

    python benchmarks/speculation/early_exit.py train --text FOLDER --models DIR [--hours 1]
    python benchmarks/speculation/early_exit.py measure --models DIR [--exits 1 3 4] [--dtypes bf16 int8] [--out runs/NAME]
    python benchmarks/speculation/early_exit.py losses --models DIR --out runs/NAME

FOLDER holds text (.txt files), as ``corpora/books`` of the shared assets. A model of 12 layers and 13.9M parameters is trained
on it twice, from one seed, on the same tokens in the same order: with layer dropout and the exit loss, and without. Both are
scored on the files that were held out. ``measure``, which wants the machine to itself, has both continue passages of these with
every way to draft; each answer must be the one without. Where `twostroke exits` has fitted a threshold to a model, it
decodes with unchecked exits too. ``losses`` writes the tables again, with losses of models that were trained since.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded
from run import HERE, N_ALONE, N_TOGETHER, continued, measure, windows

from twostroke.core.fitted_exits import FITTED_EXITS, read_fitted_exits
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.training.start import train

WITH_EXITS = {"layer_dropout": 0.1, "exit_loss": 0.5, "exits_per_step": 2}
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
MAX_SCORED_WINDOWS = 160
HELD_OUT, TRAINED = "held-out", "trained.json"


def recipe(texts: list[Path], held_out: list[Path], out: Path, hours: float, steps: int, exits: bool) -> TrainRecipe:
    """``steps`` 0: as many as fit into ``hours``."""
    settings: dict[str, Any] = {"steps": steps} if steps else {"budget_s": hours * 3600}
    settings |= {"batch_size": 16, "sequence_length": 512, "optimizer": "muon", "learning_rate": 4e-3, "weight_decay": 0.0}
    settings |= {"schedule": "linear", "warmup_fraction": 0.02, "checkpoint_every": 50}
    return recipe_from_dict(
        {
            "output": str(out),
            "model": {
                "family": "qwen3",
                "n_layers": 12,
                "d_model": 320,
                "n_heads": 5,
                "n_kv_heads": 1,
                "head_dim": 64,
                "d_ff": 896,
            },
            "data": {"sources": [*map(str, texts)], "held_out": [*map(str, held_out)], "vocab_size": 2048},
            "train": settings | (WITH_EXITS if exits else {}),
        }
    )


def held_out_nats(model: Path, texts: list[Path]) -> float:
    """Nats a token of ``texts`` in windows of 512 tokens, by the engine that serves the model."""
    llm = LLM(model, dtype="fp32")
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    cut = []
    for path in texts:
        ids = llm.tokenizer.encode(path.read_text(encoding="utf-8")).ids
        cut += [ids[at : at + 511] for at in range(0, len(ids) - 511, 512)]
    cut = cut[:: max(1, len(cut) // MAX_SCORED_WINDOWS)]
    scores = [entry.logprob for output in llm.generate(cut, params) for entry in output.prompt_logprobs or () if entry]
    return -statistics.fmean(scores)


def texts_of(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]


def speeds(model: Path, dtype: str, ways: list[str], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Of each way but the first, which is off: ratios over the rounds, turn about, and how many drafts were right."""
    texts = windows(texts_of(folder), LLM(model).tokenizer, PROMPT_TOKENS)
    rows = []
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1}):
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, **sampling)
        for n in (N_ALONE, N_TOGETHER):
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for i in range(rounds):
                prompts = continued(texts, PROMPT_TOKENS)(random.Random(i), n)
                for way in ways if i % 2 == 0 else ways[::-1]:
                    found[way].append(measure(model, dtype, way, prompts, params, n == N_ALONE))
                for way in ways[1:]:
                    assert found[way][-1]["tokens"] == found["off"][-1]["tokens"], f"{way} changed an answer"
            for way in ways[1:]:
                pairs = zip(found["off"], found[way], strict=True)
                ratios = [drafted["decode_tok_per_s"] / plain["decode_tok_per_s"] for plain, drafted in pairs]
                drafted, right = (sum(each[name] for each in found[way]) for name in ("drafted", "right"))
                row = {"dtype": dtype, "temperature": sampling["temperature"], "requests": 1 if n == N_ALONE else n}
                row |= {"drafts": way, "ratio": statistics.median(ratios), "ratios": ratios}
                rows.append(row | {"drafted": drafted, "right": right})
    return rows


def train_both(text: Path, models: Path, hours: float, steps: int) -> None:
    files = sorted(text.glob("*.txt"))
    if len(files) < 4:
        raise SystemExit(f"{text} has {len(files)} .txt files; 4 are needed, of which 2 are held out.")
    held_out, texts = files[:2], files[2:]
    aside = models / HELD_OUT
    aside.mkdir(parents=True, exist_ok=True)
    for path in held_out:
        (aside / path.name).write_bytes(path.read_bytes())
    about = []
    for exits in (True, False):  # the first decides how many steps both have
        name = "with exit loss" if exits else "without"
        done = train(recipe(texts, held_out, models / name.replace(" ", "-"), hours, steps, exits), log=print)
        steps, measured = int(done.summary["steps"]), done.summary["measurement"]
        row = {"trained": name, "model": str(done.model.relative_to(models)), "steps": steps}
        row |= {"n_parameters": done.summary["n_parameters"], "held_out_nats": held_out_nats(done.model, held_out)}
        predicted = done.summary["prediction"].get("step_time_s")
        about.append(row | {"step_time_s": measured.get("step_time_s"), "predicted_step_time_s": predicted})
        print(json.dumps(row), flush=True)
        (models / TRAINED).write_text(json.dumps(about, indent=1) + "\n")


def unchecked(model: Path, folder: Path, rounds: int) -> dict[str, Any] | None:
    """Decoding with the exits that were fitted to ``model`` beside that without, one request at a time, turn about."""
    if not (model / FITTED_EXITS).is_file():
        return None
    fitted = read_fitted_exits(model)
    texts = windows(texts_of(folder), LLM(model).tokenizer, PROMPT_TOKENS)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0)
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    exits: dict[int, int] = {}
    for i in range(rounds):
        prompts = continued(texts, PROMPT_TOKENS)(random.Random(i), N_ALONE)
        for way in [*rates] if i % 2 == 0 else [*rates][::-1]:
            llm = LLM(model, dtype=fitted.dtype, early_exit=way)
            llm.generate([prompts[0][:16]], SamplingParams(temperature=0.0, max_tokens=2))
            before = llm.stats()
            for prompt in prompts:
                llm.generate([prompt], params)
            after = llm.stats()
            rates[way].append((after.decode_tokens - before.decode_tokens) / (after.decode_s - before.decode_s))
            if way != "off":
                exits = {layers: exits.get(layers, 0) + n - before.exits[layers] for layers, n in after.exits.items()}
    ratios = [a / b for a, b in zip(rates["auto"], rates["off"], strict=True)]
    return dataclasses.asdict(fitted) | {"ratio": statistics.median(ratios), "ratios": ratios, "exits": exits}


def measure_models(args: argparse.Namespace) -> None:
    models = json.loads((args.models / TRAINED).read_text())
    ways = ["off", *(f"exit:{layers}" for layers in args.exits), *args.others]
    conditions, found = recorded.conditions(), {}
    for model in models:
        path, rows = args.models / model["model"], []
        for dtype in args.dtypes:
            rows += speeds(path, dtype, ways, args.models / HELD_OUT, args.rounds)
        found[model["trained"]] = {"rows": rows, "unchecked": unchecked(path, args.models / HELD_OUT, args.rounds)}
        for row in rows:
            print(f"  {line(row)}", flush=True)
    recorded.write(args.out, {"result.json": conditions | {"settings": WITH_EXITS, "measured": found}})
    write_tables(args.models, args.out)


def write_tables(models: Path, out: Path) -> None:
    file = out / "result.json"
    result = json.loads(file.read_text())
    result["models"] = about = json.loads((models / TRAINED).read_text())
    file.write_text(json.dumps(result, indent=1) + "\n")
    lines = [f"{result['machine']}. {about[0]['n_parameters']:,} parameters, 12 layers, {result['settings']}.", ""]
    lines += ["| trained | steps | nats a held-out token | s a step |", "|---|---|---|---|"]
    lines += [f"| {m['trained']} | {m['steps']} | {m['held_out_nats']:.4f} | {m['step_time_s'] or 0:.3f} |" for m in about]
    measured = result["measured"].items()
    lines += ["", "| trained | weights | temperature | requests | drafts | of decoding | rounds | right of drafted |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    lines += [f"| {name} {line(row)}" for name, each in measured for row in each["rows"]]
    fitted = [(name, each["unchecked"]) for name, each in measured if each["unchecked"]]
    if fitted:
        lines += ["", "Unchecked exits, one greedy request at a time:", ""]
        names = "trained", "weights", "may change", "threshold", "changed", "extra nats", "of decoding", "rounds", "predicted"
        lines += ["| " + " | ".join((*names, "left after")) + " |"]
        lines += ["|" + "---|" * 10]
    for name, f in fitted:
        n = sum(f["exits"].values())
        left = ", ".join(f"{layers}: {count / n:.0%}" for layers, count in f["exits"].items())
        lines.append(
            f"| {name} | {f['dtype']} | {f['most_changed']:.0%} | {f['threshold']:g} | {f['changed']:.2%} | "
            f"{f['extra_nats']:+.4f} | "
            f"{f['ratio']:.2f} | {min(f['ratios']):.2f}–{max(f['ratios']):.2f} | {f['predicted_speed']:.2f} | {left} |"
        )
    (out / "summary.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    training, measuring, telling = (verbs.add_parser(name) for name in ("train", "measure", "losses"))
    for each in (training, measuring, telling):
        each.add_argument("--models", type=Path, required=True)
    training.add_argument("--text", type=Path, required=True)
    training.add_argument("--hours", type=float, default=1.0, help="Of training each model.")
    training.add_argument("--steps", type=int, default=0, help="Instead of hours.")
    measuring.add_argument("--exits", type=int, nargs="+", default=[1, 3, 4])
    measuring.add_argument("--others", nargs="*", default=["ngram", "auto"], help="Other ways to draft.")
    measuring.add_argument("--dtypes", nargs="+", default=["bf16", "int8"])
    measuring.add_argument("--rounds", type=int, default=3)
    for each in (measuring, telling):
        each.add_argument("--out", type=Path, default=HERE / "runs" / "early-exit")
    args = parser.parse_args()
    if args.verb == "train":
        train_both(args.text, args.models, args.hours, args.steps)
    elif args.verb == "measure":
        measure_models(args)
    else:
        write_tables(args.models, args.out)


def line(row: dict[str, Any]) -> str:
    ratios = row["ratios"]
    return (
        f"| {row['dtype']} | {row['temperature']} | {row['requests']} | {row['drafts']} | {row['ratio']:.2f} | "
        f"{min(ratios):.2f}–{max(ratios):.2f} | {row['right'] / max(1, row['drafted']):.2f} of {row['drafted']} |"
    )


if __name__ == "__main__":
    main()
