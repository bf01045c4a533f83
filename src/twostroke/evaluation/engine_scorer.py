"""Scores with the inference engine: the lowered plan, cache and products of a server of the same directory.

With the native library the scores are its log-probabilities to the last bit (docs/determinism.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from twostroke.core.errors import DataError, TwostrokeError
from twostroke.engine.llm import LLM, RequestOutput
from twostroke.engine.scoring import TokenScores, token_scores
from twostroke.evaluation.scorer import Progress
from twostroke.scheduling.sampling_params import SamplingParams


class EngineScorer:
    """A ``Scorer`` on an ``LLM``, which must have no other requests."""

    engine = "inference"

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise DataError(
                f"{llm.directory} has no tokenizer.json, so no text can be scored. Put the model's tokenizer there."
            )
        self.llm, self.spec = llm, llm.engine.spec
        self.tokenizer: Tokenizer = llm.tokenizer
        self.longest, self.dtype = llm.engine.max_model_len, llm.engine.dtype
        self.formats = _formats(llm)

    @classmethod
    def load(cls, directory: Path, dtype: str = "auto", **settings: Any) -> EngineScorer:
        """``settings`` are fields of ``EngineSettings``: a server's own, for the very numbers that it answers."""
        return cls(LLM(directory, dtype=dtype, **settings))

    def token_scores(
        self, sequences: Sequence[tuple[Sequence[int], int]], progress: Progress | None = None
    ) -> list[TokenScores]:
        return token_scores(self.llm.engine, sequences, progress)

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = (), progress: Progress | None = None
    ) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=tuple(stop))
        outputs: list[RequestOutput] = []
        n_done = 0
        for delta in self.llm.stream([list(prompt) for prompt in prompts], params, outputs):
            if delta.finish_reason == "error":
                raise TwostrokeError("the model's output was not finite. The weights may be damaged.")
            if delta.finish_reason is not None:
                n_done += 1
                if progress is not None:
                    progress(n_done / len(prompts))
        return [output.outputs[0].text for output in outputs]


def _formats(llm: LLM) -> str:
    """The formats of weights and, if they were given, of head and cache: "int8, head int8, cache int8"."""
    config = llm.engine.settings
    asked = (("head", config.head_dtype), ("cache", config.kv_dtype))
    return ", ".join([llm.engine.dtype, *(f"{name} {dtype}" for name, dtype in asked if dtype != "auto")])
