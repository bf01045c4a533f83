"""``twostroke bench`` loads a server, or times the engine alone. A prediction is frozen before, and measured after."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.engine_options import FROM_OPTIONS, with_engine_options
from twostroke.cli.opened_model import opened_model
from twostroke.core.adapter_names import LORA_HELP, adapters_of
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, TwostrokeError
from twostroke.planner.serving.drawn import GAP_FORMS, LENGTH_FORMS, Uniform, lengths_of

if TYPE_CHECKING:
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.serving.shape import ServingShape
    from twostroke.planner.truth.recording import Planned

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def root() -> None:
    """Send load and measure latency and throughput."""


@app.command(name="serve", short_help="Send load to a server and measure its latencies.")
@with_engine_options
def bench_serve(
    model: Path | None = typer.Argument(
        None, help="Model directory or GGUF file: served for the length of the load, unless --url is given."
    ),
    url: str | None = typer.Option(None, help="A running OpenAI-compatible server, such as http://127.0.0.1:8000."),
    users: int | None = typer.Option(None, help="Closed loop: so many users, each of which waits for its answer. Default: 8."),
    request_rate: float | None = typer.Option(
        None, "--rate", help="Open loop: requests (conversations, with --turns) per second; inf sends all at once."
    ),
    arrivals: str = typer.Option("poisson", help=f"Open loop: gaps between requests: {GAP_FORMS}; a shape below 1 is bursty."),
    trace: Path | None = typer.Option(
        None, help="Requests as recorded: Mooncake's .jsonl, with shared prefixes, or Azure's .csv."
    ),
    speed: float = typer.Option(1.0, help="Of the trace: so many times as fast as recorded."),
    length_scale: float = typer.Option(1.0, help="Of the trace: so many times as many tokens, shared blocks included."),
    clients: Path | None = typer.Option(
        None,
        help="TOML file of [[client]] tables, each with rate, arrivals, prompt_tokens, output_tokens, shared_prefix, turns.",
    ),
    sweep: str | None = typer.Option(
        None,
        help="The load at each of the rates R1,R2,... or at rates up to the server's knee: auto. One server, one run a rate.",
    ),
    max_concurrency: int | None = typer.Option(
        None, help="Open loop: most conversations under way. The wait of the others counts."
    ),
    n_requests: int = typer.Option(64, "--requests", help="Requests to measure; of a trace the first ones."),
    warmup_requests: int = typer.Option(3, "--warmup", help="Requests that are sent before, one by one, and not measured."),
    prompt_tokens: str = typer.Option(
        "64", help=f"Length of prompts: {LENGTH_FORMS}, or a sum of them with weights, W*FORM+..."
    ),
    output_tokens: str = typer.Option("64", help="Length of outputs, in the same forms."),
    shared_prefix: int = typer.Option(0, help="Tokens that all prompts begin with, of their --prompt-tokens."),
    turns: int = typer.Option(1, help="Turns of a conversation. Each prompt holds all before it and --prompt-tokens more."),
    think_s: float = typer.Option(0.0, help="Seconds between an answer and the next turn."),
    endpoint: str = typer.Option("completions", help="completions or chat."),
    served_name: str | None = typer.Option(None, help="Model name to ask for. Default: the first that the server lists."),
    temperature: float = typer.Option(0.0, help="Sampling temperature; 0 is greedy."),
    stop_at_eos: bool = typer.Option(False, help="Let the model end answers early. For servers that do not know ignore_eos."),
    prompt_text: Path | None = typer.Option(None, help="Text file that prompts are cut from. Default: random words."),
    same_prompts: bool = typer.Option(
        False, help="Draw the words of prompts from --seed, too: a server may know them from the last run."
    ),
    slo: str | None = typer.Option(None, help="Terms of goodput in seconds, such as ttft=0.5,tpot=0.05,e2e=10."),
    seed: int = typer.Option(0, help="Seed of arrivals and lengths."),
    timeout_s: float = typer.Option(600.0, help="Seconds after which a request counts as failed."),
    api_key_file: Path | None = typer.Option(None, help="File whose first line is the API key to send."),
    lora: list[str] = typer.Option([], help=f"{LORA_HELP} Requests ask for them in turn."),
    engine: EngineSettings = FROM_OPTIONS,
    each: list[str] = typer.Option(
        [], help="Measure each of an engine option's values on a server of its own: OPTION=V1,V2 or OPTION=all. Repeatable."
    ),
    keep_late: bool = typer.Option(
        False, help="Keep a run whose load generator was late, which is refused and recorded as failed otherwise."
    ),
    report: Path | None = typer.Option(None, help="HTML page to write."),
    output: Path | None = typer.Option(None, help="File for the raw times, one JSON line a request."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Send closed-loop, Poisson, bursty, constant or recorded traffic: TTFT, TPOT, ITL, end to end, throughput, goodput.

    Latencies count from when a request was due, and beside that from when it was sent. The planner predicts the same requests.
    The engine's options are those of the server that is started here. With --url they only shape the prediction.
    """
    from twostroke.bench.definitions import Slo
    from twostroke.bench.http_stream import Address
    from twostroke.bench.load_spec import LoadSpec
    from twostroke.bench.prompts import PromptMaker
    from twostroke.bench.sweep import rates_of
    from twostroke.cli.bench_loads import Target, measure_once, measure_sweep, variant_name, variants_of
    from twostroke.core.families import read_spec

    if endpoint not in ("completions", "chat"):
        raise ConfigError(f"--endpoint {endpoint!r} is not known. Use completions or chat.")
    if model is None and url is None:
        raise ConfigError("give a model directory to serve, or --url of a running server.")
    adapters = adapters_of(lora)
    if adapters and (url is not None or served_name is not None):
        raise ConfigError(
            "--lora is for a server that is started here. Of a running one, name the adapter: --served-name NAME."
        )
    if each and url is not None:
        raise ConfigError("--each starts servers of its own. Leave out --url.")
    rates = None if sweep is None else rates_of(sweep)
    if rates is not None and (same_prompts or request_rate is not None):
        raise ConfigError("--sweep sets the rates itself, and needs new prompts for each. Leave out --rate and --same-prompts.")
    if rates is not None and output is not None:
        raise ConfigError("--output holds the raw times of one load. Leave it out with --sweep; --json has each run.")
    if each and output is not None:
        raise ConfigError("--output holds the raw times of one load. Leave it out with --each; --json has each run.")
    if rates is not None:
        request_rate = math.inf
    alone = users is None and request_rate is None and trace is None and clients is None
    load = LoadSpec(
        n_requests=n_requests,
        request_rate=request_rate,
        arrivals=arrivals,
        max_concurrency=max_concurrency,
        users=8 if alone else users,
        trace=None if trace is None else str(trace),
        speed=speed,
        length_scale=length_scale,
        clients=None if clients is None else str(clients),
        prompt_tokens=_lengths("--prompt-tokens", prompt_tokens),
        output_tokens=_lengths("--output-tokens", output_tokens),
        shared_prefix=shared_prefix,
        turns=turns,
        think_s=think_s,
        endpoint="chat" if endpoint == "chat" else "completions",
        model=served_name,
        temperature=temperature,
        ignore_eos=not stop_at_eos,
        prompt_text=None if prompt_text is None else str(prompt_text),
        same_prompts=same_prompts,
        warmup_requests=warmup_requests,
        seed=seed,
        timeout_s=timeout_s,
        adapters=tuple(adapters),
    )
    objective = None if slo is None else Slo.parse(slo)
    key = None if api_key_file is None else _first_key(api_key_file)
    settings = variants_of(each, engine)
    directory = None if model is None else opened_model(model)
    spec = None if directory is None else read_spec(directory)
    longest = load.workload.longest
    if spec is not None:
        _check_context(spec, engine, longest)
    for option, file in (("--output", output), ("--report", report)):
        if file is not None and file.is_dir():
            raise ConfigError(f"{option} {file} is a folder. Name a file.")
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option} {file}: the folder {file.parent} does not exist.")
    if url is not None:
        Address.parse(url)
    PromptMaker(text_file=prompt_text)  # refuses an unreadable file before a server starts

    documents: list[dict[str, Any]] = []
    texts: list[str] = []
    failure: TwostrokeError | None = None
    for variant in settings:
        name = variant_name(variant, each)
        try:
            with contextlib.ExitStack() as stack:
                target = stack.enter_context(Target(url, directory, spec, variant, adapters, key).running())
                if rates is not None:
                    found, document = measure_sweep(target, load, rates, objective, keep_late)
                    texts.append(found.text())
                    if found.knee_per_s is None:
                        failure = TwostrokeError("no rate of the sweep counts: each was refused or completed nothing.")
                else:
                    result, document = measure_once(target, load, objective, stack, keep_late)
                    texts.append("\n".join([result.text(), *compared(document["prediction"], document["measurement"])]))
                    if output is not None:
                        try:
                            result.write_raw(output)
                        except TwostrokeError as error:
                            failure = error
                    if result.summary.n_completed == 0:
                        reasons = ", ".join(f"{n} × {why}" for why, n in result.summary.failures.items())
                        failure = TwostrokeError(f"no request was completed: {reasons}")
                    elif result.refusal is not None and not keep_late:
                        failure = TwostrokeError(f"this run is refused: {result.refusal} --keep-late keeps it all the same.")
        except TwostrokeError as error:
            if not each:
                raise
            log(f"{name}: {error}")
            document, failure = {"error": str(error)}, error
            texts.append(f"not measured: {error}")
        documents.append({"variant": name, **document} if each else document)
    whole = {"variants": documents} if each else documents[0]
    shown = [f"{d['variant']}\n{text}" for d, text in zip(documents, texts, strict=True)] if each else texts
    emit(whole, "\n\n".join(shown), as_json)  # before a page is written, which a full disk may end
    if report is not None:
        from twostroke.report.load_page import write_load_page

        log(f"wrote {write_load_page(report, whole)}")
    if failure is not None and (not each or all("error" in document for document in documents)):
        raise failure


