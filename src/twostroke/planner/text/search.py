"""``twostroke plan search`` as text: the winner, the best of every device and why it is behind, and why the losers lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from twostroke.core.units import format_bytes, format_count, format_money, format_seconds
from twostroke.ledger.text import WIDTH
from twostroke.planner.choosing.candidates import Behind, Candidate, DeviceResult, Miss
from twostroke.planner.choosing.interconnect import LinkFinding
from twostroke.planner.choosing.search import Search, TrainWork
from twostroke.planner.text.format import format_quantity, with_wrapped_notes, wrapped

PHASE_WORDS = {"serve": "serving", "train": "training"}

LIMIT_WORDS = {
    "memory": "does not fit in memory",
    "type": "no arithmetic for its type",
    "devices": "needs more devices than allowed",
    "ttft": "first token too late",
    "tpot": "tokens too slow",
    "usd_per_mtok": "tokens too dear",
    "usd_per_hour": "an hour too dear",
    "days": "run takes too long",
    "run_usd": "run too dear",
}

CAUSE_WORDS = {
    "price": "price an hour",
    "interconnect": "price of an idle link",
    "power": "power",
    "devices": "fewer devices",
    "communication": "communication",
    "bubble": "pipeline bubble",
    "memory": "slower memory",
    "arithmetic": "slower arithmetic",
    "launch": "more overhead",
    "batch": "smaller batch",
    "precision": "other precision",
    "choice": "other layout or settings",
}

SHORT_WORDS = {"price": "price", "interconnect": "idle link", "arithmetic": "slower compute"}

BETTER_WORDS = {
    "price": "cheaper",
    "interconnect": "less idle link",
    "power": "less power",
    "devices": "more devices",
    "communication": "less communication",
    "bubble": "less bubble",
}
"""What a factor below 1 is called where the cause's own word does not turn."""

LIMIT_OPTIONS = {
    "devices": "--max-devices",
    "ttft": "--slo-ttft-ms",
    "tpot": "--slo-tpot-ms",
    "usd_per_mtok": "--usd-per-mtok",
    "usd_per_hour": "--usd-per-hour",
    "days": "--days",
    "run_usd": "--budget-usd",
}
"""The option that sets a limit, for the sentence that says how far to raise it."""

NEAR = 1.05
"""Factors within 5% of 1 are left out of a reason."""

OBJECTIVE_WORDS = {
    ("serve", "cost"): "$ per million output tokens",
    ("serve", "time"): "time of a whole answer",
    ("serve", "throughput"): "output tokens a second",
    ("serve", "energy"): "kWh per million output tokens",
    ("train", "cost"): "$ of the run",
    ("train", "time"): "time of the run",
    ("train", "throughput"): "trained tokens a second",
    ("train", "energy"): "kWh of the run",
}


def behind_text(behind: Behind) -> str:
    """``1.9× price, 1.3× communication``: the two largest factors that are not near 1, those against it first."""
    largest = sorted(behind.factors.items(), key=lambda item: -abs(math.log(item[1])))[:2]
    parts = []
    for name, factor in sorted(largest, key=lambda item: -item[1]):
        if factor > NEAR:
            parts.append(f"{_times(factor)} {SHORT_WORDS.get(name, CAUSE_WORDS[name])}")
        elif factor < 1 / NEAR:
            parts.append(f"{_times(1 / factor)} {_better(name)}")
    return ", ".join(parts) or "about equal"


def _times(factor: float) -> str:
    return f"{factor:.0f}×" if factor >= 9.95 else f"{factor:.2f}×" if factor < 1.1 else f"{factor:.2g}×"


def _signed_usd(usd: float) -> str:
    return f"-{format_money(-usd)}" if usd < 0 else format_money(usd)


def _behind_ratio(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:,.0f}×"


def _rate_usd(usd: float) -> str:
    """$ per million tokens with three digits: neighbours in a ranking differ by less than a cent."""
    return f"${usd:.3g}" if 0.001 <= usd < 100 else format_money(usd)


def _better(name: str) -> str:
    return BETTER_WORDS.get(name, SHORT_WORDS.get(name, CAUSE_WORDS[name]).replace("slower", "faster").replace("more", "less"))


