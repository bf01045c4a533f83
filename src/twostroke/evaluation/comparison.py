"""Compares two models on the same text and the same questions: paired differences with their errors, and the models' sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.described import plain
from twostroke.core.paths import model_directory
from twostroke.data.shards import PreparedData
from twostroke.data.tokenizer import eos_id_of, load_tokenizer
from twostroke.evaluation.bits import Progress, check_context, default_context, default_stride, nats_of
from twostroke.evaluation.conversations import answer_nats
from twostroke.evaluation.engines import engine_for, open_scorer
from twostroke.evaluation.held_out import HeldOutText, tokenize_with_ends
from twostroke.evaluation.paired import Difference, paired_ratio, paired_tasks
from twostroke.evaluation.scorer import Scorer
from twostroke.evaluation.task import Task
from twostroke.model.adapter_directory import base_directory, is_adapter_directory
from twostroke.planner.work.params import count_parameters

BLOCK_BYTES = 4096
"""Length of the blocks of text over which the two models are paired, long enough to be nearly independent of each other."""


def model_bytes(directory: Path | str) -> int:
    """Size on disk of all files of a model directory. Adapters count with their base."""
    files = (f for f in Path(directory).rglob("*") if f.is_file())
    # Hidden folders do not count: earlier releases kept packed weights there.
    own = sum(f.stat().st_size for f in files if not any(p.startswith(".") for p in f.relative_to(directory).parts))
    return own + model_bytes(base_directory(directory)) if is_adapter_directory(directory) else own


def block_nats(ends: npt.NDArray[np.int64], nats: npt.NDArray[np.float32], n_bytes: int) -> npt.NDArray[np.float64]:
    """Σ −ln p of the tokens that end in each block of ``BLOCK_BYTES`` bytes of text, for any tokenizer."""
    n_blocks = math.ceil(n_bytes / BLOCK_BYTES)
    blocks = np.clip((ends - 1) // BLOCK_BYTES, 0, n_blocks - 1)
    return np.bincount(blocks, weights=nats, minlength=n_blocks).astype(np.float64, copy=False)


def paired_difference(
    nats_a: npt.NDArray[np.float64], nats_b: npt.NDArray[np.float64], block_bytes: npt.NDArray[np.float64]
) -> Difference:
    """The difference b − a in bits per byte over blocks of text that both models scored (``paired.paired_ratio``). Its error
    says how far another text of the same kind would move it."""
    return paired_ratio(nats_a / math.log(2), nats_b / math.log(2), block_bytes)


@dataclass(frozen=True)
class Side:
    """One of two models: its directory and the scorer that computes it."""

    directory: Path
    scorer: Scorer

    def record(self) -> dict[str, Any]:
        """The model's entry in a comparison."""
        scorer = self.scorer
        return {
            "model": str(self.directory), "engine": scorer.engine, "dtype": scorer.dtype, "formats": scorer.formats,
            "parameters": count_parameters(scorer.spec).total, "model_bytes": model_bytes(self.directory),
        }  # fmt: skip


