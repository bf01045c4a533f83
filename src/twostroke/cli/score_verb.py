"""``twostroke score`` prints the log-probabilities of texts, computed by the engine that serves."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.engine_options import FROM_OPTIONS, with_engine_options
from twostroke.cli.opened_model import opened_model
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, InputError
from twostroke.core.units import format_seconds

if TYPE_CHECKING:
    from twostroke.evaluation.engine_scorer import EngineScorer
    from twostroke.planner.truth.recording import Planned

app = typer.Typer(add_completion=False)

MAX_BYTES = 2**26
"""Of one text: more than any model's context. The rest of a larger file is not read."""


@app.command(name="score")
@with_engine_options
def score(
    model: Path = typer.Argument(help="Model directory, the output of a training run, or a GGUF file."),
    text: list[str] = typer.Option([], help="Text to score. Repeatable. Default: the text on stdin."),
    file: list[Path] = typer.Option([], help="File whose text is scored, as one text. Repeatable."),
    prompt: str = typer.Option("", help="Text before each of them, which is not scored itself."),
    tokens: bool = typer.Option(False, "--tokens", help="Print each token with its log-probability."),
    engine: EngineSettings = FROM_OPTIONS,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Print how probable a model finds texts: ln p, perplexity, and with --tokens each token's.

    The numbers are those that `serve` with the same options returns from /v1/score, and as log-probabilities of the tokens it
    generates: with the native library the same bits. A text longer than the context is refused; `eval` reads it in windows.
    """
    from twostroke.core.families import read_spec

    directory = opened_model(model)
    read_spec(directory).require_buildable()  # before torch is imported, so that an unusable config.json is told at once
    texts = [*text, *map(_read, file)] or [_stdin()]
    if not all(texts):
        raise InputError("a text is empty, so there is nothing to score.")
    from twostroke.evaluation.engine_scorer import EngineScorer
    from twostroke.planner.truth.recording import recording

    scorer = EngineScorer.load(directory, **engine.changed())
    sequences = _sequences(scorer, prompt, texts)
    inputs = {"model": str(directory.resolve()), "dtype": scorer.formats, "texts": len(texts), **engine.changed()}
    plan = functools.partial(_planned, directory, scorer, engine, sequences)
    with recording("score", directory.resolve().name, inputs, plan, log) as run:
        began = time.perf_counter()
        with progress("scoring", 1.0) as advance, run.meter:
            scores = _scored(scorer, texts, sequences, advance)
        elapsed_s = time.perf_counter() - began
        measured = {"scored_tok_per_s": sum(len(ids) - first for ids, first in sequences) / elapsed_s, "elapsed_s": elapsed_s}
        run.measure(measured)
    document = {"model": str(directory), "dtype": scorer.dtype, "formats": scorer.formats, "elapsed_s": elapsed_s}
    document |= {"run_id": run.run_id, "prediction": run.prediction, "measurement": measured}
    lines = [line for i, found in enumerate(scores) for line in _lines(i, found, tokens)]
    expected = run.prediction.get("scored_tok_per_s")
    planned = f" (predicted {expected:,.0f})" if expected is not None else ""
    rate = f"{measured['scored_tok_per_s']:,.0f} tokens/s measured{planned}"
    lines.append(f"{scorer.formats}, {format_seconds(elapsed_s)}, {rate}")
    emit(document | {"scores": scores}, "\n".join(lines), as_json)


def _sequences(scorer: EngineScorer, prompt: str, texts: Sequence[str]) -> Sequence[tuple[Sequence[int], int]]:
    """The tokens of each text after ``prompt``, and the first that is scored. Raises CapacityError for one that is too long."""
    from twostroke.evaluation.encoding import Encoder

    encoder = Encoder(scorer)
    sequences = [(ids, max(1, first)) for ids, first in (encoder.split(prompt, text) for text in texts)]
    for i, (ids, _) in enumerate(sequences):
        if len(ids) - 1 > scorer.longest:
            raise CapacityError(
                f"text {i + 1} has {len(ids)} tokens with its prompt, and the context is {scorer.longest}. Shorten it, or use "
                "`twostroke eval MODEL --data FILE`, which reads longer texts in windows."
            )
    return sequences


def _planned(
    directory: Path, scorer: EngineScorer, engine: EngineSettings, sequences: Sequence[tuple[Sequence[int], int]]
) -> Planned:
    """The rate at which tokens get their score: those of a prompt are computed too, and a process begins slowly."""
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.scoring import engine_token_s
    from twostroke.planner.truth.recording import Planned
    from twostroke.quantization.held import serving_shape

    hardware = load_hardware("this", "serve")
    shape = serving_shape(directory, scorer.spec, engine)
    first_s = hardware.first_uses.prompt_s if hardware.first_uses else 0.0
    seconds = first_s + sum(len(ids) * engine_token_s(scorer.spec, shape, hardware, len(ids)) for ids, _ in sequences)
    return Planned({"scored_tok_per_s": sum(len(ids) - first for ids, first in sequences) / seconds}, hardware)


def _scored(
    scorer: EngineScorer, texts: Sequence[str], sequences: Sequence[tuple[Sequence[int], int]], advance: Any
) -> list[dict[str, Any]]:
    """What is known of each text."""
    found = []
    for text, (ids, first), (nats, greedy) in zip(texts, sequences, scorer.token_scores(sequences, advance), strict=True):
        logprobs = (-nats).tolist()
        total = math.fsum(logprobs)
        found.append(
            {
                "text": text,
                "score": total,
                "is_greedy": bool(greedy.all()),
                "perplexity": math.exp(-total / max(1, len(logprobs))),
                "bits_per_byte": -total / (math.log(2) * len(text.encode())),
                "token_ids": ids[first:],
                "tokens": [scorer.tokenizer.decode([i], skip_special_tokens=False) for i in ids[first:]],
                "token_logprobs": logprobs,
            }
        )
    return found


def _lines(i: int, found: dict[str, Any], tokens: bool) -> list[str]:
    shown = found["text"] if len(found["text"]) <= 40 else f"{found['text'][:39]}…"
    measures = f"ln p {found['score']:.4f}, {len(found['token_ids'])} tokens, perplexity {found['perplexity']:.4g}"
    lines = [f"[{i + 1}] {measures}, {found['bits_per_byte']:.4f} bits a byte  {shown!r}"]
    if tokens:
        lines += [f"{p:12.6f}  {t!r}" for p, t in zip(found["token_logprobs"], found["tokens"], strict=True)]
    return lines


def _read(path: Path) -> str:
    with path.open("rb") as stream:
        return _decoded(stream.read(MAX_BYTES + 1), str(path))


def _stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("there is no text to score. Give --text TEXT or --file FILE, or pipe the text in.")
    return _decoded(sys.stdin.buffer.read(MAX_BYTES + 1), "stdin")


def _decoded(data: bytes, name: str) -> str:
    if len(data) > MAX_BYTES:
        raise InputError(f"{name} has over {MAX_BYTES} bytes, more than a model reads at once. Use `twostroke eval`.")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InputError(f"the text of {name} is not UTF-8. Convert it.") from None
