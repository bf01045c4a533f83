"""The interface between evaluation and both engines: log-probabilities of given tokens, and greedy continuations."""

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
    """A model with its tokenizer. ``longest`` is the most tokens that it can read at once. ``formats`` names the format of its
    weights and, if they were given, those of its head and cache."""

    engine: str
    dtype: str
    formats: str
    spec: ModelSpec
    tokenizer: Tokenizer
    longest: int

    def token_scores(
        self, sequences: Sequence[tuple[Sequence[int], int]], progress: Progress | None = None
    ) -> list[TokenScores]:
        """For each (ids, first): −ln p of each token of ``ids[first:]`` given all before it, and whether it is the most
        probable."""
        ...

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = (), progress: Progress | None = None
    ) -> list[str]:
        """The most probable continuation of each prompt as text, up to a stop string, an end token or ``max_tokens``."""
        ...


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
        from twostroke.evaluation.decoder_scorer import DecoderScorer

        return DecoderScorer.load(directory, dtype or "fp32", **options)
    from twostroke.evaluation.engine_scorer import EngineScorer

    quantised = bool(read_config(directory).get("quantization_config"))
    return EngineScorer.load(directory, "auto" if quantised or dtype is None else dtype, **options)