def open_sides(
    a: Path | str,
    b: Path | str,
    engine: str = "auto",
    dtype: str | None = None,
    formats: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[Side, Side]:
    """Open both models on the same engine. "auto" is the inference engine if one of them is quantised, because that engine
    rounds activations as serving does.

    ``formats`` (``scorer.engine_formats``) apply to b alone, and select the inference engine as well."""
    directories = model_directory(a), model_directory(b)
    chosen = {engine_for(directories[0], engine), engine_for(directories[1], engine, formats)}
    engine = "inference" if "inference" in chosen else "decoder"
    first = Side(directories[0], open_scorer(directories[0], engine, dtype, **options))
    second = Side(directories[1], open_scorer(directories[1], engine, dtype, **options, **formats or {}))
    return first, second


def compare_on_text(
    a: Side, b: Side, text: HeldOutText, context: int | None = None, stride: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Score both models on ``text``, each with its own tokenizer, within the shorter of their contexts. Of held-out
    conversations only the assistant's answers are scored, and both models must have the same tokenizer.

    ``perplexity_ratio`` is exp of the difference in nats per token of a. Below 1, b is better. ``b_is`` is "same" if the
    difference is within two standard errors. Raises InputError for a context longer than one of the models supports.
    """
    if context is None:
        context = min(default_context(side.scorer) for side in (a, b))
    for side in (a, b):
        check_context(side.scorer, context)

    def advance_of(i: int) -> Progress:
        return lambda done, note: None if progress is None else progress((i + done) / 2, note)

    if text.prepared is not None and text.prepared.holds_conversations:
        found = _on_answers(a, b, text.prepared, context, advance_of)
    else:
        found = _on_bytes(a, b, text, context, default_stride(context) if stride is None else stride, advance_of)
    return {"text": text.name, "context": context, "dtype": a.scorer.dtype} | found


def _verdict(difference: Difference) -> str:
    if abs(difference.value) <= 2 * difference.standard_error:
        return "same"
    return "better" if difference.value < 0 else "worse"


def _on_answers(
    a: Side, b: Side, prepared: PreparedData, context: int, advance_of: Callable[[int], Progress]
) -> dict[str, Any]:
    answers = [answer_nats(side.scorer, prepared, context, advance_of(i)) for i, side in enumerate((a, b))]
    difference = paired_ratio(answers[0].nats, answers[1].nats, answers[0].n_tokens.astype(np.float64))
    return {
        "a": a.record() | plain(answers[0].score()),
        "b": b.record() | plain(answers[1].score()),
        "unit": "nats per answer token",
        "n_conversations": len(answers[0].nats),
        "difference_nats_per_token": difference.value,
        "standard_error_nats_per_token": difference.standard_error,
        "interval_nats_per_token": [difference.low, difference.high],
        "perplexity_ratio": math.exp(difference.value),
        "perplexity_ratio_interval": _exponentials(difference, 1.0),
        "size_ratio": model_bytes(b.directory) / model_bytes(a.directory),
        "b_is": _verdict(difference),
    }


def _on_bytes(
    a: Side, b: Side, text: HeldOutText, context: int, stride: int, advance_of: Callable[[int], Progress]
) -> dict[str, Any]:
    sides: list[dict[str, Any]] = []
    sums: list[npt.NDArray[np.float64]] = []
    n_bytes = 0
    for i, side in enumerate((a, b)):
        tokenizer = load_tokenizer(side.directory)
        tokens, ends = tokenize_with_ends(text, tokenizer, eos_id_of(tokenizer, side.directory))
        nats = nats_of(side.scorer, tokens.ids, tokens.eos_id, context, stride, progress=advance_of(i))
        n_bytes = tokens.n_bytes
        sums.append(block_nats(ends, nats, n_bytes))
        total = float(nats.sum(dtype=np.float64))
        scored = {"bits_per_byte": total / math.log(2) / n_bytes, "nats_per_token": total / len(nats), "n_tokens": len(nats)}
        sides.append(side.record() | scored)
    widths = np.full(len(sums[0]), float(BLOCK_BYTES))
    widths[-1] = n_bytes - BLOCK_BYTES * (len(widths) - 1)
    difference = paired_difference(sums[0], sums[1], widths)
    nats_per_unit = math.log(2) * n_bytes / sides[0]["n_tokens"]
    return {
        "n_bytes": n_bytes,
        "stride": stride,
        "a": sides[0],
        "b": sides[1],
        "unit": "bits per byte",
        "difference_bits_per_byte": difference.value,
        "standard_error_bits_per_byte": difference.standard_error,
        "interval_bits_per_byte": [difference.low, difference.high],
        "n_blocks": len(widths),
        "perplexity_ratio": math.exp((float(sums[1].sum()) - float(sums[0].sum())) / sides[0]["n_tokens"]),
        "perplexity_ratio_interval": _exponentials(difference, nats_per_unit),
        "size_ratio": sides[1]["model_bytes"] / sides[0]["model_bytes"],
        "b_is": _verdict(difference),
    }


def _exponentials(difference: Difference, nats_per_unit: float) -> list[float]:
    """The interval of the perplexity ratio. It is 0 to infinity if there is only one block of text, which has no error
    estimate."""
    return [
        math.exp(value * nats_per_unit) if math.isfinite(value) else (0.0 if value < 0 else math.inf)
        for value in (difference.low, difference.high)
    ]


def compare_on_tasks(a: Side, b: Side, tasks: Sequence[Task], limit: int | None, progress: Progress) -> list[dict[str, Any]]:
    """Run each task on both models. Of every metric it gives both values and the paired difference b − a."""

    def advance_of(i: int, name: str) -> Callable[[float], None]:
        return lambda done: progress((i + done) / 2 / len(tasks), name)

    found = []
    for i, task in enumerate(tasks):
        results = [task.run(side.scorer, limit, advance_of(2 * i + j, task.name)) for j, side in enumerate((a, b))]
        metrics = [result.metrics() for result in results]
        differences = paired_tasks(*results)
        found.append(
            {
                "task": task.name,
                "n_examples": results[0].n_examples,
                "n_cut": [result.n_cut for result in results],
                "chance": results[0].chance,
                "metrics": {
                    name: {"a": metrics[0][name].value, "b": metrics[1][name].value, **plain(difference)}
                    for name, difference in differences.items()
                },
            }
        )
    return found