def miss_text(miss: Miss) -> str:
    """``does not fit in memory: 1.3× (weights 16 GiB …)``."""
    words = LIMIT_WORDS[miss.limit]
    if miss.limit == "type":
        return f"{words} ({miss.unit})"
    needed, allowed = _amount(miss.needed, miss), _amount(miss.allowed, miss)
    term = f", mostly {miss.term.replace('_', ' ')}" if miss.term else ""
    return f"{words}: {needed} for {allowed} ({_times(miss.ratio)}{term})"


def _amount(value: float, miss: Miss) -> str:
    if miss.limit == "days":
        return format_seconds(86400 * value)
    return f"{value:,.0f}" if miss.unit == "devices" else format_quantity(value, miss.unit)


def _spent(candidate: Candidate) -> str:
    """kWh, in a search for little energy."""
    kwh = candidate.score("energy")
    return format_count(kwh) if kwh >= 1000 else f"{kwh:.3g}"


def _cells(candidate: Candidate, objective: str) -> list[str]:
    """The row of one candidate, under ``HEADS``."""
    values = candidate.values
    if candidate.phase == "serve":
        found = [format_seconds(values["loaded_ttft_s"]), format_seconds(values["loaded_tpot_s"])]
        found.append(format_count(values["output_tok_per_s"]))
        cost = _rate_usd(values["cost_per_mtok_usd"])
    else:
        found = [format_quantity(values["mfu"], "share"), format_count(values["train_time_s"] / 86400)]
        cost = format_money(values["cost_usd"])
    chosen = [candidate.device, candidate.layout_text, candidate.precision, _batch(candidate)]
    return [*chosen, *found, *([_spent(candidate)] if objective == "energy" else []), cost]


def _batch(candidate: Candidate) -> str:
    """Requests together; of training the sequences of a pass, with a word where backward computes again."""
    again = {"selective": " some", "full": " all"}.get(candidate.settings.get("checkpointing", ""), "")
    return f"{candidate.batch}{again}"


HEADS = {
    "train": ["device", "devices", "type", "micro", "MFU", "days", "$ run"],
    "serve": ["device", "devices", "type", "batch", "TTFT", "TPOT", "tok/s", "$/Mtok"],
}


def best_table(search: Search, top: int, width: int = WIDTH) -> list[str]:
    """The best candidate of each device, and the product of factors by which it is behind the winner."""
    head = HEADS[search.phase]
    found = [r for r in search.results if r.best is not None]
    if search.objective == "energy":
        head = [*head[:-1], "kWh/Mtok" if search.phase == "serve" else "kWh", head[-1]]
    rows = [[*head, "behind", "because"]]
    for result in found[:top]:
        if result.best is None or result.behind is None:
            continue
        why = ["best", ""] if result.best is search.winner else [_behind_ratio(result.behind.ratio), behind_text(result.behind)]
        rows.append([*_cells(result.best, search.objective), *why])
    lines = with_wrapped_notes(rows, range(3, len(head) + 1), " ", width).split("\n")
    if len(found) > top:
        lines.append(f"… and {len(found) - top} more that keep every limit (--top {len(found)} shows them)")
    return lines


def missed_table(search: Search, top: int, width: int = WIDTH) -> list[str]:
    """Devices of which nothing keeps the limits, each with its nearest miss."""
    found = [r for r in search.results if r.best is None and r.nearest is not None]
    if not found:
        return []
    rows = [[r.device, _nearest(r)] for r in found[:top]]
    lines = ["out, with the nearest miss of each:", *with_wrapped_notes(rows, width=width).split("\n")]
    if len(found) > top:
        lines.append(f"… and {len(found) - top} more devices")
    return lines


def _nearest(result: DeviceResult) -> str:
    candidate = result.nearest
    if candidate is None:
        return ""
    first = max(candidate.misses, key=lambda miss: miss.ratio)
    batch = f", batch {candidate.batch}" if candidate.batch else ""
    return f"{candidate.layout_text}, {candidate.precision}{batch}: {miss_text(first)}"


