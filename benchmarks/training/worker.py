"""One engine in a process of its own: reads its job, then takes as many steps as each line of standard input says.

Prints a JSON object a line: {"ready": …} after the warm-up, the steps' times, losses and tokens after each request, and at the
end the memory.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

_STATUS = Path("/proc/self/status")


class Steps(Protocol):
    """What each ``engine_*`` module makes: ``step`` does all that one update takes and returns its loss in nats a token."""

    def step(self, index: int) -> float: ...
    def n_tokens(self, index: int) -> int: ...


def _status_bytes(field: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if line.startswith(field))


def _say(document: dict[str, Any]) -> None:
    print(json.dumps(document), file=_REPLIES, flush=True)


def _take(engine: Steps, first: int, n_steps: int, n_batches: int) -> dict[str, list[float]]:
    from twostroke.core.contention import waited_s

    taken: dict[str, list[float]] = {"step_time_s": [], "loss": [], "tokens": [], "waited_s": []}
    for index in range(first, first + n_steps):
        waited, began = waited_s() or 0.0, time.perf_counter()
        loss = engine.step(index % n_batches)
        taken["step_time_s"].append(time.perf_counter() - began)
        taken["waited_s"].append((waited_s() or 0.0) - waited)
        taken["loss"].append(loss)
        taken["tokens"].append(engine.n_tokens(index % n_batches))
    return taken


def main() -> None:
    job = json.loads(sys.argv[1])
    import psutil

    began = psutil.Process().create_time()
    import torch

    torch.set_num_threads(job["threads"])
    module = importlib.import_module(job["module"])
    baseline = _status_bytes("VmRSS:")
    engine: Steps = module.Engine(job)
    n_batches = job["n_batches"]
    warm: dict[str, list[float]] = {"step_time_s": []}
    first_step_s = None
    for i in range(job["warm_up"]):
        once = _take(engine, i, 1, n_batches)
        first_step_s = first_step_s or time.time() - began
        warm["step_time_s"] += once["step_time_s"]
    on_gpu = job["device"] == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        baseline = 0
    elif job["warm_up"]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of steady steps, not of compiling
    _say({"ready": True, "first_step_s": first_step_s, "warm_up_step_time_s": warm["step_time_s"]})
    done = job["warm_up"]
    for line in sys.stdin:
        n_steps = int(line)
        if n_steps == 0:
            break
        _say(_take(engine, done, n_steps, n_batches))
        done += n_steps
    peak = torch.cuda.max_memory_allocated() if on_gpu else _status_bytes("VmHWM:")
    _say({"peak_bytes": peak, "baseline_bytes": baseline, "torch": torch.__version__, "pid": os.getpid()})


if __name__ == "__main__":
    _REPLIES = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    main()
