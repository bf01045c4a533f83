"""``twostroke plan``: what work will take, before any of it. One file a plan in ``cli/plan``."""

from __future__ import annotations

import typer

from twostroke.cli.plan.compare import compare
from twostroke.cli.plan.crossover import crossover
from twostroke.cli.plan.search import search
from twostroke.cli.plan.serve import serve
from twostroke.cli.plan.train import train

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Predict memory, time, throughput, energy and money, before any work."
)


@app.callback()
def plan() -> None:
    """Predict memory, time, throughput, energy and money, before any work."""


for command in (train, serve, compare, crossover, search):
    app.command()(command)
