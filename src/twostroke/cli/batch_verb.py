"""``twostroke batch`` computes a file of requests on this machine. Its prediction is frozen before, and measured after."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.bench_verb import compared
from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.engine_options import FROM_OPTIONS, with_engine_options
from twostroke.cli.opened_model import opened_model
from twostroke.core.adapter_names import LORA_HELP, adapters_of
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, Interrupted, TwostrokeError
from twostroke.core.units import format_count, format_money, format_seconds

if TYPE_CHECKING:
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.truth.recording import Planned
    from twostroke.server.batch.job import Computed, Job
    from twostroke.server.text import ModelText

app = typer.Typer(add_completion=False)

SHORTER = "answers ended before max_tokens: less work than was predicted."


@app.command(name="batch")
@with_engine_options
def batch(
    model: Path = typer.Argument(help="Model directory, the output of a training run, or a GGUF file."),
    given: Path = typer.Argument(metavar="INPUT", help="Requests, one JSON line each, in OpenAI's batch format."),
    output: Path = typer.Argument(help="File for the answers, in the order in which they are done."),
    errors: Path | None = typer.Option(None, help="File for requests that failed. Default: OUTPUT with .errors in its name."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the batch in OUTPUT that was stopped or killed."),
    served_name: list[str] = typer.Option(
        [], help="Name by which requests call the model. Repeatable. Default: the directory's name."
    ),
    lora: list[str] = typer.Option([], help=f"{LORA_HELP} Requests ask for the model NAME."),
    engine: EngineSettings = FROM_OPTIONS,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Compute a file of requests: chat completions, completions and scores, as `serve` answers them.

    All lines are checked before the first is computed. A batch that was stopped or killed goes on with --resume: each request
    is answered once, with the same bytes as without the interruption. Ctrl-C and SIGTERM exit with 75.
    """
    from twostroke.core.families import read_spec
    from twostroke.server.batch.job import BatchPaths, about, opened_job

    directory = opened_model(model)
    spec = read_spec(directory)
    spec.require_buildable()  # before anything starts, so that an unusable config.json is told at once
    names, adapters = tuple(served_name) or (directory.resolve().name,), adapters_of(lora)
    if taken := sorted(adapters.keys() & set(names)):
        raise ConfigError(f"--lora names an adapter {taken[0]!r}, as the model is called. Take another name.")
    paths = BatchPaths(given, output, errors or output.with_name(f"{output.stem}.errors{output.suffix}"))
    with opened_job(paths, about(directory, engine, names, adapters), (*names, *adapters), resume) as job:
        if job is None:
            emit({"output": str(output), "left": 0}, f"the batch in {output} had finished: nothing is left to do.", as_json)
            return
        if job.n_left:
            _compute(job, directory, spec, names, adapters, engine, as_json)
        else:
            job.finish()
            emit(_document(job), f"the batch in {output} was done but for its end: nothing is left to do.", as_json)


