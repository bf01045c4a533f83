"""What evaluation asks of a model, whichever engine computes it: logarithms of given tokens, and greedy continuations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from twostroke.core.errors import ConfigError
from twostroke.core.families import read_config
from twostroke.core.spec import ModelSpec
from twostroke.engine.scoring import TokenScores

ENGINES = ("decoder", "inference")
Progress = Callable[[float], None]


class Scorer(Protocol):
    """A model with its tokenizer. ``longest`` is how many tokens it can read at once; ``formats`` says how its weights are
    held, and its head and cache where that was asked for."""

    engine: str
    dtype: str
    formats: str
    spec: ModelSpec
    tokenizer: Tokenizer
    longest: int

    def token_scores(
        self, sequences: Sequence[tuple[Sequence[int], int]], progress: Progress | None = None
    ) -> list[TokenScores]:
        """Of each (ids, first) −ln p of ``ids[first:]``, each given all before it, and whether each was the most probable."""
        ...

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = (), progress: Progress | None = None
    ) -> list[str]:
        """The most probable continuation of each prompt as text, up to a stop string, an end token or ``max_tokens``."""
        ...


def engine_for(directory: Path, engine: str = "auto", formats: Mapping[str, str] | None = None) -> str:
    """``engine``, where "auto" is inference for quantised weights, whose rounding only its products have, and where ``formats``
    (``engine_formats``) ask for it, else the decoder."""
    if engine not in ("auto", *ENGINES):
        raise ConfigError(f"engine={engine!r} is not known. Use auto, {' or '.join(ENGINES)}.")
    if formats and engine == "decoder":
        name, value = next(iter(formats.items()))
        raise ConfigError(f"{name}={value!r} is a format of the inference engine alone. Use engine='inference'.")
    if formats or engine != "auto":
        return "inference" if formats else engine
    return "inference" if read_config(directory).get("quantization_config") else "decoder"


def engine_formats(head_dtype: str, kv_dtype: str) -> dict[str, str]:
    """The options of the inference engine that are not left to it."""
    return {name: value for name, value in (("head_dtype", head_dtype), ("kv_dtype", kv_dtype)) if value != "auto"}


def open_scorer(directory: Path, engine: str = "auto", dtype: str | None = None, **options: Any) -> Scorer:
    """The model at ``directory`` on the engine of that name. ``dtype`` None: fp32 on the decoder, the inference engine's own
    choice there; weights that are stored quantised it takes as they are. ``options`` are the decoder's device, or the inference
    engine's ``engine_formats``. Errors are those of loading."""
    if engine_for(directory, engine) == "decoder":
        from twostroke.evaluation.decoder_scorer import DecoderScorer

        return DecoderScorer.load(directory, dtype or "fp32", **options)
    from twostroke.evaluation.engine_scorer import EngineScorer

    quantised = bool(read_config(directory).get("quantization_config"))
    return EngineScorer.load(directory, "auto" if quantised or dtype is None else dtype, **options)
