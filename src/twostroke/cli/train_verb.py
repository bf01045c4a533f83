"""``twostroke train`` trains a model by a TOML recipe and scores it on held-out text."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.hosts import Alone, Hosts
from twostroke.cli.notices import check_notice, watching
from twostroke.cli.rank import as_rank, is_rank
from twostroke.cli.training_progress import training_progress
from twostroke.cli.training_summary import summary_text
from twostroke.core.errors import ConfigError, InputError
from twostroke.core.parallel_recipe import MAX_LOCAL_RANKS

if TYPE_CHECKING:
    from twostroke.core.recipe import TrainRecipe
    from twostroke.data.shards import PreparedData
    from twostroke.model.decoder import Decoder
    from twostroke.training.finish import TrainingResult
    from twostroke.training.ranks import Ranks

LINGER_S = 4.0
"""Seconds that an open page has to fetch the last state of a run that is over."""

app = typer.Typer(add_completion=False)


@app.command()
def train(
    recipe: Path = typer.Argument(help="The run as a TOML file."),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in the recipe's output directory exactly."),
    settings: list[str] = typer.Option([], "--set", metavar="a.b=c", help="Override one recipe key. Repeatable."),
    watch: bool = typer.Option(False, "--watch", help="Serve a live page of the run on 127.0.0.1 while it lasts."),
    watch_port: int | None = typer.Option(
        None, "--watch-port", metavar="N", help="Port of that page; 0: any that is free. [8765 or next]"
    ),
    ranks: int | None = typer.Option(
        None, "--ranks", metavar="N", help="Processes that train together on this machine, by the recipe's [parallel]."
    ),
    max_restarts: int = typer.Option(
        0, "--max-restarts", metavar="N", help="With --ranks: how often ranks start again from the last checkpoint."
    ),
    min_ranks: int | None = typer.Option(
        None, "--min-ranks", metavar="N", help="With --max-restarts: go on with fewer ranks, but N, if as many fail again."
    ),
    rendezvous: str | None = typer.Option(
        None, "--rendezvous", metavar="HOST:PORT", help="With --ranks on several hosts: where that of index 0 listens."
    ),
    hosts: int | None = typer.Option(None, "--hosts", metavar="N", help="How many hosts run this command."),
    host_index: int | None = typer.Option(None, "--host-index", metavar="I", help="This one's number, from 0."),
    notice: str | None = typer.Option(
        None, "--interruption-notice", metavar="PATH|URL", help="A file or URL that says when this machine is taken away."
    ),
    beside: int = typer.Option(
        0, "--beside", metavar="N", min=0, max=MAX_LOCAL_RANKS - 1,
        help="Other runs that train on this machine meanwhile: threads and prediction are of a share of its cores.",
    ),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:  # fmt: skip
    """Train by a TOML recipe with checkpoints, then score the model on held-out text beside xz -9.

    The prediction is frozen in the ledger before the first step and what was measured is added after the last. Ctrl-C and
    SIGTERM write a checkpoint and exit with 75; --resume continues to the same losses and weights. `torchrun -m twostroke
    train RECIPE` trains on several ranks too, on one host or more.
    """
    from twostroke.core.recipe import read_recipe

    if ranks is None and is_rank():
        with watching(notice, _stop_this_process):
            _train_as_rank(recipe, settings, resume, as_json)
        return
    of_hosts = {"--rendezvous": rendezvous, "--hosts": hosts, "--host-index": host_index}
    of_ranks = {"--max-restarts": max_restarts or None, "--min-ranks": min_ranks, **of_hosts}
    if ranks is None and (useless := next((name for name, value in of_ranks.items() if value is not None), None)):
        raise InputError(f"{useless} needs --ranks N, the processes on this machine.")
    if beside and ranks is not None:
        raise InputError("--beside is of a run in one process. Leave it or --ranks out.")
    parsed = read_recipe(recipe, settings)  # before torch is imported, so that a wrong key is told at once
    with _watched(Path(parsed.output), watch_port) if watch or watch_port is not None else contextlib.nullcontext():
        if ranks is not None:
            options = ["--json"] * as_json + [word for setting in settings for word in ("--set", setting)]
            words = ["train", str(recipe), *options]
            faults = {"max_restarts": max_restarts, "min_ranks": min_ranks, "notice": notice}
            _launch(parsed, ranks, Hosts.parse(rendezvous, hosts, host_index), words, resume, faults)
            return
        with watching(notice, _stop_this_process):
            directory, summary = _scored(parsed, _train(parsed, resume, None, beside))
    emit({"directory": str(directory), **summary}, summary_text(directory, summary), as_json)


def _silent(line: str) -> None:
    pass


def _stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _launch(parsed: TrainRecipe, n: int, hosts: Hosts | Alone, words: list[str], resume: bool, faults: dict[str, Any]) -> None:
    """Train as ``n`` ranks on each of ``hosts``, and exit with their code if one failed, which has said why."""
    from twostroke.cli.launch import Launch, check_ranks, run_ranks
    from twostroke.core.parallel_recipe import ParallelRecipe
    from twostroke.training.parallelize import available_cores

    check_ranks(n)
    if faults["max_restarts"] < 0:
        raise InputError(f"--max-restarts {faults['max_restarts']} must be at least 0.")
    least = faults["min_ranks"]
    if least is not None and not 1 <= least <= n * hosts.n:
        raise InputError(f"--min-ranks {least} must be from 1 to the {n * hosts.n} ranks that are started.")
    if faults["notice"] is not None:
        check_notice(faults["notice"])
    asked = parsed.parallel or ParallelRecipe()

    def works_on(ranks: int) -> bool:
        with contextlib.suppress(ConfigError):
            asked.on(ranks, parsed.train.grad_accumulation)
            return True
        return False

    layout = asked.on(n * hosts.n, parsed.train.grad_accumulation)
    threads = layout.threads or max(1, available_cores() // n)
    run_ranks(Launch(words, Path(parsed.output), n, threads, resume, works_on, hosts=hosts, **faults))


def _train_as_rank(recipe: Path, settings: list[str], resume: bool, as_json: bool) -> None:
    """Train as one rank of several. The first one logs, scores the model and prints the result."""
    from twostroke.core.recipe import read_recipe

    with as_rank() as ranks:
        with ranks.agreed():
            parsed = read_recipe(recipe, settings)
        result = _train(parsed, resume, ranks)
    if ranks.is_first:
        directory, summary = _scored(parsed, result)
        emit({"directory": str(directory), **summary}, summary_text(directory, summary), as_json)


@contextlib.contextmanager
def _watched(directory: Path, port: int | None) -> Iterator[None]:
    """Serve the run's page inside. An open page can still fetch the run's last state."""
    from twostroke.report.watch import WatchServer

    server = WatchServer(directory, port)
    log(f"watch it at {server.url}")
    try:
        yield
    finally:
        server.close(linger_s=LINGER_S)


def _train(recipe: TrainRecipe, resume: bool, ranks: Ranks | None, beside: int = 0) -> TrainingResult:
    """Train, or find the run finished, with the other ``ranks`` if there are any, ``beside`` so many other runs."""
    import psutil

    from twostroke.training.loop import execute
    from twostroke.training.parallelize import use_available_cores
    from twostroke.training.start import describe, find_finished, lay_out, start

    laid_out = lay_out(recipe, ranks, log if ranks is None or ranks.is_first else _silent, beside)
    use_available_cores(laid_out.layout.threads, laid_out.n_local)
    result = find_finished(recipe, resume, laid_out)
    began = psutil.Process().create_time()
    if not laid_out.is_first:
        return result or execute(start(recipe, resume, ranks=laid_out), None, _score_briefly, command_began=began)
    if result is None:
        with progress("preparing data", 1.0) as advance:
            run = start(recipe, resume, log, advance, ranks=laid_out)
        log(describe(run))
        with training_progress(run.steps) as show:
            return execute(run, show, _score_briefly, command_began=began)
    log(f"the run in {result.directory} had finished: nothing is left to train.")
    return result


def _scored(recipe: TrainRecipe, result: TrainingResult) -> tuple[Path, dict[str, Any]]:
    """The directory and summary of a finished run, with its score on held-out text."""
    summary = result.summary
    if not {"heldout_bits_per_byte", "heldout_answer_nats_per_token"} & summary["measurement"].keys():
        summary = _score(result, summary.get("compute_dtype", recipe.train.compute_dtype))
    return result.directory, summary


def _score_briefly(decoder: Decoder, prepared: PreparedData) -> dict[str, float]:
    """Score on held-out text in the middle of a run (``train.evaluate_every``), in the format that is trained."""
    from twostroke.evaluation.bits import bits_per_byte, default_context
    from twostroke.evaluation.conversations import score_answers

    if prepared.holds_conversations:
        score = score_answers(decoder, prepared, default_context(decoder))
        return {"heldout_answer_nats_per_token": score.nats_per_token}
    context = decoder.spec.max_positions
    scored = bits_per_byte(decoder, prepared, ctx=context, stride=context, with_xz=False)
    return {"heldout_bits_per_byte": scored.bits_per_byte}


def _score(result: TrainingResult, dtype: str) -> dict[str, Any]:
    """Score the finished model on the run's held-out text as ``twostroke eval`` does, and add that to ledger and summary."""
    from twostroke.evaluation.bits import bits_per_byte, default_context
    from twostroke.evaluation.conversations import score_answers
    from twostroke.evaluation.held_out import held_out_to_score
    from twostroke.model.load import load_model
    from twostroke.planner.truth.recording import Planned, Recording
    from twostroke.training.parallelize import pick_device
    from twostroke.training.run_directory import RunDirectory, write_json

    text = held_out_to_score(result.model)
    with progress("scoring held-out text", 1.0) as advance:
        # Where it was trained: 2.7M tokens took 54 s on 16 cores beside a GPU that trained for one second.
        # In the format that was trained and will be served. fp32 takes several times as long if products of bf16 are fast.
        decoder = load_model(result.model, dtype, pick_device())
        if text.prepared is not None and text.prepared.holds_conversations:
            answers = score_answers(decoder, text.prepared, default_context(decoder), advance)
            values: dict[str, float | None] = {"heldout_answer_nats_per_token": answers.nats_per_token}
        else:
            scored = bits_per_byte(decoder, text, tokenizer_path=result.model, progress=advance)
            values = {"heldout_bits_per_byte": scored.bits_per_byte, "xz_bits_per_byte": scored.xz_bits_per_byte}
    summary = result.summary | {"measurement": result.summary["measurement"] | values}
    Recording(result.run_id, Planned(), log).measure(values)
    write_json(RunDirectory(result.directory).summary, summary)
    return summary
