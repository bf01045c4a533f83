"""``twostroke plan train|serve|compare``: what work will take, before any of it. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.core.errors import ConfigError, InputError

if TYPE_CHECKING:
    from twostroke.core.recipe import TrainRecipe
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.hardware import Hardware
    from twostroke.planner.search import Candidate
    from twostroke.planner.serving import ServingShape
    from twostroke.planner.training import TrainingShape

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Predict memory, time, throughput, energy and money, before any work."
)

UNKNOWN_TRAIN_TOKENS = 10**12
"""Text that is assumed where nobody has counted it: more than any budget here reads, so that nothing is read twice."""

HARDWARE = typer.Option("this", help='A device by name, or "this" for the machine that `twostroke calibrate` measured.')
BATCH_SIZE = typer.Option(16, help="Sequences in one forward and backward.")
SEQUENCE_LENGTH = typer.Option(512, help="Tokens of a training sequence.")
GRAD_ACCUMULATION = typer.Option(1, help="Forward and backward passes per update.")
DTYPE = typer.Option("bf16", help="Type of training's products: bf16 or fp32.")
OPTIMIZER = typer.Option("adamw", help="adamw or muon.")
EAGER = typer.Option(False, "--eager", help="Plan for training without torch.compile.")
STEPS = typer.Option(0, help="Length of the run in steps; without it only rates are planned.")
SETTINGS = typer.Option([], "--set", help="Override one recipe key: section.key=value. Repeatable.")
TRAIN_TOKENS = typer.Option(0, help="Tokens of text there are; without it, those of the recipe's prepared data.")
SCHEME = typer.Option("bf16", help="How weights are held: fp32, bf16 or int8.")
BATCH = typer.Option(8, help="Requests that decode together.")
PROMPT = typer.Option(0, help="Tokens of a prompt; without it half the context, at most 512.")
OUTPUT = typer.Option(0, help="Tokens of an answer; without it what is left, at most 128.")
KV_DTYPE = typer.Option("auto", help="Type of the KV cache: auto, bf16 or fp32.")
KV_CACHE_BYTES = typer.Option(0, help="Size of the KV cache; 0: what the batch needs.")
MAX_MODEL_LEN = typer.Option(0, help="Longest context to serve; 0: the model's own.")


@app.callback()
def plan() -> None:
    """Predict memory, time, throughput, energy and money, before any work."""


@dataclasses.dataclass(frozen=True)
class _Subject:
    """What a SUBJECT argument stands for. ``steps`` and ``ranking`` only where a recipe's budget decided them."""

    name: str
    spec: ModelSpec
    shape: TrainingShape | None
    steps: int = 0
    ranking: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()


