"""``raw.jsonl`` → ``summary.md``: one table a shape, medians over all rounds, and the ratios that are aimed at."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, float]

EXPERTS = {"best": 2.0, "vllm": 2.0, "16 bits": 1.2, "batch": 2.0, "prefill": 2.0, "start": 6.0, "read": 0.8}
AIMS = {
    "smollm-135m": {"best": 3.0, "vllm": 7.0, "16 bits": 1.7, "batch": 2.5, "prefill": 1.8, "start": 3.0, "read": 0.7},
    "tinyllama-1.1b": {"best": 1.8, "vllm": 3.5, "16 bits": 1.2, "batch": 2.2, "prefill": 1.5, "start": 6.0, "read": 0.8},
    "mistral-7b": {"best": 1.3, "prefill best": 1.3, "read": 0.8},
    "olmoe-2-layers": EXPERTS,
    "mixture-16x135m": EXPERTS,
}
SIXTEEN_BITS = ("bf16", "f16")
EIGHT_BITS = ("int8", "int8-head8")

MEMORY_FACTOR, MEMORY_BYTES = 1.1, 300e6
"""Bound of a process's memory: the factor times weights and KV cache, and what the interpreter and torch may take."""

SINGLE_VALUES = ("start_to_first_token_s", "peak_rss_bytes", "weights_bytes", "kv_cache_bytes")

SCHEMES = {
    "int8": ("int8 (W8A8)",),
    "int8-head8": ("int8 (W8A8)", "bf16, head in int8"),
    "int8-head8-kv8": ("int8 (W8A8), head and cache in int8",),
    "int4-head8": ("int4 alone, fitted, groups of 64", "int4 as `quantize` makes it", "bf16, head in int8"),
    "int4-head4": ("int4 alone, fitted, groups of 64", "int4 as `quantize` makes it", "bf16, head in int4"),
}
"""Our variants by the names of ``benchmarks/quality``: every part that a variant has must pass. The int4 that is timed is int4
in every matrix, the layout of the first; what ``quantize`` makes may hold some in int8, and reads so much more."""


def medians(lines: list[dict[str, Any]]) -> Cell:
    """Of every quantity the median over all repeats of all rounds."""
    pooled: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, list):
                pooled.setdefault(name, []).extend(value)
            elif name in SINGLE_VALUES:
                pooled.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in pooled.items()}


