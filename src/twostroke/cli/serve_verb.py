"""``twostroke serve`` serves a model over the OpenAI-compatible HTTP interface. The prediction is frozen first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import JSON_HELP, emit, log
from twostroke.cli.engine_options import FROM_OPTIONS, with_engine_options
from twostroke.cli.opened_model import opened_model
from twostroke.cli.plan.subject import OUTPUT, PROMPT, lengths
from twostroke.cli.slo import MODE, PREFIX_HITS, SLO_TPOT, SLO_TTFT, SPREAD, Asked, chosen_server
from twostroke.core.adapter_names import LORA_HELP, adapters_of
from twostroke.core.contention import processors
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.choosing.server_settings import ServerChoice
    from twostroke.server.launch import KVEventSettings

app = typer.Typer(add_completion=False)


@app.command(name="serve")
@with_engine_options
def serve(
    context: typer.Context,
    model: Path = typer.Argument(help="Model directory, the output of a training run, or a GGUF file."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on. Anything but loopback needs --api-key-file."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    api_key_file: Path | None = typer.Option(
        None, help="File of accepted API keys, one a line, each with its limits if it has any (docs/http.md)."
    ),
    share_prefixes: bool = typer.Option(
        False, help="With --api-key-file: share cached prefixes between keys. Faster, but timing shows another key's prompts."
    ),
    without_key: bool = typer.Option(False, help="Let other machines in without an API key."),
    served_name: list[str] = typer.Option(
        [], help="Name clients call the model by. Repeatable. Default: the directory's name."
    ),
    lora: list[str] = typer.Option([], help=f"{LORA_HELP} Requests ask for the model NAME."),
    engine: EngineSettings = FROM_OPTIONS,
    files_dir: Path | None = typer.Option(
        None, help="Directory of uploaded files and batches. Without it there is no /v1/files and no /v1/batches."
    ),
    replicas: int = typer.Option(
        1, min=1, help="Engines, each with its share of the processors and a cache of its own. Engine options are of each."
    ),
    capture: Path | None = typer.Option(
        None, help="Keep chats in this folder for training; with --api-key-file those of keys with capture=yes alone."
    ),
    capture_gib: float = typer.Option(1.0, min=0.001, max=100000, help="Largest size of them; the oldest make room."),
    redact: Path | None = typer.Option(None, help="With --capture: file of regular expressions; what they match is not kept."),
    redact_command: str | None = typer.Option(
        None, help="With --capture: program that reads a chat as a line of JSON, and answers with what to keep, or null."
    ),
    log_json: bool = typer.Option(False, help="Log lines of JSON, and one for each request, without prompts and keys."),
    admin: bool = typer.Option(False, help="Have the routes below /admin, with which holders of a key replace the weights."),
    response_cache: Path | None = typer.Option(
        None,
        help="Directory in which answers are kept that would be the same again: greedy or seeded ones. Without it none are.",
    ),
    response_cache_gib: float = typer.Option(1.0, min=0.001, help="Most GiB of them; the least recently used go."),
    slo_ttft_ms: float = SLO_TTFT,
    slo_tpot_ms: float = SLO_TPOT,
    mode: str = MODE,
    prompt_tokens: int = PROMPT,
    output_tokens: int = OUTPUT,
    spread: float = SPREAD,
    prefix_hit_share: float = PREFIX_HITS,
    max_concurrent: int = typer.Option(128, min=1, help="Requests queued and running; more get 429."),
    max_queued_tokens: int | None = typer.Option(
        None, min=1, help="Tokens of prompts that wait for their first token; more get 429. Default: as many as come."
    ),
    usage_log: Path | None = typer.Option(
        None, help="File to which a JSON line of each request's tokens and times is appended."
    ),
    kv_events: str | None = typer.Option(
        None,
        help="Publish what the cache holds, as vLLM does: at tcp://… or ipc://…, or with `http` at /admin/kv-events alone.",
    ),
    kv_events_replay: str | None = typer.Option(None, help="Where published events can be had again, tcp://… or ipc://…."),
    kv_events_topic: str | None = typer.Option(None, help="Their topic. Default: kv@HOST:PORT@NAME of this server."),
    otlp_endpoint: str | None = typer.Option(
        None, help="URL of an OpenTelemetry collector that gets a trace of each request, as http://localhost:4318."
    ),
    grace_s: float = typer.Option(30.0, min=0.0, help="Seconds that requests in flight get to finish after SIGTERM."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Serve a model over the OpenAI-compatible HTTP interface until SIGTERM or Ctrl-C.

    With --slo-ttft-ms, --slo-tpot-ms or --mode the planner sets token budget, running requests, cache and the type of weights
    for the load that --prompt, --output, --spread and --prefix-hits describe; what is given by hand stays.
    """
    import logging

    from twostroke.core.families import read_spec
    from twostroke.server.launch import CaptureSettings, ServeSettings, bind, is_loopback

    directory = opened_model(model)
    spec = read_spec(directory)
    spec.require_buildable()  # before anything starts, so that an unusable config.json is told at once
    if api_key_file is not None and not api_key_file.is_file():
        raise ConfigError(f"API key file {api_key_file} does not exist. It holds one key a line.")
    if api_key_file is None and not is_loopback(host) and not without_key:
        raise ConfigError(f"host={host} lets other machines in, and there is no --api-key-file. Give one, or --without-key.")
    engine = replace(engine, separate_prefixes=api_key_file is not None and not share_prefixes)
    asked = Asked(slo_ttft_ms, slo_tpot_ms, mode)
    asked.slo()  # checked before anything is planned
    choice = None
    if asked.anything:
        if replicas > 1:
            raise ConfigError(
                f"--slo-ttft-ms, --slo-tpot-ms and --mode set one engine, and --replicas={replicas} asks for several, which "
                "are not planned. Leave out one of them."
            )
        limit = min(engine.max_model_len or spec.max_positions, spec.max_positions)
        engine, choice = _set(
            context, directory, spec, engine, asked, lengths(limit, prompt_tokens, output_tokens), spread, prefix_hit_share
        )
    elif prompt_tokens or output_tokens or spread or prefix_hit_share:
        raise ConfigError(
            "--prompt, --output, --spread and --prefix-hits describe the load that the server is set for. Give "
            "--slo-ttft-ms, --slo-tpot-ms or --mode as well, or leave them out."
        )
    names = tuple(served_name) or (directory.resolve().name,)
    adapters = {name: str(path.resolve()) for name, path in adapters_of(lora).items()}
    if taken := sorted(adapters.keys() & set(names)):
        raise ConfigError(f"--lora names an adapter {taken[0]!r}, as the model is called. Take another name.")
    most = max(1, len(processors()))
    if replicas > most:
        raise ConfigError(f"--replicas={replicas} must not be more than the processors that this process may use, {most} here.")
    settings = ServeSettings(
        directory, engine, names, api_key_file, max_concurrent, grace_s, adapters, files_dir, replicas, admin
    )
    settings = replace(
        settings, log_requests=log_json, response_cache=response_cache, response_cache_bytes=int(response_cache_gib * 2**30),
        usage_log=usage_log, max_queued_tokens=max_queued_tokens, otlp_endpoint=otlp_endpoint,
        kv_events=_kv_events(kv_events, kv_events_replay, kv_events_topic, engine.separate_prefixes),
    )  # fmt: skip
    if capture is not None:
        settings = replace(settings, capture=CaptureSettings(capture, int(capture_gib * 2**30), redact, redact_command))
    elif redact is not None or redact_command is not None:
        raise ConfigError("--redact and --redact-command say what --capture must not keep. Name its folder, or leave them out.")
    with bind(host, port) as listener:
        # The engine needs seconds to import torch: it starts before this process imports what it needs itself.
        child = settings.launches()[0]()
        try:
            from twostroke.server.json_logs import log_as_json
            from twostroke.server.run import Started, serve_model

            if log_json:
                log_as_json()
            else:
                logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

            def announce(started: Started) -> None:
                ready = started.engine
                document = {
                    "url": started.url,
                    "model": started.names[0],
                    "dtype": ready.dtype,
                    "startup_s": started.startup_s,
                    "load_s": ready.load_s,
                    "weights_bytes": ready.weights_bytes,
                    "kv_cache_bytes": ready.kv_cache_bytes,
                    "max_model_len": ready.max_model_len,
                    "replicas": replicas,
                    "run_id": started.run_id,
                } | ({} if choice is None else {"choice": choice})
                kind = ready.dtype if replicas == 1 else f"{ready.dtype}, {replicas} engines"
                sizes = f"{format_bytes(ready.weights_bytes)} of weights, {format_bytes(ready.kv_cache_bytes)} of KV cache"
                line = f"serving {started.names[0]} ({kind}, {sizes}) at {started.url}/v1"
                for note in ready.notes:
                    log(note)
                emit(document, f"{line}, ready in {format_seconds(started.startup_s)}", as_json)

            totals = serve_model(settings, listener, child, announce, choice)
        finally:
            child.kill()
    log("stopped after " + ", ".join(f"{format_count(value)} {name.replace('_', ' ')}" for name, value in totals.items()))


