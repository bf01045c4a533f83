"""Published training runs against datasheet plans, nothing fitted: speed and memory, row by row. README.md says how to read it.

python benchmarks/planner/training_published/run.py --assets PATH [--out RUN]
"""

from __future__ import annotations

import argparse
import csv
import math
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import recorded

from twostroke.core.errors import ConfigError
from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec
from twostroke.core.units import GIB
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.intervals import with_intervals

CONFIGS = {
    "Llama-3.1-8B": "meta-llama--Meta-Llama-3.1-8B_config.json",
    "Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B_config.json",
    "Llama-3.1-405B": "meta-llama--Meta-Llama-3.1-405B_config.json",
}
SPECS = {
    # meta-llama/Llama-3.2-3B, config.json
    "Llama-3.2-3B": ModelSpec("llama", 128_256, 28, 3072, 24, 8, 128, 8192, 131_072, tied_embeddings=True),
}


@dataclass(frozen=True)
class Result:
    """One row: what was published, what is planned, or why it is not."""

    row: dict[str, str]
    plan: TrainingPlan | None
    refused: str = ""

    @property
    def is_of_the_job(self) -> bool:
        return "tok/s of the job" in self.row["note"]

    def measured(self, quantity: str) -> float | None:
        """Published tokens/s of a device, or bytes of memory."""
        text = self.row["tok_per_s_gpu" if quantity == "speed" else "mem_gib"]
        return float(text) * (1 if quantity == "speed" else GIB) if text else None

    def planned(self, quantity: str) -> float | None:
        if self.plan is None:
            return None
        if quantity == "memory":
            return self.plan.peak_memory_bytes
        return self.plan.tok_per_s / (1 if self.is_of_the_job else self.plan.layout.n_devices)

    def error(self, quantity: str) -> float | None:
        """planned ÷ published − 1."""
        measured, planned = self.measured(quantity), self.planned(quantity)
        return None if measured is None or planned is None else planned / measured - 1

    def is_inside(self, quantity: str) -> bool | None:
        """Whether the published value lies in the plan's interval."""
        measured = self.measured(quantity)
        if self.plan is None or measured is None:
            return None
        name = "train_tok_per_s" if quantity == "speed" else "peak_memory_bytes"
        value = self.planned(quantity)
        interval = with_intervals({name: value}, "datasheet", "train")[name]
        return bool(interval["low"] <= measured <= interval["high"])


def hardware_of(row: dict[str, str]) -> Hardware:
    """The row's device. torchtitan's H100 of 2024-12 have HBM2e and are held at 500 W, as its report says; the table names
    them by their family."""
    name = row["hardware"]
    return load_hardware("h100-sxm-500w" if row["source"].startswith("torchtitan 202412") and name == "h100-sxm" else name)


def spec_of(model: str, assets: Path) -> ModelSpec:
    return SPECS[model] if model in SPECS else read_spec(assets / "configs/hf" / CONFIGS[model])


def shape_of(row: dict[str, str]) -> TrainingShape:
    return TrainingShape(
        batch_size=int(row["batch"]),
        sequence_length=int(row["seq"]),
        grad_accumulation=int(row["grad_acc"]),
        dtype=row["dtype"],
        optimizer=row["optimizer"],
        compile=row["compile"] == "1",
        method=row["method"],
        lora_rank=int(row["lora_rank"] or 16),
        checkpointing=row["checkpointing"],
        logits=logits_of(row),
        optimizer_in_backward="optimizer in backward" in row["note"],
        offload_activations="cpu" if "activation offloading" in row["note"] else "none",
    )


def logits_of(row: dict[str, str]) -> str:
    """torchtune's chunks are of a list that holds all logits in bf16 (``CEWithChunkedOutputLoss``); the table calls them
    chunked."""
    return "listed" if row["source"].startswith("torchtune") and row["logits"] == "chunked" else row["logits"]


def layout_of(row: dict[str, str]) -> Layout:
    return Layout(
        **{name: int(row[name]) for name in ("data", "zero", "tensor", "pipeline", "interleave", "expert")},
        devices_per_node=min(8, int(row["gpus"])),
    )


