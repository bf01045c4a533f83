"""``twostroke plan serve``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.cli.plan.explain import EXPLAIN, with_terms
from twostroke.cli.plan.subject import (
    BATCH,
    HARDWARE,
    HEAD_DTYPE,
    KV_CACHE_BYTES,
    KV_DTYPE,
    MAX_MODEL_LEN,
    OUTPUT,
    PROMPT,
    SCHEME,
    SETTINGS,
    SUBJECT_HELP,
    read_subject,
    serving_shape,
)
from twostroke.cli.slo import MODE, PREFIX_HITS, SLO_TPOT, SLO_TTFT, SPREAD, Asked, check_option, chosen_server
from twostroke.core.adapter_names import adapters_of
from twostroke.core.engine_settings import OFF
from twostroke.core.engine_settings import SETTINGS as ENGINE_SETTINGS
from twostroke.core.errors import ConfigError
from twostroke.core.paths import model_directory

if TYPE_CHECKING:
    from twostroke.cli.plan.subject import Subject
    from twostroke.planner.choosing.server_settings import ServerChoice
    from twostroke.planner.hardware.device import Hardware
    from twostroke.planner.serving.adapters import ServedAdapters
    from twostroke.planner.serving.shape import ServingShape, Speculation

TENSOR = typer.Option(1, "--tp", "--tensor", help="Devices that share every matrix (tensor parallel).")
PIPELINE = typer.Option(1, "--pp", "--pipeline", help="Stages of layers, each on devices of its own.")
EXPERT = typer.Option(
    1, "--ep", "--expert", help="Devices that share the experts; above --tensor, attention is data-parallel over them."
)
ENGINE = typer.Option(
    "any", help="Engine whose step times are taken on a datasheet's device: any, vllm, trtllm, sglang or llama.cpp."
)
SPECULATE = typer.Option(
    "",
    metavar="γ,α,c|HOW",
    help="Speculation: tokens drafted, share accepted, a draft's time ÷ a step's; or a value of serve's --speculate as the "
    "model's last run with that found it.",
)
LORA = typer.Option(
    [],
    metavar="NAME=DIR|N,RANK,TARGET…",
    help="Adapters that requests name in turn: directories in PEFT's layout, or how many of what rank and targets. Repeatable.",
)
RATE = typer.Option(0.0, help="Requests a second to be served: how many replicas that takes.")
SIMULATION = typer.Option(True, "--simulation/--no-simulation", help="Simulate --batch users who ask again when answered.")
DISAGGREGATE = typer.Option(False, "--disaggregate", help="Also plan --rate with prefill and decode on machines of their own.")


def serve(
    subject: str = typer.Argument(metavar="MODEL|RECIPE", help=SUBJECT_HELP),
    hardware: str = HARDWARE,
    settings: list[str] = SETTINGS,
    scheme: str = SCHEME,
    batch: int = BATCH,
    prompt_tokens: int = PROMPT,
    output_tokens: int = OUTPUT,
    head_dtype: str = HEAD_DTYPE,
    kv_dtype: str = KV_DTYPE,
    kv_cache_bytes: int = KV_CACHE_BYTES,
    max_model_len: int = MAX_MODEL_LEN,
    tensor: int = TENSOR,
    pipeline: int = PIPELINE,
    expert: int = EXPERT,
    engine: str = ENGINE,
    prefix_hit_share: float = PREFIX_HITS,
    speculate: str = SPECULATE,
    lora: list[str] = LORA,
    slo_ttft_ms: float = SLO_TTFT,
    slo_tpot_ms: float = SLO_TPOT,
    mode: str = MODE,
    rate: float = RATE,
    disaggregate: bool = DISAGGREGATE,
    spread: float = SPREAD,
    simulation: bool = SIMULATION,
    explain: bool = EXPLAIN,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Memory, time to first token, time per token, throughput at an SLO, replicas, energy and money of serving."""
    from twostroke.planner.choosing.serving_fits import fitting_plan
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.under_load import (
        MOST_REQUESTS_PER_S,
        Server,
        Stretch,
        latency_table,
        load_of,
        simulated,
    )
    from twostroke.planner.text.format import wrapped
    from twostroke.planner.text.server_settings import choice_lines
    from twostroke.planner.text.serving import load_text, loaded_text, serving_text
    from twostroke.planner.truth.document import plan_document
    from twostroke.planner.truth.intervals import low_by_of, predict_with_intervals

    if disaggregate and not rate:
        raise ConfigError("--disaggregate sizes two pools for a rate. Give --rate, in requests/s.")
    asked = Asked(slo_ttft_ms, slo_tpot_ms, mode)
    if not simulation and (rate or asked.anything):
        raise ConfigError("--no-simulation leaves nothing that answers --rate or an SLO. Leave one of them out.")
    check_option("--rate", rate, MOST_REQUESTS_PER_S)
    slo = asked.slo()
    machine = load_hardware(hardware, "serve")
    found = read_subject(subject, settings, machine)
    shape = serving_shape(
        found, scheme, batch, prompt_tokens, output_tokens, head_dtype=head_dtype,
        kv_dtype=kv_dtype, kv_cache_bytes=kv_cache_bytes, max_model_len=max_model_len, tensor=tensor, pipeline=pipeline,
        expert=expert, engine=engine, prefix_hit_share=prefix_hit_share,
        speculation=_speculation(subject, speculate), adapters=_adapters(lora),
    )  # fmt: skip
    planned = fitting_plan(found.spec, shape, machine)
    planned = dataclasses.replace(planned, notes=(*planned.notes, *found.notes))
    intervals = predict_with_intervals(
        planned.prediction(), machine, "serve", experts=found.spec.moe is not None, engine=engine
    )
    table = latency_table(planned)
    document = {"subject": found.name, **plan_document("serve", planned), "intervals": intervals, "latency_table": table}
    users = None
    if simulation:
        server = Server(planned)
        users = simulated(server, server.closed_loop(spread), *Stretch.ends(intervals))
        document |= {"loaded": users.medians, "simulated": users}
    under_load = [loaded_text(planned, users, table)]
    if asked.anything and (mode or machine.is_calibrated_cpu):
        choice = _choice(found, shape, machine, asked, spread, scheme, kv_dtype)
        document["choice"] = choice
        under_load.insert(0, "\n".join(wrapped(["`twostroke serve` for this:", *choice_lines(choice)])))
    if slo_ttft_ms or slo_tpot_ms or rate:
        load = load_of(planned, slo, rate, disaggregate, spread)
        document["load"] = load
        under_load.insert(0, load_text(load))
    text = serving_text(planned, found.name, intervals, low_by_of(machine, "serve"), "\n\n".join(under_load))
    if explain:
        document, text = with_terms(document, text, planned)
    emit(document, text, as_json)


