"""``twostroke plan``: what work will take, before any of it. One file a plan in ``cli/plan``, imported when it is asked for."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import typer

from twostroke.core.errors import did_you_mean

PLANS = {
    "train": "What a training run takes: memory, time, energy, money.",
    "serve": "What serving takes: memory, latency, throughput, money.",
    "compare": "Training beside prefill beside decode, phase by phase.",
    "crossover": "When serving has cost more than training did.",
    "search": "Rank devices, counts, layouts, precisions and batches.",
}
"""Plans in the order of the list, each with its line."""


@lru_cache(maxsize=len(PLANS))
def _command(name: str) -> Any:
    """The command of one plan, which alone is built: its options take a tenth of a plan's time."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(getattr(importlib.import_module(f"twostroke.cli.plan.{name}"), name))
    command = typer.main.get_command(alone)
    command.short_help = PLANS[name]
    return command


class PlanGroup(typer.core.TyperGroup):
    """Imports a plan's file only when that plan is asked for, or the list of all."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(PLANS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in PLANS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in PLANS:
            ctx.fail(f"no plan {args[0]!r}. {did_you_mean(args[0], PLANS)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=PlanGroup,
    add_completion=False,
    no_args_is_help=True,
    help="Predict memory, time, throughput, energy and money, before any work.",
)


@app.callback()
def plan() -> None:
    """Predict memory, time, throughput, energy and money, before any work."""
