"""``twostroke plan crossover``."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.cli.plan.explain import EXPLAIN, with_terms
from twostroke.cli.plan.subject import (
    BATCH,
    BATCH_SIZE,
    HARDWARE,
    OUTPUT,
    PROMPT,
    SCHEME,
    SEQUENCE_LENGTH,
    SETTINGS,
    STEPS,
    Subject,
    read_subject,
    serving_shape,
)
from twostroke.core.checks import MOST_WHOLE
from twostroke.core.errors import ConfigError
from twostroke.core.units import format_bytes

if TYPE_CHECKING:
    from twostroke.planner.hardware.device import Hardware
    from twostroke.planner.money.cost import Cost, Terms

UTILISATION = 0.5
"""Share of the time in which serving machines work by default: there are as many as the busiest hour needs."""


def crossover(
    subject: str | None = typer.Argument(
        None, metavar="[MODEL|RECIPE]", help="What is trained and served; not needed with both prices given."
    ),
    hardware: str = HARDWARE,
    settings: list[str] = SETTINGS,
    run_usd: float | None = typer.Option(
        None, "--training-usd", help="What the final training run costs; without it, that of the subject's plan."
    ),
    tokens: float = typer.Option(0.0, help="Tokens that training reads; without it a recipe's own or --steps."),
    steps: int = STEPS,
    data: int = typer.Option(1, "--devices", help="Devices that train together (data parallel, ZeRO-3 above one)."),
    batch_size: int = BATCH_SIZE,
    sequence_length: int = SEQUENCE_LENGTH,
    requests_per_day: float | None = typer.Option(None, help="Requests on the first day."),
    tokens_per_day: float | None = typer.Option(None, help="Tokens on the first day instead, prompts and answers together."),
    growth: float = typer.Option(0.0, help="Growth of the demand in percent a month."),
    months: float = typer.Option(12.0, help="How long it is served, for the bills and what 10% is worth."),
    scheme: str = SCHEME,
    batch: int = BATCH,
    prompt_tokens: int = PROMPT,
    output_tokens: int = OUTPUT,
    tensor: int = typer.Option(1, "--tp", "--tensor", help="Serving: devices that share each matrix."),
    pipeline: int = typer.Option(1, "--pp", "--pipeline", help="Serving: stages of layers."),
    expert: int = typer.Option(1, "--ep", "--expert", help="Serving: devices that share a layer's experts."),
    utilisation: float = typer.Option(UTILISATION, help="Share of the time that serving machines work."),
    usd_per_request: float | None = typer.Option(
        None, help="What serving one request costs; without it, that of the subject's plan."
    ),
    always_on: bool = typer.Option(False, "--always-on", help="Whole replicas run day and night, at least one."),
    spot: bool = typer.Option(False, "--spot", help="Devices are rented where they may be taken away."),
    bought: bool = typer.Option(False, "--bought", help="Devices are bought and depreciated; electricity is paid."),
    years: float | None = typer.Option(None, help="Years over which bought devices are depreciated."),
    data_acquisition_usd: float = typer.Option(0.0, "--data-usd", help="Acquiring the data."),
    data_cleaning_usd: float = typer.Option(0.0, "--cleaning-usd", help="Cleaning the data."),
    people_months: float = typer.Option(0.0, help="Months of work of people."),
    repeated_runs: float = typer.Option(0.0, help="Sweeps, ablations and failures, in runs of the final's size."),
    evaluation_usd: float = typer.Option(0.0, help="Evaluation, by people or by other models."),
    stored_gb: float = typer.Option(0.0, help="Data and checkpoints kept, in GB."),
    storage_months: float = typer.Option(0.0, help="How long they are kept."),
    egress_gb: float = typer.Option(0.0, help="GB moved out of a cloud."),
    api: str | None = typer.Option(
        None, help="A vendor's model to compare with; without it, the one of the subject's name, if any."
    ),
    cached_share: float = typer.Option(
        0.0, "--api-cached-share", help="Share of the prompts' tokens that the API has read before, 0 to 1."
    ),
    explain: bool = EXPLAIN,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """The day and the token at which serving has cost more than training, what 10% saved is worth, an API's price beside it."""
    from twostroke.planner.choosing.crossover import (
        LIMIT_GROWTH_PER_MONTH,
        Demand,
        Energy,
        PaidByRequest,
        Serving,
        own_serving,
        plan_crossover,
    )
    from twostroke.planner.choosing.serving_fits import fitting_plan
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.money.api_prices import api_price, nearest_api
    from twostroke.planner.money.cost import ProjectInputs, project_cost
    from twostroke.planner.serving.under_load import Server
    from twostroke.planner.text.crossover import crossover_text, terms_lines
    from twostroke.planner.truth.document import plan_document

    if not -100 < growth <= 100 * LIMIT_GROWTH_PER_MONTH:
        most = 100 * LIMIT_GROWTH_PER_MONTH
        raise ConfigError(f"--growth {growth:g} must be above -100 and at most {most:g} percent a month.")
    if (requests_per_day is None) == (tokens_per_day is None):
        raise ConfigError("the demand is needed once: give --requests-per-day or --tokens-per-day.")
    terms = _terms(spot, bought, years)
    inputs = ProjectInputs(
        data_acquisition_usd,
        data_cleaning_usd,
        people_months,
        repeated_runs,
        evaluation_usd,
        stored_gb,
        storage_months,
        egress_gb,
    )
    vendor = api_price(api) if api else None
    document: dict[str, Any] = {"subject": subject or "a model"}
    lines: list[str] = []
    notes: list[str] = []
    energy = None
    serving: Serving | None = PaidByRequest(usd_per_request) if usd_per_request is not None else None
    replica = None
    if run_usd is None or serving is None:
        if subject is None:
            raise ConfigError(
                "a model or recipe is needed to plan with. Name one, or give --training-usd and --usd-per-request."
            )
        machine = load_hardware(hardware, "train" if run_usd is None else "serve")
        found = read_subject(subject, settings, machine)
        vendor = vendor or nearest_api(found.name)
        document |= {"subject": found.name, "hardware": machine}
        if run_usd is None:
            spent, notes = _training_cost(found, machine, terms, years, tokens, steps, data, batch_size, sequence_length)
            run_usd, document["training_cost"] = spent.usd, spent
        if serving is None:
            shape = serving_shape(
                found,
                scheme,
                batch,
                prompt_tokens,
                output_tokens,
                tensor=tensor,
                pipeline=pipeline,
                expert=expert,
            )
            served_on = load_hardware(hardware, "serve")
            planned = fitting_plan(found.spec, shape, served_on)
            server = Server(planned)
            simulated = server.serve(server.closed_loop())
            own = own_serving(planned, terms, utilisation, years, simulated.output_tok_per_s)
            prompt_tokens, output_tokens = planned.shape.prompt_tokens, planned.shape.output_tokens
            replica = own.by_replica
            if "training_cost" in document:
                kwh_per_request = planned.kwh_per_mtok * planned.shape.output_tokens / 1e6
                trained = document["training_cost"]
                energy = Energy(trained.energy_kwh, kwh_per_request, trained.grid, trained.pue)
            serving = own.by_replica if always_on else own.by_request
            document |= {"worked_hour": own.worked, "utilisation": utilisation, "token_prices": own.tokens}
            lines = terms_lines(own, served_on)
        notes += found.notes
    if always_on and replica is None:
        raise ConfigError("--always-on needs a replica's speed, which --usd-per-request does not tell. Name a model instead.")
    prompt_tokens, output_tokens = prompt_tokens or 512, output_tokens or 128
    requests = requests_per_day if tokens_per_day is None else tokens_per_day / (prompt_tokens + output_tokens)
    assert requests is not None  # one of the two was given
    demand = Demand(requests, prompt_tokens, output_tokens, growth / 100)
    plan = plan_crossover(project_cost(run_usd, inputs), demand, serving, months, vendor, replica, cached_share, energy)
    document, text = (
        document | plan_document("crossover", plan) | {"notes": notes},
        crossover_text(plan, document["subject"], lines, notes),
    )
    if explain:
        document, text = with_terms(document, text, plan)
    emit(document, text, as_json)