def _kv_events(endpoint: str | None, replay: str | None, topic: str | None, separate: bool) -> KVEventSettings | None:
    """Raises ConfigError for what does not go together."""
    from twostroke.server.launch import KVEventSettings

    if endpoint is None:
        if replay is not None or topic is not None:
            raise ConfigError("--kv-events-replay and --kv-events-topic are of --kv-events. Give it, or leave them out.")
        return None
    for option, value in (("--kv-events", endpoint), ("--kv-events-replay", replay)):
        if value is not None and not value.startswith(("tcp://", "ipc://")) and (option, value) != ("--kv-events", "http"):
            raise ConfigError(
                f"{option} {value} must be an address as tcp://*:5557 or ipc:///run/file, --kv-events may be `http`."
            )
    if separate:
        raise ConfigError(
            "--kv-events tells the tokens of all prompts, and with --api-key-file each key has prefixes of its own. Give "
            "--share-prefixes if the keys trust each other, or leave it out."
        )
    if endpoint == "http" and (replay is not None or topic is not None):
        raise ConfigError("--kv-events http has no topic, and its route replays by itself. Leave the other two out.")
    return KVEventSettings(None if endpoint == "http" else endpoint, replay, topic)


def _set(
    context: typer.Context,
    directory: Path,
    spec: ModelSpec,
    engine: EngineSettings,
    asked: Asked,
    of_load: tuple[int, int],
    spread: float,
    prefix_hit_share: float,
) -> tuple[EngineSettings, ServerChoice]:
    """``engine`` as it is set for what was asked, which is said. Raises CapacityError where nothing meets it."""
    from twostroke.planner.choosing.server_settings import Fixed
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.text.server_settings import choice_lines
    from twostroke.quantization.held import serving_shape

    prompt, output = of_load
    request = {"batch": 1, "prompt_tokens": prompt, "output_tokens": output, "prefix_hit_share": prefix_hit_share}
    shape = serving_shape(directory, spec, engine, **request)
    given = [name for name in Fixed._fields if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    by_hand = {name: getattr(engine, name) for name in given}  # be it the default
    own = engine.dtype == "auto", engine.kv_dtype == "auto"
    choice = chosen_server(directory, spec, shape, load_hardware("this", "serve"), asked, spread, Fixed(**by_hand), *own)
    if choice.chosen is None:
        raise CapacityError(choice.refusal)
    for line in choice_lines(choice):
        log(line)
    chosen = choice.chosen
    return replace(
        engine,
        dtype=engine.dtype if chosen.scheme == shape.scheme else chosen.scheme,
        kv_dtype=engine.kv_dtype if chosen.kv_dtype == shape.cache_dtype else chosen.kv_dtype,
        token_budget=chosen.token_budget,
        max_running=chosen.max_running,
        kv_cache_bytes=chosen.kv_cache_bytes,
    ), choice
