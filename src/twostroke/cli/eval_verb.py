"""``twostroke eval`` measures bits per byte and perplexity of a model on held-out text, and scores it on tasks."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.opened_model import opened_model
from twostroke.cli.rank import as_rank, is_rank
from twostroke.cli.typed import typed_again
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from twostroke.evaluation.division import Division
    from twostroke.evaluation.held_out import HeldOutText
    from twostroke.evaluation.results import TaskResult
    from twostroke.evaluation.scorer import Scorer
    from twostroke.evaluation.task import Task
    from twostroke.planner.truth.recording import Planned
    from twostroke.training.ranks import Ranks

app = typer.Typer(add_completion=False)

TASK_HELP = "Task to score: arc_easy, copa, gsm8k, lambada, piqa, or a .toml file that describes one. Repeatable."
TASK_DATA_HELP = "Folder of the tasks' .jsonl files. Default: eval in Twostroke's home; for a .toml file, its own folder."
ENGINE_HELP = (
    "decoder (training's forward pass), inference (what serves), or auto: inference for quantised weights, else decoder."
)
FORMATS_HELP = "as `generate` takes it, scored by the inference engine, which rounds as it serves."


@app.command(name="eval")
def evaluate(
    command: typer.Context,
    model: Path = typer.Argument(help="Model directory, the output of a training run, or a GGUF file."),
    data: list[str] = typer.Option([], help="Files, folders or globs to score, all of them. Repeatable."),
    prepared: Path | None = typer.Option(
        None, help="Prepared data whose held-out part is scored. Default, without a task: the training run's."
    ),
    task: list[str] = typer.Option([], help=TASK_HELP),
    task_data: Path | None = typer.Option(None, help=TASK_DATA_HELP),
    limit: int | None = typer.Option(None, min=1, help="Only the first questions of each task."),
    engine: str = typer.Option("auto", help=ENGINE_HELP),
    context: int | None = typer.Option(None, help="Tokens in a window of text. Default: the model's longest, 2048 at most."),
    stride: int | None = typer.Option(
        None, help="Tokens by which windows move; context − stride overlap. Default: three quarters of the context."
    ),
    dtype: str | None = typer.Option(
        None,
        help="fp32, bf16 or fp16: the format the model computes in. Default: fp32; on the inference engine, its own choice.",
    ),
    head_dtype: str = typer.Option("auto", help=f"How the output head is held: {FORMATS_HELP}"),
    kv_dtype: str = typer.Option("auto", help=f"How keys and values are cached: {FORMATS_HELP}"),
    layer_by_layer: bool = typer.Option(
        False, "--layer-by-layer", help="Have one layer in memory at a time. For the decoder: the same bits, of any model."
    ),
    ranks: int | None = typer.Option(
        None, "--ranks", metavar="N", help="Processes on this machine that share the work, to the same bits."
    ),
    text_key: str = typer.Option("text", help="Key of a .jsonl record that holds its text."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Measure bits per byte and perplexity on held-out text, beside xz -9 of the same bytes, and scores on tasks.

    `torchrun -m twostroke eval MODEL` shares the work over several ranks too, on one host or more.
    """
    if ranks is not None:
        _start_ranks(typed_again(command, "ranks"), ranks)
        return
    if limit is not None and not task:
        raise ConfigError(f"limit={limit} is of a task's questions, and no --task is given. Name one, or leave --limit out.")
    from twostroke.evaluation.engines import engine_for, engine_formats, open_scorer
    from twostroke.evaluation.held_out import held_out_to_score
    from twostroke.evaluation.task_files import load_task
    from twostroke.planner.truth.recording import recording

    with _divided() as division:
        directory = opened_model(model)
        tasks = [load_task(name, task_data) for name in task]
        wants_text = bool(data) or prepared is not None or not tasks
        text = held_out_to_score(directory, data, prepared, text_key) if wants_text else None
        formats = engine_formats(head_dtype, kv_dtype)
        chosen = engine_for(directory, engine, formats)
        if layer_by_layer and chosen != "decoder":
            raise ConfigError("layer_by_layer is an option of the decoder. Use it with engine='decoder'.")
        streamed = {"layer_by_layer": True} if layer_by_layer else {}
        options: dict[str, Any] = {**formats, **streamed}
        scorer = (open_scorer if division is None else division.open)(directory, chosen, dtype, **options)
        inputs = {"engine": scorer.engine, "dtype": scorer.formats, "tasks": list(task), "limit": limit}
        inputs |= {"model": str(directory.resolve()), "text": text.name if text else None}
        together = {} if division is None else {"ranks": division.ranks.n}
        inputs |= {**together, **streamed}
        start = time.perf_counter()
        document: dict[str, Any] = {
            "model": str(directory),
            "engine": scorer.engine,
            "dtype": scorer.dtype,
            "formats": scorer.formats,
        }
        lines: list[str] = []
        plan = None
        if text is not None and not (text.prepared is not None and text.prepared.holds_conversations):
            joined = None if division is None else division.ranks
            plan = functools.partial(_planned, directory, scorer, text, context, stride, layer_by_layer, joined)
        with recording("evaluate", directory.resolve().name, inputs, plan, log) as run:
            if text is not None:
                log(f"scoring {directory} on {text.name}")
                with progress("scoring", 1.0) as advance, run.meter:
                    scored, lines = _score_text(scorer, text, directory, context, stride, advance)
                document |= {"text": text.name, **scored}
            results = run_tasks(scorer, tasks, limit)
            elapsed_s = time.perf_counter() - start
            values = {k: v for k, v in document.items() if isinstance(v, int | float)}
            values |= {f"{r.task}_{name}": metric.value for r in results for name, metric in r.metrics().items()}
            run.measure(values | {"elapsed_s": elapsed_s})
    if results:
        lines += [*([""] if lines else []), *task_table(results)]
        lines.append(f"{scorer.engine} engine, {scorer.formats}, {format_seconds(elapsed_s)}")
    document |= {"tasks": results, "elapsed_s": elapsed_s, "run_id": run.run_id, "prediction": run.prediction, **together}
    emit(document, "\n".join(lines), as_json)


