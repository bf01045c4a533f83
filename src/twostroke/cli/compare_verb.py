"""``twostroke compare`` puts two models side by side: quality on the same text and questions, speed, cost and size."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from twostroke.cli.console import JSON_HELP, emit, progress
from twostroke.cli.eval_verb import ENGINE_HELP, FORMATS_HELP, TASK_DATA_HELP, TASK_HELP
from twostroke.core.paths import model_directory
from twostroke.core.units import format_bytes, format_count

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    a: Path = typer.Argument(help="Model directory or training run to compare with."),
    b: Path = typer.Argument(help="Model directory or training run that is compared."),
    data: list[str] = typer.Option([], help="Files, folders or globs to score, all of them. Repeatable."),
    prepared: Path | None = typer.Option(
        None, help="Prepared data whose held-out part is scored. Default: that of A's training run, if it has one."
    ),
    task: list[str] = typer.Option([], help=TASK_HELP),
    task_data: Path | None = typer.Option(None, help=TASK_DATA_HELP),
    limit: int | None = typer.Option(None, min=1, help="Only the first questions of each task."),
    engine: str = typer.Option("auto", help=ENGINE_HELP),
    context: int | None = typer.Option(
        None, help="Tokens in a window of text. Default: the shorter of the models' longest, 2048 at most."
    ),
    stride: int | None = typer.Option(None, help="Tokens by which windows move. Default: three quarters of the context."),
    dtype: str | None = typer.Option(
        None, help="fp32, bf16 or fp16: the format both compute in. Default: fp32; on the inference engine, its own choice."
    ),
    head_dtype: str = typer.Option("auto", help=f"How B's output head is held, not A's: {FORMATS_HELP}"),
    kv_dtype: str = typer.Option("auto", help=f"How B's keys and values are cached, not A's: {FORMATS_HELP}"),
    speed: bool = typer.Option(True, help="Measure prefill and decode of both on the inference engine, by turns."),
    hardware: str | None = typer.Option(
        None, help="Machine whose price per token is predicted. Default: this one, if it is calibrated."
    ),
    max_perplexity_ratio: float | None = typer.Option(None, help="Fail if B's perplexity is more than this times A's."),
    min_accuracy_difference: float | None = typer.Option(
        None, help="Fail if B − A of a task's accuracy is less; -0.01 allows one point."
    ),
    max_slowdown: float | None = typer.Option(None, help="Fail if B's prefill or decode takes more than this times A's time."),
    max_size_ratio: float | None = typer.Option(None, help="Fail if B takes more than this times A's bytes on disk."),
    max_cost_ratio: float | None = typer.Option(
        None, help="Fail if a token of B is predicted to cost more than this times A's."
    ),
    strict: bool = typer.Option(
        False, help="Quality thresholds must hold for the whole 95% interval, not only for its middle."
    ),
    text_key: str = typer.Option("text", help="Key of a .jsonl record that holds its text."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Compare two models: quality with paired 95% intervals, speed, predicted cost, size. Exits 1 if a threshold fails."""
    from twostroke.cli.side_measurements import costs, machine_of, side_recording, side_values, speeds, training_rates
    from twostroke.evaluation.comparison import compare_on_tasks, compare_on_text, open_sides
    from twostroke.evaluation.engines import engine_formats
    from twostroke.evaluation.held_out import held_out_to_score
    from twostroke.evaluation.task_files import load_task
    from twostroke.evaluation.thresholds import Thresholds

    thresholds = Thresholds(max_perplexity_ratio, min_accuracy_difference, max_slowdown, max_size_ratio, max_cost_ratio, strict)
    model_directory(b)  # checked first: what follows takes time
    directory = model_directory(a)
    tasks = [load_task(name, task_data) for name in task]
    has_own = (directory.parent / "recipe.json").is_file()
    wants_text = bool(data) or prepared is not None or has_own or not tasks
    text = held_out_to_score(directory, data, prepared, text_key) if wants_text else None
    machine = machine_of(hardware)
    thresholds.require(text is not None, bool(tasks), speed, machine is not None)
    sides = open_sides(a, b, engine, dtype, engine_formats(head_dtype, kv_dtype))
    result: dict[str, Any] = {name: side.record() for name, side in zip("ab", sides, strict=True)}
    result["size_ratio"] = result["b"]["model_bytes"] / result["a"]["model_bytes"]
    inputs = {"text": text.name if text else None, "tasks": list(task), "limit": limit}
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(side_recording(side, sides, inputs, speed)) for side in sides]
        if text is not None:
            with progress("scoring", 1.0) as advance:
                result |= compare_on_text(*sides, text, context, stride, advance)
        if tasks:
            with progress("tasks", 1.0) as advance:
                result["tasks"] = compare_on_tasks(*sides, tasks, limit, advance)
        if speed:
            result["speed"] = speeds(sides)
        for run, name in zip(runs, "ab", strict=True):
            run.measure(side_values(result, name))
    result["run_ids"] = [run.run_id for run in runs]
    result["training"] = training_rates(sides)
    result["cost"] = None if machine is None else costs(sides, machine)
    checks = thresholds.checks(result)
    passed = all(c.passed for c in checks) if checks else None
    result |= {"max_perplexity_ratio": max_perplexity_ratio, "checks": checks, "passed": passed}
    lines = _table(result)
    if checks:
        lines += ["", *(c.text() for c in checks)]
    emit(result, "\n".join(lines), as_json)
    if passed is False:
        raise typer.Exit(1)


