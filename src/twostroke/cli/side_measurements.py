"""Measures and predicts what ``twostroke compare`` shows beside quality: speed and cost; keeps both models' ledger entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twostroke.cli.console import log, progress
from twostroke.cli.typed import NAMED_DEVICE
from twostroke.core.described import plain
from twostroke.core.documents import read_object
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CorruptFileError, InputError, TwostrokeError

if TYPE_CHECKING:
    from twostroke.evaluation.comparison import Side
    from twostroke.planner.hardware.device import Hardware
    from twostroke.planner.serving.plan import ServingPlan
    from twostroke.planner.truth.recording import Planned, Recording

BATCHES = (1, 8)
PROMPT_TOKENS, OUTPUT_TOKENS, TURNS = 128, 32, 5


def machine_of(name: str | None) -> Hardware | None:
    """The machine of that name. Without a name this machine, or None and a line on stderr if it was never calibrated."""
    from twostroke.planner.hardware.tables import load_hardware

    try:
        return load_hardware(name or "this", "serve")
    except TwostrokeError as error:
        if name is not None:
            raise
        log(f"no predicted cost: {error}{NAMED_DEVICE}")
        return None


def _lengths(sides: Sequence[Side]) -> tuple[int, int]:
    """Tokens of prompt and output that both models' contexts hold."""
    longest = min(side.scorer.spec.max_positions for side in sides)
    prompt = max(1, min(PROMPT_TOKENS, longest // 2))
    output = min(OUTPUT_TOKENS, longest - prompt)
    if output < 2:
        raise InputError(f"a context of {longest} tokens is too short to measure speed in. Give --no-speed.")
    return prompt, output


def speeds(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Prefill and decode of both at each batch size, by turns. Drops the weights of a decoder among ``sides``."""
    from twostroke.bench.side_by_side import measure_alternating
    from twostroke.engine.llm import LLM
    from twostroke.evaluation.decoder_scorer import DecoderScorer
    from twostroke.evaluation.engine_scorer import EngineScorer

    prompt, output = _lengths(sides)
    for side in sides:
        if isinstance(side.scorer, DecoderScorer):
            side.scorer.decoder.to("meta")  # all is scored, and the engines need the memory
    models = [s.scorer.llm if isinstance(s.scorer, EngineScorer) else LLM(s.directory) for s in sides]
    done = 0
    with progress("speed", len(BATCHES) * TURNS) as advance:

        def step() -> None:
            nonlocal done
            done += 1
            advance(done)

        return [plain(measure_alternating(models, batch, prompt, output, TURNS, step)) for batch in BATCHES]


def _plan(side: Side, sides: Sequence[Side], machine: Hardware, batch: int) -> ServingPlan:
    from twostroke.evaluation.engine_scorer import EngineScorer
    from twostroke.planner.serving.plan import plan_serving
    from twostroke.quantization.held import serving_shape

    (prompt, output), scorer = _lengths(sides), side.scorer
    settings = EngineSettings()
    if isinstance(scorer, EngineScorer):
        settings = replace(scorer.llm.engine.settings, dtype=scorer.dtype)
    shape = serving_shape(side.directory, scorer.spec, settings, batch=batch, prompt_tokens=prompt, output_tokens=output)
    return plan_serving(scorer.spec, shape, machine)


def costs(sides: Sequence[Side], machine: Hardware) -> dict[str, Any] | None:
    """Predicted $ per million output tokens of both, prefill included, on ``machine`` kept busy with full batches."""
    try:
        plans = [_plan(side, sides, machine, BATCHES[-1]) for side in sides]
    except TwostrokeError as error:
        log(f"no predicted cost: {error}")
        return None
    a, b = ({"usd_per_mtok": p.usd_per_mtok, "kwh_per_mtok": p.kwh_per_mtok, "scheme": p.shape.scheme} for p in plans)
    # A ratio of times, because the machine may have no price. On one machine the ratio of prices is the same.
    ratio = plans[0].output_tok_per_s / plans[1].output_tok_per_s
    return {"hardware": machine.label, "batch": BATCHES[-1], "a": a, "b": b, "ratio": ratio}


def training_rates(sides: Sequence[Side]) -> dict[str, float | None]:
    """Tokens a second of the training run that made each model; None for a model of no run."""
    found: dict[str, float | None] = {}
    for name, side in zip("ab", sides, strict=True):
        try:
            summary = read_object(side.directory.parent / "summary.json")
            found[name] = float(summary["measurement"]["train_tok_per_s"])
        except (CorruptFileError, ValueError, KeyError, TypeError):
            found[name] = None
    return found


def side_recording(side: Side, sides: Sequence[Side], inputs: Mapping[str, Any], speed: bool) -> Recording:
    """A ledger entry for one of the two models, with its speed predicted if this machine is calibrated."""
    from twostroke.planner.truth.recording import recording

    (other,) = (s for s in sides if s is not side)
    own: dict[str, str | None] = {
        "model": str(side.directory.resolve()),
        "engine": side.scorer.engine,
        "dtype": side.scorer.dtype,
    }
    own |= {"beside": str(other.directory.resolve()), "kv_dtype": _cache_of(side)}
    plan = (lambda: _planned_speed(side, sides)) if speed else None
    return recording("evaluate", side.directory.resolve().name, {**inputs, **own}, plan, log)


def _cache_of(side: Side) -> str | None:
    """The type of cache that it was scored with; None of the decoder, which has none."""
    from twostroke.evaluation.engine_scorer import EngineScorer

    return side.scorer.llm.engine.pool.dtype if isinstance(side.scorer, EngineScorer) else None


def _planned_speed(side: Side, sides: Sequence[Side]) -> Planned:
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.first_answer import after_a_pause
    from twostroke.planner.truth.recording import Planned

    machine = load_hardware("this", "serve")
    plan = after_a_pause(_plan(side, sides, machine, 1).prediction(), _lengths(sides)[0], machine)
    return Planned({name: plan[name] for name in ("prefill_tok_per_s", "decode_tok_per_s")}, machine)


def side_values(result: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The measurements of side ``name``, "a" or "b", by the ledger's names."""
    values: dict[str, Any] = {k: v for k, v in result[name].items() if k in ("bits_per_byte", "nats_per_token", "model_bytes")}
    if name == "b" and "perplexity_ratio" in result:
        values["perplexity_ratio"] = result["perplexity_ratio"]
    for task in result.get("tasks", ()):
        values |= {f"{task['task']}_{metric}": found[name] for metric, found in task["metrics"].items()}
    for point in result.get("speed", ())[:1]:
        values |= point[name]
    return values