def _start_ranks(words: list[str], n: int) -> None:
    """Run ``twostroke`` with ``words`` as ``n`` ranks, and exit with their code if one failed, which has said why."""
    from twostroke.cli.launch import Launch, check_ranks, run_ranks
    from twostroke.training.parallelize import available_cores

    check_ranks(n)
    run_ranks(Launch(words, None, n, max(1, available_cores() // n), False, lambda ranks: True))


@contextlib.contextmanager
def _divided() -> Iterator[Division | None]:
    """How the work is shared if this process is the first of several ranks; None if it is alone. Another rank does its share in
    here, and exits."""
    if not is_rank():
        yield None
        return
    from twostroke.evaluation.division import Division

    with as_rank("Start again.") as ranks:
        division = Division(ranks)
        if ranks.is_first:
            with division.leading():
                yield division
            return
        division.follow()
    raise typer.Exit


def _score_text(
    scorer: Scorer, text: HeldOutText, directory: Path, context: int | None, stride: int | None, advance: Any
) -> tuple[dict[str, Any], list[str]]:
    from twostroke.evaluation.bits import bits_per_byte, check_context, default_context, xz_of
    from twostroke.evaluation.conversations import answer_nats

    if text.prepared is not None and text.prepared.holds_conversations:
        context = default_context(scorer) if context is None else context
        check_context(scorer, context)
        score = answer_nats(scorer, text.prepared, context, advance).score()
        cut = f", {score.n_cut} cut at the context" if score.n_cut else ""
        return plain(score), [
            f"answers        {score.nats_per_token:.4f} nats a token measured, perplexity {score.perplexity:.3f}",
            f"conversations  {score.n_conversations} held out{cut}, {score.n_tokens} tokens of answers, {scorer.formats}",
        ]
    began = time.perf_counter()
    result = bits_per_byte(scorer, text, ctx=context, stride=stride, tokenizer_path=directory, progress=advance, with_xz=False)
    rate = result.n_tokens / (time.perf_counter() - began)
    result = replace(result, xz_bits_per_byte=xz_of(text))
    windows = f"context {result.context}, stride {result.stride}, {scorer.formats}"
    return {**plain(result), "scored_tok_per_s": rate}, [
        f"bits per byte  {result.bits_per_byte:.4f} measured (xz -9: {result.xz_bits_per_byte:.4f})",
        f"perplexity     {result.perplexity:.3f} a token, {result.nats_per_token:.4f} nats",
        f"text           {format_bytes(result.n_bytes)}, {result.n_tokens} tokens, {windows}",
        f"rate           {rate:,.0f} tokens/s",
    ]


def _planned(
    directory: Path, scorer: Scorer, text: HeldOutText, context: int | None, stride: int | None, layer_by_layer: bool,
    ranks: Ranks | None,
) -> Planned:  # fmt: skip
    """The rate at which tokens get their score: ``stride`` of each ``context`` that the decoder computes. The inference engine
    computes again only what lies before in the document that a window begins in, half of one on average."""
    from twostroke.core.engine_settings import EngineSettings
    from twostroke.evaluation.bits import default_context, default_stride
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.scoring import engine_token_s
    from twostroke.planner.training.scoring import decoder_token_s, reading_token_s
    from twostroke.planner.truth.recording import Planned
    from twostroke.quantization.held import serving_shape

    context = context or default_context(scorer)
    stride = stride or default_stride(context)
    again, prepared = context - stride, text.prepared
    if scorer.engine == "decoder":
        hardware = load_hardware("this", "train")
        token_s = decoder_token_s(scorer.spec, scorer.dtype, hardware, context)
        if layer_by_layer:
            n_tokens = math.inf if prepared is None else prepared.n_heldout_tokens * context / stride
            token_s += reading_token_s(scorer.spec, hardware, n_tokens)
    else:
        hardware = load_hardware("this", "serve")
        document = context if prepared is None else prepared.n_heldout_tokens // max(1, prepared.n_heldout_documents)
        again = min(again, document // 2)
        shape = serving_shape(directory, scorer.spec, EngineSettings(dtype=scorer.dtype))
        token_s = engine_token_s(scorer.spec, shape, hardware, min(context, max(1, document)))
    rate = stride / (stride + again) / token_s
    # Ranks that share a processor are together as fast as the one process that it was calibrated with.
    times = 1.0 if ranks is None else ranks.n / ranks.sharing(hardware.kind)
    return Planned({"scored_tok_per_s": rate * times}, hardware, n_devices=math.ceil(times))


def run_tasks(scorer: Scorer, tasks: Sequence[Task], limit: int | None) -> list[TaskResult]:
    results = []
    for task in tasks:
        log(f"scoring {task.name}{': ' + task.about if task.about else ''}")
        with progress(task.name, 1.0) as advance:
            results.append(task.run(scorer, limit, advance))
        if results[-1].n_cut:
            log(f"{results[-1].n_cut} prompts of {task.name} were longer than the context and lost their beginning")
    return results


def task_table(results: Sequence[TaskResult]) -> list[str]:
    lines = [f"{'task':14} {'metric':12} {'measured':>9}   {'± s.e.':8} {'n':>6} {'guessing':>9}"]
    for result in results:
        for i, (name, metric) in enumerate(result.metrics().items()):
            error = _number(metric.standard_error) if math.isfinite(metric.standard_error) else "unknown"
            chance = f"{result.chance:9.4f}" if result.chance is not None and name.startswith("acc") else ""
            first = f"{result.task if i == 0 else '':14} {name:12} {_number(metric.value):>9} ± {error:8}"
            lines.append(f"{first} {result.n_examples:6} {chance}".rstrip())
    return lines


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