def _compute(
    job: Job, directory: Path, spec: ModelSpec, names: tuple[str, ...], adapters: Mapping[str, Path], engine: EngineSettings,
    as_json: bool,
) -> None:  # fmt: skip
    from twostroke.kernels.native_library import why_absent
    from twostroke.planner.truth.recording import recording
    from twostroke.server.batch.job import compute
    from twostroke.server.launch import ServeSettings, launch_engine
    from twostroke.server.text import ModelText

    if why := why_absent():
        log(f"answers may depend on what is computed beside them, and differ after --resume: {why}")
    command = ServeSettings(directory, engine, names).engine_command()
    # The engine needs seconds to import torch, in which this process reads a sample of the requests and plans.
    child = launch_engine(command)
    try:
        text, n_left = ModelText(directory), job.n_left
        plan = functools.partial(_planned, job, directory, spec, text, names, adapters, engine)
        inputs = {"directory": str(directory.resolve()), "requests": n_left, **engine.changed()}
        with recording("batch", f"{directory.resolve().name}, {job.paths.given.name}", inputs, plan, log) as run:
            log(_expected(n_left, run.prediction))
            with progress("batch", n_left) as advance:
                found = asyncio.run(
                    compute(
                        job, command, child, text, spec, names, adapters, run.meter, lambda ready: _noted(ready.notes),
                        lambda done, failed: advance(done, f"{done} done{f', {failed} failed' if failed else ''}"),
                    )
                )  # fmt: skip
            measured = _measured(found, n_left - job.n_left)
            measured = run.spent(measured) | measured
            shorter = "served_elapsed_s" in measured
            why_not = dict.fromkeys(("elapsed_s", "requests_per_s", "cost_usd", "energy_kwh"), SHORTER) if shorter else {}
            run.measure(measured, "interrupted" if found.stopped else "finished", why_not)
    finally:
        child.kill()
    if found.stopped:
        done = len(job.given) - job.n_left
        raise Interrupted(
            f"stopped by a signal. {done} of {len(job.given)} requests are in {job.paths.output}. --resume goes on with them."
        )
    job.finish()
    document = _document(job) | {"run_id": run.run_id, "prediction": run.prediction, "measurement": measured}
    if not job.output.done:
        document["error"] = error = f"no request was computed. {job.paths.errors} says why."
        log(f"error: {error}")
    emit(document, "\n".join([*_told(job, found), *compared(run.prediction, measured)]), as_json)
    if not job.output.done:
        raise typer.Exit(TwostrokeError.exit_code)  # the one document has said why


def _noted(notes: list[str]) -> None:
    for note in notes:
        log(note)


def _planned(
    job: Job, directory: Path, spec: ModelSpec, text: ModelText, names: tuple[str, ...], adapters: Mapping[str, Path],
    engine: EngineSettings,
) -> Planned:  # fmt: skip
    from twostroke.server.batch.job import AT_ONCE
    from twostroke.server.batch.prediction import asked_of, predict_batch, sampled

    left = job.left()
    places = sampled(left)
    longest = min(engine.max_model_len or spec.max_positions, spec.max_positions)
    named = {name: str(path) for name, path in adapters.items()}
    asked = asyncio.run(asked_of(job.given, places, text, spec, names, longest, named))
    share = len(places) / len(left)
    return predict_batch(directory, spec, engine.behind_http(), asked, share, len(left), AT_ONCE, [*adapters.values()])


def _expected(n_left: int, prediction: Mapping[str, Any]) -> str:
    if not prediction:
        return f"{n_left} requests"
    money = f", {format_money(prediction['cost_usd'])}" if "cost_usd" in prediction else ""
    return f"{n_left} requests: at most {format_seconds(prediction['elapsed_s'])}{money} predicted"


def _measured(found: Computed, n_done: int) -> dict[str, float]:
    """By the prediction's names, if all answers were as long as was predicted, else by the names ``served_…``."""
    if not n_done or found.elapsed_s <= 0:
        return {}
    prefix = "" if found.reasons.keys() <= {"length"} else "served_"
    prompt_tokens, output_tokens = found.totals["prompt_tokens"], found.totals["output_tokens"]
    values = {
        f"{prefix}elapsed_s": found.elapsed_s,
        f"{prefix}requests_per_s": n_done / found.elapsed_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    if output_tokens:
        values["output_tok_per_s"] = output_tokens / found.elapsed_s
    if "peak_memory_bytes" in found.engine:
        values["peak_memory_bytes"] = found.engine["peak_memory_bytes"]
    return values


def _document(job: Job) -> dict[str, Any]:
    errors = str(job.paths.errors) if job.errors.done else None
    counts = {"requests": len(job.given), "completed": len(job.output.done), "failed": len(job.errors.done)}
    return {"output": str(job.paths.output), "errors": errors, **counts, "left": job.n_left}


def _told(job: Job, found: Computed) -> list[str]:
    totals = found.totals
    lines = [f"answers   {len(job.output.done)} in {job.paths.output}"]
    if job.errors.done:
        lines.append(f"failed    {len(job.errors.done)} in {job.paths.errors}")
    tokens = f"{format_count(totals['prompt_tokens'])} prompt tokens, {format_count(totals['output_tokens'])} output tokens"
    return [*lines, f"time      {format_seconds(found.elapsed_s)}, {tokens}"]
