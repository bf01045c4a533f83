"""``twostroke plan serve`` as text."""

from __future__ import annotations

from twostroke.core.engines import planned_only_text
from twostroke.core.units import format_bytes, format_money, format_seconds
from twostroke.planner.serving import ServingPlan
from twostroke.planner.text.format import columns, memory_table, money_lines, work_rows
from twostroke.planner.text.tokens import token_lines


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
