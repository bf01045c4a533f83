"""``twostroke bench`` loads a server, or times the engine alone. A prediction is frozen before, and measured after."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.engine_options import FROM_OPTIONS, with_engine_options, words
from twostroke.cli.opened_model import opened_model
from twostroke.core.adapter_names import LORA_HELP, adapters_of
from twostroke.core.described import plain
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, TwostrokeError

if TYPE_CHECKING:
    from twostroke.bench.load import LoadSpec
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.serving.shape import ServingShape
    from twostroke.planner.truth.recording import Planned

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def root() -> None:
    """Send load and measure latency and throughput."""


@app.command(name="serve")
@with_engine_options
def bench_serve(
    model: Path | None = typer.Argument(
        None, help="Model directory or GGUF file: served for the length of the load, unless --url is given."
    ),
    url: str | None = typer.Option(None, help="A running OpenAI-compatible server, such as http://127.0.0.1:8000."),
    users: int | None = typer.Option(None, help="Closed loop: so many users, each of which waits for its answer. Default: 8."),
    request_rate: float | None = typer.Option(None, "--rate", help="Open loop: requests per second; inf sends all at once."),
    burstiness: float = typer.Option(1.0, help="Open loop: shape of the Gamma-distributed gaps; 1 is Poisson."),
    max_concurrency: int | None = typer.Option(None, help="Open loop: most requests in flight. The wait of the others counts."),
    n_requests: int = typer.Option(64, "--requests", help="Requests to measure."),
    warmup_requests: int = typer.Option(3, "--warmup", help="Requests that are sent before, one by one, and not measured."),
    prompt_tokens: str = typer.Option("64", help="Length of prompts: N, or LEAST:MOST for lengths drawn uniformly."),
    output_tokens: str = typer.Option("64", help="Length of outputs: N, or LEAST:MOST."),
    endpoint: str = typer.Option("completions", help="completions or chat."),
    served_name: str | None = typer.Option(None, help="Model name to ask for. Default: the first that the server lists."),
    temperature: float = typer.Option(0.0, help="Sampling temperature; 0 is greedy."),
    stop_at_eos: bool = typer.Option(False, help="Let the model end answers early. For servers that do not know ignore_eos."),
    prompt_text: Path | None = typer.Option(None, help="Text file that prompts are cut from. Default: random words."),
    slo: str | None = typer.Option(None, help="Terms of goodput in seconds, such as ttft=0.5,tpot=0.05,e2e=10."),
    seed: int = typer.Option(0, help="Seed of arrivals, lengths and prompts."),
    timeout_s: float = typer.Option(600.0, help="Seconds after which a request counts as failed."),
    api_key_file: Path | None = typer.Option(None, help="File whose first line is the API key to send."),
    lora: list[str] = typer.Option([], help=f"{LORA_HELP} Requests ask for them in turn."),
    engine: EngineSettings = FROM_OPTIONS,
    output: Path | None = typer.Option(None, help="File for the raw times, one JSON line a request."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Send Poisson, bursty or closed-loop traffic: TTFT, TPOT, ITL, end to end, throughput, failures, goodput.

    The engine's options are those of the server that is started here. With --url they only shape the prediction.
    """
    from twostroke.bench.definitions import Slo
    from twostroke.bench.engine_counters import FORMULAS as COUNTED
    from twostroke.bench.http_stream import Address
    from twostroke.bench.load import LoadSpec, run_load
    from twostroke.bench.own_server import own_server
    from twostroke.bench.prediction import latency_quantiles, measured_values
    from twostroke.bench.prompts import PromptMaker
    from twostroke.core.families import read_spec
    from twostroke.planner.truth.drafts import drafts_seen
    from twostroke.planner.truth.recording import recording
    from twostroke.quantization.held import serving_shape
    from twostroke.scheduling.sampling_params import SamplingParams

    if endpoint not in ("completions", "chat"):
        raise ConfigError(f"--endpoint {endpoint!r} is not known. Use completions or chat.")
    if model is None and url is None:
        raise ConfigError("give a model directory to serve, or --url of a running server.")
    adapters = adapters_of(lora)
    if adapters and (url is not None or served_name is not None):
        raise ConfigError(
            "--lora is for a server that is started here. Of a running one, name the adapter: --served-name NAME."
        )
    load = LoadSpec(
        n_requests=n_requests,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        users=8 if users is None and request_rate is None else users,
        prompt_tokens=_lengths("--prompt-tokens", prompt_tokens),
        output_tokens=_lengths("--output-tokens", output_tokens),
        endpoint="chat" if endpoint == "chat" else "completions",
        model=served_name,
        temperature=temperature,
        ignore_eos=not stop_at_eos,
        prompt_text=None if prompt_text is None else str(prompt_text),
        warmup_requests=warmup_requests,
        seed=seed,
        timeout_s=timeout_s,
        adapters=tuple(adapters),
    )
    objective = None if slo is None else Slo.parse(slo)
    key = None if api_key_file is None else _first_key(api_key_file)
    directory = None if model is None else opened_model(model)
    spec = None if directory is None else read_spec(directory)
    if spec is not None:
        _check_context(spec, engine, load.prompt_tokens[1] + load.output_tokens[1])
    if output is not None and output.is_dir():
        raise ConfigError(f"--output {output} is a folder. Name a file.")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.parent} does not exist.")
    if url is not None:
        Address.parse(url)
    PromptMaker(text_file=prompt_text)  # refuses an unreadable file before a server starts

    with contextlib.ExitStack() as stack:
        server: dict[str, Any] = {}
        if url is None:
            assert directory is not None
            log(f"starting a server for {directory}")
            own = stack.enter_context(
                own_server(directory, [*words(engine), *(f"--lora={name}={path}" for name, path in adapters.items())])
            )
            url, server = own.url, own.document
            engine = replace(engine, dtype=own.dtype)  # the engine's choice, if --dtype left it to the engine
        inputs: dict[str, Any] = {"url": url, "scheme": None}
        if directory is not None:
            inputs["directory"] = str(directory.resolve())
        plan = None
        if directory is not None and spec is not None:
            sampling = SamplingParams(temperature=temperature).kinds
            shape = serving_shape(
                directory, spec, engine, sampling=sampling, speculation=drafts_seen(directory, engine.speculate)
            )
            inputs |= {"scheme": shape.scheme, "in_int8": shape.in_int8, "in_bf16": shape.in_bf16}
            plan = functools.partial(_planned_load, spec, load, shape, adapters)
        tokenizer = None
        if directory is not None:
            from twostroke.data.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(directory)
        subject = f"{directory.resolve().name if directory else url} over HTTP"
        run = stack.enter_context(recording("bench", subject, {**inputs, **engine.changed(), **plain(load)}, plan, log))
        with progress("load", load.n_requests) as advance, run.meter:
            result = run_load(url, load, objective, key, tokenizer, progress=lambda ended, _: advance(ended, f"{ended} ended"))
        measured = measured_values(result.summary, result.records)
        why = dict.fromkeys(COUNTED, "the server has no /metrics of an engine of ours.") if not result.summary.engine else {}
        kept = {**measured, "latency_quantiles": latency_quantiles(result.records)}
        measured = run.spent(measured) | measured
        run.measure(kept, "finished" if not result.summary.failures else "partial", why)
    if output is not None:
        result.write_raw(output)
    document = plain(result) | {"run_id": run.run_id, "prediction": run.prediction, "measurement": measured, "server": server}
    emit(document, "\n".join([result.text(), *compared(run.prediction, measured)]), as_json)
    if result.summary.n_completed == 0:
        raise TwostrokeError(
            "no request was completed: " + ", ".join(f"{n} × {why}" for why, n in result.summary.failures.items())
        )


