"""``twostroke compare``: two models on the same held-out text."""

from __future__ import annotations

from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit, progress
from twostroke.core.units import format_bytes, format_count

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    a: Path = typer.Argument(help="Model directory or training run to compare with."),
    b: Path = typer.Argument(help="Model directory or training run that is compared."),
    data: list[str] = typer.Option([], help="Files, folders or globs to score, all of them. Repeatable."),
    prepared: Path = typer.Option(None, help="Prepared data whose held-out part is scored. Default: that of A's training run."),
    context: int = typer.Option(None, help="Tokens in a window. Default: the shorter of the models' longest, 2048 at most."),
    stride: int = typer.Option(None, help="Tokens by which windows move. Default: three quarters of the context."),
    dtype: str = typer.Option("fp32", help="fp32 or bf16: the format both compute in."),
    max_perplexity_ratio: float = typer.Option(None, help="Fail (exit 1) where B's perplexity is more than this times A's."),
    text_key: str = typer.Option("text", help="Where a .jsonl record keeps its text."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Quality of two models on the same text, with the standard error of the difference, and their sizes."""
    from twostroke.evaluation.comparison import compare_models, model_directory
    from twostroke.evaluation.held_out import held_out_to_score

    text = held_out_to_score(model_directory(a), data, prepared, text_key)
    with progress("scoring", 1.0) as advance:
        result = compare_models(a, b, text, context, stride, dtype, progress=advance)
    passed = None if max_perplexity_ratio is None else result["perplexity_ratio"] <= max_perplexity_ratio
    result |= {"max_perplexity_ratio": max_perplexity_ratio, "passed": passed}
    lines = [f"{'':14} {'bits/byte':>10} {'parameters':>11} {'on disk':>9}"]
    for name in ("a", "b"):
        side = result[name]
        size, count = format_bytes(side["model_bytes"]), format_count(side["parameters"])
        lines.append(f"{name.upper():14} {side['bits_per_byte']:10.4f} {count:>11} {size:>9}  {side['model']}")
    difference = f"{result['difference_bits_per_byte']:+10.5f} ± {result['standard_error_bits_per_byte']:.5f}"
    lines.append(
        f"B − A          {difference} (measured, standard error over {result['n_blocks']} blocks): B is {result['b_is']}"
    )
    lines.append(f"perplexity × {result['perplexity_ratio']:.5f}, size × {result['size_ratio']:.3f}")
    if passed is not None:
        lines.append(f"{'pass' if passed else 'FAIL'}: the perplexity ratio may be {max_perplexity_ratio} at most")
    emit(result, "\n".join(lines), as_json)
    if passed is False:
        raise typer.Exit(1)
