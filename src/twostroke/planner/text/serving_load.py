"""A served model under load as text: beside other users, by batch and context, at a rate, within an SLO."""

from __future__ import annotations

from twostroke.core.units import format_bytes, format_money, format_seconds
from twostroke.planner.serving.plan import ServingPlan
from twostroke.planner.serving.under_load import AtRate, LatencyTable, Load, Service
from twostroke.planner.text.format import columns


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
    return columns(rows, right=tuple(range(1, len(table.contexts) + 1)))


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