def _table(result: Mapping[str, Any]) -> list[str]:
    """A table with a column for each model, and one for B beside A with its 95% interval."""
    rows: list[tuple[str, ...]] = [("", "A", "B", "B beside A")]

    def row(*cells: str) -> None:
        rows.append(cells)

    a, b = result["a"], result["b"]
    if "unit" in result:
        key = "bits_per_byte" if result["unit"] == "bits per byte" else "nats_per_token"
        low, high = result[f"interval_{key}"]
        error = result[f"standard_error_{key}"]
        interval = f"[{low:+.5f}, {high:+.5f}]" if math.isfinite(error) else "of unknown error"
        row(
            result["unit"], f"{a[key]:.4f}", f"{b[key]:.4f}", f"{result[f'difference_{key}']:+.5f} {interval}: {result['b_is']}"
        )
        row("perplexity", "", "", f"× {result['perplexity_ratio']:.5f}")
    for task in result.get("tasks", ()):
        for name, m in task["metrics"].items():
            beside = f"{m['value']:+.4f}"
            if m["low"] is not None:
                beside += f" [{m['low']:+.4f}, {m['high']:+.4f}], p = {m['p_value']:.2g}"
            row(f"{task['task']} {name}", f"{m['a']:.4f}", f"{m['b']:.4f}", f"{beside}, n = {task['n_examples']}")
    for point in result.get("speed", ()):
        for phase in ("prefill", "decode"):
            rates = [f"{point[side][f'{phase}_tok_per_s']:,.0f}" for side in "ab"]
            low, high = point[f"{phase}_ratio_range"]
            beside = f"× {point[f'{phase}_ratio']:.3f} measured, {low:.2f} to {high:.2f} over the rounds"
            row(f"{phase} tok/s, batch {point['batch']}", *rates, beside)
    if any(result["training"].values()):
        rates = [f"{result['training'][s]:,.0f}" if result["training"][s] else "–" for s in "ab"]
        row("training tok/s", *rates, "measured when they were trained")
    if result["cost"] is not None:
        cost = result["cost"]
        prices = [f"${cost[s]['usd_per_mtok']:.4g}" for s in "ab"]
        row("a million tokens", *prices, f"× {cost['ratio']:.3f} predicted, {cost['hardware']}, batch {cost['batch']}")
    row("on disk", format_bytes(a["model_bytes"]), format_bytes(b["model_bytes"]), f"× {result['size_ratio']:.3f}")
    row("parameters", format_count(a["parameters"]), format_count(b["parameters"]), "")
    row("scored by", f"{a['engine']}, {a['formats']}", f"{b['engine']}, {b['formats']}", "")
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    lines = [f"{r[0]:{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]}".rstrip() for r in rows]
    return [
        f"A  {a['model']}",
        f"B  {b['model']}",
        "",
        *lines,
        "",
        "Intervals hold 95%, paired over the same text and questions.",
    ]
