"""Decode, prefill and start-up of our engine and its peers on the same models, in one run.

    python benchmarks/inference/run.py --peers FOLDER [--shapes smollm-135m] [--engines twostroke vllm ...] [--out runs/NAME]

FOLDER holds a virtual environment for each peer: vllm, llama, ov (how they are made: README.md). Every engine runs in a process
of its own, two threads, one after another, and the whole list ``--rounds`` times, so that a slow quarter of an hour hits all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded
from cases import LARGE, REPEATS, SHAPES
from models import HERE, model_for, write_model
from summary import write_summary

from twostroke.ledger.code_version import code_version

VARIANTS = {
    "twostroke": ("bf16", "int8", "int8-head8", "int4-head8", "int4-head4", "int8-head8-kv8"),
    "vllm": ("bf16", "w8a8"),
    "llama.cpp": ("f16", "q8_0", "q4_0", "q8_0-plain", "q4_0-plain"),
    "openvino": ("bf16", "int8", "int4"),
    "transformers": ("bf16",),
}
SCRIPTS = {
    "twostroke": "twostroke_engine.py",
    "vllm": "vllm_engine.py",
    "llama.cpp": "llama_cpp_engine.py",
    "openvino": "openvino_engine.py",
    "transformers": "transformers_engine.py",
}
ENVIRONMENTS = {"vllm": "vllm", "llama.cpp": "llama", "openvino": "ov"}
LIMIT_S = 900


def environment(engine: str) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if engine == "vllm":
        own = {
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
        }
    if engine == "twostroke":
        own |= {"GOMP_SPINCOUNT": "300", "PYTHONPATH": str(HERE.parents[1] / "src")}
    return os.environ | own


def measure(engine: str, variant: str, model: Path, shape_name: str, pythons: dict[str, str], repeats: int) -> dict[str, Any]:
    """What one process measured. Ours is started once before and ends after its first token: a first start writes its packed
    weights to disk, as the peers' conversions do beforehand, and takes half the processors for seconds meanwhile."""
    shape = SHAPES[shape_name]
    command = [pythons[engine], str(HERE / "engines" / SCRIPTS[engine]), str(model), "--variant", variant]
    command += ["--vocab-size", str(shape.vocab_size), "--repeats", str(repeats)]
    batches = shape.batches[:1] if variant.endswith("-kv8") else shape.batches  # a cache in int8 is for long contexts
    command += ["--batches", *map(str, batches)]
    first = _process(engine, [*command, "--start-only"]) if engine == "twostroke" else {}
    os.sync()  # what conversions wrote is on disk before anything is timed
    result = _process(engine, command)
    result |= {name: first[name] for name in ("start_to_first_token_s", "packed_was_read") if name in first}
    return {"shape": shape_name, "engine": engine, "variant": variant} | result


def _process(engine: str, command: list[str]) -> dict[str, Any]:
    """One process; what it wrote before it ended, and how it ended where that was not well."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "result.json", Path(folder) / "log"
        began = time.time()
        with log.open("wb") as stream:
            try:
                # An empty working directory: `python -m` in a peer must not find our files for its own modules.
                code = subprocess.run(
                    [*command, "--out", str(out)], stdout=stream, stderr=stream, env=environment(engine), timeout=LIMIT_S,
                    check=False, cwd=folder,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = -1
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        if code != 0:
            result["error"] = recorded.without_folders(log.read_text(encoding="utf-8", errors="replace"))[-1500:]
    if "first_token_unix_s" in result:
        result["start_to_first_token_s"] = result.pop("first_token_unix_s") - began
    return {"unix_s": began} | result


def versions(pythons: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "machine": recorded.machine(), "code": code_version()}
    for engine, python in pythons.items():
        done = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=False)
        wanted = ("torch==", "vllm", "llama", "openvino==", "optimum", "transformers==")
        found[engine] = [line for line in done.stdout.splitlines() if line.startswith(wanted)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-benchmark-models")
    parser.add_argument("--shapes", nargs="+", default=[s for s in SHAPES if s not in LARGE], choices=list(SHAPES))
    parser.add_argument("--engines", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--variants", nargs="+", default=[], help="Only these, of all engines.")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pythons = dict.fromkeys(args.engines, sys.executable)
    pythons |= {e: str(args.peers / ENVIRONMENTS[e] / "bin" / "python") for e in args.engines if e in ENVIRONMENTS}
    pythons["twostroke"] = sys.executable
    recorded.write(args.out, {"versions.json": versions(pythons), "command.txt": recorded.command() + "\n"})
    raw = args.out / "raw.jsonl"
    for round_number in range(args.rounds):
        for shape_name in args.shapes:
            source = write_model(SHAPES[shape_name], args.models / shape_name)
            for engine in args.engines:
                for variant in VARIANTS[engine]:
                    if args.variants and variant not in args.variants:
                        continue
                    try:
                        model = model_for(engine, variant, source, args.models, pythons)
                        result = measure(engine, variant, model, shape_name, pythons, args.repeats)
                    except subprocess.CalledProcessError as error:  # one peer's converter does not end the run of all
                        failure = recorded.without_folders(str(error))
                        result = {"shape": shape_name, "engine": engine, "variant": variant, "error": failure}
                    result["round"] = round_number
                    with raw.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(result) + "\n")
                    print(_line(result), flush=True)
    write_summary(args.out)
    print((args.out / "summary.md").read_text(encoding="utf-8"))


def _line(result: dict[str, Any]) -> str:
    parts = [f"{result['shape']} {result['engine']} {result['variant']}:"]
    for name, value in result.items():
        if isinstance(value, list):
            parts.append(f"{name.removesuffix('_tok_per_s')} {sorted(value)[len(value) // 2]:.1f}")
    if "start_to_first_token_s" in result:
        parts.append(f"start {result['start_to_first_token_s']:.1f} s")
    if "error" in result:
        parts.append(f"FAILED: {result['error'][-200:]!r}")
    return " ".join(parts)


if __name__ == "__main__":
    main()
