"""``twostroke plan train``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.cli.plan.explain import EXPLAIN, with_terms
from twostroke.cli.plan.subject import (
    EAGER,
    HARDWARE,
    SEQUENCE_LENGTH,
    SETTINGS,
    STEPS,
    SUBJECT_HELP,
    TRAIN_TOKENS,
    Subject,
    read_subject,
)
from twostroke.cli.typed import is_typed
from twostroke.core.checks import MOST_WHOLE
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.optimizers import CHOICES

if TYPE_CHECKING:
    from twostroke.planner.hardware.device import Hardware
    from twostroke.planner.training.layout import Layout

Number = TypeVar("Number", int, float)

SHAPE_OPTIONS = (
    "batch_size",
    "sequence_length",
    "grad_accumulation",
    "dtype",
    "optimizer",
    "eager",
    "steps",
    "tokens",
    "method",
    "lora_rank",
    "lora_targets",
    "checkpointing",
    "logits",
    "optimizer_in_backward",
    "offload_activations",
    "offload_optimizer",
    "gradient_bits",
)
"""Options whose values a recipe has itself."""


def train(
    call: typer.Context,
    subject: str = typer.Argument(metavar="RECIPE|MODEL", help=SUBJECT_HELP),
    hardware: str = HARDWARE,
    settings: list[str] = SETTINGS,
    train_tokens: int = TRAIN_TOKENS,
    batch_size: int = typer.Option(16, help="Sequences in one forward and backward of one data-parallel rank."),
    sequence_length: int = SEQUENCE_LENGTH,
    grad_accumulation: int = typer.Option(1, help="Forward and backward passes per update: micro-batches in a pipeline."),
    dtype: str = typer.Option("bf16", help="fp32, bf16, fp16 (mixed), pure_bf16; fp8, mxfp8, nvfp4 (blocks' products)."),
    optimizer: str = typer.Option("adamw", help=f"{CHOICES}."),
    eager: bool = EAGER,
    steps: int = STEPS,
    tokens: float = typer.Option(0.0, help="Length of the run in tokens, as in 1e12, in place of --steps."),
    method: str = typer.Option("full", help="full, lora or qlora."),
    lora_rank: int = typer.Option(16, help="Rank of the adapters."),
    lora_targets: str = typer.Option("all-linear", help="Matrices with an adapter, as q_proj,v_proj."),
    checkpointing: str = typer.Option(
        "none", help="What backward computes again: none, selective (elementwise work), selective_op or full."
    ),
    logits: str = typer.Option(
        "chunked",
        help="chunked; whole where the loss takes a micro-batch's at once, listed where it takes them by the chunk.",
    ),
    optimizer_in_backward: bool = typer.Option(False, help="Each gradient is used and freed as soon as it is there."),
    offload_activations: str = typer.Option(
        "none", help="Where what layers keep for backward waits: none, cpu (the host's memory) or disk."
    ),
    offload_optimizer: str = typer.Option(
        "none", help="Where the optimizer's state stays: none, cpu (the host's memory, updated there) or disk."
    ),
    gradient_bits: int = typer.Option(0, help="Bits in which a gradient is sent, as 8; without it, as it is held."),
    data: int = typer.Option(1, "--dp", "--data-parallel", help="Ranks that each read their own part of the batch."),
    zero: int = typer.Option(
        0, help="What they share out: 0 nothing (DDP), 1 optimizer, 2 gradients too, 3 weights too (FSDP2)."
    ),
    fsdp: int = typer.Option(0, help="Short for --data-parallel with --zero 3: ranks that share out all of the state."),
    tensor: int = typer.Option(1, "--tp", "--tensor", help="Devices that share each matrix."),
    sequence_parallel: bool = typer.Option(True, help="Tensor parallel cuts norms along the sequence."),
    pipeline: int = typer.Option(1, "--pp", "--pipeline", help="Stages of layers."),
    interleave: int = typer.Option(1, help="Chunks of layers that a stage holds."),
    expert: int = typer.Option(1, "--ep", "--expert", help="Devices that share a layer's experts."),
    context: int = typer.Option(1, "--cp", "--context", help="Devices that share each sequence (ring attention)."),
    ranks: int = typer.Option(0, help="Ranks that a recipe is planned on, whose [parallel] lays them out."),
    devices_per_node: int = typer.Option(0, help="Devices that the fast link joins; without it, the hardware's own number."),
    mtbf_hours: float = typer.Option(0.0, help="Hours between failures of one device; without it, 50,676 (Llama 3's H100)."),
    explain: bool = EXPLAIN,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Memory by term, time by pass and component, traffic, throughput, energy and money of a training run.

    A recipe brings its own shape; the options from --batch-size to --logits are for a bare model. Memory, time and traffic are
    one device's, rate and money the whole job's.
    """
    from twostroke.planner.choosing.fitting import remedy_for
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.text.training import candidates_text, training_text
    from twostroke.planner.training.layout import Layout
    from twostroke.planner.training.plan import plan_training
    from twostroke.planner.training.shape import TrainingShape
    from twostroke.planner.truth.document import plan_document
    from twostroke.planner.truth.intervals import low_by_of, predict_with_intervals

    machine = load_hardware(hardware, "train")
    if fsdp:
        data, zero = _of_fsdp(fsdp, data, zero)
    layout = Layout(
        data,
        zero,
        tensor,
        sequence_parallel,
        pipeline,
        interleave,
        expert,
        _or_none("devices-per-node", devices_per_node),
        context,
    )
    if tokens and steps:
        raise ConfigError(f"--tokens={tokens:g} and --steps={steps}: give one of them.")
    if not (tokens == 0 or 1 <= tokens <= MOST_WHOLE):
        raise ConfigError(f"--tokens={tokens:g} must be from 1 to {MOST_WHOLE:g}.")
    found = read_subject(subject, settings, machine, train_tokens)
    if found.shape is not None:
        _refuse_shape_options(call, subject)
    elif method == "full" and (name := _first_typed(call, ("lora_rank", "lora_targets"))):
        raise ConfigError(f"{_option(name)} is of adapters, and --method full trains none. Add --method lora or qlora.")
    if ranks or (found.recipe is not None and found.recipe.parallel is not None):
        if layout != Layout(devices_per_node=layout.devices_per_node):
            raise ConfigError(f"the layout is that of [parallel] in {subject}. Change it there, or with --set parallel.data=2.")
        found, own = _laid_out(found, ranks, machine)
        layout = dataclasses.replace(own, devices_per_node=layout.devices_per_node)
    shape = found.shape or TrainingShape(
        batch_size,
        sequence_length,
        grad_accumulation,
        dtype,
        optimizer,
        not eager,
        steps,
        method,
        lora_rank,
        tuple(name.strip() for name in lora_targets.split(",") if name.strip()),
        checkpointing,
        logits,
        optimizer_in_backward,
        offload_activations,
        offload_optimizer,
        gradient_bits,
    )
    if tokens:
        shape = dataclasses.replace(shape, steps=-(-int(tokens) // (shape.tokens_per_step * layout.data)))
    planned = plan_training(found.spec, shape, machine, layout, _or_none("mtbf-hours", mtbf_hours))
    planned = dataclasses.replace(planned, notes=(*planned.notes, *found.notes))
    remedy = "" if planned.fits else remedy_for(found.spec, shape, machine, layout)
    intervals = predict_with_intervals(planned.prediction(), machine, "train")
    document = {"subject": found.name, **plan_document("train", planned), "intervals": intervals, "ranking": found.ranking}
    if remedy:
        document["notes"] = [*document["notes"], remedy]
    text = training_text(planned, found.name, intervals, low_by_of(machine, "train"), remedy)
    if found.ranking:
        text = f"{candidates_text(found.ranking)}\n\n{text}"
    if explain:
        document, text = with_terms(document, text, planned)
    emit(document, text, as_json)
    if not planned.fits:
        raise typer.Exit(CapacityError.exit_code)


def _laid_out(found: Subject, ranks: int, machine: Hardware) -> tuple[Subject, Layout]:
    """``found``, a recipe, as its ``[parallel]`` lays it out on ``ranks`` ranks of ``machine``; 0: as many as it asks for."""
    from twostroke.core.parallel_recipe import ParallelRecipe
    from twostroke.planner.choosing.layouts import choose_layout
    from twostroke.planner.training.layout import layout_of
    from twostroke.planner.training.plan import steps_for_budget
    from twostroke.planner.training.shape import TrainingShape

    recipe = found.recipe
    if recipe is None:
        raise ConfigError(f"--ranks={ranks} is for a recipe, and {found.name} is a model. Use --dp, --tp or --pp.")
    if ranks < 0:
        raise ConfigError(f"--ranks={ranks} must be above 0.")
    parallel, sharing, notes = recipe.parallel or ParallelRecipe(), max(1, ranks) if machine.is_calibrated_cpu else 1, []
    if parallel.is_auto:
        from twostroke.training.parallelize import check_layout

        if not ranks:
            raise ConfigError('parallel.layout="auto" is planned for a number of ranks. Give --ranks N.')
        parallel, sentence = choose_layout(recipe, found.spec, ranks, machine, check_layout, sharing)
        notes.append(sentence)
    if ranks:
        parallel = parallel.on(ranks, recipe.train.grad_accumulation)
    layout, laid_out = layout_of(parallel, found.spec, sharing), dataclasses.replace(recipe, parallel=parallel)
    shape, budget_s = TrainingShape.from_recipe(laid_out, steps=0), recipe.train.budget_s
    steps = recipe.train.steps or steps_for_budget(found.spec, shape, machine, budget_s, layout)
    shape = dataclasses.replace(shape, steps=steps)
    return dataclasses.replace(found, shape=shape, steps=steps, notes=(*found.notes, *notes)), layout


def _of_fsdp(ranks: int, data: int, zero: int) -> tuple[int, int]:
    """(data, zero) of ``--fsdp``. Raises ConfigError beside the options that it stands for."""
    if data != 1 or zero not in (0, 3):
        raise ConfigError(f"--fsdp={ranks} stands for --data-parallel {ranks} --zero 3. Give it or them.")
    return ranks, 3


def _or_none(name: str, value: Number) -> Number | None:
    """``value``, or None for 0, an option that was left out. Raises ConfigError below 0."""
    if value < 0:
        raise ConfigError(f"--{name}={value:g} must be above 0.")
    return value or None


def _refuse_shape_options(call: typer.Context, subject: str) -> None:
    """ConfigError for an option that a recipe would silently overrule."""
    if name := _first_typed(call, SHAPE_OPTIONS):
        raise ConfigError(f"{_option(name)} is for a bare model, and {subject} is a recipe. Use --set train.{name}=… instead.")


def _first_typed(call: typer.Context, names: tuple[str, ...]) -> str | None:
    """The first of ``names`` that stands on the command line."""
    return next((name for name in names if is_typed(call, name)), None)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
