"""Options that the plans share, and the reader of their SUBJECT argument."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.core.documents import read_object
from twostroke.core.engines import CACHE_CHOICES, WEIGHT_CHOICES
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.optimizers import CHOICES
from twostroke.core.schemes import CACHES, SCHEMES, scheme_of

if TYPE_CHECKING:
    from twostroke.core.recipe import TrainRecipe
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.choosing.size_ladder import Rung
    from twostroke.planner.hardware.device import Hardware
    from twostroke.planner.serving.shape import ServingShape
    from twostroke.planner.training.shape import TrainingShape
    from twostroke.quantization.held import Held

UNKNOWN_TRAIN_TOKENS = 10**12
"""Tokens of text that are assumed before it is counted: more than any budget here reads, so that none is read twice."""

SUBJECT_HELP = "A model of the Hub as meta-llama/Llama-3.1-8B, a model directory, a config.json or a recipe (.toml)."
HARDWARE = typer.Option("this", help='A device by name, or "this" for the machine that `twostroke calibrate` measured.')
BATCH_SIZE = typer.Option(16, help="Sequences in one forward and backward.")
SEQUENCE_LENGTH = typer.Option(512, help="Tokens of a training sequence.")
GRAD_ACCUMULATION = typer.Option(1, help="Forward and backward passes per update.")
DTYPE = typer.Option("bf16", help="Type of training's products: bf16 or fp32.")
OPTIMIZER = typer.Option("adamw", help=f"{CHOICES}.")
EAGER = typer.Option(False, "--eager", help="Plan for training without torch.compile.")
STEPS = typer.Option(0, help="Length of the run in steps; without it only rates are planned.")
SETTINGS = typer.Option([], "--set", help="Override one recipe key: section.key=value. Repeatable.")
TRAIN_TOKENS = typer.Option(0, help="Tokens of text there are; without it, those of the recipe's prepared data.")
SCHEME = typer.Option("auto", help=f"How weights are held: auto (as the checkpoint is, else bf16), {', '.join(SCHEMES)}.")
HEAD_DTYPE = typer.Option("auto", help=f"How our engine holds the output head: {WEIGHT_CHOICES}.")
BATCH = typer.Option(8, help="Requests that decode together.")
PROMPT = typer.Option(0, "--prompt", help="Tokens of a prompt; without it half the context, at most 512.")
OUTPUT = typer.Option(0, "--output", help="Tokens of an answer; without it what is left, at most 128.")
KV_DTYPE = typer.Option("auto", help=f"Type of the KV cache: {CACHE_CHOICES}; auto takes a published checkpoint's own.")
KV_CACHE_BYTES = typer.Option(0, help="Size of the KV cache; 0: what the batch needs.")
MAX_MODEL_LEN = typer.Option(0, help="Longest context to serve; 0: the model's own.")


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a SUBJECT argument names. It has ``steps`` and ``ranking`` only if a recipe's budget decided them."""

    name: str
    spec: ModelSpec
    shape: TrainingShape | None
    steps: int = 0
    ranking: tuple[Rung, ...] = ()
    notes: tuple[str, ...] = ()
    held: Held | None = None
    """How our engine holds the matrices of a quantised directory."""
    published: str | None = None
    """The scheme of a checkpoint that another tool quantised, on other engines."""
    directory: Path | None = None
    """Where the model is, if it is here."""
    cache: str | None = None
    """The type of KV cache that it has scales for, which those engines take then."""
    recipe: TrainRecipe | None = None

    def scheme(self, asked: str) -> str:
        """``asked``, or the scheme that "auto" means here: the checkpoint's own, bf16 where it is plain."""
        return (self.held.scheme if self.held else self.published or "bf16") if asked == "auto" else scheme_of(asked).name

    def kv_dtype(self, asked: str, scheme: str, engine: str) -> str:
        """``asked``, or what "auto" means of weights in ``scheme``: the checkpoint's own type, if it is planned as it is under
        an engine that reads it."""
        from twostroke.planner.serving.shape import LLAMA_CPP

        if asked != "auto" or self.cache is None or engine == LLAMA_CPP or self.scheme(scheme) != self.published:
            return asked
        return self.cache

    def as_held(self, asked: str) -> Held:
        """The scheme, and the matrices that are held otherwise, if the directory is planned as it is."""
        from twostroke.quantization.held import Held

        scheme = self.scheme(asked)
        return self.held if self.held is not None and scheme == self.held.scheme else Held(scheme)


