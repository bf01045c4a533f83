"""One training run of the real engine by its recipe; prints as JSON what was measured and how much of it was disturbed.

The prediction is frozen in the ledger by the run itself, before its first step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from twostroke.core.contention import waited_s

DISTURBED_SHARE = 0.02


def main(recipe_path: str, settings: list[str]) -> None:
    import psutil

    from twostroke.core.recipe import read_recipe
    from twostroke.training.loop import execute
    from twostroke.training.measurement import PARTS, StepRecord
    from twostroke.training.parallelize import use_available_cores
    from twostroke.training.start import start

    use_available_cores()
    run = start(read_recipe(recipe_path, settings))
    steps: list[tuple[StepRecord, bool]] = []
    last = [waited_s() or 0.0, time.perf_counter()]

    def on_step(record: StepRecord, eta_s: float) -> None:
        waited, now = waited_s() or 0.0, time.perf_counter()
        steps.append((record, waited - last[0] > DISTURBED_SHARE * (now - last[1])))
        last[:] = [waited, now]

    result = execute(run, on_step, command_began=psutil.Process().create_time())
    steady = [(r, disturbed) for r, disturbed in steps if not r.warm_up and not r.skipped]
    clean = [r for r, disturbed in steady if not disturbed] or [r for r, _ in steady]
    measured = {name: statistics.median(getattr(r, name) for r in clean) for name in ("step_time_s", *PARTS)}
    record = {
        "run_id": result.run_id,
        "measured": {**result.summary["measurement"], **measured},
        "disturbed_share": sum(d for _, d in steady) / max(1, len(steady)),
        "compiled": result.summary["compiled"],
        "n_clean": sum(not d for _, d in steady),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
