"""What a batch behind them costs interactive requests: the same arrivals alone and beside a batch, on one or two versions.

    python benchmarks/serving/behind.py --out benchmarks/serving/runs/NAME [--before CHECKOUT] [--rounds N]

``--before`` is a working tree of another version, whose native library was built; its server takes turns with this one's. A
second call with the same ``--out`` adds rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
from run import describe, make_model, values_of
from servers import ROOT, Model, Server, free_port

from twostroke.bench.load import run_load
from twostroke.bench.load_spec import LoadSpec
from twostroke.core.distribution import Distribution
from twostroke.data.tokenizer import load_tokenizer

RATE, REQUESTS, PROMPT, OUTPUT = 1.5, 60, 128, 16
"""Interactive requests a second, of each load, and their tokens."""
LINES, BATCH_PROMPT, BATCH_OUTPUT = 2000, 400, 48
"""Requests of the batch, more than are done during a load, and their tokens."""
RUN_UP_S = 2.0
"""How long a batch runs before the load begins."""


def batch_file(vocab_size: int, seed: int) -> bytes:
    chance = random.Random(seed)
    lines = []
    for i in range(LINES):
        prompt = [chance.randrange(vocab_size) for _ in range(BATCH_PROMPT)]
        body = {"model": "model", "prompt": prompt, "max_tokens": BATCH_OUTPUT, "ignore_eos": True}
        lines.append(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}))
    return "\n".join(lines).encode()


def versions_of(before: Path | None, model: Model, folder: Path) -> list[Server]:
    found = []
    for name, root in (("before", before), ("after", ROOT)):
        if root is not None:
            port, files = free_port(), folder / name / str(uuid.uuid4())
            files.mkdir(parents=True)
            command = [
                sys.executable,
                "-P",
                "-m",
                "twostroke",
                "serve",
                str(model.bf16),
                "--port",
                str(port),
                "--dtype",
                "bf16",
            ]
            command += ["--served-name", "model", "--files-dir", str(files)]
            found.append(Server("twostroke", name, command, {"PYTHONPATH": str(root / "src")}, folder / name, port))
    return found


def load(chosen: Server, model: Model, seed: int, beside: bool) -> dict[str, Any]:
    """One load on a server that is awake, beside a batch or alone."""
    with httpx.Client(base_url=chosen.url, trust_env=False, timeout=60) as web:
        batch: dict[str, Any] = {}
        if beside:
            content = batch_file(10_000, seed)
            file = (
                web.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
                .raise_for_status()
                .json()
            )
            asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = web.post("/v1/batches", json=asked).raise_for_status().json()
            while batch["status"] != "in_progress":
                time.sleep(0.1)
                batch = web.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
            time.sleep(RUN_UP_S)
            batch = web.get(f"/v1/batches/{batch['id']}").json()
        spec = LoadSpec(
            model="model", request_rate=RATE, arrivals="poisson", n_requests=REQUESTS, prompt_tokens=(PROMPT, PROMPT),
            output_tokens=(OUTPUT, OUTPUT), seed=seed, warmup_requests=1, timeout_s=60.0,
        )  # fmt: skip
        began = time.perf_counter()
        result = run_load(chosen.url, spec, tokenizer=load_tokenizer(model.bf16))
        seconds = time.perf_counter() - began
        values = values_of(result) | {"ttft_s": [r.ttft_from_sent_s for r in result.records]}
        if beside:
            done = web.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"]
            values["batch_per_s"] = (done - batch["request_counts"]["completed"]) / seconds
            web.post(f"/v1/batches/{batch['id']}/cancel").raise_for_status()
            while web.get(f"/v1/batches/{batch['id']}").json()["status"] != "cancelled":
                time.sleep(0.1)
    return values


def write_summary(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "raw.jsonl").read_text(encoding="utf-8").splitlines()]
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    lines = [
        f"{versions['cpu']}, {versions['processors']} processors; Twostroke {versions['twostroke']}. All measured, rounds "
        "together: each is the same arrivals alone and beside a batch.", "",
        f"Poisson arrivals at {RATE} a second, prompts of {PROMPT} and answers of {OUTPUT} tokens; the batch has prompts of "
        f"{BATCH_PROMPT} and answers of {BATCH_OUTPUT}.", "",
        "| version | batch | requests | TTFT median | p90 | p99 | p99 moves by round (aim: 5%) | TPOT median | batch req/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for version in dict.fromkeys(row["version"] for row in rows):
        alone_s = {row["round"]: row["ttft_p99_s"] for row in rows if row["version"] == version and not row["beside"]}
        for beside in (False, True):
            own = [row for row in rows if row["version"] == version and row["beside"] == beside]
            first = Distribution.of([t for row in own for t in row["ttft_s"] if t is not None])
            times = [f"{1e3 * t:.0f} ms" for t in (first.median, first.p90, first.p99)]
            moves = ", ".join(f"{row['ttft_p99_s'] / alone_s[row['round']] - 1:+.0%}" for row in own) if beside else "–"
            tpot = sorted(row["tpot_median_s"] for row in own)[len(own) // 2]
            rate = f"{sum(row['batch_per_s'] for row in own) / len(own):.2f}" if beside else "–"
            cells = [version, "yes" if beside else "no", str(first.n), *times, moves, f"{1e3 * tpot:.1f} ms", rate]
            lines.append(f"| {' | '.join(cells)} |")
    (folder / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-benchmark-models")
    parser.add_argument("--shape", default="smollm-135m", choices=["smollm-135m", "tinyllama-1.1b"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="Of the first round's arrivals.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    model = make_model(args.shape, args.models.resolve())
    describe(args.out, {})
    with tempfile.TemporaryDirectory() as folder:
        servers = versions_of(None if args.before is None else args.before.resolve(), model, Path(folder))
        try:
            for one in servers:
                one.start()
                one.pause()
            for number in range(args.rounds):
                for one in servers if number % 2 == 0 else servers[::-1]:
                    for beside in (False, True):
                        one.resume()
                        values = load(one, model, args.seed + number, beside)
                        one.pause()
                        row = {"version": one.variant, "beside": beside, "round": args.seed + number, **values}
                        with (args.out / "raw.jsonl").open("a", encoding="utf-8") as stream:
                            stream.write(json.dumps(row) + "\n")
                        chosen = {k: v for k, v in values.items() if k.startswith(("ttft_m", "ttft_p", "batch"))}
                        shown = {k: round(v, 4) for k, v in chosen.items()}
                        print(one.variant, "beside" if beside else "alone", shown, flush=True)
        finally:
            for one in servers:
                one.stop()
    write_summary(args.out)
    print((args.out / "summary.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