def _prepared_counts(recipe: TrainRecipe) -> tuple[int, int] | None:
    """(vocabulary, training tokens) of data that was prepared with this very recipe, or None. From manifests alone: to count
    anew takes longer than the whole plan."""
    from twostroke.core.paths import data_cache_dir

    wanted = json.loads(json.dumps(recipe.data.preparation()))
    manifests = sorted(data_cache_dir().glob("*/manifest.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in manifests:
        try:
            manifest = read_object(path)
            if manifest["inputs"]["recipe"] == wanted:
                return int(manifest["vocab_size"]), int(manifest["n_train_tokens"])
        except (CorruptFileError, ValueError, KeyError, TypeError):
            continue  # another version's, or damaged: `data prepare` says so, and a plan need not
    return None


def _from_recipe(path: Path, settings: list[str], hardware: Hardware, train_tokens: int) -> Subject:
    from twostroke.core.families import named_model
    from twostroke.core.recipe import read_recipe, spec_from_recipe
    from twostroke.planner.choosing.size_ladder import rank_models
    from twostroke.planner.training.plan import steps_for_budget
    from twostroke.planner.training.shape import TrainingShape

    recipe = read_recipe(path, settings)
    counted = _prepared_counts(recipe)
    vocabulary, tokens = counted or (recipe.data.vocab_size, train_tokens or UNKNOWN_TRAIN_TOKENS)
    tokens = train_tokens or tokens
    notes = []
    if counted is None and not train_tokens:
        notes.append("the recipe's text is not prepared yet: unlimited text and the recipe's vocabulary are assumed.")
    ranking: tuple[Rung, ...] = ()
    model = recipe.model
    if model.init_from is not None:
        spec = named_model(model.init_from).spec
    else:
        if model.size == "auto":
            ranked = rank_models(recipe.train.budget_s, vocabulary, tokens, recipe.train, hardware)
            ranking, picked = tuple(ranked), ranked[0].spec
            model = model.sized_as(picked)
        spec = spec_from_recipe(model, vocabulary, recipe.train.sequence_length)
    shape = TrainingShape.from_recipe(recipe, steps=0)
    steps = recipe.train.steps or steps_for_budget(spec, shape, hardware, recipe.train.budget_s)
    return Subject(str(path), spec, dataclasses.replace(shape, steps=steps), steps, ranking, tuple(notes), recipe=recipe)


def read_subject(text: str, settings: list[str], hardware: Hardware, train_tokens: int = 0) -> Subject:
    """The subject that ``text`` names: a recipe (.toml), a model directory, a config.json or a model of the Hub."""
    from twostroke.core.families import named_model

    path = Path(text)
    if train_tokens < 0:
        raise ConfigError(f"train_tokens={train_tokens} must be at least 1. Leave it out for the recipe's prepared data.")
    if path.suffix == ".toml":
        return _from_recipe(path, settings, hardware, train_tokens)
    if settings:
        raise ConfigError(f"--set needs a recipe, and {text} is not a .toml file. Use the options instead, or name a recipe.")
    found = named_model(text)
    # What another tool wrote, accelerators serve as it is, and our engine as it holds it.
    here = found.spec.checkpoint_scheme is None or hardware.is_calibrated_cpu
    ours = _held(found.directory, found.spec) if here and found.directory is not None and found.scheme is not None else None
    published, notes = (None, ()) if ours else _served_as(found.scheme, hardware)
    if ours and found.spec.checkpoint_scheme is not None:
        notes = (f"published in {found.scheme}: our engine holds it in {ours.scheme}.",)
    cache = found.cache if published else None
    if cache is not None and cache not in CACHES:
        notes, cache = (*notes, f"its KV cache is published in {cache}, which is not planned: the engine's own type."), None
    return Subject(
        found.name, found.spec, None, notes=notes, held=ours, published=published, directory=found.directory, cache=cache
    )


def _served_as(scheme: str | None, hardware: Hardware) -> tuple[str | None, tuple[str, ...]]:
    """The scheme that a published one is planned in on ``hardware``, and a note where it is another: our engine has its own."""
    if scheme is None or not hardware.is_calibrated_cpu:
        return scheme, ()
    from twostroke.planner.serving.plan import served_schemes

    if scheme in served_schemes(hardware):
        return scheme, ()
    return None, (f"published in {scheme}, which our engine does not serve on this machine: planned in bf16.",)


def _held(path: Path, spec: ModelSpec) -> Held | None:
    """How a quantised directory is held by our engine; None for formats of other tools."""
    from twostroke.quantization.held import held

    try:
        return held(path, spec)
    except ConfigError:
        return None


def lengths(limit: int, prompt_tokens: int, output_tokens: int) -> tuple[int, int]:
    """Of prompts and answers; 0: those that are planned where nothing is said, within a context of ``limit`` tokens."""
    for name, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if value < 0:
            raise ConfigError(f"{name}={value} must not be negative.")
    prompt = prompt_tokens or max(1, min(512, limit // 2, limit - output_tokens))
    return prompt, output_tokens or max(1, min(128, limit - prompt))


def serving_shape(
    found: Subject, scheme: str, batch: int, prompt_tokens: int, output_tokens: int, **others: Any
) -> ServingShape:
    """The shape to plan. A prompt and output of 0 become half of a short context, or 512 + 128 tokens of a long one."""
    from twostroke.planner.serving.shape import ServingShape

    prompt, output = lengths(others.get("max_model_len") or found.spec.max_positions, prompt_tokens, output_tokens)
    held = found.as_held(scheme)._asdict()
    others["kv_dtype"] = found.kv_dtype(others.get("kv_dtype", "auto"), scheme, others.get("engine", "any"))
    return ServingShape(**held, batch=batch, prompt_tokens=prompt, output_tokens=output, **others)
