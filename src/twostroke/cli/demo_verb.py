"""``twostroke demo`` runs the whole path once. It calls the other verbs in child processes, as a person would.

Each stage's result is kept in ``<directory>/stages.json``, written whole after the stage. Another run of the demo goes on
with the first stage that is missing there. An interrupted training continues from its checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import twostroke
from twostroke.cli.console import JSON_HELP, emit, log
from twostroke.core.aside import make_parent, write_text
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, Interrupted, TwostrokeError
from twostroke.core.recipe import read_recipe
from twostroke.core.schemes import DEFAULT_WRITTEN, scheme_of
from twostroke.core.units import format_bytes, format_count, format_flop_rate, format_seconds

if TYPE_CHECKING:
    from twostroke.report.cards import Card

app = typer.Typer(add_completion=False)

Result = dict[str, Any]
OWN_RECIPE = Path(twostroke.__file__).parent / "recipes" / "demo.toml"
"""The package's recipe. In a checkout its folder is a link to the repository's recipes."""

LOAD = ("--users", "4", "--requests", "64", "--prompt-tokens", "64", "--output-tokens", "64")
"""The demo's traffic: four users, who each send the next request when the last one is answered."""


@dataclass(frozen=True)
class Demo:
    """One demo: its directory, and the recipe and budget of its training."""

    directory: Path
    recipe: Path
    budget_s: float

    @property
    def run_directory(self) -> Path:
        return self.directory / "train"

    @property
    def model(self) -> Path:
        return self.run_directory / "model"

    @property
    def quantised_model(self) -> Path:
        return self.directory / f"model-{DEFAULT_WRITTEN}"

    @property
    def report(self) -> Path:
        return self.directory / "report.html"

    @property
    def settings(self) -> list[str]:
        """Keys of the recipe that are overridden."""
        return [f"train.budget_s={self.budget_s:g}", f"output={self.run_directory}"]

    @property
    def recipe_arguments(self) -> list[str]:
        """Recipe and overrides, for `plan train` and `train` alike, so that both are about one run."""
        return [str(self.recipe), *(word for each in self.settings for word in ("--set", each))]


