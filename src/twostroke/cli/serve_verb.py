"""``twostroke serve`` serves a model over the OpenAI-compatible HTTP interface. The prediction is frozen first."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log
from twostroke.cli.engine_options import FROM_OPTIONS, with_engine_options
from twostroke.cli.model_options import AB, MEMORY, MODEL, WAIT, several, with_others
from twostroke.cli.opened_model import opened_model
from twostroke.cli.plan.subject import OUTPUT, PROMPT, lengths
from twostroke.cli.slo import MODE, PREFIX_HITS, SLO_TPOT, SLO_TTFT, SPREAD, Asked, chosen_server
from twostroke.cli.typed import is_typed
from twostroke.core.adapter_names import LORA_HELP
from twostroke.core.contention import processors
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.choosing.server_settings import ServerChoice
    from twostroke.server.handover.settings import HandoverSettings
    from twostroke.server.launch import KVEventSettings, ServeSettings
    from twostroke.server.ray_serve.settings import Scale

ROLES = ("joint", "prefill", "decode")
SET = "--slo-ttft-ms, --slo-tpot-ms or --mode"
APART: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("--model",
     ("--replicas", SET, "--admin", "--files-dir", "--response-cache", "--kv-events", "--role", "--prefill-engines", "--ray"),
     "a server of several models does not have it so far"),
    ("--prefill-engines", ("--replicas", "--role", SET, "--ray"),
     "it divides this machine between one engine that decodes and those that prefill"),
    (SET, ("--replicas", "--ray"), "the planner sets one engine"),
    ("--role prefill", ("--replicas",), "it is of one engine"),
    ("--role prefill", ("--kv-events",), "events tell the tokens of all prompts, which here are another server's"),
    ("--role", ("--ray",), "Ray starts and ends replicas, and a peer has one address"),
)  # fmt: skip
"""What does not go together, and why."""

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
    lora: list[str] = typer.Option(
        [], help=f"{LORA_HELP} Requests ask for the model NAME. With --model, NAME@MODEL=DIR belongs to that one."
    ),
    other_models: list[str] = MODEL,
    models_memory_gib: float = MEMORY,
    model_wait_s: float = WAIT,
    ab: str = AB,
    engine: EngineSettings = FROM_OPTIONS,
    files_dir: Path | None = typer.Option(
        None, help="Directory of uploaded files and batches. Without it there is no /v1/files and no /v1/batches."
    ),
    replicas: int = typer.Option(
        1, min=1, help="Engines, each with its share of the processors and a cache of its own. Engine options are of each."
    ),
    prefill_engines: int = typer.Option(
        0, min=0, help="Further engines on this machine that compute prompts, while one decodes; all have equal shares of it."
    ),
    role: str = typer.Option(
        "joint",
        help="joint: the engine does all; prefill: it also computes prompts for others; decode: others compute its prompts.",
    ),
    listen: str | None = typer.Option(
        None, help="With --role prefill: HOST:PORT, or the path of a socket on this machine, at which engines that decode ask."
    ),
    peer: list[str] = typer.Option([], help="With --role decode: --listen of an engine that prefills. Repeatable."),
    role_key_file: Path | None = typer.Option(
        None, help="With --role, over HOST:PORT: file of the key that both prove to have. Pages are not encrypted."
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
    ray: bool = typer.Option(
        False, "--ray", help="Let Ray Serve run up to --replicas replicas, on this machine or on the cluster of RAY_ADDRESS."
    ),
    min_replicas: int = typer.Option(1, min=0, help="With --ray: replicas that always run; with 0 a request starts the first."),
    replica_cpus: int = typer.Option(1, min=1, help="With --ray: processors of each replica."),
    target_ongoing: float = typer.Option(16.0, help="With --ray: requests under way above which a replica more is started."),
    target_wait_s: float = typer.Option(1.0, help="With --ray: predicted wait above which a replica more is started."),
    scale_down_s: float = typer.Option(600.0, help="With --ray: seconds after which replicas that are not needed end."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Serve a model over the OpenAI-compatible HTTP interface until SIGTERM or Ctrl-C.

    With --slo-ttft-ms, --slo-tpot-ms or --mode the planner sets token budget, running requests, cache and the type of weights
    for the load that --prompt, --output, --spread and --prefix-hits describe; what is given by hand stays.
    """
    import logging

    from twostroke.core.families import read_spec
    from twostroke.server.launch import CaptureSettings, ServeSettings, bind, is_loopback
    from twostroke.server.ray_serve.settings import Scale

    directory = opened_model(model)
    spec = read_spec(directory)
    spec.require_buildable()  # before anything starts, so that an unusable config.json is told at once
    if api_key_file is not None and not api_key_file.is_file():
        wrong = "is not a file" if api_key_file.exists() else "does not exist"
        raise ConfigError(f"API key file {api_key_file} {wrong}. It holds one key a line.")
    if api_key_file is None and not is_loopback(host) and not without_key:
        raise ConfigError(f"host={host} lets other machines in, and there is no --api-key-file. Give one, or --without-key.")
    engine = replace(engine, separate_prefixes=api_key_file is not None and not share_prefixes)
    asked = Asked(slo_ttft_ms, slo_tpot_ms, mode)
    asked.slo()  # checked before anything is planned
    names = tuple(served_name) or (directory.resolve().name,)
    models = several(other_models, models_memory_gib, model_wait_s, ab, lora, names)
    adapters = {name: str(path.resolve()) for name, path in models.of_model.get("", {}).items()}
    _check_apart({
        "--model": bool(models.directories), "--replicas": replicas > 1 and not ray, SET: asked.anything, "--admin": admin,
        "--files-dir": files_dir is not None, "--response-cache": response_cache is not None, "--ray": ray,
        "--kv-events": kv_events is not None, "--role": role != "joint", "--role prefill": role == "prefill",
        "--prefill-engines": prefill_engines > 0,
    })  # fmt: skip
    if models.directories and models.split is not None and usage_log is None:
        raise ConfigError("--ab keeps answers and ratings in the usage log. Name its file with --usage-log.")
    choice = None
    if asked.anything:
        limit = min(engine.max_model_len or spec.max_positions, spec.max_positions)
        engine, choice = _set(
            context, directory, spec, engine, asked, lengths(limit, prompt_tokens, output_tokens), spread, prefix_hit_share
        )
    elif prompt_tokens or output_tokens or spread or prefix_hit_share:
        raise ConfigError(
            "--prompt, --output, --spread and --prefix-hits describe the load that the server is set for. Give "
            "--slo-ttft-ms, --slo-tpot-ms or --mode as well, or leave them out."
        )
    most = max(1, len(processors()))
    if replicas > most and not ray:
        raise ConfigError(f"--replicas={replicas} must not be more than the processors that this process may use, {most} here.")
    settings = ServeSettings(
        directory, engine, names, api_key_file, max_concurrent, grace_s, adapters, files_dir, replicas, admin
    )
    settings = replace(
        settings, log_requests=log_json, response_cache=response_cache, response_cache_bytes=int(response_cache_gib * 2**30),
        usage_log=usage_log, max_queued_tokens=max_queued_tokens, otlp_endpoint=otlp_endpoint,
        kv_events=_kv_events(kv_events, kv_events_replay, kv_events_topic, engine.separate_prefixes),
    )  # fmt: skip
    handover = _handover(role, listen, peer, role_key_file)
    if role == "prefill":
        settings = replace(settings, engine=replace(engine, separate_prefixes=True))  # the other side knows whose they are
    if prefill_engines and 1 + prefill_engines > most:
        raise ConfigError(
            f"--prefill-engines={prefill_engines} and one that decodes must not be more than the processors that this process "
            f"may use, {most} here."
        )
    settings = replace(settings, handover=handover)
    if capture is not None:
        settings = replace(settings, capture=CaptureSettings(capture, int(capture_gib * 2**30), redact, redact_command))
    elif redact is not None or redact_command is not None:
        raise ConfigError("--redact and --redact-command say what --capture must not keep. Name its folder, or leave them out.")
    for name, of, there in (
        ("capture_gib", "--capture", capture), ("response_cache_gib", "--response-cache", response_cache),
    ):  # fmt: skip
        if there is None and is_typed(context, name):
            raise ConfigError(f"--{name.replace('_', '-')} bounds what {of} keeps. Name its folder with {of}, or leave it out.")
    of_ray = ("min_replicas", "replica_cpus", "target_ongoing", "target_wait_s", "scale_down_s")
    if ray:
        _serve_on_ray(
            settings,
            host,
            port,
            Scale(min_replicas, replicas, replica_cpus, target_ongoing, target_wait_s, scale_down_s),
            as_json,
        )
        return
    for name in of_ray:
        if is_typed(context, name):
            raise ConfigError(f"--{name.replace('_', '-')} says how --ray scales. Give --ray as well, or leave it out.")
    if models.directories:
        settings = with_others(settings, models)
    with bind(host, port) as listener, tempfile.TemporaryDirectory(prefix="twostroke-") as private:  # mode 0700
        settings = replace(settings, prefill_at=tuple(f"{private}/{i}" for i in range(prefill_engines)))
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
                    "prefill_engines": prefill_engines,
                    "models": [*started.names, *models.directories],
                    "run_id": started.run_id,
                } | ({} if choice is None else {"choice": choice})
                kind = ready.dtype if replicas == 1 else f"{ready.dtype}, {replicas} engines"
                if prefill_engines:
                    kind = f"{ready.dtype}, {prefill_engines} of {1 + prefill_engines} engines prefill"
                sizes = f"{format_bytes(ready.weights_bytes)} of weights, {format_bytes(ready.kv_cache_bytes)} of KV cache"
                line = f"serving {started.names[0]} ({kind}, {sizes}) at {started.url}/v1"
                if models.directories:
                    line += f", and when asked for {', '.join(models.directories)}"
                for note in ready.notes:
                    log(note)
                said = f"{line}, ready in {format_seconds(started.startup_s)}; {started.url}/ is a page to chat with it"
                emit(document, said, as_json)

            totals = serve_model(settings, listener, child, announce, choice)
        finally:
            child.kill()
    log("stopped after " + ", ".join(f"{format_count(value)} {name.replace('_', ' ')}" for name, value in totals.items()))


