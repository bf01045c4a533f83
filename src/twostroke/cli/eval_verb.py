"""``twostroke eval``: bits per byte and perplexity of a model on held-out text."""

from __future__ import annotations

from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.core.units import format_bytes

app = typer.Typer(add_completion=False)


@app.command(name="eval")
def evaluate(
    model: Path = typer.Argument(help="Model directory, or the output of a training run."),
    data: list[str] = typer.Option([], help="Files, folders or globs to score, all of them. Repeatable."),
    prepared: Path = typer.Option(None, help="Prepared data whose held-out part is scored. Default: the training run's."),
    context: int = typer.Option(None, help="Tokens in a window. Default: the model's longest, 2048 at most."),
    stride: int = typer.Option(
        None, help="Tokens by which windows move; context − stride overlap. Default: three quarters of the context."
    ),
    dtype: str = typer.Option("fp32", help="fp32 or bf16: the format the model computes in."),
    text_key: str = typer.Option("text", help="Where a .jsonl record keeps its text."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Bits per byte and perplexity of a model on held-out text, beside what xz -9 needs for the same bytes."""
    import time

    from twostroke.evaluation.bits import bits_per_byte, default_context
    from twostroke.evaluation.comparison import model_directory
    from twostroke.evaluation.conversations import score_answers
    from twostroke.evaluation.held_out import held_out_to_score
    from twostroke.quantization.load import load_decoder

    directory = model_directory(model)
    text = held_out_to_score(directory, data, prepared, text_key)
    decoder = load_decoder(directory, dtype)
    if text.prepared is not None and text.prepared.holds_conversations:
        log(f"scoring the assistant's answers of {directory} on {text.name}")
        with progress("scoring", 1.0) as advance:
            score = score_answers(decoder, text.prepared, context or default_context(decoder), advance)
        cut = f", {score.n_cut} cut at the context" if score.n_cut else ""
        lines = [
            f"answers        {score.nats_per_token:.4f} nats a token measured, perplexity {score.perplexity:.3f}",
            f"conversations  {score.n_conversations} held out{cut}, {score.n_tokens} tokens of answers, {dtype}",
        ]
        emit({"model": str(directory), "text": text.name, "dtype": dtype, **score.to_dict()}, "\n".join(lines), as_json)
        return
    log(f"scoring {directory} on {text.name}")
    with progress("scoring", 1.0) as advance:
        start = time.perf_counter()
        result = bits_per_byte(decoder, text, ctx=context, stride=stride, tokenizer_path=directory, progress=advance)
        elapsed_s = time.perf_counter() - start
    document = {"model": str(directory), "text": text.name, "dtype": dtype, **result.to_dict(), "elapsed_s": elapsed_s}
    xz = result.xz_bits_per_byte
    windows = f"context {result.context}, stride {result.stride}, {dtype}"
    lines = [
        f"bits per byte  {result.bits_per_byte:.4f} measured (xz -9: {xz:.4f})",
        f"perplexity     {result.perplexity:.3f} a token, {result.nats_per_token:.4f} nats",
        f"text           {format_bytes(result.n_bytes)}, {result.n_tokens} tokens, {windows}",
    ]
    emit(document, "\n".join(lines), as_json)
