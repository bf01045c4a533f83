"""``twostroke plan serve`` as text."""

from __future__ import annotations

from twostroke.core.engines import planned_only_text
from twostroke.core.units import format_bytes, format_money, format_seconds
from twostroke.planner.money.api_prices import nearest_api
from twostroke.planner.serving.plan import ServingPlan
from twostroke.planner.text.format import columns, memory_table, money_lines, work_rows


def serving_text(plan: ServingPlan, subject: str) -> str:
    """``twostroke plan serve``: all predicted."""
    shape = plan.shape
    lines = [
        f"Serving {subject} on {plan.hardware.label} (rates {plan.hardware.basis}; everything below is predicted)",
        f"{plan.parameters.total:,} parameters, {shape.scheme} weights, {shape.cache_dtype} KV cache; batch {shape.batch}, "
        f"prompt {shape.prompt_tokens}, output {shape.output_tokens} tokens",
        *([planned_only_text(plan.planned_only)] if plan.planned_only else []),
        "",
        "memory",
        memory_table(plan.memory_bytes, plan.peak_memory_bytes),
        f"KV cache: {format_bytes(plan.kv_bytes_per_token)} a token, {plan.pages:,} pages of 16 tokens; "
        f"the memory holds {plan.largest_batch:,} such requests",
        "",
        columns(
            [
                ["pass", "component", "time", "bound", "intensity"],
                *work_rows("prefill", plan.prefill),
                *work_rows("decode", plan.decode),
            ],
            right=(2, 4),
        ),
        "",
        f"TTFT      {format_seconds(plan.ttft_s)} ({plan.prefill_tok_per_s:,.0f} prompt tok/s)",
        f"TPOT      {format_seconds(plan.tpot_s)} at batch {shape.batch} ({plan.decode_tok_per_s:,.0f} tok/s together)",
        f"answer    {format_seconds(plan.e2e_s)} from request to last token",
        f"rate      {plan.output_tok_per_s:,.0f} output tok/s with the batch kept full, prefills included",
        f"start     {format_seconds(plan.startup_s)}",
        f"cost      {format_money(plan.usd_per_mtok)} and {plan.kwh_per_mtok:.3g} kWh per million output tokens",
        *token_lines(plan, subject),
        money_lines(plan.hardware),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


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
