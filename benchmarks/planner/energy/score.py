"""Scores planned power and energy against public measurements of H100s that serve, none of which any time was fitted to.

    python benchmarks/planner/energy/score.py --assets PATH [--out DIR]

PATH (or TWOSTROKE_ASSETS) holds profiles/ and configs/. ``READ_J_PER_BYTE`` is the one constant of the power model that these
rows helped to choose; it is also fitted without each model in turn, and each model is scored with the others' value.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import recorded

from twostroke.core.families import spec_from_config
from twostroke.ledger.code_version import code_version
from twostroke.planner.hardware.tables import hardware_names, load_hardware
from twostroke.planner.money import power
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape

TABLE = "profiles/serving_energy_h100.csv"
MODELS = {
    "Llama-3.1-8B": "meta-llama--Meta-Llama-3.1-8B_config.json",
    "Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B_config.json",
    "Llama-3.1-405B": "meta-llama--Meta-Llama-3.1-405B_config.json",
    "Qwen3-8B": "Qwen--Qwen3-8B_config.json",
    "Qwen3-30B-A3B": "Qwen--Qwen3-30B-A3B_config.json",
}
PROMPT_TOKENS = {"lm-arena-chat": 128, "gpqa": 256}
"""Not published: guesses, the same for every row of a task."""


@dataclass(frozen=True)
class Row:
    """A measured row and its plan. W of all devices."""

    model: str
    task: str
    batch: int
    devices: int
    watts: float
    joules_per_token: float
    tok_per_s: float
    plan: ServingPlan

    @property
    def kind(self) -> str:
        return "dense" if self.plan.spec.moe is None else "experts"

    def planned_watts(self) -> float:
        """With the seconds that the plan has."""
        shape, plan = self.plan.shape, self.plan
        parts = plan.prompt_busy.times(shape.prompts), plan.step_busy.times(shape.output_tokens)
        return self.devices * power.mean_watts(parts, plan.hardware)

    def watts_in_measured_time(self) -> float:
        """The plan's seconds of reading and computing, spread over the time that was measured."""
        busy = [self.plan.prompt_busy.times(self.batch), self.plan.step_busy.times(self.plan.shape.output_tokens)]
        whole = power.Busy(*map(sum, zip(*busy, strict=True)))
        taken_s = self.batch * self.plan.shape.output_tokens / self.tok_per_s
        return self.devices * power.mean_watts((whole._replace(seconds=taken_s),), self.plan.hardware)

    def planned_joules(self) -> float:
        """Of a token, end to end: planned watts times planned time."""
        return self.planned_watts() / self.plan.output_tok_per_s


def read_rows(assets: Path) -> list[Row]:
    found = []
    hardware = load_hardware("h100-sxm")
    for row in csv.DictReader((assets / TABLE).read_text(encoding="utf-8").splitlines()):
        spec = spec_from_config(json.loads((assets / "configs/hf" / MODELS[row["model"]]).read_text(encoding="utf-8")))
        batch, devices = round(float(row["avg_batch"])), int(row["gpus"])
        shape = ServingShape(
            batch=batch, prompt_tokens=PROMPT_TOKENS[row["task"]], output_tokens=round(float(row["avg_output"])),
            scheme="fp8" if row["precision"] == "fp8" else "bf16", tensor=devices, expert=int(row["expert"]), engine="vllm",
        )  # fmt: skip
        measured = float(row["watts"]), float(row["joules_per_token"]), float(row["out_tok_per_s"])
        found.append(Row(row["model"], row["task"], batch, devices, *measured, plan_serving(spec, shape, hardware)))
    return found


def fitted(rows: Sequence[Row]) -> float:
    """J a byte with the least median |ln(planned ÷ measured)| of watts over ``rows``."""

    def cost(joules: float) -> float:
        power.READ_J_PER_BYTE = joules
        return median(abs(math.log(row.planned_watts() / row.watts)) for row in rows)

    shipped = power.READ_J_PER_BYTE
    best = min((1e-12 * tenth for tenth in range(80, 200)), key=cost)
    power.READ_J_PER_BYTE = shipped
    return best


def left_out(rows: Sequence[Row]) -> tuple[dict[str, float], list[float]]:
    """J a byte without each model, and each row's planned ÷ measured watts with the value of the other models."""
    without = {model: fitted([row for row in rows if row.model != model]) for model in MODELS}
    shipped, ratios = power.READ_J_PER_BYTE, []
    for row in rows:
        power.READ_J_PER_BYTE = without[row.model]
        ratios.append(row.planned_watts() / row.watts)
    power.READ_J_PER_BYTE = shipped
    return without, ratios


