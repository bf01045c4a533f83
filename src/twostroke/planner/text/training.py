"""``twostroke plan train`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.engines import planned_only_text
from twostroke.core.units import format_bytes, format_count, format_money, format_seconds
from twostroke.ledger.text import align
from twostroke.planner.choosing.size_ladder import Rung
from twostroke.planner.text.format import memory_table, money_lines, pass_table, power_line
from twostroke.planner.training.plan import TrainingPlan


def training_text(plan: TrainingPlan, subject: str) -> str:
    """``twostroke plan train``: all predicted."""
    shape, layout, n = plan.shape, plan.layout, plan.layout.n_devices
    devices = f"{n:,} × " if n > 1 else ""
    lines = [
        f"Training {subject} on {devices}{plan.hardware.label} (rates {plan.hardware.basis}; everything below is predicted)",
        f"{plan.parameters.total:,} parameters; batch {shape.batch_size} × {shape.sequence_length} × {shape.grad_accumulation}"
        f"{f' × {layout.data} ranks' if layout.data > 1 else ''}, {shape.dtype}, {shape.optimizer}, "
        f"{'compiled' if shape.compile else 'eager'}",
        *shape_lines(plan),
        *([planned_only_text(plan.planned_only)] if plan.planned_only else []),
        "",
        "memory" if n == 1 else "memory of the device that holds most",
        memory_table(_with_masters_apart(plan), plan.peak_memory_bytes),
        "",
        pass_table({"forward": plan.forward, "backward": plan.backward, "update": plan.optimizer}),
        "",
        *traffic_lines(plan),
        f"step      {format_seconds(plan.step_time_s)}: forward {format_seconds(plan.forward_s)}, backward "
        f"{format_seconds(plan.backward_s)}, optimizer {format_seconds(plan.optimizer_s)}, data {format_seconds(plan.data_s)}"
        + (f", waiting for traffic {format_seconds(plan.communication_s)}" if plan.traffic else "")
        + (f", bubble {format_seconds(plan.bubble_s)}" if plan.bubble_s else ""),
        f"rate      {plan.tok_per_s:,.0f} tok/s, MFU {100 * plan.mfu:.1f}%"
        + (f", HFU {100 * plan.hfu:.1f}% with what is computed again" if plan.recomputed_flops_per_token else ""),
        f"work      {format_count(plan.flops_per_token)} FLOP and {format_bytes(plan.bytes_per_token)} moved a token",
        f"disk      checkpoint {format_bytes(plan.checkpoint_bytes)}, model {format_bytes(plan.model_bytes)}",
    ]
    if n == 1:
        lines.append(f"network   {format_bytes(plan.network_bytes_per_step)} of gradients a step, were there one more machine")
    else:
        lines.append(f"network   {format_bytes(plan.network_bytes_per_step)} sent by a device a step")
    lines += [power_line(n, plan.watts, plan.hardware), *resilience_lines(plan), *run_lines(plan)]
    lines += [money_lines(plan.hardware), *(f"note: {note}" for note in (*memory_notes(plan), *plan.notes))]
    return "\n".join(lines)


def shape_lines(plan: TrainingPlan) -> list[str]:
    """Method, recomputation and layout, where they are not the plain ones."""
    shape, layout = plan.shape, plan.layout
    parts = []
    if shape.method != "full":
        parts.append(f"{shape.method} of rank {shape.lora_rank} on {', '.join(shape.lora_targets)}: "
                     f"{plan.trained_parameters:,} parameters trained")  # fmt: skip
    if shape.checkpointing != "none":
        parts.append(f"{shape.checkpointing} checkpointing")
    if shape.logits != "chunked":
        parts.append("whole logits")
    if layout.n_devices > 1:
        cuts = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline, "expert": layout.expert}
        words = [f"{name} {count}" for name, count in cuts.items() if count > 1]
        words += [f"ZeRO-{layout.zero}"] if layout.zero else []
        words += [f"interleaved {layout.interleave}"] if layout.interleave > 1 else []
        parts.append(", ".join(words))
    return ["; ".join(parts)] if parts else []


def _with_masters_apart(plan: TrainingPlan) -> dict[str, float]:
    """The memory terms with fp32 masters in a row of their own."""
    terms = dict(plan.memory_bytes)
    weights = terms.pop("weights") - plan.masters_bytes
    return {"weights": weights, "masters": plan.masters_bytes, **terms}


def traffic_lines(plan: TrainingPlan) -> list[str]:
    """A table of what a device sends in a step; nothing for one device."""
    if not plan.traffic:
        return []
    rows = [["traffic", "", "ranks", "bursts", "each", "sent", "time", "waited", "overlap"]]
    for t in plan.traffic:
        sent = [f"{t.bursts:,.0f}", format_bytes(t.burst_bytes), format_bytes(t.sent_bytes)]
        times = [format_seconds(t.seconds), format_seconds(t.exposed_s)]
        rows.append([t.parallel, t.what, f"{t.n_ranks:,}", *sent, *times, t.overlap])
    return [align(rows, right=(2, 3, 4, 5, 6, 7)), link_line(plan), ""]


def link_line(plan: TrainingPlan) -> str:
    """The links that the traffic was timed with."""
    machine, found = plan.hardware, []
    node = plan.layout.devices_per_node or machine.devices_per_node
    for where, link in ((f"inside a node of {node}", machine.link), ("between nodes", machine.network)):
        share = link.effective_bytes_per_s / link.bytes_per_s
        reached = f", {100 * share:.0f}% of it reached (assumed)" if share < 1 else ""
        found.append(f"{where} {link.bytes_per_s / 1e9:,.4g} GB/s ({link.kind}{reached})")
    return f"links     {'; '.join(found)}"


def resilience_lines(plan: TrainingPlan) -> list[str]:
    """How often to write a checkpoint and what failures cost, for a job of several devices."""
    found = plan.resilience
    if found is None or plan.layout.n_devices == 1:
        return []
    return [
        f"failures  one in {format_seconds(found.mtbf_s)} ({found.mtbf_kind}: {found.mtbf_device_hours:,.0f} device-hours); a "
        f"checkpoint takes {format_seconds(found.checkpoint_s)}: write one every {format_seconds(found.interval_s)} "
        f"(Daly; Young {format_seconds(found.young_s)}); {100 * found.lost_share:.2g}% of the time is lost"
    ]


def run_lines(plan: TrainingPlan) -> list[str]:
    """The whole run, where its length is known."""
    if plan.cost is None or plan.wall_time_s is None or plan.train_time_s is None:
        return []
    tokens = plan.shape.steps * plan.tokens_per_step
    lines = [
        f"run       {plan.shape.steps:,} steps, {format_count(tokens)} tokens, {format_seconds(plan.train_time_s)}, "
        f"{plan.cost.energy_kwh:,.3g} kWh, {plan.cost.co2_kg:,.3g} kg CO2, {format_money(plan.cost.usd)}"
    ]
    if plan.layout.n_devices > 1:
        lines.append(
            f"          {plan.wall_time_s / 86_400:,.1f} days with failures, "
            f"{plan.wall_time_s / 3600 * plan.layout.n_devices:,.0f} device-hours; energy and money are of these"
        )
    return lines


def memory_notes(plan: TrainingPlan) -> list[str]:
    """A line where the plan does not fit the machine."""
    if plan.peak_memory_bytes <= plan.hardware.memory_bytes:
        return []
    return [
        f"this does not fit: it takes {format_bytes(plan.peak_memory_bytes)}, "
        f"and the device has {format_bytes(plan.hardware.memory_bytes)}."
    ]


def candidates_text(candidates: Sequence[Rung], limit: int = 6) -> str:
    """The first rungs of a ranking, the chosen one on top."""
    rows = [["", "width", "layers", "parameters", "steps", "tokens", "loss (assumed law)"]]
    for i, c in enumerate(candidates[:limit]):
        size = [str(c.spec.d_model), str(c.spec.n_layers), format_count(c.n_parameters)]
        run = [f"{c.steps:,}", format_count(c.tokens), f"{c.predicted_loss:.3f}"]
        rows.append(["chosen" if i == 0 else "", *size, *run])
    return align(rows, right=(1, 2, 3, 4, 5, 6))
