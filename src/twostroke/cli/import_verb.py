"""``twostroke import`` makes a model directory of a Hugging Face directory or Hub name, a GGUF or a llama2.c file."""

from __future__ import annotations

import functools
from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.cli.moved_models import Watch, planned_import, took
from twostroke.core.described import plain
from twostroke.core.units import format_count

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def import_(
    source: str = typer.Argument(
        help="A llama2.c .bin, a GGUF file, a Hugging Face directory, or a Hub name: owner/model, owner/model@REVISION, "
        "owner/model:TYPE or owner/model:FILE.gguf for a GGUF file there."
    ),
    directory: Path = typer.Argument(help="Directory to write, in Hugging Face layout."),
    tokenizer: str = typer.Option(
        "", help="Tokenizer to use instead of the source's: tokenizer.bin, tokenizer.json or a directory."
    ),
    dtype: str = typer.Option(
        "auto",
        help="Format to store: auto (as it is; of a GGUF file's quantised matrices the codes, where they are computed with, "
        "and bf16 for the rest), fp32, bf16 or fp16.",
    ),
    revision: str = typer.Option("", help="Branch, tag or commit of a Hub name, the main branch unless given."),
    replace: bool = typer.Option(False, "--replace", help="Replace what is in the directory."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Bring in a model from a Hugging Face directory or Hub name, a GGUF or a llama2.c file."""
    from twostroke.interop.import_model import open_source, write_import
    from twostroke.planner.truth.recording import recording

    inputs = {"source": source, "directory": str(directory.resolve()), "dtype": dtype, "revision": revision}
    opened = open_source(source, tokenizer or None, dtype, revision or None)
    with recording("import", directory.resolve().name, inputs, functools.partial(planned_import, opened), log) as run:
        watch = Watch()
        with progress(f"importing {source}", 1.0) as advance:
            report = write_import(opened, directory, replace, advance)
        measured = watch.read("import_s", report.n_bytes)
        run.measure(measured)
    lines = [
        f"{report.directory}: a {report.family} model of {format_count(report.n_parameters)} parameters in {report.dtype}, "
        f"from {report.kind} {report.source}: {took(run, 'import_s', measured)}.",
        f"Tokenizer: {report.tokenizer or 'none'}.",
        *(f"Note: {note}" for note in report.notes),
    ]
    run_document = {"run_id": run.run_id, "prediction": run.prediction, "measurement": measured}
    emit({**plain(report), **run_document}, "\n".join(lines), as_json)
