"""``twostroke plan train`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.units import format_bytes, format_count, format_money, format_seconds
from twostroke.planner.size_ladder import Candidate
from twostroke.planner.text.format import columns, memory_table, money_lines, work_rows
from twostroke.planner.training import TrainingPlan


def training_text(plan: TrainingPlan, subject: str) -> str:
    """``twostroke plan train``: all predicted."""
    shape = plan.shape
    lines = [
        f"Training {subject} on {plan.hardware.label} (rates {plan.hardware.basis}; everything below is predicted)",
        f"{plan.parameters.total:,} parameters; batch {shape.batch_size} × {shape.sequence_length} × {shape.grad_accumulation}"
        f", {shape.dtype}, {shape.optimizer}, {'compiled' if shape.compile else 'eager'}",
        "",
        "memory",
        memory_table(plan.memory_bytes, plan.peak_memory_bytes),
        "",
        columns(
            [
                ["pass", "component", "time", "bound", "intensity"],
                *work_rows("forward", plan.forward),
                *work_rows("backward", plan.backward),
                *work_rows("update", plan.optimizer),
            ],
            right=(2, 4),
        ),
        "",
        f"step      {format_seconds(plan.step_time_s)}: forward {format_seconds(plan.forward_s)}, backward "
        f"{format_seconds(plan.backward_s)}, optimizer {format_seconds(plan.optimizer_s)}, data {format_seconds(plan.data_s)}",
        f"rate      {plan.tok_per_s:,.0f} tok/s, MFU {100 * plan.mfu:.1f}%",
        f"work      {format_count(plan.flops_per_token)} FLOP and {format_bytes(plan.bytes_per_token)} moved a token",
        f"disk      checkpoint {format_bytes(plan.checkpoint_bytes)}, model {format_bytes(plan.model_bytes)}",
        f"network   {format_bytes(plan.network_bytes_per_step)} of gradients a step, were there one more machine",
    ]
    if plan.cost is not None and plan.train_time_s is not None:
        tokens = shape.steps * shape.tokens_per_step
        lines.append(
            f"run       {shape.steps:,} steps, {format_count(tokens)} tokens, {format_seconds(plan.train_time_s)}, "
            f"{plan.cost.energy_kwh:.3g} kWh, {format_money(plan.cost.usd)}"
        )
    lines += [money_lines(plan.hardware), *(f"note: {note}" for note in (*plan.notes, *memory_notes(plan)))]
    return "\n".join(lines)


def memory_notes(plan: TrainingPlan) -> list[str]:
    """A line where the plan does not fit the machine."""
    if plan.peak_memory_bytes <= plan.hardware.memory_bytes:
        return []
    return [
        f"this does not fit: {format_bytes(plan.peak_memory_bytes)} wanted, {format_bytes(plan.hardware.memory_bytes)} there."
    ]


def candidates_text(candidates: Sequence[Candidate], limit: int = 6) -> str:
    """The first rungs of a ranking, the chosen one on top."""
    rows = [["", "width", "layers", "parameters", "steps", "tokens", "loss (assumed law)"]]
    rows += [
        [
            "chosen" if i == 0 else "",
            str(c.spec.d_model),
            str(c.spec.n_layers),
            format_count(c.n_parameters),
            f"{c.steps:,}",
            format_count(c.tokens),
            f"{c.predicted_loss:.3f}",
        ]
        for i, c in enumerate(candidates[:limit])
    ]
    return columns(rows, right=(1, 2, 3, 4, 5, 6))
