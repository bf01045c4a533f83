"""Beam search against transformers' ``generate(num_beams=…)``, fp32, for every family."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from parity import prompts
from small_models import EVERY, transformers_model
from twostroke.engine.llm import LLM, CompletionOutput
from twostroke.scheduling.sampling_params import SamplingParams

MAX_TOKENS = 20
STOPS = (3, 8, 14, 21, 35, 40, 52, 66, 71, 88)  # so many that sequences end at different lengths

SEARCHES = (
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 5, "num_return_sequences": 5, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 2, "num_return_sequences": 1, "length_penalty": -1.0, "repetition_penalty": 1.3},
)


@dataclass
class Answer:
    tokens: list[int]
    score: float  # sum of log-probabilities ÷ length ** length penalty

    def assert_same(self, found: CompletionOutput, penalty: float) -> None:
        assert found.token_ids == self.tokens
        assert found.cumulative_logprob is not None
        assert found.cumulative_logprob == pytest.approx(self.score * len(self.tokens) ** penalty, abs=2e-4)


def ours(search: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, use_beam_search=True, stop_token_ids=STOPS, best_of=search["num_beams"],
        n=search["num_return_sequences"], length_penalty=search.get("length_penalty", 1.0),
        early_stopping=search.get("early_stopping", False), repetition_penalty=search.get("repetition_penalty", 1.0),
    )  # fmt: skip


def theirs(model: Any, prompt: list[int], search: dict[str, Any], ends: Collection[int]) -> list[Answer]:
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=MAX_TOKENS,
            do_sample=False, use_cache=False, eos_token_id=list(ends), pad_token_id=0, return_dict_in_generate=True,
            output_scores=True, **search,
        )  # fmt: skip
    answers = []
    for row, score in zip(made.sequences.tolist(), made.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        answers.append(Answer(tokens[: end + 1], score))
    return answers


@pytest.mark.parametrize("name", EVERY)
def test_beams_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model: Any = transformers_model(name, seed=2)
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="fp32", n_threads=1, page_tokens=4, max_running=8)
    asked = [(prompt, search) for prompt, search in zip(prompts()[1:5], SEARCHES, strict=True)]
    # All together, so that searches of several widths share their steps.
    found = llm.generate([prompt for prompt, _ in asked], [ours(search) for _, search in asked])
    lengths = set()
    for output, (prompt, search) in zip(found, asked, strict=True):
        expected = theirs(model, prompt, search, {*llm.engine.spec.eos_token_ids, *STOPS})
        assert len(output.outputs) == len(expected)
        for answer, wanted in zip(output.outputs, expected, strict=True):
            wanted.assert_same(answer, search.get("length_penalty", 1.0))
            lengths.add(len(wanted.tokens))
    assert len(lengths) > 1, "sequences of one length say little of when they end"
    assert llm.stats().pages_used == 0