def read(folder: Path) -> dict[str, dict[tuple[str, str], Cell]]:
    grouped: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for text in (folder / "raw.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        grouped.setdefault(line["shape"], {}).setdefault((line["engine"], line["variant"]), []).append(line)
    return {shape: {key: medians(lines) for key, lines in rows.items()} for shape, rows in grouped.items()}


def _best(rows: dict[tuple[str, str], Cell], name: str, keep: Any) -> tuple[str, float]:
    found = [
        (f"{engine} {variant}", cell[name])
        for (engine, variant), cell in rows.items()
        if name in cell and keep(engine, variant)
    ]
    return max(found, key=lambda item: item[1], default=("none", float("nan")))


def ratios(shape: str, rows: dict[tuple[str, str], Cell]) -> list[str]:
    """A line for each aim: ours over the peer's."""
    aims = AIMS[shape]
    batches = sorted({int(n.split("_")[1]) for cell in rows.values() for n in cell if n.startswith("decode_")})

    def ours(name: str, *variants: str) -> tuple[str, float]:
        return _best(rows, name, lambda e, v: e == "twostroke" and (not variants or v in variants))

    def peer(name: str, engine: str = "", variants: tuple[str, ...] = ()) -> tuple[str, float]:
        return _best(
            rows, name, lambda e, v: e != "twostroke" and (not engine or e == engine) and (not variants or v in variants)
        )

    lines = []

    def compare(title: str, mine: tuple[str, float], other: tuple[str, float], aim: float | None) -> None:
        if aim is None:
            return
        ratio = mine[1] / other[1]
        verdict = "–" if ratio != ratio else "reached" if ratio >= aim else "missed"
        lines.append(f"| {title} | {mine[0]} {mine[1]:.1f} | {other[0]} {other[1]:.1f} | {ratio:.2f} | {aim} | {verdict} |")

    name = "decode_1_tok_per_s"
    compare("decode 1, ours at its best over the best peer", ours(name), peer(name), aims.get("best"))
    compare("decode 1, ours at its best over vLLM bf16", ours(name), peer(name, "vllm", ("bf16",)), aims.get("vllm"))
    compare("decode 1, 16 bits", ours(name, "bf16"), peer(name, "", SIXTEEN_BITS), aims.get("16 bits"))
    for batch in batches:
        if batch > 1:
            name = f"decode_{batch}_tok_per_s"
            compare(f"decode {batch} over vLLM bf16", ours(name), peer(name, "vllm", ("bf16",)), aims.get("batch"))
            compare(f"decode {batch}, 8 bits over vLLM w8a8", ours(name, *EIGHT_BITS), peer(name, "vllm", ("w8a8",)), 1.2)
            compare(f"decode {batch}, 16 bits", ours(name, "bf16"), peer(name, "", SIXTEEN_BITS), 1.2)
            compare(f"decode {batch} over llama.cpp", ours(name), peer(name, "llama.cpp"), aims.get("batch"))
    name = "prefill_512_tok_per_s"
    compare("prefill 512, ours at its best over the best peer", ours(name), peer(name), aims.get("prefill best"))
    compare("prefill 512 over transformers", ours(name), peer(name, "transformers"), aims.get("prefill"))
    compare("prefill 512, int8 over vLLM bf16", ours(name, *EIGHT_BITS), peer(name, "vllm", ("bf16",)), aims.get("prefill"))
    compare("prefill 512, 8 bits over vLLM w8a8", ours(name, *EIGHT_BITS), peer(name, "vllm", ("w8a8",)), 1.2)
    compare("prefill 512, 16 bits", ours(name, "bf16"), peer(name, "", SIXTEEN_BITS), 1.2)
    return lines


def limits(shape: str, rows: dict[tuple[str, str], Cell]) -> list[str]:
    """A line for each of our variants and each aim that is not a peer's: a share, measured over what bounds it."""
    aims, lines = AIMS[shape], []

    def hold(title: str, variant: str, value: float, aim: float | None, at_least: bool = False, unit: str = "%") -> None:
        shown, wanted = (f"{100 * v:.1f}%" if unit == "%" else f"{v:.2f} {unit}" for v in (value, aim or 0.0))
        verdict = "" if aim is None else "reached" if (value >= aim if at_least else value <= aim) else "missed"
        sign = "≥" if at_least else "≤"
        lines.append(f"| {title} | {variant} | {shown} | {'' if aim is None else f'{sign} {wanted}'} | {verdict} |")

    for (engine, variant), cell in rows.items():
        if engine != "twostroke":
            continue
        if "decode_1_read_share" in cell:
            aim = aims["read"] if variant in EIGHT_BITS else None
            hold("share of the bandwidth limit, decode 1", variant, cell["decode_1_read_share"], aim, at_least=True)
        if "decode_1_beyond_products" in cell:
            beyond = 0.1 if variant == "bf16" else 0.15  # products of 8 and 4 bits are shorter, and the rest is as long
            hold("a step of decode 1 beyond its matrix products", variant, cell["decode_1_beyond_products"], beyond)
        if "prefix_hit_share" in cell:
            hold("prefix hit of 2,000 tokens, share of its cold TTFT", variant, cell["prefix_hit_share"], 0.05)
        if "start_to_first_token_s" in cell:
            hold("process start to first token", variant, cell["start_to_first_token_s"], aims.get("start"), unit="s")
        if "kv_cache_bytes" in cell and "peak_rss_bytes" in cell:
            bound = MEMORY_FACTOR * (cell["weights_bytes"] + cell["kv_cache_bytes"]) + MEMORY_BYTES
            hold("peak memory, share of its bound", variant, cell["peak_rss_bytes"] / bound, 1.0)
    name = "context_4096_tok_per_s"
    whole, small = (rows.get(("twostroke", v), {}) for v in ("int8-head8", "int8-head8-kv8"))
    if name in whole and name in small:
        hold("decode 1 at 4,096 tokens, cache in int8 over bf16", "int8-head8", small[name] / whole[name], 1.0, True, "×")
    return lines


def gates(rows: dict[tuple[str, str], Cell]) -> list[str]:
    """A line for each of our variants, part of its scheme and model of the newest runs that judged that part."""
    runs = Path(__file__).parents[1] / "quality" / "runs"
    documents = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(runs.glob("*/raw.json"))}
    lines = []
    for engine, variant in rows:
        for name in SCHEMES.get(variant, ()) if engine == "twostroke" else ():
            found = [(run, d["commit"], row) for run, d in documents.items() for row in d["schemes"] if row["scheme"] == name]
            for run, _, row in (one for one in found if one[1] == found[-1][1]):  # documents are sorted by date
                verdict = "passes" if row["passes"] else "fails: a speed may not be quoted for such a model"
                lines.append(f"| {variant} | {name} | {row['perplexity_ratio']:.5f} | {row['limit']} | {verdict} | {run} |")
            if not found:
                lines.append(f"| {variant} | {name} | | | not judged: its speed may not be quoted | |")
    return lines


def write_summary(folder: Path) -> None:
    parts = ["# Decode, prefill and start-up beside the peers", "", "Medians, tokens a second; *measured*.", ""]
    for shape, rows in read(folder).items():
        columns = sorted({n for cell in rows.values() for n in cell if n.endswith("_tok_per_s")}, key=_order)
        titles = [n.removesuffix("_tok_per_s").replace("_", " ") for n in columns]
        parts += [f"## {shape}", "", f"| engine | {' | '.join(titles)} | start to first token, s | peak memory, GB |"]
        parts.append("|---" * (len(columns) + 3) + "|")
        for (engine, variant), cell in rows.items():
            values = [_shown(engine, variant, n, cell) for n in columns]
            start = f"{cell['start_to_first_token_s']:.1f}" if "start_to_first_token_s" in cell else "failed"
            memory = f"{cell['peak_rss_bytes'] / 1e9:.2f}" if "peak_rss_bytes" in cell else "failed"
            parts.append(f"| {engine} {variant} | {' | '.join(values)} | {start} | {memory} |")
        parts += ["", "| aim | ours | peer | ratio | aim | |", "|---|---|---|---|---|---|", *ratios(shape, rows), ""]
        parts += ["| aim | ours | measured | aim | |", "|---|---|---|---|---|", *limits(shape, rows), ""]
        parts += ["Quality gates of the schemes (`benchmarks/quality`, perplexity ratio to bf16), the newest runs:", ""]
        parts += ["| ours | scheme | ratio | limit | | run |", "|---|---|---|---|---|---|", *gates(rows), ""]
    (folder / "summary.md").write_text("\n".join(parts), encoding="utf-8")


def _shown(engine: str, variant: str, name: str, cell: Cell) -> str:
    """A measured number; nothing where this was not asked of the variant."""
    if name in cell:
        return f"{cell[name]:.1f}"
    asked = not name.startswith("context") or engine == "twostroke"
    return "failed" if asked and not variant.endswith("-kv8") else ""


def _order(name: str) -> tuple[str, int]:
    kind, n = name.split("_")[:2]
    return kind, int(n)


if __name__ == "__main__":
    write_summary(Path(sys.argv[1]))