def _check_apart(given: Mapping[str, bool]) -> None:
    """Raises ConfigError for two options of ``APART`` that are both given."""
    for option, others, reason in APART:
        if given[option] and (both := [other for other in others if given[other]]):
            raise ConfigError(f"{option} and {both[0]} do not go together: {reason}. Leave one of them out.")


def _kv_events(endpoint: str | None, replay: str | None, topic: str | None, separate: bool) -> KVEventSettings | None:
    """Raises ConfigError for what does not go together."""
    from twostroke.server.launch import KVEventSettings

    if endpoint is None:
        if replay is not None or topic is not None:
            raise ConfigError("--kv-events-replay and --kv-events-topic are of --kv-events. Give it, or leave them out.")
        return None
    for option, value in (("--kv-events", endpoint), ("--kv-events-replay", replay)):
        if value is not None and not value.startswith(("tcp://", "ipc://")) and (option, value) != ("--kv-events", "http"):
            way = ", or `http`" if option == "--kv-events" else ""
            raise ConfigError(f"{option} {value} must be an address, as tcp://*:5557 or ipc:///run/file{way}.")
    if separate:
        raise ConfigError(
            "--kv-events tells the tokens of all prompts, and with --api-key-file each key has prefixes of its own. Give "
            "--share-prefixes if the keys trust each other, or leave it out."
        )
    if endpoint == "http" and (replay is not None or topic is not None):
        raise ConfigError("--kv-events http has no topic, and its route replays by itself. Leave the other two out.")
    return KVEventSettings(None if endpoint == "http" else endpoint, replay, topic)


