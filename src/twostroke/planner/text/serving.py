"""``twostroke plan serve`` as text."""

from __future__ import annotations

from twostroke.core.engines import planned_only_text
from twostroke.core.units import format_bytes, format_count, format_energy, format_money, format_parameters, format_seconds
from twostroke.ledger.text import align
from twostroke.planner.money.api_prices import nearest_api
from twostroke.planner.serving.adapters import ServedAdapters
from twostroke.planner.serving.plan import ServingPlan
from twostroke.planner.serving.under_load import AtRate, LatencyTable, Load, Loaded, Service
from twostroke.planner.text.format import (
    NO_INTERVALS,
    Intervals,
    Result,
    footnotes,
    memory_table,
    money_lines,
    notes_lines,
    on_text,
    pass_table,
    power_result,
    rent_text,
    results_table,
    wrapped,
)


def serving_text(
    plan: ServingPlan, subject: str, intervals: Intervals = NO_INTERVALS, low_by: float = 0.0, under_load: str = ""
) -> str:
    """``twostroke plan serve``: results first, then ``under_load``, how they come about, and where prices are from."""
    parts = (head_text(plan, subject), results_text(plan, intervals, low_by), under_load, how_text(plan))
    return "\n\n".join(
        [*filter(None, parts), footnotes([*token_lines(plan, subject), *money_lines(plan.hardware).split("\n")])]
    )


def head_text(plan: ServingPlan, subject: str) -> str:
    """What is served, on what, to whom."""
    shape = plan.shape
    users = f"{shape.batch} requests at once" if shape.batch > 1 else "one request at a time"
    return "\n".join(
        wrapped(
            [
                f"Serving {subject} on {on_text(plan.devices, plan.hardware)}",
                f"{format_parameters(plan.parameters.total)} parameters, {shape.scheme} weights, {shape.cache_dtype} KV cache; "
                f"{users}, each a prompt of {shape.prompt_tokens:,} and an answer of {shape.output_tokens:,} tokens",
                *(_adapters_text(group) for group in shape.adapters),
                *([planned_only_text(plan.planned_only)] if plan.planned_only else []),
            ]
        )
    )


def _adapters_text(group: ServedAdapters) -> str:
    named = f"{group.count} adapters, which requests name in turn" if group.count > 1 else "an adapter"
    return f"{named}: rank {group.rank} on {', '.join(group.targets)}"


def results_text(plan: ServingPlan, intervals: Intervals, low_by: float) -> str:
    """What a reader decides by, with intervals, and what qualifies them."""
    shape, machine = plan.shape, plan.hardware
    n = f", all {plan.devices} devices" if plan.devices > 1 else ""
    per_device = " per device" if plan.devices > 1 else ""
    results = [
        Result("first token (TTFT)", "ttft_s", format_seconds(plan.ttft_s), "of an idle server"),
        Result("next token (TPOT)", "tpot_s", format_seconds(plan.tpot_s), f"with {shape.batch} at once"),
        Result("whole answer", "e2e_s", format_seconds(plan.e2e_s), "from request to last token"),
        Result(
            "output", "output_tok_per_s", f"{format_count(plan.output_tok_per_s)} tok/s", f"{shape.batch} kept at work{n}"
        ),
        Result(
            f"memory{per_device}", "peak_memory_bytes", format_bytes(plan.peak_memory_bytes),
            f"of {format_bytes(machine.memory_bytes)}; room for {plan.largest_batch:,} such requests",
        ),
        Result("start", "startup_s", format_seconds(plan.startup_s), "until the first request"),
        Result(
            "$ per 1M tokens out", "cost_per_mtok_usd", format_money(plan.usd_per_mtok),
            f"never idle, at {rent_text(plan.devices, machine)}",
        ),
        Result("energy for these 1M", "energy_per_mtok_kwh", format_energy(plan.kwh_per_mtok), "of the devices alone"),
        power_result(plan.devices, plan.watts, machine),
    ]  # fmt: skip
    return "\n".join([results_table(results, intervals, low_by), *notes_lines(plan.notes)])


