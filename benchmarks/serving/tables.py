"""Tables of a run's ``raw.jsonl``: medians over rounds, each aim beside what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servers import processor_line

Rows = list[dict[str, Any]]
AIMS = {
    "offline": "served ÷ offline at 16 and 32 clients: at least 0.90",
    "vllm": "÷ vLLM's server at 32 clients in the same weight type: at least 2",
    "llama.cpp": "÷ llama.cpp's server at 32 clients: at least 2",
}


def write_summary(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "raw.jsonl").read_text(encoding="utf-8").splitlines()]
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    lines = [
        f"{processor_line(versions)}; Twostroke {versions['twostroke']}; {', '.join(versions['vllm']) or 'no vLLM'}; "
        f"{versions['llama.cpp']}; load {versions['load_average_at_start']:.1f} at the start. All measured; medians over "
        "rounds.",
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == shape]
        lines += ["", f"## {shape}", ""]
        for table in (_throughput, _ratios, _mixed, _prefix, _constrained, _overload, _in_time, _missing):
            found = table(own)
            lines += [*found, ""] if found else []
    (folder / "summary.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _median(rows: Rows, name: str) -> float | None:
    found = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return statistics.median(found) if found else None


def _of(rows: Rows, **fields: Any) -> Rows:
    return [row for row in rows if all(row.get(name) == value for name, value in fields.items())]


def _kinds(rows: Rows) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["engine"], row["variant"]) for row in rows))


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1e3 * value:,.0f} ms" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def _number(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else format(value, form)


def _grid(title: str, heads: list[str], rows: list[list[str]]) -> list[str]:
    bar = "|".join("---" for _ in heads)
    return [title, "", f"| {' | '.join(heads)} |", f"|{bar}|", *(f"| {' | '.join(row)} |" for row in rows)] if rows else []


def _throughput(rows: Rows) -> list[str]:
    rows = _of(rows, case="throughput")
    cells = []
    for users in sorted({row["users"] for row in rows}):
        for engine, variant in _kinds(rows):
            own = _of(rows, users=users, engine=engine, variant=variant)
            if own:
                times = (_ms(_median(own, name)) for name in ("ttft_median_s", "ttft_p99_s", "itl_median_s", "itl_p99_s"))
                failed = sum(sum(row.get("failures", {}).values()) for row in own)
                cells.append(
                    [str(users), engine, variant, _number(_median(own, "output_tok_per_s")), *times, str(failed), str(len(own))]
                )
    heads = ["clients", "engine", "weights", "output tok/s", "TTFT median", "p99", "ITL median", "p99", "failed", "rounds"]
    return _grid("Closed loop, prompts and answers of 64 to 192 tokens:", heads, cells)


def _ratios(rows: Rows) -> list[str]:
    rows = _of(rows, case="throughput")
    cells = []

    def speed(engine: str, variant: str, users: int) -> float | None:
        return _median(_of(rows, engine=engine, variant=variant, users=users), "output_tok_per_s")

    pairs: list[tuple[str, str, str, Callable[[str], str]]] = [
        ("offline", "twostroke offline", "of the same engine offline", lambda variant: variant),
        ("vllm", "vllm", "vLLM's server", lambda variant: variant.split("-")[0]),
        ("llama.cpp", "llama.cpp", "llama.cpp's server", lambda variant: variant.split("-")[0]),
    ]
    for variant in dict.fromkeys(row["variant"] for row in rows if row["engine"] == "twostroke"):
        for key, other, _, of in pairs:
            ratios = []
            for users in (1, 16, 32):
                ours, theirs = speed("twostroke", variant, users), speed(other, of(variant), users)
                ratios.append("–" if ours is None or not theirs else f"{ours / theirs:.2f}")
            cells.append([variant, *ratios, AIMS[key]])
    return _grid("Our output tokens/s against others':", ["weights", "1 client", "16", "32", "what, and its aim"], cells)


def _mixed(rows: Rows) -> list[str]:
    rows = _of(rows, case="mixed")
    cells = []
    for engine, variant in _kinds(rows):
        own = _of(rows, engine=engine, variant=variant)
        median, p99 = _median(own, "itl_median_s"), _median(own, "itl_p99_s")
        ratio = "–" if not median or p99 is None else f"{p99 / median:.2f}"
        first = (_ms(_median(own, name)) for name in ("ttft_median_s", "ttft_p99_s"))
        cells.append([engine, variant, _number(_median(own, "output_tok_per_s")), *first, _ms(median), _ms(p99), ratio])
    heads = ["engine", "weights", "output tok/s", "TTFT median", "p99", "ITL median", "p99", "p99 ÷ median (aim: 2)"]
    return _grid("16 clients, prompts of 10 to 4,000 tokens, answers of 64 to 192:", heads, cells)


def _prefix(rows: Rows) -> list[str]:
    rows = _of(rows, case="prefix")
    cells = []
    for engine, variant in _kinds(rows):
        own = _of(rows, engine=engine, variant=variant)
        share = _median(own, "share")
        cells.append([engine, variant, _ms(_median(own, "cold_s")), _ms(_median(own, "known_s")), _number(share, ".1%")])
    heads = ["engine", "weights", "cold TTFT", "known TTFT", "share (aim: 5%)"]
    return _grid("A prefix of 2,000 tokens and 16 more, one client:", heads, cells)


def _constrained(rows: Rows) -> list[str]:
    rows = _of(rows, case="constrained")
    cells = []
    for engine, variant in _kinds(rows):
        own = _of(rows, engine=engine, variant=variant)
        free, formed = _median(own, "free_tok_per_s"), _median(own, "formed_tok_per_s")
        longer = _median(own, "step_longer")
        itl = [_ms(_median(own, name)) for name in ("free_itl_s", "formed_itl_s")]
        cells.append([engine, variant, _number(free), _number(formed), *itl, _number(longer, "+.1%")])
    heads = ["engine", "weights", "free tok/s", "with a schema", "ITL free", "with a schema", "decode step longer (aim: 3%)"]
    return _grid("32 clients at once, 192 tokens each, without and with a JSON schema:", heads, cells)


def _overload(rows: Rows) -> list[str]:
    rows = _of(rows, case="overload")
    cells = []
    for engine, variant in _kinds(rows):
        own = _of(rows, engine=engine, variant=variant)
        counts = [_number(_median(own, name), ".0f") for name in ("n_requests", "n_completed", "n_refused")]
        times = [_ms(_median(own, name)) for name in ("refused_p99_s", "ttft_p99_s", "tpot_p99_s")]
        cells.append([engine, variant, _number(_median(own, "rate_per_s")), *counts, *times])
    heads = [
        "engine",
        "weights",
        "requests/s",
        "sent",
        "completed",
        "refused",
        "refusal p99 (aim: 50 ms)",
        "TTFT p99",
        "TPOT p99",
    ]
    return _grid("Ten times the rate that each completes of 32 clients, for three seconds:", heads, cells)


def _in_time(rows: Rows) -> list[str]:
    rows = [row for row in _of(rows, case="overload") if "slo_s" in row]
    cells = []
    for engine, variant in _kinds(rows):
        own = _of(rows, engine=engine, variant=variant)
        counts = [_number(_median(own, f"slo_n_{name}"), ".0f") for name in ("requests", "admitted", "refused")]
        kept = _median(own, "slo_kept_share")
        cells.append([
            engine, variant, _ms(_median(own, "slo_s")), *counts, "–" if kept is None else f"{kept:.1%}",
            _ms(_median(own, "slo_refused_p99_s")),
        ])  # fmt: skip
    heads = [
        "engine",
        "weights",
        "first token by",
        "sent",
        "admitted",
        "refused",
        "in time (aim: 99%)",
        "refusal p99 (aim: 50 ms)",
    ]
    return _grid("The same, each request with the time by which its first token must have come:", heads, cells)


def _missing(rows: Rows) -> list[str]:
    failed = [row for row in rows if row["case"] == "start" and "error" in row]
    return [f"{row['engine']} {row['variant']} did not start: {row['error']}" for row in failed]
