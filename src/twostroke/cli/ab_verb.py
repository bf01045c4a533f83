"""``twostroke ab`` compares the arms of an A/B test that a server has run, from its usage log."""

from __future__ import annotations

from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.core.contention import processors
from twostroke.core.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command(name="ab")
def ab(
    log: Path = typer.Argument(help="Usage log of `serve --ab NAME=SHARE --usage-log FILE`."),
    arm: list[str] = typer.Option([], help="Given twice: the arms to compare, A first. Default: the two that are there."),
    out: Path | None = typer.Option(None, help="Page to write: HTML, self-contained."),
    hardware: str | None = typer.Option(None, help="Machine whose price is taken. Default: this machine's cores."),
    usd_per_hour: float | None = typer.Option(None, help="Price of an hour of the machine, in the place of the listed one."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Compare the arms of an A/B test: latency, ratings and cost with 95% intervals, and what is told from noise."""
    from twostroke.evaluation.arms import compare_arms, read_lines
    from twostroke.planner.hardware.tables import hourly_price, load_hardware
    from twostroke.report.arms_page import arms_text, write_arms_page

    if usd_per_hour is not None and not 0 <= usd_per_hour < 1e9:
        raise ConfigError(f"--usd-per-hour={usd_per_hour:g} must be at least 0 and finite.")
    if arm and len(arm) != 2:
        raise ConfigError(f"--arm is given {len(arm)} times. Name two arms, A first, or none.")
    if usd_per_hour is not None:
        hourly, price = usd_per_hour, f"${usd_per_hour:g} an hour (given)"
    else:
        listed = load_hardware(hardware).usd_per_hour if hardware else hourly_price("this", max(1, len(processors())))
        hourly, price = listed.value, f"${listed.value:.4g} an hour ({listed.kind}: {listed.source})"
    comparison = compare_arms(read_lines(log), hourly, arm)
    text = arms_text(comparison) + f"\n\nprice  {price}"
    document = comparison.to_dict() | {"price": price}
    if out is not None:
        written = write_arms_page(out, comparison, price)
        document["report"] = str(written)
        text += f"\nreport {written}"
    emit(document, text, as_json)
