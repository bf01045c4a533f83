"""``twostroke plan serve`` as text."""

from __future__ import annotations

from twostroke.core.engines import planned_only_text
from twostroke.core.units import format_bytes, format_money, format_seconds
from twostroke.ledger.text import align
from twostroke.planner.money.api_prices import nearest_api
from twostroke.planner.serving.plan import ServingPlan
from twostroke.planner.serving.under_load import AtRate, LatencyTable, Load, Service
from twostroke.planner.text.format import memory_table, money_lines, pass_table, power_line


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
        pass_table({"prefill": plan.prefill, "decode": plan.decode}),
        "",
        f"TTFT      {format_seconds(plan.ttft_s)} ({plan.prefill_tok_per_s:,.0f} prompt tok/s)",
        f"TPOT      {format_seconds(plan.tpot_s)} at batch {shape.batch} ({plan.decode_tok_per_s:,.0f} tok/s together)",
        f"answer    {format_seconds(plan.e2e_s)} from request to last token",
        f"rate      {plan.output_tok_per_s:,.0f} output tok/s with the batch kept full, prefills included",
        f"start     {format_seconds(plan.startup_s)}",
        f"cost      {format_money(plan.usd_per_mtok)} and {plan.kwh_per_mtok:.3g} kWh per million output tokens",
        power_line(plan.devices, plan.watts, plan.hardware),
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


def loaded_text(plan: ServingPlan, table: LatencyTable) -> str:
    """What every plan says of its users beside each other, and the table of TTFT and TPOT."""
    shape, loaded = plan.shape, plan.loaded
    lines = (
        [f"predicted for {shape.batch} users who each ask again at once:"] if shape.batch > 1 else ["predicted for one user:"]
    )
    lines.append(
        f"TTFT {format_seconds(loaded.ttft_s)}, waiting included; TPOT {format_seconds(loaded.tpot_s)} with the "
        f"prompts of others; answer {format_seconds(loaded.e2e_s)}"
    )
    if shape.speculation is not None:
        lines.append(
            f"speculation: {shape.speculation.tokens_per_step:.3g} tokens a check, {plan.step_s / plan.tpot_s:.3g} times as "
            f"fast as plain steps of {format_seconds(plan.step_s)}, {shape.speculation.operations:.3g} times the arithmetic "
            "(α, c assumed)"
        )
    return "\n".join([*lines, "", "predicted TTFT of a prompt alone, TPOT by batch, by tokens of context:", _table(table)])


def _table(table: LatencyTable) -> str:
    rows = [["", *(f"{c:,}" for c in table.contexts)], ["TTFT", *(format_seconds(s) for s in table.ttft_s)]]
    for batch, values in table.rows:
        rows.append([f"TPOT, batch {batch}", *("no memory" if v is None else format_seconds(v) for v in values)])
    return align(rows, right=tuple(range(1, len(table.contexts) + 1)))


def load_text(load: Load) -> str:
    """What an SLO and a rate were answered with."""
    lines = []
    limits = [f"{n} {format_seconds(s)}" for n, s in (("TTFT", load.slo.ttft_s), ("TPOT", load.slo.tpot_s)) if s is not None]
    within = f"within {' and '.join(limits)}" if limits else "without an SLO"
    if load.best is None:
        lines.append(f"one copy {within}: not even one request alone")
    else:
        lines.append(f"one copy {within}: up to {load.best.rate_per_s:.3g} requests/s; {_at(load.best)}")
    if load.largest_batch is not None:
        lines.append(f"users who ask again at once, within that TPOT: {load.largest_batch:,}")
    if load.service is not None:
        lines += _service(load.service)
    if load.pools is not None:
        pools = load.pools
        lines.append(
            f"separated: {pools.prefill_instances} prefill copies ({pools.prefill_utilisation:.0%} busy) and "
            f"{pools.decode_instances} decode copies ({pools.decode_utilisation:.0%} full); "
            f"TTFT {format_seconds(pools.ttft_s)}, TPOT {format_seconds(pools.tpot_s)}; "
            f"{format_bytes(pools.transfer_bytes)} of cache a request, sent in {format_seconds(pools.transfer_s)}"
        )
    return "\n".join(f"predicted {line}" for line in lines)


def _service(service: Service) -> list[str]:
    return [
        f"{service.rate_per_s:.4g} requests/s: {service.replicas} replicas on {service.devices} devices, "
        f"{service.concurrency:,.0f} requests in flight; each {_at(service.each)}",
        f"that costs {format_money(service.usd_per_hour)} an hour, {format_money(service.usd_per_mtok)} per million output "
        "tokens",
    ]


def _at(found: AtRate) -> str:
    return (
        f"TTFT {format_seconds(found.ttft_s)} ({format_seconds(found.wait_s)} of it waiting), "
        f"TPOT {format_seconds(found.tpot_s)}, batch {found.batch:.3g}, prompts {found.prefill_utilisation:.0%} of the time"
    )