def _choice(
    found: Subject, shape: ServingShape, machine: Hardware, asked: Asked, spread: float, scheme: str, kv_dtype: str
) -> ServerChoice:
    """What ``serve`` would be set to, with the same options."""
    from twostroke.planner.choosing.server_settings import Fixed

    fixed = Fixed(kv_cache_bytes=shape.kv_cache_bytes or None)
    one = dataclasses.replace(shape, batch=1)
    own = scheme == "auto", kv_dtype == "auto"
    return chosen_server(found.directory, found.spec, one, machine, asked, spread, fixed, *own)


def _adapters(options: list[str]) -> tuple[ServedAdapters, ...]:
    """What ``--lora`` asks for: directories together, and each description by itself."""
    from twostroke.planner.serving.adapters import ServedAdapters, adapters_in

    named = adapters_of([option for option in options if "=" in option])
    described = tuple(ServedAdapters.parse(option) for option in options if "=" not in option)
    return adapters_in(named.values()) + described


def _speculation(subject: str, text: str) -> Speculation | None:
    """What ``--speculate`` asks for. Raises ConfigError for a way to draft of which the ledger knows no run of this model."""
    from twostroke.planner.serving.shape import Speculation
    from twostroke.planner.truth.drafts import drafts_seen

    if not text or text == OFF:
        return None
    if not ENGINE_SETTINGS["speculate"].allows(text):
        return Speculation.parse(text)
    found = drafts_seen(model_directory(Path(subject)), text)
    if found is None:
        raise ConfigError(
            f"the ledger knows no run of {subject} with --speculate {text}, so its drafts cannot be planned. Run `twostroke "
            f"generate {subject} --speculate {text}` once, or give γ,α,c."
        )
    return found
