"""A run's raw records as tables."""

from __future__ import annotations

import statistics
from typing import Any

from rows import GROUPS, SIZES

DISTURBED_SHARE = 0.02
OURS = "twostroke"
GB = 1e9


def clean_steps(record: dict[str, Any]) -> list[int]:
    """Steps whose threads waited for a processor at most 2% of the time; all, where there are fewer than five such."""
    times, waited = record["step_time_s"], record["waited_s"]
    kept = [i for i, (t, w) in enumerate(zip(times, waited, strict=True)) if w <= DISTURBED_SHARE * t]
    return kept if len(kept) >= 5 else list(range(len(times)))


def tok_per_s(record: dict[str, Any]) -> float:
    """All tokens of the steps that count over the time that their median step would take for each: medians of step rates lie
    where batches differ in length."""
    kept = clean_steps(record)
    return statistics.median(record["tokens"][i] / record["step_time_s"][i] for i in kept)


def _speed_table(name: str, records: list[dict[str, Any]]) -> list[str]:
    group = GROUPS[name]
    size = SIZES[group.size]
    lines = [
        f"## {name}: {size.n_layers} × {size.width}, {size.n_heads} heads, FFN {size.feed_forward}, vocabulary "
        f"{size.vocab_size}, batch {size.batch_size} × {size.sequence_length}, {group.layout}",
        "",
        "| engine | tokens/s | step s | ours is | first step s | peak GB | peak over imports GB | ours takes | clean steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    done = {r["engine"]: r for r in records if "failed" not in r}
    ours = next((r for e, r in done.items() if e.startswith(OURS)), None)
    for record in records:
        if "failed" in record:
            lines.append(f"| {record['engine']} | failed: {record['failed'].splitlines()[-1][:120]} | | | | | | | |")
            continue
        mine = done.get(record["engine"].replace("peft", OURS)) if "peft" in record["engine"] else ours
        if mine is None or record["engine"].startswith(OURS):
            mine = record
        rate, peak = tok_per_s(record), record["peak_bytes"]
        net, own_net = peak - record["baseline_bytes"], mine["peak_bytes"] - mine["baseline_bytes"]
        kept = clean_steps(record)
        lines.append(
            f"| {record['engine']} | {rate:,.0f} | {statistics.median(record['step_time_s'][i] for i in kept):.4f} "
            f"| {tok_per_s(mine) / rate:.2f}× | {record['first_step_s']:.1f} | {peak / GB:.2f} | {net / GB:.2f} "
            f"| {mine['peak_bytes'] / peak:.0%} ({own_net / net:.0%}) | {len(kept)} of {len(record['step_time_s'])} |"
        )
    return lines


def _loss_table(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## loss: the same initial weights and batches",
        "",
        "| engine | step 1 | 10 | 25 | 50 | largest difference |",
        "|---|---|---|---|---|---|",
    ]
    ours = next((r for r in records if r["engine"] == OURS and "failed" not in r), None)
    for record in records:
        if "failed" in record or ours is None:
            lines.append(f"| {record['engine']} | failed | | | | |")
            continue
        loss = record["loss"]
        difference = max(abs(a - b) for a, b in zip(loss, ours["loss"], strict=True))
        lines.append(
            f"| {record['engine']} | " + " | ".join(f"{loss[i - 1]:.4f}" for i in (1, 10, 25, 50)) + f" | {difference:.4f} |"
        )
    return lines


def _command_table(name: str, records: list[dict[str, Any]]) -> list[str]:
    lines = [f"## {name}: `twostroke train`", "", "| what | median s | all |", "|---|---|---|"]
    for record in records:
        values = record.get("startup_s") or record["checkpoint_s"]
        what = record["engine"] + (", to the end of the first step" if "startup_s" in record else "")
        lines.append(f"| {what} | {statistics.median(values):.2f} | {', '.join(f'{v:.2f}' for v in values)} |")
    return lines


def summary(records: list[dict[str, Any]]) -> str:
    lines = [
        "# Training beside its peers",
        "",
        'All numbers *measured*, two threads. tokens/s: median over steps, text only, padding does not count. "ours is" and '
        "\"ours takes\": this package's speed and peak memory over the engine's (in brackets: over what its imports take).",
        "",
    ]
    rates = [r["product_flop_per_s"] for r in records]
    lines += [f"4096³ bf16 product before each row: {min(rates) / 1e9:.0f} to {max(rates) / 1e9:.0f} GFLOP/s.", ""]
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        rows.setdefault(record["row"], []).append(record)
    for name, found in rows.items():
        if name not in GROUPS:
            lines += _command_table(name, found)
        elif GROUPS[name].kind == "loss":
            lines += _loss_table(found)
        else:
            lines += _speed_table(name, found)
        lines.append("")
    return "\n".join(lines)
