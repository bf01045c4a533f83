"""What a form costs the engine's steps: 32 requests that follow a JSON schema, beside the same number that are free.

    python benchmarks/serving/masks.py --out benchmarks/serving/runs/NAME

The engine alone, in this process. Each variant is computed in turn, in rounds of which every second goes backwards. ``mask_us``
is what a thread needs for one answer's mask; ``waited_share`` is the part of the steps' time in which the engine waited for
masks, and ``forced_share`` that in which it looked for forced text. Weights are random, so which tokens are chosen, and how
many drafts are right, says nothing of trained models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded
from run import make_model
from servers import SCHEMA, machine

from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.engine.grammars import Matcher
from twostroke.engine.speculation.forced import ForcedDrafts
from twostroke.scheduling.constraint import Constraint
from twostroke.scheduling.sampling_params import SamplingParams

USERS, N_PROMPT, N_OUTPUT = 32, 32, 128
VARIANTS = {"free": (False, "off"), "form": (True, "off"), "free, drafts": (False, "auto"), "form, drafts": (True, "auto")}


class Watch:
    """Seconds of each call of a method by threads of the name ``thread``, as it is called from now on."""

    def __init__(self, owner: type, name: str, thread: str) -> None:
        self.seconds: list[float] = []
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args)
            finally:
                if threading.current_thread().name.startswith(thread):
                    self.seconds.append(time.perf_counter() - began)

        setattr(owner, name, timed)

    def taken(self) -> list[float]:
        found, self.seconds = self.seconds, []
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-benchmark-models")
    parser.add_argument("--dtype", nargs="+", default=["int8", "bf16"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    versions = recorded.conditions() | machine()
    model = make_model("smollm-135m", args.models.resolve())
    looks = Watch(Matcher, "look_in_thread", "grammars")
    waits, forced = Watch(Matcher, "_wait", "MainThread"), Watch(ForcedDrafts, "propose", "MainThread")
    rows = []
    for dtype in args.dtype:
        directory = model.int8 if dtype == "int8" else model.bf16
        cores = {way: EngineCore(directory, EngineSettings(dtype=dtype, speculate=way)) for way in ("off", "auto")}
        for round_number in range(-1, args.rounds):  # the first is not counted
            order = list(VARIANTS) if round_number % 2 == 0 else list(VARIANTS)[::-1]
            for name in order:
                formed, way = VARIANTS[name]
                core = cores[way]
                before = core.stats()
                for watch in (looks, waits, forced):
                    watch.taken()
                reasons = serve(core, formed, round_number)
                after = core.stats()
                if round_number < 0:
                    continue
                seconds, steps = after.decode_s - before.decode_s, after.decode_steps - before.decode_steps
                masks = sorted(looks.taken())
                tokens = after.output_tokens - before.output_tokens
                row = {
                    "dtype": dtype, "variant": name, "round": round_number, "step_ms": 1e3 * seconds / steps,
                    "tok_per_s": tokens / seconds, "drafted": after.draft_tokens - before.draft_tokens,
                    "accepted": after.accepted_draft_tokens - before.accepted_draft_tokens,
                    "reasons": reasons, "waited_share": sum(waits.taken()) / seconds,
                    "forced_share": sum(forced.taken()) / seconds,
                }  # fmt: skip
                if masks:
                    row |= {"masks": len(masks), "mask_us": 1e6 * statistics.mean(masks)}
                    row |= {f"mask_p{p}_us": 1e6 * masks[min(len(masks) - 1, len(masks) * p // 100)] for p in (50, 99)}
                rows.append(row)
                print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}))
    raw = "".join(json.dumps(row) + "\n" for row in rows)
    recorded.write(args.out, {"raw.jsonl": raw, "versions.json": versions, "summary.md": summary(rows)})
    print(summary(rows))


def serve(core: EngineCore, formed: bool, seed: int) -> dict[str, int]:
    """How many answers ended for each reason."""
    reasons: Counter[str] = Counter()
    form = Constraint.json_schema(SCHEMA) if formed else None
    for i in range(USERS):
        params = SamplingParams(temperature=0.0, max_tokens=N_OUTPUT, ignore_eos=not formed, constraint=form)
        core.add_request(str(i), [(7 * i + 31 * j + 997 * (seed + 2)) % 40_000 for j in range(N_PROMPT)], params)
    while core.has_work:
        reasons.update(event.finish_reason for event in core.step() if event.finish_reason is not None)
    return dict(reasons)


def summary(rows: list[dict[str, Any]]) -> str:
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float | int):
                found[row["dtype"], row["variant"]][name].append(value)
    lines = [
        f"# Masks of {USERS} requests, the 135M shape", "", "Medians of the rounds.", "",
        "| weights | variant | step, ms | longer than free | waited for masks | looked for forced text | "
        "mask mean / p50 / p99, µs | tokens/s | drafts right |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (dtype, variant), values in found.items():
        middle = {name: statistics.median(each) for name, each in values.items()}
        free = statistics.median(found[dtype, variant.replace("form", "free")]["step_ms"])
        longer = f"{100 * (middle['step_ms'] / free - 1):+.1f}%" if variant.startswith("form") else "–"
        masks = (
            " / ".join(f"{middle[n]:.0f}" for n in ("mask_us", "mask_p50_us", "mask_p99_us")) if "mask_us" in middle else "–"
        )
        right = f"{sum(values['accepted']):.0f} of {sum(values['drafted']):.0f}"
        lines.append(
            f"| {dtype} | {variant} | {middle['step_ms']:.2f} | {longer} | {100 * middle['waited_share']:.2f}% | "
            f"{100 * middle['forced_share']:.2f}% | {masks} | {middle['tok_per_s']:.0f} | {right} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
