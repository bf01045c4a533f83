"""``twostroke plan search``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import JSON_HELP, emit, terminal_width
from twostroke.cli.plan.subject import OUTPUT, PROMPT, SETTINGS, SUBJECT_HELP, read_subject, serving_shape
from twostroke.core.optimizers import CHOICES

if TYPE_CHECKING:
    from twostroke.planner.hardware.device import Hardware

A_YEAR = 365.0
"""Days that a run may take by default. A machine that needs more is the wrong one, however cheap."""

SIMULATED = 20
"""Of the ways to serve, so many of the best by formulas have their latency simulated."""

TERMS = {"on-demand": "on demand", "spot": "spot", "bought": "bought"}


def search(
    subject: str = typer.Argument(metavar="MODEL|RECIPE", help=SUBJECT_HELP),
    phase: str = typer.Option("both", help="What to choose for: train, serve or both (each apart)."),
    hardware: list[str] = typer.Option([], help='A device by name, or "this". Repeatable; without it every device.'),
    objective: str = typer.Option("cost", help="What is best: cost, time, throughput or energy."),
    max_devices: int = typer.Option(8, help="Most devices of one kind."),
    usd_per_hour: float = typer.Option(None, help="Most $ an hour, all devices together."),
    terms: str = typer.Option("on-demand", help="How devices are paid for: on-demand, spot or bought."),
    prompt_tokens: int = PROMPT,
    output_tokens: int = OUTPUT,
    scheme: list[str] = typer.Option(
        [], help="Serving: only these ways to hold weights; without it a quantised checkpoint's own, else several. Repeatable."
    ),
    requests_per_s: float = typer.Option(0.0, help="Serving: requests a second, for the number of replicas; 0: one kept full."),
    slo_ttft_ms: float = typer.Option(None, help="Serving: longest time to the first token, in ms."),
    slo_tpot_ms: float = typer.Option(None, help="Serving: longest time per output token, in ms."),
    usd_per_mtok: float = typer.Option(None, help="Serving: most $ per million output tokens."),
    tokens: float = typer.Option(0.0, help="Training: tokens of the run; without it 20 a parameter."),
    sequence_length: int = typer.Option(0, help="Training: tokens of a sequence; without it 4096, or the model's context."),
    batch_tokens: int = typer.Option(0, help="Training: tokens of an optimizer step; without it about 2 million."),
    dtype: list[str] = typer.Option([], help="Training: only these types; without it bf16, or the device's own. Repeatable."),
    optimizer: str = typer.Option("adamw", help=f"Training: {CHOICES}."),
    days: float = typer.Option(A_YEAR, help="Training: most days of the run."),
    budget_usd: float = typer.Option(None, help="Training: most $ of the run."),
    top: int = typer.Option(12, help="Devices to show; --json has all."),
    simulation: bool = typer.Option(
        True, "--simulation/--no-simulation", help=f"Simulate the users of the {SIMULATED} best ways to serve."
    ),
    settings: list[str] = SETTINGS,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Rank devices, counts, layouts, precisions and batches for each phase, and say why the losers lost."""
    from twostroke.core.errors import CapacityError, ConfigError
    from twostroke.core.profile import ENGINES
    from twostroke.planner.choosing.candidates import OBJECTIVES
    from twostroke.planner.choosing.search import (
        ServeLimits,
        ServeWork,
        Space,
        TrainLimits,
        search_serving,
        search_training,
        train_work,
    )
    from twostroke.planner.hardware.tables import hardware_names, load_hardware
    from twostroke.planner.text.search import nothing_found, search_text, verdict_text
    from twostroke.planner.truth.document import plan_document

    if phase not in ("train", "serve", "both"):
        raise ConfigError(f"--phase={phase} is not known. Use train, serve or both.")
    if objective not in OBJECTIVES:
        raise ConfigError(f"--objective={objective} is not known. Use one of {', '.join(OBJECTIVES)}.")
    if terms not in TERMS:
        raise ConfigError(f"--terms={terms} is not known. Use one of {', '.join(TERMS)}.")
    if top < 1:
        raise ConfigError(f"--top={top} must be at least 1.")
    serving: dict[str, float | str | None] = {
        "--slo-ttft-ms": slo_ttft_ms,
        "--slo-tpot-ms": slo_tpot_ms,
        "--usd-per-mtok": usd_per_mtok,
    }
    training: dict[str, float | str | None] = {"--days": None if days == A_YEAR else days, "--budget-usd": budget_usd}
    _refuse_not_positive(serving | training | {"--usd-per-hour": usd_per_hour, "--days": days})
    _refuse_other_phase(
        phase, "train", serving | {"--requests-per-s": requests_per_s or None, "--scheme": next(iter(scheme), None)}
    )
    _refuse_other_phase(phase, "serve", training | {"--tokens": tokens or None, "--dtype": next(iter(dtype), None)})
    names = dict.fromkeys(hardware or hardware_names())
    sheets = {name: load_hardware(name) for name in names if name != "this"}
    machines = {
        engine: tuple(_at_terms(sheets.get(name) or load_hardware(name, engine), terms) for name in names)
        for engine in ENGINES
        if phase in (engine, "both")
    }
    found = read_subject(subject, settings, next(iter(machines.values()))[0])
    searches = []
    if phase != "serve":
        space = Space(machines["train"], max_devices, tuple(dtype))
        work = train_work(found.spec, tokens, sequence_length, batch_tokens, optimizer)
        searches.append(search_training(found.spec, work, space, TrainLimits(days, budget_usd, usd_per_hour), objective))
    if phase != "train":
        space = Space(machines["serve"], max_devices, tuple(scheme) or ((found.published,) if found.published else ()))
        shape = serving_shape(found, "bf16", 1, prompt_tokens, output_tokens)
        limits = ServeLimits(_seconds(slo_ttft_ms), _seconds(slo_tpot_ms), usd_per_mtok, usd_per_hour)
        asked = ServeWork(shape.prompt_tokens, shape.output_tokens, requests_per_s)
        n_simulated = SIMULATED if simulation else 0
        searches.append(search_serving(found.spec, asked, space, limits, objective, n_simulated))
    if all(done.winner is None for done in searches):
        raise CapacityError(" ".join(nothing_found(done) for done in searches))
    document = plan_document("search", {"subject": found.name, "searches": {done.phase: done for done in searches}})
    width = terminal_width()
    texts = [*(search_text(done, found.name, top, width) for done in searches), verdict_text(searches, width)]
    emit(document, "\n\n".join(filter(None, texts)), as_json)


def _at_terms(machine: Hardware, terms: str) -> Hardware:
    """``machine`` at the price an hour of those terms."""
    from twostroke.planner.money.cost import rate_of

    return dataclasses.replace(machine, usd_per_hour=rate_of(machine, TERMS[terms]).usd_per_hour)  # type: ignore[arg-type]


def _refuse_not_positive(options: dict[str, float | str | None]) -> None:
    """Raise ConfigError for a limit that nothing can keep."""
    from twostroke.core.errors import ConfigError

    for name, value in options.items():
        if isinstance(value, float) and not value > 0:
            raise ConfigError(f"{name}={value:g} must be above 0. Leave it out for no limit.")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _refuse_other_phase(phase: str, asked: str, options: dict[str, float | str | None]) -> None:
    """Raise ConfigError for an option of the phase that was not asked for."""
    from twostroke.core.errors import ConfigError

    other = {"train": "serving", "serve": "training"}[asked]
    for name, value in options.items():
        if phase == asked and value is not None:
            shown = value if isinstance(value, str) else f"{value:g}"
            raise ConfigError(
                f"{name}={shown} is about {other}, which --phase={phase} leaves out. Drop it or use --phase=both."
            )
