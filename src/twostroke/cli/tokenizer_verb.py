"""``twostroke tokenizer train`` makes a byte-level BPE tokenizer from text."""

from __future__ import annotations

from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit, progress
from twostroke.core.units import format_bytes

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train a byte-level BPE tokenizer.")


@app.callback()
def tokenizer() -> None:
    """Train a byte-level BPE tokenizer."""


@app.command(short_help="Train byte-level BPE on text: a tokenizer.json.")
def train(
    sources: list[str] = typer.Argument(help='Files, folders, globs (.txt .md .py .jsonl .jsonl.gz) or "stdlib".'),
    vocab_size: int = typer.Option(4096, help="Entries, at least 257: 256 bytes and one end-of-text."),
    out: Path = typer.Option(Path("tokenizer.json"), help="File to write."),
    text_key: str = typer.Option("text", help="Key of a .jsonl record that holds its text."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Train byte-level BPE on text and write a tokenizer.json that any Hugging Face tool reads."""
    from collections.abc import Iterator

    from twostroke.core.errors import InputError
    from twostroke.data.sources import find_documents
    from twostroke.data.tokenizer import train_tokenizer

    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"--out {out} must be a file in a folder that exists.")
    source = find_documents(sources, text_key)
    with progress("training the tokenizer", max(1, source.n_file_bytes)) as advance:

        def texts() -> Iterator[str]:
            done = 0
            for document in source:
                done += document.n_bytes
                advance(done, "")
                yield document.text

        trained = train_tokenizer(texts(), vocab_size, out)
    entries = trained.get_vocab_size()
    document = {"tokenizer": str(out), "vocab_size": entries, "report": source.report}
    text = f"{out}: {entries} entries from {source.report.n_documents} documents, {format_bytes(source.report.n_bytes)}."
    if entries < vocab_size:
        text += f" {vocab_size} were asked for; the text has no more pairs that occur twice."
    emit(document, text, as_json)
