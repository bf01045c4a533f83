"""What evaluation asks of a model, whichever engine computes it: logarithms of given tokens, and greedy continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A model with its tokenizer. ``longest`` is how many tokens it can read at once."""

    engine: str
    dtype: str
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


def engine_for(directory: Path, engine: str = "auto") -> str:
    """``engine``, where "auto" is inference for quantised weights, whose rounding only its products have, else the decoder."""
    if engine not in ("auto", *ENGINES):
        raise ConfigError(f"engine={engine!r} is not known. Use auto, {' or '.join(ENGINES)}.")
    if engine != "auto":
        return engine
    return "inference" if read_config(directory).get("quantization_config") else "decoder"


def open_scorer(directory: Path, engine: str = "auto", dtype: str | None = None, **options: Any) -> Scorer:
    """The model at ``directory`` on the engine of that name. ``dtype`` None: fp32 on the decoder, the inference engine's own
    choice there; weights that are stored quantised it takes as they are. Errors are those of loading."""
    if engine_for(directory, engine) == "decoder":
        from twostroke.evaluation.decoder_scorer import DecoderScorer

        return DecoderScorer.load(directory, dtype or "fp32", **options)
    from twostroke.evaluation.engine_scorer import EngineScorer

    quantised = bool(read_config(directory).get("quantization_config"))
    return EngineScorer.load(directory, "auto" if quantised or dtype is None else dtype)