def _handover(role: str, listen: str | None, peers: list[str], key_file: Path | None) -> HandoverSettings | None:
    """What ``--role`` and its options say. Raises ConfigError."""
    from twostroke.server.handover.settings import HandoverSettings, address_of, read_key

    if role not in ROLES:
        raise ConfigError(f"--role={role} is not known. Use one of {', '.join(ROLES)}.")
    if (listen is None) == (role == "prefill"):
        raise ConfigError("--role prefill and --listen go together: it says where engines that decode ask. Give both or none.")
    if bool(peers) != (role == "decode"):
        raise ConfigError("--role decode and --peer go together: it says who computes prompts. Give both or none.")
    far = [address for address in (*peers, *filter(None, [listen])) if isinstance(address_of(address), tuple)]
    if far and key_file is None:
        raise ConfigError(f"{far[0]} can be reached by others, so both sides must prove who they are. Give --role-key-file.")
    if key_file is not None:
        if not far:
            raise ConfigError("--role-key-file is for engines at HOST:PORT. Leave it out, or give --role with such an address.")
        read_key(key_file)
    if role == "joint":
        return None
    return HandoverSettings(listen, tuple(peers), None if key_file is None else str(key_file.resolve()))


def _serve_on_ray(settings: ServeSettings, host: str, port: int, scale: Scale, as_json: bool) -> None:
    from twostroke.server.ray_serve.run import serve_on_ray

    def announce(about: dict[str, Any]) -> None:
        document = {"model": settings.names[0], "min_replicas": scale.min_replicas, "replicas": scale.max_replicas} | about
        for note in about.get("notes", ()):
            log(note)
        first = "as soon as a request comes" if not scale.min_replicas else f"ready in {format_seconds(about['startup_s'])}"
        kind = f"{scale.min_replicas} to {scale.max_replicas} replicas on Ray Serve"
        emit(document, f"serving {settings.names[0]} ({kind}) at {about['url']}/v1, {first}", as_json)

    totals = serve_on_ray(replace(settings, replicas=1), scale, host, port, announce)
    log("stopped after " + ", ".join(f"{format_count(value)} {name}" for name, value in totals.items()))


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
    shape = serving_shape(directory, spec, engine.behind_http(), **request)
    given = [name for name in Fixed._fields if is_typed(context, name)]
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