def reason_table(search: Search, width: int = WIDTH) -> list[str]:
    """How many lost for which reason, and on which devices most of them."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for result in search.results:
        for limit, n in result.rejected.items():
            counts.setdefault((LIMIT_WORDS[limit], "misses a limit"), Counter())[result.device] += n
        for cause, n in result.outranked.items():
            counts.setdefault((CAUSE_WORDS[cause], "keeps all, behind"), Counter())[result.device] += n
    rows = [["lost by", "", "candidates", "most of them on"]]
    for (words, kind), devices in sorted(counts.items(), key=lambda item: (item[0][1] != "misses a limit", -item[1].total())):
        most = ", ".join(f"{device} {n:,}" for device, n in devices.most_common(3))
        rows.append([words, kind, f"{devices.total():,}", most + (", …" if len(devices) > 3 else "")])
    return with_wrapped_notes(rows, (2,), width=width).split("\n")


def link_lines(findings: Sequence[LinkFinding], top: int = 6, width: int = WIDTH) -> list[str]:
    """The interconnect: what it costs, what of it this work uses, and whether the rest of the device is worth its price."""
    if not findings:
        return []
    plain, link = findings[0].plain, findings[0].plain_link_bytes_per_s / 1e9
    lines = [f"interconnect: against {plain.device} (link {link:.3g} GB/s), the cheapest a token without NVLink or its like"]
    rows = [["device", "link", "used", "dearer by", "idle link", "worth here", "asked", "its cost"]]
    for finding in findings[:top]:
        link_used = [f"{finding.rich_link_bytes_per_s / 1e9:.3g} GB/s", format_quantity(finding.link_use, "share")]
        dearer = [f"{_signed_usd(finding.difference_usd)}/h", f"{format_money(finding.idle_usd)}/h"]
        worth = [f"{format_money(finding.break_even_usd)}/h", f"{format_money(finding.price_usd)}/h"]
        rows.append([finding.device, *link_used, *dearer, *worth, _verdict(finding)])
    below = [
        "idle link (assumed): its part of the price difference, split by the logarithms of capacity, bandwidth, arithmetic and "
        f"link; worth here: the price an hour at which the work costs as much as on {plain.device}; more is lost money; its "
        f"cost: against that of {plain.device}"
    ]
    table = with_wrapped_notes(rows, (1, 2, 3, 4, 5, 6), width=width).split("\n")
    return [*wrapped(lines, width=width), *table, *wrapped(below, width=width)]


def _verdict(finding: LinkFinding) -> str:
    """Whether the dearer device pays for itself in this work, with or without the use of its link."""
    return f"{finding.cost_ratio:.2f}×{', overpaid' if finding.wasted else ''}"


def workload_text(search: Search) -> str:
    work = search.work
    if isinstance(work, TrainWork):
        return (
            f"{format_count(work.tokens)} tokens in steps of {format_count(work.batch_tokens)}, sequences of "
            f"{work.sequence_length}, {work.optimizer}"
        )
    rate = f", {work.requests_per_s:g} requests/s" if work.requests_per_s else ", kept full"
    return f"prompt {work.prompt_tokens}, output {work.output_tokens} tokens{rate}"


def limits_text(search: Search) -> str:
    """The limits that were given, in the words of their options."""
    shown = {
        "ttft_s": lambda v: f"TTFT ≤ {format_seconds(v)}",
        "tpot_s": lambda v: f"TPOT ≤ {format_seconds(v)}",
        "usd_per_mtok": lambda v: f"≤ {format_money(v)} a million tokens",
        "usd_per_hour": lambda v: f"≤ {format_money(v)} an hour",
        "days": lambda v: f"≤ {v:g} days",
        "run_usd": lambda v: f"≤ {format_money(v)} the run",
    }
    given = [shown[name](value) for name, value in vars(search.limits).items() if value is not None]
    return "; ".join(given) or "memory only"


NOTES = {
    "serve": (
        "TTFT and TPOT: as users of a full batch see them, each asking again at once.",
        "types of fewer bits must pass your own quality gate (`twostroke compare`); --scheme bf16 leaves them out.",
        "shares of a datasheet's rates are fitted to NVIDIA's devices; on others well-kept software is assumed.",
    ),
    "train": (
        "micro: sequences of a pass on one rank; some or all: what backward computes a second time (checkpointing).",
        "shares of a datasheet's rates are assumed alike for every vendor: software that lags reaches less.",
        "by $ or kWh alone a slow run is as good as a fast one: --days bounds it.",
    ),
}


POWER_NOTE = "energy is what the devices draw at the work they do; their hosts, cooling and supply (PUE) are not in it."


def search_text(search: Search, subject: str, top: int = 12, width: int = WIDTH) -> str:
    """One phase's search in ``width`` columns; one that found nothing is the sentence that says so. Every number is predicted
    but prices (see ``--json`` for their sources)."""
    phase = PHASE_WORDS[search.phase].upper()
    if search.winner is None:
        return "\n".join(wrapped([f"{phase} {subject}: {nothing_found(search)}"], "", width))
    head = [
        f"{phase} {subject}: {workload_text(search)}",
        f"by {OBJECTIVE_WORDS[search.phase, search.objective]}; limits: {limits_text(search)}",
        f"{search.enumerated:,} candidates: {search.out_of_memory:,} pruned by memory before any timing, "
        f"{search.timed:,} timed, {search.kept:,} keep every limit",
        "all numbers predicted, from datasheets and assumed efficiencies where not measured; prices listed or assumed",
    ]
    lines = [*wrapped(head, "  ", width), "", *best_table(search, top, width)]
    tables = missed_table(search, top, width), ["", *reason_table(search, width)], link_lines(search.links, width=width)
    for block in tables:
        lines += ["", *block] if block and block[0] else block
    power = (POWER_NOTE,) if search.objective == "energy" else ()
    notes = (f"note: {note}" for note in (*NOTES[search.phase], *power, *search.notes))
    return "\n".join([*lines, "", *wrapped(notes, "  ", width)])


def verdict_text(searches: Sequence[Search], width: int = WIDTH) -> str:
    """What each phase wants, side by side; empty where there are not two winners."""
    winners = [search.winner for search in searches if search.winner is not None]
    if len(winners) < 2:
        return ""
    words = []
    for winner in winners:
        links = "uses no link" if winner.link_use == 0 else f"keeps its links busy {format_quantity(winner.link_use, 'share')}"
        bound = f"is bound by {winner.bound}" if winner.bound != "launch" else "is bound by starting operations"
        what = f"{winner.label} ({winner.layout_text}; {winner.precision})"
        words.append(f"{PHASE_WORDS[winner.phase]} wants {what}: it {bound} and {links}")
    return "\n".join(wrapped([f"{words[0][0].upper()}{'; '.join(words)[1:]}."], "", width))


def nothing_found(search: Search) -> str:
    """The sentence for a search that found nothing: the nearest miss, and which single limit would have to give how much."""
    nearest = search.nearest
    head = f"none of {search.enumerated:,} ways to {search.phase} this model keeps every limit ({limits_text(search)})."
    if nearest is None:
        return head
    worst = max(nearest.misses, key=lambda miss: miss.ratio)
    text = f"{head} The nearest is {nearest.label}, {nearest.layout_text}, {nearest.precision}: {miss_text(worst)}."
    remedies = []
    for candidate in search.reliefs:
        miss = candidate.misses[0]
        if miss.limit in LIMIT_OPTIONS:
            remedies.append(f"{LIMIT_OPTIONS[miss.limit]} {_raised(miss)} ({candidate.device})")
        elif miss.limit == "memory" and not search.timed:  # of others, nobody knows that memory is all they miss
            remedies.append(f"{format_bytes(miss.needed - miss.allowed)} more memory on {candidate.device}, or --max-devices")
    if not remedies:
        return f"{text} Raise several limits at once."
    would = "Any one of these would do" if search.timed else "To fit, it takes"
    return f"{text} {would}: {'; '.join(remedies[:3])}."


def _raised(miss: Miss) -> str:
    """The limit as its option takes it, rounded up to three digits so that it admits the candidate."""
    value = 1e3 * miss.needed if miss.limit in ("ttft", "tpot") else miss.needed
    if miss.unit == "devices":
        return f"{value:.0f}"
    shown = float(f"{value:.3g}")
    return f"{shown if shown >= value else float(f'{value * 1.005:.3g}'):g}"
