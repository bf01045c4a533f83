"""``twostroke exits`` finds how sure a model must be before a token may leave at an earlier layer, and writes it beside it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.opened_model import opened_model
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, DataError
from twostroke.core.fitted_exits import FITTED_EXITS, check_exits, default_exits
from twostroke.core.schemes import ASKED
from twostroke.core.units import format_seconds

if TYPE_CHECKING:
    from twostroke.core.fitted_exits import FittedExits
    from twostroke.planner.truth.recording import Planned

app = typer.Typer(add_completion=False)


@app.command(name="exits")
def exits(
    model: Path = typer.Argument(help="Model directory, the output of a training run, or a GGUF file."),
    data: list[str] = typer.Option(
        [], help="Files, folders or globs of text that the model was not trained on. Default: the training run's held-out text."
    ),
    layers: list[int] = typer.Option([], help="After how many layers rows may leave. Repeatable. Default: each quarter."),
    most_changed: float = typer.Option(0.05, help="Largest share of the greedy tokens that may change."),
    confidence: float = typer.Option(0.95, help="Probability with which that must hold."),
    dtype: str = typer.Option("auto", help=f"How weights are held, as `generate` takes it: auto, {', '.join(ASKED)}."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Find how sure a model must be before a token leaves at an earlier layer, for `generate --early-exit auto`.

    Text is decoded token by token with exits at ever lower thresholds. The lowest is taken under which, with the probability
    asked for, no larger share of greedy tokens changes than is allowed. That holds for text like the text given.
    """
    from twostroke.core.families import read_spec

    directory = opened_model(model)
    spec = read_spec(directory)
    spec.require_buildable()
    after = tuple(layers) or default_exits(spec.n_layers)
    check_exits(after, spec.n_layers)
    for name, value in (("--most-changed", most_changed), ("--confidence", confidence)):
        if not 0 < value < 1:
            raise ConfigError(f"{name} {value:g} must be a share, above 0 and below 1.")
    from twostroke.data.tokenizer import eos_id_of, load_tokenizer
    from twostroke.evaluation.exit_fitting import fit_exits, windows_of
    from twostroke.evaluation.held_out import held_out_to_score, tokenize

    tokenizer = load_tokenizer(directory)
    text = held_out_to_score(directory, data)
    ids = tokenize(text, tokenizer, eos_id_of(tokenizer, directory)).ids
    if int(ids.max()) >= spec.vocab_size:
        raise DataError(f"the text has token {int(ids.max())} and the model a vocabulary of {spec.vocab_size}.")
    from twostroke.core.engine_settings import EngineSettings
    from twostroke.engine.core import EngineCore
    from twostroke.planner.truth.recording import recording

    inputs = {"model": str(directory.resolve()), "text": text.name, "layers": list(after), "most_changed": most_changed}
    with recording("exits", directory.resolve().name, inputs, _unplanned, log) as run:
        began = time.perf_counter()
        engine = EngineCore(directory, EngineSettings(dtype=dtype, early_exit="at:1"))
        with progress(f"trying exits of {directory}", 1.0) as advance:
            windows = windows_of(ids, engine.max_model_len)
            found = fit_exits(engine, directory, windows, after, most_changed, confidence, advance)
        found.write(directory)
        elapsed_s = time.perf_counter() - began
        run.measure({"elapsed_s": elapsed_s, "changed_share": found.changed, "extra_nats": found.extra_nats})
    document = {"model": str(directory), "text": text.name, "elapsed_s": elapsed_s, "exits": plain(found), "run_id": run.run_id}
    emit(document, "\n".join(_lines(found, spec.n_layers, directory, elapsed_s)), as_json)


def _unplanned() -> Planned:
    raise ConfigError("how many thresholds are tried depends on the text, so no time is predicted for finding exits.")


def _lines(found: FittedExits, n_layers: int, directory: Path, elapsed_s: float) -> list[str]:
    left = ", ".join(f"{share:.0%} after {n}" for share, n in zip(found.shares, (*found.layers, n_layers), strict=True))
    return [
        f"threshold {found.threshold:g}: with a probability of {found.confidence:.0%} at most {found.most_changed:.1%} of "
        "greedy tokens change in text like this.",
        f"On its {found.n_tokens} tokens {found.changed:.2%} changed, and a token cost {found.extra_nats:+.4f} nats "
        "(measured).",
        f"Rows left: {left} of {n_layers} layers (measured).",
        f"Decoding one request: × {found.predicted_speed:.2f} as fast (predicted, by the bytes of weights that it reads).",
        f"{directory / FITTED_EXITS} was written in {format_seconds(elapsed_s)}; `--early-exit auto` reads it.",
    ]
