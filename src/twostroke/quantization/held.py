"""How a model directory's matrices will be held, in the planner's words: its own quantisation, matrix by matrix. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.families import layout
from twostroke.core.spec import ModelSpec
from twostroke.planner.serving.shape import ServingShape


class Held(NamedTuple):
    """``ServingShape.scheme``, ``ServingShape.in_int8`` and ``ServingShape.in_bf16``."""

    scheme: str
    in_int8: tuple[str, ...] = ()
    in_bf16: tuple[str, ...] = ()


def held(directory: Path | str, spec: ModelSpec, dtype: str = "auto") -> Held:
    """How the engine will hold the matrices of ``directory``: as they are stored where it computes with that, else as
    ``dtype``, where "auto" is bf16. Raises ConfigError for a quantisation that is not read."""
    from twostroke.model.published.registry import directory_holding  # plans of recipes need no format: 13 of their 460 ms

    holding = directory_holding(directory, spec)
    if holding is None or holding.scheme is None or dtype in ("bf16", "fp32"):
        return Held("bf16" if dtype == "auto" else dtype)
    others = [entry for entry in layout(spec) if entry.canonical in holding.others]
    in_codes, plain = (
        tuple(
            f"{entry.canonical.split('.')[1]}.{entry.matrix.name}"
            for entry in others
            if entry.matrix is not None and (holding.others[entry.canonical] is not None) is coded
        )
        for coded in (True, False)
    )
    return Held(holding.scheme, in_codes, plain)


def serving_shape(directory: Path | str, spec: ModelSpec, settings: EngineSettings, **request: Any) -> ServingShape:
    """What is planned for the engine that ``settings`` make of ``directory``; ``request`` are further fields of the shape.
    Raises as ``held`` and ``ServingShape``."""
    return ServingShape(
        **held(directory, spec, settings.dtype)._asdict(),
        head_dtype=settings.head_dtype,
        kv_dtype=settings.kv_dtype,
        kv_cache_bytes=settings.kv_cache_bytes or 0,
        max_model_len=min(settings.max_model_len or spec.max_positions, spec.max_positions),
        max_step_ratio=settings.max_step_ratio,
        in_server=settings.in_server,
        **{name: value for name, value in settings.changed().items() if name in ("token_budget", "max_running")},
        **request,
    )
