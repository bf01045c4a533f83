"""What a server was set to for an SLO, as text."""

from __future__ import annotations

from twostroke.core.units import format_bytes, format_seconds
from twostroke.planner.choosing.server_settings import Considered, ServerChoice
from twostroke.planner.serving.under_load import Slo


def choice_lines(choice: ServerChoice) -> list[str]:
    """What was chosen, what it is expected to do, and why."""
    load = f"prompts of {choice.prompt_tokens:,} and answers of {choice.output_tokens:,} tokens"
    setting, expected = choice.chosen, choice.expected
    if setting is None or expected is None:
        return [choice.refusal]
    cache = "" if setting.kv_cache_bytes is None else f" of {format_bytes(setting.kv_cache_bytes)}"
    lines = [
        f"set for {_limits(choice)} with {load}: {setting.scheme} weights, {setting.kv_dtype} KV cache{cache}, "
        f"--token-budget {setting.token_budget} --max-running {setting.max_running}",
        f"expected: up to {expected.rate_per_s:.3g} requests/s{'' if choice.slo.is_free else ' within that'}, then TTFT "
        f"{format_seconds(expected.ttft_s)}, TPOT {format_seconds(expected.tpot_s)} on average"
        + (f", p99 of TTFT {format_seconds(expected.simulated.ttft_s.p99)}" if expected.simulated else ""),
    ]
    for level in choice.levels[:1] + choice.levels[1:][-1:]:
        who = "one user alone" if level.users == 1 else f"{level.users} users who ask again at once"
        lines.append(f"{who}: TTFT {format_seconds(level.ttft_s)}, TPOT {format_seconds(level.tpot_s)}")
    if len(choice.considered) > 1:
        lines.append("tried: " + "; ".join(_row(row) for row in choice.considered))
    return lines + [f"not tried: {note}" for note in choice.left_out]


def _limits(choice: ServerChoice) -> str:
    text = slo_text(choice.slo)
    return f"{choice.mode} ({text})" if choice.mode else text


def slo_text(slo: Slo) -> str:
    limits = [f"TTFT ≤ {format_seconds(s)}" for s in (slo.ttft_s,) if s is not None]
    limits += [f"TPOT ≤ {format_seconds(s)}" for s in (slo.tpot_s,) if s is not None]
    return " and ".join(limits) or "no limit"


def _row(row: Considered) -> str:
    carried = f"{row.requests_per_s:.3g} requests/s" if row.requests_per_s else "not even one request alone"
    return f"{row.scheme} weights and {row.kv_dtype} cache, {carried}"
