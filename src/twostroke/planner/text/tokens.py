"""What tokens cost, prefill and decode apart, and beside them what a vendor asks for those of the same model."""

from __future__ import annotations

from twostroke.core.units import format_money
from twostroke.planner.api_prices import nearest_api
from twostroke.planner.serving import ServingPlan


def token_lines(plan: ServingPlan, subject: str) -> list[str]:
    """One line of one's own, never idle; one of the API whose model has the subject's name, where there is one."""
    own, api = plan.usd_by_phase, nearest_api(subject)
    lines = [
        f"tokens    {format_money(own.input_usd_per_mtok)} a million in (prefill), {format_money(own.output_usd_per_mtok)} "
        "a million out (decode), never idle"
    ]
    if api is not None:
        lines.append(
            f"API       {format_money(api.input_usd_per_mtok)} a million in, {format_money(api.output_usd_per_mtok)} "
            f"a million out: {api.model} of {api.vendor} (listed: {api.source}; {api.date})"
        )
    return lines
