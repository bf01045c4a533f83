"""``twostroke plan train`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.engines import planned_only_text
from twostroke.core.units import (
    format_bytes,
    format_count,
    format_energy,
    format_mass,
    format_money,
    format_parameters,
    format_seconds,
)
from twostroke.ledger.text import align
from twostroke.planner.choosing.size_ladder import Rung
from twostroke.planner.text.format import (
    NO_INTERVALS,
    Intervals,
    Result,
    fits_lines,
    footnotes,
    member,
    memory_table,
    money_lines,
    notes_lines,
    on_text,
    pass_table,
    power_result,
    rent_text,
    results_table,
    with_wrapped_notes,
    wrapped,
)
from twostroke.planner.training.plan import TrainingPlan


def training_text(
    plan: TrainingPlan, subject: str, intervals: Intervals = NO_INTERVALS, low_by: float = 0.0, remedy: str = ""
) -> str:
    """``twostroke plan train``: whether it fits and ``remedy``, results, how they come about, and where prices are from."""
    layout = plan.layout
    needs = fits_lines(plan.peak_memory_bytes, layout.n_devices, plan.hardware, remedy, layout.sharing)
    head = [*needs, *head_lines(plan, subject)]
    parts = ("\n".join(head), results_text(plan, intervals, low_by), how_text(plan), footnotes(source_lines(plan)))
    return "\n\n".join(parts)


def head_lines(plan: TrainingPlan, subject: str) -> list[str]:
    """What is trained, on what, by what step."""
    shape, layout, n = plan.shape, plan.layout, plan.layout.n_whole
    passes = f" × {shape.grad_accumulation} passes" if shape.grad_accumulation > 1 else ""
    ranks = f" × {layout.data} ranks" if layout.data > 1 else ""
    return wrapped(
        [
            f"Training {subject} on {on_text(n, plan.hardware)}",
            f"{format_parameters(plan.parameters.total)} parameters, {shape.dtype}, {shape.optimizer}, "
            f"{'compiled' if shape.compile else 'eager'}; a step of {shape.batch_size} × {shape.sequence_length:,} tokens"
            f"{passes}{ranks}",
            *shape_lines(plan),
            *([planned_only_text(plan.planned_only)] if plan.planned_only else []),
        ]
    )


def results_text(plan: TrainingPlan, intervals: Intervals, low_by: float) -> str:
    """What a reader decides by, with intervals, and what qualifies them."""
    layout, machine, room = plan.layout, plan.hardware, format_bytes(plan.room_bytes)
    n, each = layout.n_devices, member(layout.sharing)
    together = f"all {n:,} {each}s together" if n > 1 else ""
    memory = f"memory per {each}" if n > 1 else "memory"
    again = [Result("", None, f"HFU {100 * plan.hfu:.1f}%", "with what is computed again")]
    results = [
        Result("step", "step_time_s", format_seconds(plan.step_time_s), f"{format_count(plan.tokens_per_step)} tokens"),
        Result("rate", "train_tok_per_s", f"{format_count(plan.tok_per_s)} tok/s", together),
        Result("share of peak", None, f"MFU {100 * plan.mfu:.1f}%", "model FLOP ÷ peak"),
        *(again if plan.recomputed_flops_per_token else []),
        Result(memory, "peak_memory_bytes", format_bytes(plan.peak_memory_bytes), f"of {room}"),
        power_result(layout.n_whole, plan.watts, machine),
        *run_results(plan),
    ]
    return "\n".join([results_table(results, intervals, low_by), *notes_lines(plan.notes)])


def run_results(plan: TrainingPlan) -> list[Result]:
    """The whole run, where its length is known."""
    if plan.cost is None or plan.wall_time_s is None or plan.train_time_s is None:
        return []
    n, tokens = plan.layout.n_whole, format_count(plan.shape.steps * plan.tokens_per_step)
    hours = f"{format_count(plan.wall_time_s / 3600 * n)} device-hours; money and energy are of these"
    failures = [Result("with failures", None, format_seconds(plan.wall_time_s), hours)] if n > 1 else []
    found = plan.cost
    return [
        Result("run", "train_time_s", format_seconds(plan.train_time_s), f"{plan.shape.steps:,} steps, {tokens} tokens"),
        *failures,
        Result("money", "cost_usd", format_money(found.usd), f"at {rent_text(n, plan.hardware)}"),
        Result("energy", "energy_kwh", format_energy(found.energy_kwh), f"{format_mass(found.co2_kg)} CO2"),
    ]


def how_text(plan: TrainingPlan) -> str:
    """Memory by term, the time of each component and what makes up a step."""
    n, each = plan.layout.n_devices, member(plan.layout.sharing)
    waits = [
        f"{name} {format_seconds(seconds)}"
        for name, seconds in (("waiting for traffic", plan.communication_s), ("bubble", plan.bubble_s))
        if (plan.traffic if name == "waiting for traffic" else seconds)
    ]
    if n == 1:
        network = f"network   {format_bytes(plan.network_bytes_per_step)} of gradients a step, were there one more machine"
    else:
        network = f"network   {format_bytes(plan.network_bytes_per_step)} sent by a {each} a step{burst_text(plan)}"
    step = (
        f"step      {format_seconds(plan.step_time_s)}: forward {format_seconds(plan.forward_s)}, backward "
        f"{format_seconds(plan.backward_s)}, optimizer {format_seconds(plan.optimizer_s)}, data {format_seconds(plan.data_s)}"
    )
    lines = [
        ", ".join([step, *waits]),
        f"work      {format_count(plan.flops_per_token)} FLOP and {format_bytes(plan.bytes_per_token)} moved a token",
        f"disk      checkpoint {format_bytes(plan.checkpoint_bytes)}, model {format_bytes(plan.model_bytes)}",
        network,
        *offload_lines(plan),
        *resilience_lines(plan),
    ]
    return "\n".join(
        [
            "memory" if n == 1 else f"memory of the {each} that holds most (of {n:,})",
            memory_table(_with_masters_apart(plan), plan.peak_memory_bytes),
            "",
            pass_table({"forward": plan.forward, "backward": plan.backward, "update": plan.optimizer}),
            "",
            *traffic_lines(plan),
            *wrapped(lines, " " * 10),
        ]
    )


def source_lines(plan: TrainingPlan) -> list[str]:
    return [*([link_line(plan)] if plan.traffic else []), *money_lines(plan.hardware).split("\n")]


def shape_lines(plan: TrainingPlan) -> list[str]:
    """Method, recomputation and layout, where they are not the plain ones."""
    shape, layout = plan.shape, plan.layout
    parts = []
    if shape.method != "full":
        parts.append(f"{shape.method} of rank {shape.lora_rank} on {', '.join(shape.lora_targets)}: "
                     f"{plan.trained_parameters:,} parameters trained")  # fmt: skip
    if shape.checkpointing != "none":
        parts.append(f"{shape.checkpointing} checkpointing")
    for what, place in (("activations", shape.offload_activations), ("optimizer", shape.offload_optimizer)):
        if place != "none":
            parts.append(f"{what} on disk" if place == "disk" else f"{what} in host memory")
    if shape.logits != "chunked":
        parts.append(f"{shape.logits} logits")
    if layout.n_devices > 1:
        cuts = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline, "expert": layout.expert}
        cuts |= {"context": layout.context}
        words = [f"{name} {count}" for name, count in cuts.items() if count > 1]
        words += [f"ZeRO-{layout.zero}"] if layout.zero else []
        words += [f"{layout.copies} copies"] if layout.copies > 1 else []
        words += [f"interleaved {layout.interleave}"] if layout.interleave > 1 else []
        words += [f"{layout.sharing} ranks that share the cores"] if layout.sharing > 1 else []
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
    rows = [["traffic", "", "bursts", "sent", "time", "waited", "overlap"]]
    for t in plan.traffic:
        sent, times = format_bytes(t.sent_bytes), [format_seconds(t.seconds), format_seconds(t.exposed_s)]
        rows.append([f"{t.parallel} {t.n_ranks:,}", t.what, f"{t.bursts:,.0f}", sent, *times, t.overlap])
    return [with_wrapped_notes(rows, right=(2, 3, 4, 5), gap=" "), ""]


def burst_text(plan: TrainingPlan) -> str:
    """The busiest window of a step beside a mean one, where it is planned."""
    most = plan.peak_sent_bytes(50)
    if most is None:
        return ""
    times = most / 0.05 / (plan.network_bytes_per_step / plan.step_time_s)
    return f", of which {format_bytes(most)} in the busiest 50 ms, {times:.2g} times the mean"


def link_line(plan: TrainingPlan) -> str:
    """The links that the traffic was timed with."""
    machine, found = plan.hardware, []
    node = plan.layout.devices_per_node or machine.devices_per_node
    for where, link in ((f"inside a node of {node}", machine.link), ("between nodes", machine.network)):
        share = link.effective_bytes_per_s / link.bytes_per_s
        reached = f", {100 * share:.0f}% of it reached (assumed)" if share < 1 else ""
        found.append(f"{where} {link.bytes_per_s / 1e9:,.4g} GB/s ({link.kind}{reached})")
    return f"links     {'; '.join(found)}"


def offload_lines(plan: TrainingPlan) -> list[str]:
    """What scratch files save and take."""
    found = plan.offload
    if found is None:
        return []
    return [
        f"offload   {format_bytes(found.saved_bytes)} of memory saved; {format_bytes(found.moved_bytes)} written to a scratch "
        f"file of {format_bytes(found.file_bytes)} and read a step, which adds {format_seconds(found.added_s)}"
    ]


def resilience_lines(plan: TrainingPlan) -> list[str]:
    """How often to write a checkpoint and what failures cost, for a job of several devices."""
    found = plan.resilience
    if found is None or plan.layout.n_whole == 1:
        return []
    return [
        f"failures  one in {format_seconds(found.mtbf_s)} ({found.mtbf_kind}: {found.mtbf_device_hours:,.0f} device-hours); a "
        f"checkpoint takes {format_seconds(found.checkpoint_s)}: write one every {format_seconds(found.interval_s)} "
        f"(Daly; Young {format_seconds(found.young_s)}); {100 * found.lost_share:.2g}% of the time is lost"
    ]


def candidates_text(candidates: Sequence[Rung], limit: int = 6) -> str:
    """The first rungs of a ranking, the chosen one on top."""
    rows = [["", "width", "layers", "parameters", "steps", "tokens", "loss (assumed law)"]]
    for i, c in enumerate(candidates[:limit]):
        size = [str(c.spec.d_model), str(c.spec.n_layers), format_count(c.n_parameters)]
        run = [f"{c.steps:,}", format_count(c.tokens), f"{c.predicted_loss:.3f}"]
        rows.append(["chosen" if i == 0 else "", *size, *run])
    return align(rows, right=(1, 2, 3, 4, 5, 6))
