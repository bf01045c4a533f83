"""How sure a model must be before a row leaves early, so that a bounded share of its tokens changes.

Thresholds are tried from the strictest on, and each is a hypothesis: "more than the allowed share of greedy tokens changes".
The last one is taken before the first that text does not reject. They are tested in an order that was fixed beforehand, so the
probability of taking one that changes more is at most that of a single wrong rejection (Learn then Test: Angelopoulos et al.
2021, arXiv 2110.01052; for early exit CALM, arXiv 2207.07061). A test bets against its hypothesis, text after text, and rejects
once it has won enough (Waudby-Smith and Ramdas 2024, arXiv 2010.09686): unlike Hoeffding's bound, that uses how little texts
differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import DataError, EngineError
from twostroke.core.fitted_exits import NEVER, FittedExits
from twostroke.engine.core import EngineCore
from twostroke.engine.tiers.identity import weights_digest
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

THRESHOLDS = (0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
MOST_CHANGED, CONFIDENCE = 0.05, 0.95
N_TEXTS, PROMPT_TOKENS, ANSWER_TOKENS = 256, 32, 64
LEAST_TEXTS = 32

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Forced:
    """What the model makes of texts behind their prompts, each next token given: its own greedy ``tokens`` (texts, n), the
    ``nats`` of the text's, and the rows that left after each number of layers."""

    tokens: npt.NDArray[np.int64]
    nats: npt.NDArray[np.float64]
    depths: dict[int, int]


def windows_of(ids: npt.NDArray[np.int64], longest: int) -> list[list[int]]:
    """Up to ``N_TEXTS`` texts of equal length that do not overlap, drawn from all of ``ids``. Raises DataError for too few."""
    length = min(PROMPT_TOKENS + ANSWER_TOKENS, longest)
    n = len(ids) // length
    if n < LEAST_TEXTS or length < 4:
        raise DataError(
            f"the text has {len(ids)} tokens, which make {n} texts of {length}; {LEAST_TEXTS} are needed. Name more text."
        )
    chosen = np.random.default_rng(0).permutation(n)[:N_TEXTS]
    return [ids[i * length : (i + 1) * length].tolist() for i in chosen]


def forced(engine: EngineCore, texts: Sequence[Sequence[int]]) -> Forced:
    """Decode ``texts``, all of one length, token by token as a server would, but with their own tokens as the answers. The
    engine must be idle."""
    assert engine.exits is not None
    length = len(texts[0])
    n_prompt = _prompt_tokens(length)
    params = SamplingParams(max_tokens=length - n_prompt, temperature=0.0, ignore_eos=True)
    scheduler, places = engine.scheduler, {}
    engine.exits.depths = [0] * len(engine.exits.depths)
    for i, text in enumerate(texts):
        request = Request(f"{i}", text[:n_prompt], params)
        scheduler.add(request)
        places[request.id] = i
    tokens = np.zeros((len(texts), length - n_prompt), np.int64)
    nats = np.zeros(tokens.shape)
    while scheduler.has_work:
        step = scheduler.schedule()
        try:
            if step.copies:
                engine.pool.copy(step.copies)
            logits = engine.compute(step).double()
        except BaseException:
            scheduler.abandon(step)
            raise
        logprobs = logits.log_softmax(dim=1).numpy()
        best = logits.argmax(dim=1).numpy()
        answers: list[int | list[int] | None] = [None] * len(step.requests)
        sampled = [i for i in range(len(step.requests)) if step.samples(i)]
        for row, i in enumerate(sampled):
            request = step.requests[i]
            place, at = places[request.id], request.n_output
            target = texts[place][len(request.tokens)]
            tokens[place, at], nats[place, at] = best[row], -logprobs[row, target]
            answers[i] = target
        scheduler.update(step, answers, set())
    if not np.isfinite(nats).all():
        raise EngineError("the model's output was not finite. The weights may be damaged.")
    return Forced(tokens, nats, engine.exits.histogram())


def _prompt_tokens(length: int) -> int:
    return max(1, length * PROMPT_TOKENS // (PROMPT_TOKENS + ANSWER_TOKENS))


def p_value(losses: npt.NDArray[np.float64], most: float) -> float:
    """The largest probability of such ``losses`` (0 to 1, independent, in an order of no meaning) if their mean is above
    ``most``."""
    won = largest = 0.0  # natural logarithms of the capital
    total, squares = 0.5, 0.25  # as if one loss of 0.5 had come first
    for i, loss in enumerate(losses, start=1):
        # The stake is fixed before its loss is seen, and a loss of 1 leaves a tenth.
        stake = min(math.sqrt(2 * math.log(1 / 0.05) / (len(losses) * squares / i)), 0.9 / (1 - most))
        won += math.log1p(-stake * (loss - most))
        largest = max(largest, won)
        mean = (total + loss) / (i + 1)
        total, squares = total + loss, squares + (loss - mean) ** 2
    return math.exp(-largest)


def fit_exits(
    engine: EngineCore,
    directory: Path,
    texts: Sequence[Sequence[int]],
    layers: Sequence[int],
    most_changed: float = MOST_CHANGED,
    confidence: float = CONFIDENCE,
    progress: Progress | None = None,
) -> FittedExits:
    """The loosest of ``THRESHOLDS`` under which, with a probability of ``confidence``, at most ``most_changed`` of the greedy
    tokens of text like ``texts`` change. Raises DataError if the strictest is not shown to keep that."""
    n_trials = len(THRESHOLDS) + 1
    engine.leave_after(layers, NEVER)
    whole = forced(engine, texts)
    chosen: tuple[float, Forced, float] | None = None
    for i, threshold in enumerate(THRESHOLDS, start=1):
        if progress is not None:
            progress(i / n_trials, f"threshold {threshold:g}")
        engine.leave_after(layers, threshold)
        found = forced(engine, texts)
        losses = (found.tokens != whole.tokens)[:, 1:].mean(axis=1)  # the first row of an answer never leaves
        if p_value(losses, most_changed) > 1 - confidence:
            break
        chosen = threshold, found, float(losses.mean())
    if chosen is None:
        raise DataError(
            f"at the strictest threshold, {THRESHOLDS[0]:g}, {losses.mean():.1%} of the tokens change on {len(texts)} texts, "
            f"which does not show that at most {most_changed:.1%} do. Allow more, name more text, or train the model for exits "
            "(train.exit_loss)."
        )
    threshold, found, changed = chosen
    assert engine.exits is not None
    n_rows = sum(found.depths.values())
    shares = tuple(n / n_rows for n in found.depths.values())
    read = sum(share * part for share, part in zip(shares, engine.exits.read_shares(), strict=True))
    extra = found.nats[:, 1:].mean() - whole.nats[:, 1:].mean()
    return FittedExits(
        tuple(layers), threshold, weights_digest(directory), engine.dtype, most_changed, confidence, n_rows, changed,
        float(extra), shares, 1 / read,
    )  # fmt: skip
