"""Reads a model directory and lowers it to a plan, as an engine does at its start and when its weights are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.crossovers import Crossovers
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.families import read_spec
from twostroke.core.schemes import SCHEMES, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes
from twostroke.engine.lowering import lower
from twostroke.engine.memory import available_bytes
from twostroke.engine.packed_cache import PackedCache, cache_key
from twostroke.engine.plan import Plan
from twostroke.kernels.features import has_packed_linear
from twostroke.model.load import load_state
from twostroke.model.published.registry import directory_holding
from twostroke.planner.work.weights import weights_bytes
from twostroke.quantization.load import load_any_state


@dataclass
class Loaded:
    """The tensors of ``directory``, of which none has been read yet. ``weights``: the scheme in which they are to be held."""

    directory: Path
    spec: ModelSpec
    state: Mapping[str, Tensor]
    weights: str
    quantised: bool


def load(directory: Path, dtype: str, native: bool) -> Loaded:
    """The model in ``directory`` for the ``native`` runner, or torch's. Raises InputError, ConfigError or CorruptFileError if
    it is not a usable model, and CapacityError if its weights do not fit in the memory that is free."""
    spec = read_spec(directory)
    spec.require_buildable()
    holding, weights = directory_holding(directory, spec), dtype
    stored = None if holding is None or holding.scheme is None else SCHEMES[holding.scheme]
    expands = dtype in SCHEMES and not SCHEMES[dtype].quantised
    if stored is not None and not expands:
        if dtype not in ("auto", stored.family, stored.name):
            raise ConfigError(
                f"{directory} holds {stored.family} weights, which cannot be used as dtype={dtype!r}. "
                "Use dtype='auto', bf16 or fp32, or the unquantised model that it was made from."
            )
        weights = stored.name
    elif dtype == "auto":
        # torch has fast products of bf16 only with AVX-512 or newer. The native library reads half of fp32's bytes everywhere:
        # with AVX2 alone all matrices of the 135M shape take 7.1 ms for one row in bf16 and 15.2 in fp32 (Zen 3).
        weights = "bf16" if native or has_packed_linear(torch.bfloat16) else "fp32"
    needed, free = weights_bytes(spec, scheme_of(weights).multiplied("native")), available_bytes()
    if needed > free:
        raise CapacityError(
            f"the weights in {weights} need {format_bytes(needed)} and {format_bytes(free)} of memory is free. "
            "Use weights of fewer bits, a smaller model or a machine with more memory."
        )
    spec, state = (load_state if expands else load_any_state)(directory)
    return Loaded(directory, spec, state, weights, holding is not None)


def lowered(loaded: Loaded, settings: EngineSettings, native: bool, crossovers: Crossovers) -> tuple[Plan, bool]:
    """The plan of ``loaded``, and whether its matrices came from an earlier start's file. Raises what ``lower`` raises.

    Packing takes longer than the rest of a start. With that file the whole takes 0.05 to 0.10 s (135M)."""
    head = None if settings.head_dtype == "auto" else settings.head_dtype
    shared = settings.replicas > 1
    packed = PackedCache(cache_key(loaded.directory, loaded.weights, str(head)), shared) if native else None
    plan = lower(loaded.spec, loaded.state, loaded.weights, crossovers, native, head, packed)
    is_read = packed is not None and packed.is_read
    if packed is not None:
        packed.finish()
    return plan, is_read
