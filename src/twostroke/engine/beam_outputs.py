"""What ``LLM.beam_search`` takes and gives, with the names of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from twostroke.engine.sampler import TokenLogprobs
from twostroke.scheduling.request import FinishReason
from twostroke.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.llm import RequestOutput


@dataclass(frozen=True)
class BeamSearchParams:
    """As ``SamplingParams`` with ``use_beam_search``, of which all ``beam_width`` answers are given. Raises InputError when it
    is used with a value that those refuse."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, n=self.beam_width,
            include_stop_str_in_output=self.include_stop_str_in_output, logprobs=0, use_beam_search=True,
            length_penalty=self.length_penalty, early_stopping=self.early_stopping,
        )  # fmt: skip


@dataclass(frozen=True)
class BeamSearchSequence:
    """One answer: ``tokens`` are the prompt's and its own, ``text`` is theirs if the prompt was one, else that of its own.
    ``logprobs`` and their sum ``cum_logprob`` are of its own tokens."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cum_logprob: float
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers to one prompt, the best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, output: RequestOutput) -> BeamSearchOutput:
        sequences = []
        for answer in output.outputs:
            tokens, text = [*output.prompt_token_ids, *answer.token_ids], (output.prompt or "") + answer.text
            found = answer.logprobs or [], answer.cumulative_logprob or 0.0
            sequences.append(BeamSearchSequence(tokens, *found, text, answer.finish_reason))
        return cls(sequences)
