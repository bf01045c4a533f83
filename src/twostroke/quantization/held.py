"""How a model directory's matrices will be held, in the planner's words: its own quantisation, matrix by matrix. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.matrices import layer_kinds
from twostroke.core.spec import ModelSpec
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.params import modules_of
from twostroke.quantization.directory import Quantisation, stored_quantisation

_MODULE = re.compile(r"\.(\d+)\.(.+)$")
"""Layer and name below it of a module: ``model.layers.3.mlp.down_proj``."""


class Held(NamedTuple):
    """``ServingShape.scheme`` and ``ServingShape.in_int8``."""

    scheme: str
    in_int8: tuple[str, ...] = ()


def held(directory: Path | str, spec: ModelSpec, dtype: str = "auto") -> Held:
    """How the engine will hold the matrices of ``directory``: as they are stored where they are quantised, 4 bits with their
    group, else as ``dtype``, where "auto" is bf16. Raises ConfigError for a quantisation that is not known."""
    stored = stored_quantisation(directory)
    if stored is None:
        return Held("bf16" if dtype == "auto" else dtype)
    return Held(stored.scheme.name, _in_int8(stored, spec))


def serving_shape(directory: Path | str, spec: ModelSpec, settings: EngineSettings, **request: Any) -> ServingShape:
    """What is planned for the engine that ``settings`` make of ``directory``; ``request`` are further fields of the shape.
    Raises as ``held`` and ``ServingShape``."""
    return ServingShape(
        **held(directory, spec, settings.dtype)._asdict(),
        head_dtype=settings.head_dtype,
        kv_dtype=settings.kv_dtype,
        kv_cache_bytes=settings.kv_cache_bytes or 0,
        max_model_len=min(settings.max_model_len or spec.max_positions, spec.max_positions),
        **request,
    )


def _in_int8(stored: Quantisation, spec: ModelSpec) -> tuple[str, ...]:
    """``<layer>.<product>`` of each matrix that the directory holds in int8 beside int4; the parts of one count once."""
    if not stored.others:
        return ()
    product_of = {
        module: product.name
        for kind, _ in layer_kinds(spec)
        for product in kind.matrices
        for module, _ in modules_of(product, spec.family)
    }
    found: dict[str, None] = {}
    for module in stored.others:
        match = _MODULE.search(module)
        if match is None or match[2] not in product_of:
            raise ConfigError(f"quantization_config names {module!r}, which is not a matrix of a {spec.family} model.")
        found[f"{match[1]}.{product_of[match[2]]}"] = None
    return tuple(sorted(found, key=lambda name: (int(name.partition(".")[0]), name)))
