"""Peak memory of each of two ranks beside what the plan says of it. See README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded
from started import asked, home_with, said

from twostroke.core.recipe import TrainRecipe, recipe_from_dict, spec_from_recipe
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.measurement import StepRecord
from twostroke.training.ranks import joined
from twostroke.training.start import train

RANKS, STEPS, PORT, VOCABULARY = 2, 6, 29521, 4096

SIZES: dict[str, dict[str, int]] = {
    "12M": {"n_layers": 6, "d_model": 384, "n_heads": 6, "d_ff": 1024},
    "45M": {"n_layers": 8, "d_model": 640, "n_heads": 10, "d_ff": 1920},
}
LAYOUTS: dict[str, dict[str, int]] = {
    "DDP": {"data": RANKS},
    "ZeRO-2": {"shard": RANKS, "zero": 2},
    "ZeRO-3": {"shard": RANKS, "zero": 3},
}
BATCHES = {"4 × 512": (4, 512, 1), "1 × 256, 4 a rank": (1, 256, 4)}
"""Rows and tokens of a micro-batch, and micro-batches of a rank: activations of many tokens, and sums of many gradients."""

Case = tuple[str, str, bool, str]
"""Size, layout, ``exact``, batch."""

CASES: list[Case] = [
    (size, layout, exact, batch) for batch in BATCHES for size in SIZES for layout in LAYOUTS for exact in (True, False)
]


def name_of(case: Case) -> str:
    size, layout, exact, batch = case
    return f"{size}, {layout}{', exact' if exact else ''}, {batch}"


def recipe_of(folder: Path, case: Case) -> TrainRecipe:
    size, layout, exact, batch = case
    rows, tokens, each = BATCHES[batch]
    settings = {"batch_size": rows, "sequence_length": tokens, "grad_accumulation": each * RANKS, "steps": STEPS}
    return recipe_from_dict(
        {
            "output": str(folder / "run"),
            "model": {"family": "llama", **SIZES[size]},
            "data": {"sources": ["stdlib"], "vocab_size": VOCABULARY},
            "train": settings,
            "parallel": {"threads": 1, "exact": exact, **LAYOUTS[layout]},
        }
    )


def planned(case: Case, hardware: Hardware) -> dict[str, float]:
    """Bytes by term on a rank, and in all."""
    recipe = recipe_of(Path(), case)
    spec = spec_from_recipe(recipe.model, VOCABULARY, recipe.train.sequence_length)
    layout = layout_of(recipe.parallel, spec, sharing=RANKS)
    return plan_training(spec, TrainingShape.from_recipe(recipe), hardware, layout).memory_and_peak


def as_rank(folder: Path, name: str) -> None:
    """Train, and print the highest memory of the process since its first step began."""
    peaks: list[int] = []

    def after(record: StepRecord, eta_s: float) -> None:
        peaks.append(record.peak_memory_bytes)

    case = next(case for case in CASES if name_of(case) == name)
    with joined() as ranks:
        train(recipe_of(folder, case), ranks=ranks, on_step=after)
    print(json.dumps(max(peaks)))


def measured(home: Path, name: str) -> list[int]:
    """Peak memory of each rank, whose compiler begins with an empty cache, as a first run's does."""
    return [int(answer) for answer in said(home, __file__, name, RANKS, PORT, threads=1, own_cache=True)]


def error_of(row: dict[str, Any]) -> float:
    """Plan over the rank that peaked highest, less 1."""
    return float(row["planned"]["peak"] / max(row["peaks"]) - 1.0)


def summary(results: dict[str, Any]) -> str:
    rows = results["rows"]
    lines = [
        f"{results['machine']}; torch {results['torch']}, Twostroke {results['twostroke']}",
        f"In {results['dtype']}, compiled, AdamW; two ranks of a thread each.",
        "",
        "| model, layout, micro-batch | plan, MB | measured, each rank, MB | plan ÷ measured − 1 |",
        "|---|---|---|---|",
    ]
    for row in rows:
        peaks = " and ".join(f"{peak / 1e6:.0f}" for peak in row["peaks"])
        lines.append(f"| {row['name']} | {row['planned']['peak'] / 1e6:.0f} | {peaks} | {error_of(row):+.1%} |")
    lines += ["", "| layout | median error | largest |", "|---|---|---|"]
    for layout in (*LAYOUTS, ""):
        errors = [error_of(row) for row in rows if layout in row["name"]]
        if not errors:  # --only left it out
            continue
        most = max(errors, key=abs)
        lines.append(f"| {layout or 'all'} | {statistics.median(map(abs, errors)):.1%} | {most:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="Measure the cases whose name has this in it.")
    arguments = asked(parser, as_rank)
    chosen = [case for case in CASES if arguments.only in name_of(case)]
    if not chosen:
        parser.error(f"--only {arguments.only!r} is in no case. One is: {name_of(CASES[0])}")
    conditions, hardware = recorded.conditions(), load_hardware("this", "train", "cpu")
    rows: list[dict[str, Any]] = []
    with home_with(recipe_of(Path(), CASES[0]).data) as home:
        for case in chosen:
            name = name_of(case)
            rows.append({"name": name, "planned": planned(case, hardware), "peaks": measured(home, name)})
            print(json.dumps(rows[-1]), flush=True)
    dtype = TrainingShape.from_recipe(recipe_of(Path(), CASES[0])).on(hardware).dtype
    results = conditions | {"dtype": dtype, "rows": rows}
    recorded.write(arguments.out, {"results.json": results, "summary.md": summary(results)})
    print(summary(results))


if __name__ == "__main__":
    main()
