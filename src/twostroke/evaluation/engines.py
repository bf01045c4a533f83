"""Which engine scores a model, and opening it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.files import read_config
from twostroke.evaluation.scorer import Scorer

ENGINES = ("decoder", "inference")


def engine_for(directory: Path, engine: str = "auto", formats: Mapping[str, str] | None = None) -> str:
    """The engine that scores. "auto" is the inference engine if ``formats`` (``engine_formats``) are given or weights are
    quantised, because only its products round activations as serving does; else it is the decoder."""
    if engine not in ("auto", *ENGINES):
        raise ConfigError(f"engine={engine!r} is not known. Use auto, {' or '.join(ENGINES)}.")
    if formats and engine == "decoder":
        name, value = next(iter(formats.items()))
        raise ConfigError(f"{name}={value!r} is an option of the inference engine alone. Use engine='inference'.")
    if formats or engine != "auto":
        return "inference" if formats else engine
    return "inference" if read_config(directory).get("quantization_config") else "decoder"


def engine_formats(head_dtype: str, kv_dtype: str) -> dict[str, str]:
    """The options of the inference engine that are not "auto"."""
    return {name: value for name, value in (("head_dtype", head_dtype), ("kv_dtype", kv_dtype)) if value != "auto"}


def open_scorer(directory: Path, engine: str = "auto", dtype: str | None = None, **options: Any) -> Scorer:
    """Open the model at ``directory`` on ``engine``. With ``dtype`` None the decoder computes in fp32, and the inference engine
    chooses. The inference engine takes weights that are stored quantised as they are. ``options`` are the decoder's device, or
    the inference engine's ``engine_formats``. Raises the errors of loading."""
    if engine_for(directory, engine) == "decoder":
        from twostroke.evaluation.decoder_scorer import DecoderScorer  # each imports an engine, and one is enough

        return DecoderScorer.load(directory, dtype or "fp32", **options)
    from twostroke.evaluation.engine_scorer import EngineScorer

    quantised = bool(read_config(directory).get("quantization_config"))
    return EngineScorer.load(directory, "auto" if quantised or dtype is None else dtype, **options)
