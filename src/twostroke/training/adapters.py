"""Runs that train adapters beside a frozen base: loading it, in NF4 under method "qlora", and writing the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.model.adapter_directory import fingerprint, is_adapter_directory, save_adapters
from twostroke.model.adapters import AdapterSettings, Nf4Linear, all_targets, attach_adapters, choose_targets, peft_names
from twostroke.model.decoder import Decoder
from twostroke.model.families import to_canonical
from twostroke.model.load import open_weights, torch_dtype


def adapter_settings(recipe: TrainRecipe) -> AdapterSettings:
    lora = recipe.lora
    return AdapterSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        dropout=lora.dropout,
        nf4=recipe.method == "qlora",
        nf4_block=lora.nf4_block,
        double_quantization=lora.double_quantization,
    )


def _base(recipe: TrainRecipe) -> Path:
    assert recipe.model.init_from is not None  # a recipe that trains adapters without is refused
    return Path(recipe.model.init_from)


def check_adapters(recipe: TrainRecipe, spec: ModelSpec) -> None:
    """Raise ConfigError where the base is no whole model, a target is not known, or the rank is above that of every matrix."""
    if not recipe.trains_adapters:
        return
    if is_adapter_directory(_base(recipe)):
        raise ConfigError(
            f"model.init_from={str(_base(recipe))!r} holds adapters. Make a whole model of it first: "
            "`twostroke export --merge`, or name its base."
        )
    chosen = choose_targets(spec, recipe.lora.targets)
    largest = max(chosen, key=lambda target: min(target.rows, target.columns))
    most = min(largest.rows, largest.columns)
    if recipe.lora.rank > most:  # of some matrices, as the few key rows of grouped queries, it may be
        raise ConfigError(
            f"lora.rank={recipe.lora.rank} is more than any of the targets can have: {largest.name} is {largest.rows} × "
            f"{largest.columns}, so at most {most}."
        )


@torch.no_grad()
def load_adapted(recipe: TrainRecipe, device: torch.device) -> Decoder:
    """The base of ``recipe``, frozen, in the dtype that computes, with fresh fp32 adapters beside its matrices.

    Read one tensor at a time, so that a matrix in NF4 is never held otherwise. Memory: the base as it stays, and one tensor.
    """
    settings, dtype = adapter_settings(recipe), torch_dtype(recipe.train.compute_dtype)
    spec, get = open_weights(_base(recipe))
    decoder = Decoder(spec, device="meta")
    in_nf4 = {target.module for target in all_targets(spec)} if settings.nf4 else set()
    for name, tensor in to_canonical(spec, get):
        module, _, kind = name.rpartition(".")
        if module in in_nf4 and kind == "weight":
            # A bias, if it has one, comes after its weight.
            weight = tensor.to(device, torch.float32)
            decoder.set_submodule(module, Nf4Linear(weight, None, settings.nf4_block, settings.double_quantization))
        else:
            parameter = nn.Parameter(tensor.to(device, dtype, copy=True).contiguous(), requires_grad=False)
            setattr(decoder.get_submodule(module), kind, parameter)
    attach_adapters(decoder, spec, settings, recipe.seed)
    return decoder


def base_state(recipe: TrainRecipe) -> dict[str, Any]:
    """What a checkpoint keeps of the base, which is not in it."""
    return {"base": fingerprint(_base(recipe))} if recipe.trains_adapters else {}


def check_base(recipe: TrainRecipe, state: Mapping[str, Any]) -> None:
    """Raise CorruptFileError where the base is not the one that the checkpoint of ``state`` was trained on."""
    if recipe.trains_adapters and state.get("base") != fingerprint(_base(recipe)):
        raise CorruptFileError(
            f"the weights of {_base(recipe)} have changed since the run began, so it cannot be continued exactly. Put the "
            "former back, or start another run: --set output=..."
        )


def write_adapters(recipe: TrainRecipe, spec: ModelSpec, weights: Mapping[str, Tensor], directory: Path) -> None:
    """The run's ``model`` directory: its adapters in PEFT's layout, opened by every command as the base with them merged in."""
    names = peft_names(spec)
    tokenizer = Path(recipe.data.tokenizer) if recipe.data.tokenizer is not None else _base(recipe)
    by_peft_name = {names[name]: weight for name, weight in weights.items()}
    save_adapters(by_peft_name, spec, adapter_settings(recipe), _base(recipe), directory, tokenizer)