def _prepared_counts(recipe: TrainRecipe) -> tuple[int, int] | None:
    """(vocabulary, training tokens) of data that was prepared with this very recipe; None where there is none. Read from
    manifests alone: counting anew would take longer than everything else here."""
    from twostroke.core.paths import data_cache_dir

    wanted = json.loads(json.dumps(dataclasses.asdict(recipe.data)))
    manifests = sorted(data_cache_dir().glob("*/manifest.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in manifests:
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if manifest["inputs"]["recipe"] == wanted:
                return int(manifest["vocab_size"]), int(manifest["n_train_tokens"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another version's or a damaged one: `data prepare` will say so, a plan need not
    return None


def _from_recipe(path: Path, settings: list[str], hardware: Hardware, train_tokens: int) -> _Subject:
    from twostroke.core.families import read_spec
    from twostroke.core.recipe import read_recipe, spec_from_recipe
    from twostroke.planner.search import rank_models
    from twostroke.planner.training import TrainingShape, steps_for_budget

    recipe = read_recipe(path, settings)
    counted = _prepared_counts(recipe)
    vocabulary, tokens = counted or (recipe.data.vocab_size, train_tokens or UNKNOWN_TRAIN_TOKENS)
    tokens = train_tokens or tokens
    notes = []
    if counted is None and not train_tokens:
        notes.append("the recipe's text is not prepared yet: unlimited text and the recipe's vocabulary are assumed.")
    ranking: tuple[Candidate, ...] = ()
    model = recipe.model
    if model.init_from is not None:
        spec = read_spec(model.init_from)
    else:
        if model.size == "auto":
            ranked = rank_models(recipe.train.budget_s, vocabulary, tokens, recipe.train, hardware)
            ranking, picked = tuple(ranked), ranked[0].spec
            model = dataclasses.replace(
                model,
                n_layers=picked.n_layers,
                d_model=picked.d_model,
                n_heads=picked.n_heads,
                n_kv_heads=picked.n_kv_heads,
                head_dim=picked.head_dim,
                d_ff=picked.d_ff,
            )
        spec = spec_from_recipe(model, vocabulary, recipe.train.sequence_length)
    shape = TrainingShape.from_settings(recipe.train, steps=0)
    steps = recipe.train.steps or steps_for_budget(spec, shape, hardware, recipe.train.budget_s)
    return _Subject(str(path), spec, dataclasses.replace(shape, steps=steps), steps, ranking, tuple(notes))


def _subject(text: str, settings: list[str], hardware: Hardware, train_tokens: int = 0) -> _Subject:
    """A recipe (.toml), a model directory or a config.json."""
    from twostroke.core.families import read_spec

    path = Path(text)
    if path.suffix == ".toml":
        return _from_recipe(path, settings, hardware, train_tokens)
    if settings:
        raise ConfigError(f"--set changes a recipe, and {text} is none. Use the options, or name a .toml file.")
    if not path.exists():
        raise InputError(f"{text} does not exist. Give a recipe (.toml), a model directory or a config.json.")
    return _Subject(str(path), read_spec(path), None)


def _serving_shape(spec: ModelSpec, scheme: str, batch: int, prompt: int, output: int, **others: Any) -> ServingShape:
    """Prompt and output left out take half of a short context and 512 + 128 tokens of a long one."""
    from twostroke.planner.serving import ServingShape

    for name, value in (("prompt", prompt), ("output", output)):
        if value < 0:
            raise ConfigError(f"--{name}={value} must not be negative.")
    limit = others.get("max_model_len") or spec.max_positions
    prompt = prompt or max(1, min(512, limit // 2, limit - output))
    output = output or max(1, min(128, limit - prompt))
    return ServingShape(scheme=scheme, batch=batch, prompt_tokens=prompt, output_tokens=output, **others)


@app.command()
def train(
    subject: str = typer.Argument(metavar="RECIPE|MODEL", help="A recipe (.toml), a model directory or a config.json."),
    hardware: str = HARDWARE,
    settings: list[str] = SETTINGS,
    train_tokens: int = TRAIN_TOKENS,
    batch_size: int = BATCH_SIZE,
    sequence_length: int = SEQUENCE_LENGTH,
    grad_accumulation: int = GRAD_ACCUMULATION,
    dtype: str = DTYPE,
    optimizer: str = OPTIMIZER,
    eager: bool = EAGER,
    steps: int = STEPS,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Memory by term, time by pass and component, throughput, energy and money of a training run.

    A recipe brings its own shape; the options from --batch-size to --steps are for a bare model.
    """
    from twostroke.planner.hardware import load_hardware
    from twostroke.planner.text import candidates_text, training_text
    from twostroke.planner.training import TrainingShape, plan_training

    machine = load_hardware(hardware)
    found = _subject(subject, settings, machine, train_tokens)
    shape = found.shape or TrainingShape(batch_size, sequence_length, grad_accumulation, dtype, optimizer, not eager, steps)
    planned = plan_training(found.spec, shape, machine)
    planned = dataclasses.replace(planned, notes=(*planned.notes, *found.notes))
    document = {"subject": found.name, **planned.to_dict(), "ranking": [c.to_dict() for c in found.ranking]}
    text = training_text(planned, found.name)
    if found.ranking:
        text = f"{candidates_text(found.ranking)}\n\n{text}"
    emit(document, text, as_json)


@app.command()
def serve(
    subject: str = typer.Argument(metavar="MODEL|RECIPE", help="A model directory, a config.json or a recipe (.toml)."),
    hardware: str = HARDWARE,
    settings: list[str] = SETTINGS,
    scheme: str = SCHEME,
    batch: int = BATCH,
    prompt: int = PROMPT,
    output: int = OUTPUT,
    kv_dtype: str = KV_DTYPE,
    kv_cache_bytes: int = KV_CACHE_BYTES,
    max_model_len: int = MAX_MODEL_LEN,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Memory, time to first token, time per token, throughput, energy and money of serving."""
    from twostroke.planner.hardware import load_hardware
    from twostroke.planner.serving import plan_serving
    from twostroke.planner.text import serving_text

    machine = load_hardware(hardware)
    found = _subject(subject, settings, machine)
    shape = _serving_shape(
        found.spec, scheme, batch, prompt, output,
        kv_dtype=kv_dtype, kv_cache_bytes=kv_cache_bytes, max_model_len=max_model_len,
    )  # fmt: skip
    planned = plan_serving(found.spec, shape, machine)
    emit({"subject": found.name, **planned.to_dict()}, serving_text(planned, found.name), as_json)


@app.command()
def compare(
    subject: str = typer.Argument(metavar="MODEL|RECIPE", help="A model directory, a config.json or a recipe (.toml)."),
    hardware: str = HARDWARE,
    settings: list[str] = SETTINGS,
    train_tokens: int = TRAIN_TOKENS,
    batch_size: int = BATCH_SIZE,
    sequence_length: int = SEQUENCE_LENGTH,
    grad_accumulation: int = GRAD_ACCUMULATION,
    dtype: str = DTYPE,
    optimizer: str = OPTIMIZER,
    eager: bool = EAGER,
    steps: int = STEPS,
    scheme: str = SCHEME,
    batch: int = BATCH,
    prompt: int = PROMPT,
    output: int = OUTPUT,
    train_run: str = typer.Option(None, help="A training run of the ledger whose measurements go beside the predictions."),
    serve_run: list[str] = typer.Option([], help="Serving or bench runs of the ledger, likewise. Repeatable."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Training beside prefill beside decode: passes, memory, work, bounds, latency, network, storage, energy, money."""
    from twostroke.planner.comparison import compare as compare_phases
    from twostroke.planner.comparison import merge_measured
    from twostroke.planner.hardware import load_hardware
    from twostroke.planner.text import comparison_text
    from twostroke.planner.training import TrainingShape

    machine = load_hardware(hardware)
    found = _subject(subject, settings, machine, train_tokens)
    shape = found.shape or TrainingShape(batch_size, sequence_length, grad_accumulation, dtype, optimizer, not eager, steps)
    serving = _serving_shape(found.spec, scheme, batch, prompt, output)
    table = compare_phases(found.spec, shape, serving, machine, found.name)
    if train_run or serve_run:
        from twostroke.ledger.store import Ledger  # only here: sqlite3 takes a tenth of the time a plan has

        ledger = Ledger()
        trained = ledger.get(train_run).measurement if train_run else None
        served: dict[str, Any] = {}
        for run_id in serve_run:
            served |= ledger.get(run_id).measurement
        table = merge_measured(table, trained, served)
    emit(table.to_dict(), comparison_text(table), as_json)