@app.command(name="offline", short_help="Measure prefill and decode of the engine alone.")
@with_engine_options
def bench_offline(
    model: Path = typer.Argument(help="Model directory, the output of a training run, or a GGUF file."),
    batches: list[int] = typer.Option([1, 8], "--batch", help="Batch size to measure. Repeatable."),
    prompt_tokens: int = typer.Option(128, help="Length of each prompt."),
    output_tokens: int = typer.Option(64, help="Length of each output, at least 2."),
    repeats: int = typer.Option(3, help="Measurements of each batch size; the median counts."),
    lora: list[str] = typer.Option([], help=f"{LORA_HELP} Requests of a batch have them in turn."),
    engine: EngineSettings = FROM_OPTIONS,
    seed: int = typer.Option(0, help="Seed of the random prompts."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Measure prefill and decode throughput of the engine alone, by batch size."""
    from twostroke.bench.offline import FORMULAS, OfflineSpec, offline_text, run_offline
    from twostroke.core.families import read_spec
    from twostroke.planner.truth.recording import recording
    from twostroke.quantization.held import serving_shape

    offline = OfflineSpec(tuple(batches), prompt_tokens, output_tokens, repeats, seed, engine.max_running)
    directory = opened_model(model)
    spec = read_spec(directory)
    _check_context(spec, engine, prompt_tokens + output_tokens)
    shape = serving_shape(directory, spec, engine, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    from twostroke.engine.llm import LLM

    adapters = adapters_of(lora)
    llm = LLM(directory, adapters, **engine.changed())
    inputs: dict[str, Any] = {"directory": str(directory.resolve()), "scheme": shape.scheme, "in_int8": shape.in_int8}
    inputs |= {"in_bf16": shape.in_bf16, **engine.changed()}
    inputs |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, **({"lora": [*adapters]} if adapters else {})}
    points, runs = [], []
    with progress("offline", len(offline.batches) * repeats) as advance:
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            advance(done, "")

        for n in offline.batches:
            subject, plan = (
                f"{directory.resolve().name} offline, batch {n}",
                functools.partial(_planned_offline, spec, shape, n, adapters),
            )
            with recording("bench", subject, inputs | {"batch": n}, plan, log) as run:
                with run.meter:
                    point = run_offline(directory, llm, offline, n, step, [*adapters])
                measured = point.values() | ({"ttft_s": point.prefill_s} if n == 1 else {})
                measured = run.spent(measured) | measured
                run.measure({name: value for name, value in measured.items() if name != "batch"})
            points.append(point)
            runs.append({"run_id": run.run_id, "prediction": run.prediction, "measurement": measured})
    document = {
        "model": str(directory),
        "dtype": shape.scheme,
        "points": [p.values() for p in points],
        "runs": runs,
        "definitions": FORMULAS,
    }
    emit(document, offline_text(points), as_json)


def _check_context(spec: ModelSpec, engine: EngineSettings, longest: int) -> None:
    limit = min(engine.max_model_len or spec.max_positions, spec.max_positions)
    if longest > limit:
        raise ConfigError(
            f"prompt and output of up to {longest} tokens exceed the model's context of {limit}. Use less of either."
        )


def _lengths(option: str, text: str) -> tuple[int, int] | str:
    """``64`` → (64, 64), ``32:128`` → (32, 128), another form as it is."""
    try:
        found = lengths_of(text)
    except ConfigError as error:
        what = repr(text) if repr(text) in str(error) else text
        raise ConfigError(re.sub(r"^lengths ('.*?'|\S+)", lambda _: f"{option} {what:.100}", str(error))) from None
    return (found.least, found.most) if isinstance(found, Uniform) else text


def _first_key(file: Path) -> str:
    from twostroke.server.keys import read_keys

    return read_keys(file)[0]


def _planned_offline(spec: ModelSpec, shape: ServingShape, batch: int, adapters: Mapping[str, Path]) -> Planned:
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.adapters import adapters_in
    from twostroke.planner.serving.first_answer import after_a_pause
    from twostroke.planner.serving.plan import plan_serving
    from twostroke.planner.truth.recording import Planned

    machine = load_hardware("this", "serve")
    plan = plan_serving(spec, replace(shape, batch=batch, adapters=adapters_in(adapters.values())), machine).prediction()
    plan = after_a_pause(plan, batch * shape.prompt_tokens, machine)
    names = ["prefill_tok_per_s", "decode_tok_per_s", "tpot_s", "output_tok_per_s", "energy_per_mtok_kwh", "cost_per_mtok_usd"]
    names += ["ttft_s"] if batch == 1 else []
    return Planned({name: plan[name] for name in names}, machine)


def compared(prediction: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """A table of predicted beside measured."""
    from twostroke.ledger.scoring import error_percent
    from twostroke.ledger.text import align, format_error, format_value

    if not prediction:
        return []
    rows = [["", "predicted", "measured", "error"]]
    for name, predicted in prediction.items():
        value = measured.get(name)
        rows.append(
            [name, format_value(name, predicted), format_value(name, value), format_error(error_percent(predicted, value))]
        )
    return ["", align(rows, right=(1, 2, 3))]