def _terms(spot: bool, bought: bool, years: float | None) -> Terms:
    if spot and bought:
        raise ConfigError("--spot and --bought exclude each other: a device is rented or bought.")
    if years is not None and not bought:
        raise ConfigError(f"--years={years:g} depreciates bought devices. Add --bought.")
    return "spot" if spot else "bought" if bought else "on demand"


def _training_cost(
    found: Subject, machine: Hardware, terms: Terms, years: float | None, tokens: float, steps: int, devices: int,
    batch_size: int, sequence_length: int,
) -> tuple[Cost, list[str]]:  # fmt: skip
    """Cost of the subject's final run on ``devices``, and notes on it. Its length is the recipe's, ``tokens`` or ``steps``."""
    from twostroke.planner.money.cost import bought_rate, cost_of, rate_of
    from twostroke.planner.training.layout import Layout
    from twostroke.planner.training.plan import plan_training
    from twostroke.planner.training.shape import TrainingShape

    if not 0 <= tokens <= MOST_WHOLE:
        raise ConfigError(f"--tokens={tokens:g} must be from 0 to {MOST_WHOLE:g}.")
    shape = found.shape or TrainingShape(batch_size, sequence_length, steps=steps)
    layout = Layout(data=devices, zero=3 if devices > 1 else 0)
    if tokens:
        shape = dataclasses.replace(shape, steps=math.ceil(tokens / (shape.tokens_per_step * layout.data)))
    if not shape.steps:
        raise ConfigError("the training run has no length. Give --tokens, --steps or --training-usd.")
    run = plan_training(found.spec, shape, machine, layout)
    planned = run.cost
    assert planned is not None  # it has steps
    notes = []
    if not run.fits:
        notes.append(
            f"the run DOES NOT FIT: it takes {format_bytes(run.peak_memory_bytes)} a device, and {machine.label} has "
            f"{format_bytes(machine.memory_bytes)}: its price is of its work alone. `plan search` finds layouts that fit; "
            "give their price as --training-usd."
        )
    rate = bought_rate(machine, years) if terms == "bought" else rate_of(machine, terms)
    return cost_of(planned.seconds * planned.n_devices, machine, rate=rate, watts=run.watts), notes
