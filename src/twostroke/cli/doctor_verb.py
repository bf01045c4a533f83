"""``twostroke doctor`` tells what this machine has, what is missing, and the command that mends it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from twostroke.cli.console import JSON_HELP, emit

app = typer.Typer(add_completion=False)


@app.command()
def doctor(as_json: bool = typer.Option(False, "--json", help=JSON_HELP)) -> None:
    """What this machine has for training and serving, what is missing, and the command that mends it.

    Exit code 0 where work can be done, however slowly; 1 where something forbids it.
    """
    from twostroke.cli.doctor.advice import advise
    from twostroke.cli.doctor.facts import read_facts
    from twostroke.cli.doctor.text import doctor_text

    facts = read_facts()
    advice = advise(facts)
    is_usable = not any(item.is_fatal for item in advice)
    document = {"is_usable": is_usable, "facts": asdict(facts), "advice": [asdict(item) for item in advice]}
    emit(document, doctor_text(facts, advice), as_json)
    if not is_usable:
        raise typer.Exit(1)