def planned(row: dict[str, str], assets: Path) -> Result:
    try:
        spec = spec_of(row["model"], assets)
        return Result(row, plan_training(spec, shape_of(row), hardware_of(row), layout_of(row)))
    except ConfigError as error:
        return Result(row, None, str(error))


def results(assets: Path) -> list[Result]:
    with (assets / "profiles/training_published.csv").open() as rows:
        return [planned(row, assets) for row in csv.DictReader(rows)]


def line(name: str, found: Sequence[Result], quantity: str) -> str:
    """Median of the absolute errors, of the errors, share inside the interval."""
    errors = [e for r in found if (e := r.error(quantity)) is not None]
    if not errors:
        return f"| {name} | {quantity} | 0 | | | |"
    inside = [i for r in found if (i := r.is_inside(quantity)) is not None]
    absolute, signed = statistics.median(map(abs, errors)), statistics.median(errors)
    return f"| {name} | {quantity} | {len(errors)} | {absolute:.1%} | {signed:+.1%} | {sum(inside) / len(inside):.0%} |"


def summary(found: Sequence[Result]) -> str:
    """The tables of summary.md."""
    groups = {
        "all": found,
        "full, bf16": [r for r in found if r.row["method"] == "full" and "bf16" in r.row["dtype"]],
        "full, fp8": [r for r in found if r.row["method"] == "full" and r.row["dtype"] == "fp8"],
        "adapters": [r for r in found if r.row["method"] != "full"],
    }
    head = ["| rows | of | n | median error | median bias | inside 90% |", "|---|---|---|---|---|---|"]
    lines = [line(name, some, quantity) for quantity in ("speed", "memory") for name, some in groups.items()]
    return "\n".join([*head, *lines, "", *row_lines(found)]) + "\n"


def row_lines(found: Iterable[Result]) -> list[str]:
    lines = [
        "| model | device | how | tok/s | planned | error | GiB | planned | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        how = " ".join(
            (r.row["dtype"], r.row["method"], r.row["checkpointing"], "compiled" if r.row["compile"] == "1" else "eager",
             f"{r.row['batch']}×{r.row['seq']}", r.row["logits"], r.row["optimizer"])
        )  # fmt: skip
        cells = [cell for q, unit in (("speed", 1.0), ("memory", GIB)) for cell in cells_of(r, q, unit)]
        lines.append(f"| {r.row['model']} | {r.row['gpus']} {r.row['hardware']} | {how} | {' | '.join(cells)} |")
        if r.refused:
            lines.append(f"| | | not planned: {r.refused} | | | | | | |")
    return lines


def cells_of(result: Result, quantity: str, unit: float) -> list[str]:
    """Published, planned and the error, as text; empty where they are not known."""
    values = (result.measured(quantity), result.planned(quantity))
    error = result.error(quantity)
    return [
        *("" if v is None else f"{v / unit:,.{0 if unit == 1 else 1}f}" for v in values),
        "" if error is None else f"{error:+.0%}",
    ]


def write_predictions(found: Iterable[Result], path: Path) -> None:
    """Every row with its predictions and residuals ln(measured ÷ planned)."""
    with path.open("w", newline="") as file:
        writer = None
        for r in found:
            extra = {"refused": r.refused}
            for quantity in ("speed", "memory"):
                value, error = r.planned(quantity), r.error(quantity)
                extra[f"planned_{quantity}"] = "" if value is None else f"{value:.6g}"
                extra[f"residual_{quantity}"] = "" if error is None else f"{-math.log1p(error):.4f}"
            writer = writer or csv.DictWriter(file, [*r.row, *extra])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(r.row | extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = results(arguments.assets)
    print(summary(found))
    if arguments.out:
        about = f"{recorded.command()}\nPython {platform.python_version()}\n"
        recorded.write(arguments.out, {"summary.md": summary(found), "command.txt": about})
        write_predictions(found, arguments.out / "predictions.csv")


if __name__ == "__main__":
    main()
