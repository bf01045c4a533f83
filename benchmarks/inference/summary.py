"""``raw.jsonl`` → ``summary.md``: one table a shape, medians over all rounds, and the ratios that are aimed at."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, float]

AIMS = {
    "smollm-135m": {"best": 3.0, "vllm": 7.0, "16 bits": 1.7, "batch": 2.5, "prefill": 1.8, "start": 3.0},
    "tinyllama-1.1b": {"best": 1.8, "vllm": 3.5, "16 bits": 1.2, "batch": 2.2, "prefill": 1.5, "start": 6.0},
}
SIXTEEN_BITS = ("bf16", "f16")


def medians(lines: list[dict[str, Any]]) -> Cell:
    """Of every quantity the median over all repeats of all rounds."""
    pooled: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, list):
                pooled.setdefault(name, []).extend(value)
            elif name in ("start_to_first_token_s", "peak_rss_bytes", "weights_bytes"):
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

    def compare(title: str, mine: tuple[str, float], other: tuple[str, float], aim: float) -> None:
        ratio = mine[1] / other[1]
        verdict = "–" if ratio != ratio else "reached" if ratio >= aim else "missed"
        lines.append(f"| {title} | {mine[0]} {mine[1]:.1f} | {other[0]} {other[1]:.1f} | {ratio:.2f} | {aim} | {verdict} |")

    name = "decode_1_tok_per_s"
    compare("decode 1, ours at its best over the best peer", ours(name), peer(name), aims["best"])
    compare("decode 1, ours at its best over vLLM bf16", ours(name), peer(name, "vllm", ("bf16",)), aims["vllm"])
    compare("decode 1, 16 bits", ours(name, "bf16"), peer(name, "", SIXTEEN_BITS), aims["16 bits"])
    for batch in batches:
        if batch > 1:
            name = f"decode_{batch}_tok_per_s"
            compare(f"decode {batch} over vLLM bf16", ours(name), peer(name, "vllm", ("bf16",)), aims["batch"])
            compare(
                f"decode {batch}, 8 bits over vLLM w8a8", ours(name, "int8", "int8-head8"), peer(name, "vllm", ("w8a8",)), 1.2
            )
            compare(f"decode {batch}, 16 bits", ours(name, "bf16"), peer(name, "", SIXTEEN_BITS), 1.2)
    name = "prefill_512_tok_per_s"
    compare(
        "prefill 512, int8 over vLLM bf16", ours(name, "int8", "int8-head8"), peer(name, "vllm", ("bf16",)), aims["prefill"]
    )
    compare("prefill 512, 8 bits over vLLM w8a8", ours(name, "int8", "int8-head8"), peer(name, "vllm", ("w8a8",)), 1.2)
    compare("prefill 512, 16 bits", ours(name, "bf16"), peer(name, "", SIXTEEN_BITS), 1.2)
    return lines


def write_summary(folder: Path) -> None:
    parts = ["# Decode, prefill and start-up beside the peers", "", "Medians, tokens a second; *measured*.", ""]
    for shape, rows in read(folder).items():
        columns = sorted({n for cell in rows.values() for n in cell if n.endswith("_tok_per_s")}, key=_order)
        titles = [n.removesuffix("_tok_per_s").replace("_", " ") for n in columns]
        parts += [f"## {shape}", "", f"| engine | {' | '.join(titles)} | start to first token, s | peak memory, GB |"]
        parts.append("|---" * (len(columns) + 3) + "|")
        for (engine, variant), cell in rows.items():
            values = [f"{cell[n]:.1f}" if n in cell else "failed" for n in columns]
            start = f"{cell['start_to_first_token_s']:.1f}" if "start_to_first_token_s" in cell else "failed"
            memory = f"{cell['peak_rss_bytes'] / 1e9:.2f}" if "peak_rss_bytes" in cell else "failed"
            parts.append(f"| {engine} {variant} | {' | '.join(values)} | {start} | {memory} |")
        parts += ["", "| aim | ours | peer | ratio | aim | |", "|---|---|---|---|---|---|", *ratios(shape, rows), ""]
    (folder / "summary.md").write_text("\n".join(parts), encoding="utf-8")


def _order(name: str) -> tuple[str, int]:
    kind, n = name.split("_")[:2]
    return kind, int(n)


if __name__ == "__main__":
    write_summary(Path(sys.argv[1]))