def verb(*args: str) -> Result:
    """Run ``twostroke <args> --json`` in a child, with its progress on our stderr. Raises the error that the child reports,
    with its exit code: 130 after Ctrl-C."""
    command = [sys.executable, "-m", "twostroke", *args, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        output = None
        while output is None:
            try:
                output, _ = child.communicate()
            except KeyboardInterrupt:
                continue  # Ctrl-C reached the child as well, which may need a moment to write a checkpoint
    try:
        document = json.loads(output)
    except ValueError:
        document = {}
    if child.returncode == Interrupted.exit_code:
        raise Interrupted(f"stopped in `twostroke {args[0]}` after a checkpoint. Run the demo again to continue.")
    if child.returncode != 0:
        error = TwostrokeError(document.get("error") or f"`twostroke {' '.join(args)}` exited with {child.returncode}.")
        error.is_told = "error" in document
        error.exit_code = child.returncode if child.returncode > 0 else 128 - child.returncode
        raise error
    return dict(document)


def _calibrate(demo: Demo) -> tuple[Result, str]:
    """The machine's profile if it holds by `doctor`'s rules, else a new one."""
    from twostroke.cli.doctor.advice import needs_calibration
    from twostroke.cli.doctor.facts import read_facts
    from twostroke.core.profile import CALIBRATION_TIME, load_profile

    reasons = needs_calibration(read_facts())
    stored = None if reasons else load_profile("serve")
    if stored is None:
        log(f"      {' '.join(reasons)} It is measured now, which takes {CALIBRATION_TIME}.")
        profile, source = verb("calibrate"), ""
    else:
        profile, source = plain(stored), f"as measured {stored.measured_at} (`twostroke calibrate` measures again): "
    rates = profile["peak_flop_per_s"]
    shown = {"bf16": "bf16 in training", scheme_of("bf16").native_product: "bf16"}
    shown[scheme_of(DEFAULT_WRITTEN).native_product] = f"{DEFAULT_WRITTEN} in serving"
    peaks = ", ".join(f"{words} {format_flop_rate(rates[name])}" for name, words in shown.items() if name in rates)
    slowest = min(p["bytes_per_s"] for p in profile["read_bandwidth"])
    words = f"reads {format_bytes(slowest)}/s from memory; products: {peaks}"
    return profile, f"{source}{profile['fingerprint']['cpu_model']}: {words}"


def _prepare(demo: Demo) -> tuple[Result, str]:
    recipe = read_recipe(demo.recipe).data
    options = ["--vocab-size", str(recipe.vocab_size), "--held-out-fraction", f"{recipe.held_out_fraction:g}"]
    data = verb("data", "prepare", *recipe.sources, *options)
    return data, (
        f"{format_count(data['n_train_tokens'])} tokens to train on, "
        f"{format_bytes(data['n_heldout_bytes'])} of text held out, vocabulary {data['vocab_size']}"
    )


def _plan(demo: Demo) -> tuple[Result, str]:
    plan = verb("plan", "train", *demo.recipe_arguments)
    prediction = plan["prediction"]
    return plan, (
        f"{format_count(plan['parameters']['total'])} parameters, {plan['shape']['steps']} steps; predicted "
        f"{format_count(prediction['train_tok_per_s'])} tok/s and {format_seconds(prediction['train_time_s'])}"
    )


def _train(demo: Demo) -> tuple[Result, str]:
    started = (demo.run_directory / "recipe.json").is_file()
    run = verb("train", *demo.recipe_arguments, *(["--resume"] if started else []))
    measured = run["measurement"]
    bits, xz = measured["heldout_bits_per_byte"], measured["xz_bits_per_byte"]
    return run, (
        f"{format_seconds(measured['train_time_s'])}, {format_count(measured['train_tok_per_s'])} tok/s; held-out text takes "
        f"{bits:.3f} bits per byte, with xz -9 {xz:.3f}: "
        + ("the model is the better compressor" if bits < xz else "xz is still the better compressor")
    )


def _quantize(demo: Demo) -> tuple[Result, str]:
    verb(
        "quantize", str(demo.model), str(demo.quantised_model), "--replace"
    )  # replaces what an interrupted run of this stage has left
    quality = verb("compare", str(demo.model), str(demo.quantised_model), "--dtype", "bf16")
    return quality, (
        f"{DEFAULT_WRITTEN}: perplexity × {quality['perplexity_ratio']:.5f}, {format_bytes(quality['b']['model_bytes'])} "
        f"instead of {format_bytes(quality['a']['model_bytes'])}"
    )


def _serve(demo: Demo) -> tuple[Result, str]:
    load = verb("bench", "serve", str(demo.quantised_model), *LOAD)
    measured = load["measurement"]
    return load, (
        f"ready {format_seconds(load['server']['startup_s'])} after the start; {measured['output_tok_per_s']:.0f} tok/s "
        f"to 4 users, median TTFT {format_seconds(measured['ttft_s'])}, TPOT {format_seconds(measured['tpot_s'])}"
    )


STAGES: dict[str, tuple[str, Callable[[Demo], tuple[Result, str]]]] = {
    "calibrate": ("Calibrate this machine", _calibrate),
    "data": ("Prepare the text", _prepare),
    "plan": ("Plan", _plan),
    "train": ("Train", _train),
    "quantize": ("Quantise", _quantize),
    "serve": ("Serve and load", _serve),
}


def _read_stages(file: Path) -> dict[str, Result]:
    try:
        stages = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return stages if isinstance(stages, dict) else {}


def _quantised_card(quality: Result) -> Card:
    from twostroke.report.cards import Card

    sizes = f"{format_bytes(quality['b']['model_bytes'])} instead of {format_bytes(quality['a']['model_bytes'])}"
    return Card(f"Quantised to {DEFAULT_WRITTEN}", f"× {quality['perplexity_ratio']:.4f}", f"perplexity against bf16; {sizes}")


def _compare(demo: Demo, stages: dict[str, Result]) -> tuple[Result, str]:
    """The table and the report of the stages' runs, from the ledger."""
    from twostroke.ledger.store import Ledger
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.text.comparison import comparison_text
    from twostroke.planner.truth.document import plan_document
    from twostroke.report.page import write_report
    from twostroke.report.phases import compare_runs, phases_table

    ledger, machines = Ledger(), (load_hardware("this", "train"), load_hardware("this", "serve"))
    train, bench = ledger.get(stages["train"]["run_id"]), ledger.get(stages["serve"]["run_id"])
    server = stages["serve"]["server"].get("run_id")
    comparison = compare_runs(train, bench, [ledger.get(server)] if server else [], *machines)
    write_report(demo.report, ledger, phases_table(comparison), [_quantised_card(stages["quantize"])])
    return plan_document("compare", comparison) | {"report": str(demo.report)}, comparison_text(comparison)


@app.command(name="demo")
def demo(
    directory: Path = typer.Option(Path("runs/demo"), help="Where the demo keeps its files, in a folder for each budget."),
    recipe: Path = typer.Option(None, help="Recipe of the training run. Default: the package's own."),
    budget_s: float = typer.Option(300.0, help="Seconds of training."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Run the whole path once: calibrate, plan, train, evaluate, quantise, serve, load, compare.

    Another run continues from what is done. At the end stand training beside inference, predicted beside measured, and the
    path of an HTML report.
    """
    recipe = recipe or OWN_RECIPE
    if not recipe.is_file():
        raise ConfigError(f"recipe {recipe} does not exist. Leave --recipe out for the package's own.")
    if not 0 < budget_s < float("inf"):
        raise ConfigError(f"--budget-s {budget_s:g} must be above 0.")
    here = Demo(directory / f"{budget_s:g}s", recipe, budget_s)
    read_recipe(recipe, here.settings)  # what is wrong is told before the minutes of calibration
    file = here.directory / "stages.json"
    make_parent(file)
    stages = _read_stages(file)
    began = time.monotonic()
    for number, (name, (title, work)) in enumerate(STAGES.items(), start=1):
        heading = f"[{number}/{len(STAGES) + 1}] {title}"
        if name in stages:
            log(f"{heading}: done before. {stages[name]['line']}")
            continue
        log(heading)
        start = time.monotonic()
        result, line = work(here)
        worked_s = time.monotonic() - start
        stages[name] = result | {"line": line, "worked_s": worked_s}
        write_text(file, json.dumps(stages))
        log(f"      {line} ({format_seconds(worked_s)})")
    log(f"[{len(STAGES) + 1}/{len(STAGES) + 1}] Compare")
    document, text = _compare(here, stages)
    worked_s = sum(stage.get("worked_s", 0.0) for stage in stages.values())
    document |= {"stages": {n: s["line"] for n, s in stages.items()}, "worked_s": worked_s}
    document["elapsed_s"] = time.monotonic() - began
    write_text(here.directory / "comparison.json", json.dumps(document, default=str))
    write_text(here.directory / "comparison.txt", text + "\n")
    text = f"{text}\n\nreport: {here.report.resolve()}\nall of it took {format_seconds(document['elapsed_s'])}"
    emit(document, text, as_json)
