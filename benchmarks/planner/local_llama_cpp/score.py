"""Scores `plan serve --engine llama.cpp` on public rows of llama-bench, none of which its constants were fitted to row by row.

    python benchmarks/planner/local_llama_cpp/score.py --assets PATH [--out DIR]

PATH (or TWOSTROKE_ASSETS) holds profiles/local_llama_cpp_2024.csv and configs/. ``tokens`` are those generated from an empty
context, so the mean context is half of it, or those of the prompt.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import recorded

from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import strategy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.truth.intervals import with_intervals

TABLE = "profiles/local_llama_cpp_2024.csv"
CONFIGS = {"Llama-3-8B": "Meta-Llama-3-8B.json", "Llama-3-70B": "meta-llama--Meta-Llama-3.1-70B_config.json"}
"""Llama-3.1-70B has the matrices of Llama-3-70B."""

READ_OFF = {("a6000", 1, "Llama-3-8B"), ("apple-m2-ultra", 1, "Llama-3-8B")}
"""(device, devices, model) of the rows that a constant was read off: how decoding slows down from 512 to 8,192 tokens."""


def tokens_per_s(spec: ModelSpec, hardware: str, scheme: str, devices: int, tokens: int) -> dict[str, float]:
    """The planned rates of generating ``tokens`` from one token on, and of a prompt of ``tokens``."""
    machine = load_hardware(hardware)
    answer = ServingShape(scheme, 1, 1, tokens, pipeline=devices, engine="llama.cpp")
    prompt = ServingShape(scheme, 1, tokens, 1, pipeline=devices, engine="llama.cpp")
    return {
        "decode": 1 / strategy_of(spec, answer, machine).decode_s(),
        "prompt": tokens / strategy_of(spec, prompt, machine).prefill_s(),
    }


def read_rows(assets: Path) -> list[dict[str, Any]]:
    specs = {name: read_spec(assets / "configs/hf" / file) for name, file in CONFIGS.items()}
    rows = []
    for row in csv.DictReader((assets / TABLE).read_text(encoding="utf-8").splitlines()):
        devices, tokens = int(row["devices"]), int(row["tokens"])
        planned = tokens_per_s(specs[row["model"]], row["hardware"], row["quant"], devices, tokens)
        for what, column in (("decode", "tg_tok_per_s"), ("prompt", "pp_tok_per_s")):
            measured = float(row[column])
            range_of = with_intervals(
                {f"{'decode' if what == 'decode' else 'prefill'}_tok_per_s": planned[what]}, "local", "serve"
            )
            (interval,) = range_of.values()
            rows.append({
                "what": what, "hardware": row["hardware"], "devices": devices, "model": row["model"], "quant": row["quant"],
                "tokens": tokens, "measured": measured, "planned": round(planned[what], 2),
                "error": round(planned[what] / measured - 1, 4),
                "inside": interval["low"] <= measured <= interval["high"],
                "read_off": what == "decode" and (row["hardware"], devices, row["model"]) in READ_OFF,
            })  # fmt: skip
    return rows


def line(name: str, rows: Iterable[dict[str, Any]]) -> str:
    found = list(rows)
    errors = [row["error"] for row in found]
    worst = max(errors, key=lambda error: abs(math.log1p(error)))
    inside = sum(row["inside"] for row in found) / len(found)
    return f"| {name} | {len(found)} | {median(map(abs, errors)):.1%} | {median(errors):+.1%} | {worst:+.0%} | {inside:.0%} |"


HEAD = "| rows | n | median error | median bias | worst | inside the 90% interval |\n|---|---|---|---|---|---|"


def table(rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> list[str]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return [line(name, found) for name, found in groups.items()]


def is_mac(row: dict[str, Any]) -> bool:
    return str(row["hardware"]).startswith("apple-")


def summary(rows: list[dict[str, Any]]) -> str:
    lines = ["# llama.cpp, planned and measured", "", HEAD]
    for what in ("decode", "prompt"):
        mine = [row for row in rows if row["what"] == what]
        one = [row for row in mine if not is_mac(row) and row["devices"] == 1]
        lines.append(line(f"{what}, Apple", filter(is_mac, mine)))
        lines.append(line(f"{what}, NVIDIA, one device", one))
        lines.append(line(f"{what}, NVIDIA, several devices", (r for r in mine if not is_mac(r) and r["devices"] > 1)))
        if what == "decode":
            lines.append(line("decode, without the rows that a constant was read off", (r for r in mine if not r["read_off"])))
    for what in ("decode", "prompt"):
        mine = [row for row in rows if row["what"] == what]
        lines += ["", f"## {what.capitalize()}", "", HEAD]
        lines += table(mine, lambda r: f"{r['devices']} × {r['hardware']}, {r['model']}, {r['quant']}")
    worst = sorted(rows, key=lambda row: -abs(math.log1p(row["error"])))[:12]
    lines += ["", "## The worst", "", "| row | planned tok/s | measured | error |", "|---|---|---|---|"]
    lines += [
        f"| {r['what']}, {r['devices']} × {r['hardware']}, {r['model']}, {r['quant']}, {r['tokens']} tokens "
        f"| {r['planned']:.1f} | {r['measured']:.1f} | {r['error']:+.0%} |"
        for r in worst
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--assets", type=Path, default=os.environ.get("TWOSTROKE_ASSETS"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = read_rows(Path(asked.assets))
    text = summary(rows)
    print(text)
    if asked.out is not None:
        about = f"{recorded.command()}\n{date.today()}, Python {platform.python_version()}\n"
        recorded.write(asked.out, {"summary.md": text, "command.txt": about})
        with (asked.out / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
