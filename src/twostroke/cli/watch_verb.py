"""``twostroke watch`` serves the live page of a run from another process."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit, log

app = typer.Typer(add_completion=False)


@app.command()
def watch(
    run: Path = typer.Argument(help="The run's directory: the recipe's output."),
    port: int | None = typer.Option(None, "--port", metavar="N", help="Port on 127.0.0.1; 0: any that is free. [8765 or next]"),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Serve a live page of a run that is training or has ended, until Ctrl-C. It is read only, and on this machine only.

    `twostroke train RECIPE --watch` serves the same page for as long as the run lasts.
    """
    from twostroke.core.errors import InputError
    from twostroke.report.watch import WatchServer

    if not (run / "recipe.json").is_file():
        raise InputError(f"{run} is not a run: it has no recipe.json. Name the directory that a recipe calls output.")
    server = WatchServer(run, port)
    emit({"url": server.url, "directory": str(run)}, server.url, as_json)
    log("Ctrl-C ends it.")
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    server.close()
