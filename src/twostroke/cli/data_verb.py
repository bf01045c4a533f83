"""``twostroke data prepare``: text into token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from twostroke.cli.console import JSON_HELP, emit, progress
from twostroke.core.units import format_bytes, format_count

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Prepare text into token shards.")


@app.callback()
def data() -> None:
    """Prepare text into token shards."""


@app.command()
def prepare(
    sources: list[str] = typer.Argument(help='Files, folders, globs (.txt .md .py .jsonl .jsonl.gz) or "stdlib".'),
    vocab_size: int = typer.Option(4096, help="Entries of the tokenizer trained on the text."),
    tokenizer: str = typer.Option(None, help="Use this tokenizer.json, or the one in this directory, instead of training one."),
    held_out: list[str] = typer.Option([], help="Hold out these sources instead of a share of the others. Repeatable."),
    held_out_fraction: float = typer.Option(0.1, help="Share of documents to hold out, chosen by a hash of their path."),
    text_key: str = typer.Option("text", help="Where a .jsonl record keeps its text."),
    out: Path = typer.Option(None, help="Directory to write; without it, one in the cache is made or reused."),
    verify: bool = typer.Option(False, help="Also read every shard found and check its sha256."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Tokenise text into memory-mapped shards with a held-out part. Found again when nothing changed."""
    from twostroke.core.recipe import DataRecipe
    from twostroke.data.prepare import prepare as prepare_data

    recipe = DataRecipe(
        sources=tuple(sources),
        held_out=tuple(held_out),
        held_out_fraction=held_out_fraction,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        text_key=text_key,
    )
    with progress("preparing data", 1.0) as advance:
        prepared = prepare_data(recipe, progress=advance, out=out)
    if verify:
        prepared.verify()
    document: dict[str, Any] = {
        "directory": str(prepared.directory),
        "tokenizer": str(prepared.tokenizer_path),
        "vocab_size": prepared.vocab_size,
        "eos_id": prepared.eos_id,
        "n_train_tokens": prepared.n_train_tokens,
        "n_heldout_tokens": prepared.n_heldout_tokens,
        "n_heldout_bytes": prepared.n_heldout_bytes,
        "report": prepared.report,
    }
    emit(document, _text(document), as_json)


def _text(d: dict[str, Any]) -> str:
    r = d["report"]
    found = f"{r['n_documents']} documents, {format_bytes(r['n_bytes'])} of text in {r['n_files']} files"
    left_out = f"{r['n_duplicates']} duplicates and {r['n_empty']} empty left out"
    if r["n_other_files"]:
        left_out += f", {r['n_other_files']} files of other formats not read"
    train = (
        f"{format_count(d['n_train_tokens'])} tokens, {r['n_train_documents']} documents, {format_bytes(r['n_train_bytes'])}"
    )
    held_out = f"{format_count(d['n_heldout_tokens'])} tokens, {format_bytes(d['n_heldout_bytes'])}"
    lines = [
        f"{found}; {left_out}.",
        f"tokenizer {format_count(d['vocab_size'])} entries, {r['bytes_per_token']:.2f} bytes a token",
        f"training  {train}",
        f"held out  {held_out}, {100 * r['held_out_share']:.1f}% by {r['split_by']}",
        f"in {d['directory']}",
    ]
    if r["invalid_utf8_bytes"]:
        where = f"{r['invalid_utf8_documents']} documents"
        lines.insert(1, f"{r['invalid_utf8_bytes']} bytes in {where} were no UTF-8 and were replaced by U+FFFD.")
    return "\n".join(lines)