@app.command(name="offline")
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

    offline = OfflineSpec(tuple(batches), prompt_tokens, output_tokens, repeats, seed)
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


def _lengths(option: str, text: str) -> tuple[int, int]:
    """``64`` → (64, 64), ``32:128`` → (32, 128)."""
    least, separator, most = text.partition(":")
    try:
        return int(least), int(most if separator else least)
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be N or LEAST:MOST, in tokens.") from None


def _first_key(file: Path) -> str:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"API key file {file} cannot be read as text. Name a file with one key a line.") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"API key file {file} holds no key. Write one key a line.")
    return keys[0]


def _planned_load(spec: ModelSpec, load: LoadSpec, shape: ServingShape, adapters: Mapping[str, Path]) -> Planned:
    from twostroke.bench.prediction import predict_load
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.adapters import adapters_in
    from twostroke.planner.truth.recording import Planned

    machine = load_hardware("this", "serve")
    shape = replace(shape, adapters=adapters_in(adapters.values()))
    return Planned(predict_load(spec, load, shape, machine), machine)


def _planned_offline(spec: ModelSpec, shape: ServingShape, batch: int, adapters: Mapping[str, Path]) -> Planned:
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.adapters import adapters_in
    from twostroke.planner.serving.plan import plan_serving
    from twostroke.planner.truth.recording import Planned

    machine = load_hardware("this", "serve")
    plan = plan_serving(spec, replace(shape, batch=batch, adapters=adapters_in(adapters.values())), machine).prediction()
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