def errors(name: str, rows: Sequence[Row], ratios: Iterable[float]) -> list[str]:
    """Table rows of planned ÷ measured: all, by kind and by model."""
    ratios, lines = list(ratios), []
    groups: dict[str, Callable[[Row], bool]] = {"all": lambda row: True}
    groups |= {kind: lambda row, kind=kind: row.kind == kind for kind in ("dense", "experts")}
    groups |= {model: lambda row, model=model: row.model == model for model in MODELS}
    for group, belongs in groups.items():
        found = [ratio - 1 for row, ratio in zip(rows, ratios, strict=True) if belongs(row)]
        away = sorted(map(abs, found))
        p90 = away[min(len(away) - 1, int(0.9 * len(away)))]
        lines.append(f"| {name} | {group} | {len(found)} | {median(away):.1%} | {p90:.1%} | {median(found):+.1%} |")
    return lines


def allowed_by_datasheets() -> list[tuple[str, float]]:
    """(accelerator, pJ a bit that reading at its datasheet's full rate may take at most, so that the board stays below its
    limit), the least first."""
    found = []
    for name in hardware_names():
        device = load_hardware(name)
        if device.kind == "gpu":
            above = device.watts.value - device.idle_watts.value
            found.append((name, 1e12 * above / device.read_bandwidth[-1].bytes_per_s / 8))
    return sorted(found, key=lambda pair: pair[1])


def summary(rows: Sequence[Row]) -> str:
    without, unseen = left_out(rows)
    shipped = 1e12 * power.READ_J_PER_BYTE / 8
    allowed = allowed_by_datasheets()
    below = [f"| {name} | {most:.1f} |" for name, most in allowed if most < shipped]
    tables = [
        ("watts", (row.planned_watts() / row.watts for row in rows)),
        ("watts, constant of the other models", unseen),
        ("watts in the measured time", (row.watts_in_measured_time() / row.watts for row in rows)),
        ("watts, the board's limit always", (row.devices * row.plan.hardware.watts.value / row.watts for row in rows)),
        ("tokens/s", (row.plan.output_tok_per_s / row.tok_per_s for row in rows)),
        ("joules a token, planned time", (row.planned_joules() / row.joules_per_token for row in rows)),
        ("joules a token, measured time", (row.planned_watts() / row.tok_per_s / row.joules_per_token for row in rows)),
    ]
    fits = ", ".join(f"{1e12 * joules / 8:.1f} without {model}" for model, joules in without.items())
    residuals = {
        "watts": sorted(math.log(row.watts / row.planned_watts()) for row in rows),
        "joules a token": sorted(math.log(row.joules_per_token / row.planned_joules()) for row in rows),
    }
    ranges = [
        f"| {name} | {r[round(0.05 * (len(r) - 1))]:+.3f} | {r[round(0.95 * (len(r) - 1))]:+.3f} |"
        for name, r in residuals.items()
    ]
    return "\n".join([
        "# Planned power and energy beside measured, H100s that serve",
        "",
        f"{len(rows)} rows, planned ÷ measured − 1; bias is the median with its sign.",
        "",
        "| quantity | rows | n | median error | p90 | bias |",
        "|---|---|---:|---:|---:|---:|",
        *(line for name, ratios in tables for line in errors(name, rows, ratios)),
        "",
        f"Energy of reading, pJ a bit ({shipped:.1f} shipped): {fits}.",
        "",
        f"Of {len(allowed)} accelerators with a datasheet these could not read at their full rate with the shipped constant "
        "and stay below their board's limit. They are planned at the limit, which is more than they draw:",
        "",
        "| accelerator | pJ a bit, at most |",
        "|---|---:|",
        *below,
        "",
        "Middle 90% of ln(measured ÷ planned):",
        "",
        "| quantity | low | high |",
        "|---|---:|---:|",
        *ranges,
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=os.environ.get("TWOSTROKE_ASSETS"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.assets is None:
        parser.error("name the folder of the assets: --assets PATH")
    rows = read_rows(Path(given.assets))
    text = summary(rows)
    print(text)
    if given.out is None:
        return
    about = f"twostroke {code_version()}, Python {platform.python_version()}, {sys.platform}"
    recorded.write(given.out, {"summary.md": text, "command.txt": f"{recorded.command()}\n{about}\n"})
    with (given.out / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(
            [
                "model",
                "task",
                "batch",
                "devices",
                "watts",
                "planned_watts",
                "joules_per_token",
                "planned_joules",
                "tok_per_s",
                "planned_tok_per_s",
            ]
        )
        for row in rows:
            out.writerow([row.model, row.task, row.batch, row.devices, row.watts, f"{row.planned_watts():.1f}",
                          row.joules_per_token, f"{row.planned_joules():.4g}", row.tok_per_s,
                          f"{row.plan.output_tok_per_s:.1f}"])  # fmt: skip


if __name__ == "__main__":
    main()
