"""One serving configuration of the real engine; prints as JSON what was predicted, measured and disturbed.

Memory is what the engine counts of the matrices and the pool that it made: the library maps both in pages of its own, which
the C library does not count. Times are of whole calls of the engine: TTFT from adding a request to an idle engine to its first
token, TPOT of decode steps with the whole batch.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from configurations import SAMPLING

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "adapters"))

PROMPTS = ((256, 25), (1024, 9))
"""Prompts of up to so many tokens, so often; of longer ones ``LONG``. A short one takes milliseconds, and a machine that is
shared stays slow for longer than nine of them."""
LONG = 4
DECODE_S = 1.5
"""Seconds of decode steps at least: medians of 0.1 s of them differed by up to 2 × within seconds, of 2 s by 15%."""
DISTURBED_SHARE = 0.02


def main(directory: str, case: dict[str, Any]) -> None:
    import psutil
    import torch

    from twostroke.core.contention import waited_s
    from twostroke.core.engine_settings import EngineSettings
    from twostroke.core.families import read_spec
    from twostroke.core.schemes import SCHEMES
    from twostroke.engine.core import EngineCore
    from twostroke.ledger.store import Ledger
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.adapters import ServedAdapters
    from twostroke.planner.serving.plan import plan_serving, request_kv_bytes
    from twostroke.planner.truth.intervals import predict_with_intervals
    from twostroke.quantization.held import serving_shape
    from twostroke.scheduling.sampling_params import SamplingParams

    spec = read_spec(directory)
    scheme, batch, prompt_tokens, output_tokens = (case[k] for k in ("scheme", "batch", "prompt_tokens", "output_tokens"))
    formats = {name: case[name] for name in ("head_dtype", "kv_dtype")}
    longest = prompt_tokens + output_tokens + 64  # for all engines: tables grow with it
    dtype = "auto" if SCHEMES[scheme].only_read else scheme  # of a directory that holds it
    # Bounded steps let a batch's first requests end before its last prompt is in, and the rest were measured in their place.
    settings = EngineSettings(dtype=dtype, runner=case["runner"], max_model_len=longest, max_step_ratio="off", **formats)
    params = {"temperature": 0.0} | {k: v for kind in case["sampling"] for k, v in SAMPLING[kind].items()}
    asked = {"batch": batch, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    asked["sampling"] = SamplingParams(**params).kinds
    described = ServedAdapters.parse(case["loras"]) if case["loras"] else None
    asked["adapters"] = (described,) if described else ()
    n_prompts = next((n for longest_prompt, n in PROMPTS if prompt_tokens <= longest_prompt), LONG)
    request_bytes = request_kv_bytes(spec, serving_shape(directory, spec, settings, **asked))
    cache = int(max(2 * (batch + 2), n_prompts + 2) * request_bytes)  # each prompt finds pages that none has touched
    shape = serving_shape(directory, spec, replace(settings, kv_cache_bytes=cache), **asked)
    if dtype == "auto" and shape.scheme != scheme:
        raise SystemExit(f"{directory} is held in {shape.scheme}, and not in {scheme}.")
    hardware = load_hardware("this", "serve")
    if case["runner"] == "torch":  # as on a machine without the native library
        hardware = replace(hardware, native=None)
    plan = plan_serving(spec, shape, hardware)
    values = plan.prediction()
    names = ("weights_bytes", "kv_cache_bytes", "ttft_s", "tpot_s", "decode_tok_per_s", "prefill_tok_per_s", "startup_s")
    ledger = Ledger()
    frozen = predict_with_intervals({name: values[name] for name in names}, hardware, "serve", ledger)
    run_id = ledger.freeze("bench", case["name"], {"model": directory, **case}, frozen)

    engine = EngineCore(directory, replace(settings, kv_cache_bytes=cache))
    ready_s = time.time() - psutil.Process().create_time()
    if described is not None:
        from random_adapters import write_adapter

        with tempfile.TemporaryDirectory() as folder:
            for i in range(described.count):
                to = Path(folder) / str(i)
                engine.load_adapter(str(i), write_adapter(spec, Path(directory), described.targets, described.rank, to, i))
    loras = itertools.cycle(sorted(engine.adapters.known) or [None])

    generator = torch.Generator().manual_seed(0)
    numbers = iter(range(10**9))

    def add(n_output: int) -> str:
        tokens = torch.randint(0, spec.vocab_size, (prompt_tokens,), generator=generator).tolist()
        name = f"r{next(numbers)}"
        engine.add_request(name, tokens, SamplingParams(max_tokens=n_output, ignore_eos=True, **params), lora=next(loras))
        return name

    def timed(run: Callable[[], int], repeats: int) -> tuple[float, float]:
        """(median seconds a unit, share disturbed): undisturbed repeats where there are any."""
        clean, all_of_them = [], []
        for i in range(repeats + 1):
            waited, begin = waited_s() or 0.0, time.perf_counter()
            units = run()
            elapsed = time.perf_counter() - begin
            if i == 0:
                continue
            all_of_them.append(elapsed / units)
            if (waited_s() or 0.0) - waited <= DISTURBED_SHARE * elapsed:
                clean.append(elapsed / units)
        return statistics.median(clean or all_of_them), 1 - len(clean) / len(all_of_them)

    def first_token() -> int:
        add(1)
        while engine.has_work:
            engine.step()
        return 1

    ttft_s, ttft_disturbed = timed(first_token, n_prompts)

    def decode() -> int:
        steps = 0
        while engine.has_work and steps < 8:
            engine.step()
            steps += 1
        return steps

    found, decoded_s, n_blocks = [], 0.0, max(2, output_tokens // 8 - 2)
    warm = False
    while len(found) < 2 or decoded_s < DECODE_S:
        names_ = [add(output_tokens + 32) for _ in range(batch)]
        started: set[str] = set()
        while len(started) < batch:
            started |= {event.request_id for event in engine.step()}
        timing = timed(decode, n_blocks)
        if engine.stats().running != batch:
            raise SystemExit(f"{batch - engine.stats().running} of {batch} requests ended while decode steps were timed.")
        if warm:
            found.append(timing)
            decoded_s += 8 * n_blocks * timing[0]
        warm = True  # the first some 50 steps of a process take half as long again
        for name in names_:
            engine.abort(name)
    tpot_s = statistics.median(seconds for seconds, _ in found)
    tpot_disturbed = statistics.mean(share for _, share in found)
    measured = {
        "weights_bytes": float(engine.weights_bytes),
        "kv_cache_bytes": float(engine.kv_cache_bytes),
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "decode_tok_per_s": batch / tpot_s,
        "prefill_tok_per_s": prompt_tokens / ttft_s,
    }
    ledger.measure(run_id, measured)
    disturbed = max(ttft_disturbed, tpot_disturbed)
    print(json.dumps({"run_id": run_id, "measured": measured, "disturbed_share": disturbed, "ready_s": ready_s}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
