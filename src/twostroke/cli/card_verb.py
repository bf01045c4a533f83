"""``twostroke card`` writes a model's card from what was recorded here."""

from __future__ import annotations

from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.core.errors import InputError
from twostroke.core.paths import model_directory

app = typer.Typer(add_completion=False)


@app.command(name="card")
def card(
    model: Path = typer.Argument(help="Model directory, or the output of a training run."),
    output: Path | None = typer.Option(None, "--output", "-o", help="File to write, as README.md. Default: print it."),
    replace: bool = typer.Option(False, "--replace", help="Replace a file that is there."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write a Hugging Face model card: size, training, quality, quantisation, speed, memory, energy and cost.

    Every number comes from the model's files or from a run in the ledger, and names it. What was never measured is left out,
    with the command that would measure it.
    """
    from twostroke.core.aside import written_file
    from twostroke.ledger.store import Ledger
    from twostroke.report.model_card import model_card

    directory = model_directory(model)
    if output is not None and output.is_dir():
        raise InputError(f"--output {output} is a folder. Name a file, such as {output / 'README.md'}.")
    if output is not None and output.exists() and not replace:
        raise InputError(f"{output} is there already. Use --replace, or name another file.")
    found = model_card(directory, Ledger())
    text = found.text()
    if output is None:
        emit(found, text, as_json, verbatim=True)
        return
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: the folder {output.parent} does not exist.")
    with written_file(output) as stream:
        stream.write(text.encode())
    n_facts = sum(len(facts) for facts in found.sections.values())
    emit({**vars(found), "output": str(output)}, f"{output}: {n_facts} facts, {len(found.missing)} not known.", as_json)