def how_text(plan: ServingPlan) -> str:
    """Memory by term, and the time of each component."""
    return "\n".join(
        [
            f"memory{' of each device' if plan.devices > 1 else ''}",
            memory_table(plan.memory_bytes, plan.peak_memory_bytes),
            *wrapped([f"KV cache: {format_bytes(plan.kv_bytes_per_token)} a token, {plan.pages:,} pages of 16 tokens"]),
            "",
            pass_table({"prefill": plan.prefill, "decode": plan.decode}),
        ]
    )


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


def loaded_text(plan: ServingPlan, users: Loaded | None, table: LatencyTable) -> str:
    """What every plan says of its users beside each other (nothing where they were not simulated), and the table of TTFT and
    TPOT."""
    shape = plan.shape
    lines = [] if users is None else _users_lines(shape.prompts, users)
    if shape.speculation is not None:
        sentence = (
            f"speculation: {shape.speculation.tokens_per_step:.3g} tokens a check, {plan.step_s / plan.tpot_s:.3g} times as "
            f"fast as plain steps of {format_seconds(plan.step_s)}, {shape.speculation.operations:.3g} times the arithmetic "
            "(α, c assumed)"
        )
        lines += wrapped([sentence])
    lines += [""] if lines else []
    return "\n".join([*lines, "predicted TTFT of a prompt alone, TPOT by batch, by tokens of context", _table(table)])


def _users_lines(n: int, users: Loaded) -> list[str]:
    """Latencies of ``n`` users by percentile; of the median also what it is where steps take as little and as long as their
    intervals say."""
    found = users.expected
    who = f"{n} users who each ask again at once" if n > 1 else "one user"
    rows = [["", "median", "p90", "p99", "median, steps at their ends"]]
    for title, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("answer", "e2e_s")):
        at, low, high = (getattr(each, name) for each in (found, users.fast, users.slow))
        if at.n:
            ends = f"{format_seconds(low.median)} to {format_seconds(high.median)}"
            rows.append([title, *map(format_seconds, (at.median, at.p90, at.p99)), ends])
    rate = (
        f"{found.output_tok_per_s:,.0f} output tok/s; {found.decoding:.3g} requests decode on average; prompts are in steps of "
        f"{found.prompt_share:.0%} of the time" + (f"; {found.preemptions} preemptions" if found.preemptions else "")
    )
    return [
        *wrapped([f"predicted for {who} ({found.n_requests:,} answers, simulated, waiting included):"]),
        align(rows, right=(1, 2, 3)),
        *wrapped([rate]),
    ]


def _table(table: LatencyTable) -> str:
    rows = [["", *(f"{c:,}" for c in table.contexts)], ["TTFT", *(format_seconds(s) for s in table.ttft_s)]]
    for batch, values in table.rows:
        rows.append([f"TPOT, batch {batch}", *("–" if v is None else format_seconds(v) for v in values)])
    full = ["–: more than the memory holds"] if any(v is None for _, values in table.rows for v in values) else []
    return "\n".join([align(rows, right=tuple(range(1, len(table.contexts) + 1))), *full])


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
    return "\n".join(["predicted for the load asked for:", *wrapped(lines)])


def _service(service: Service) -> list[str]:
    return [
        f"{service.rate_per_s:.4g} requests/s: {_counted(service.replicas, 'replica')} on "
        f"{_counted(service.devices, 'device')}, "
        f"{service.concurrency:,.0f} requests in flight; each {_at(service.each)}",
        f"these cost {format_money(service.usd_per_hour)} an hour, {format_money(service.usd_per_mtok)} per million output "
        "tokens",
    ]


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _at(found: AtRate) -> str:
    return (
        f"TTFT {format_seconds(found.ttft_s)} ({format_seconds(found.wait_s)} of it waiting){_p99(found)}, "
        f"TPOT {format_seconds(found.tpot_s)}, batch {found.batch:.3g}, prompts in steps of {found.prefill_utilisation:.0%} of "
        "the time"
    )


def _p99(found: AtRate) -> str:
    return "" if found.simulated is None else f", p99 {format_seconds(found.simulated.ttft_s.p99)}"
