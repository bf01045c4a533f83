"""The engine without a server: the same requests as a load, as many at a time as the load has users.

Started by ``run.py``. Reads a JSON line with the fields of a ``LoadSpec`` and ``salt``, answers with a JSON line. Tokenising
and making text of tokens are left out; everything else of the engine is what the server runs.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path

from twostroke.bench.load import plan_requests
from twostroke.bench.load_spec import LoadSpec
from twostroke.core.engine_settings import EngineSettings
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams


def main() -> None:
    directory, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    core, tokenizer = EngineCore(directory, EngineSettings(**settings)), load_tokenizer(directory)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        salt = asked.pop("salt")
        spec = LoadSpec(**{name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()})
        planned = [(tokenizer.encode(p.text).ids, p.max_tokens) for p in plan_requests(spec, tokenizer, salt)]
        for ids, n_output in planned[: spec.warmup_requests]:
            serve(core, [(ids, n_output)], 1)
        measured = planned[spec.warmup_requests :]
        seconds = serve(core, measured, spec.users or len(measured))
        tokens = sum(n_output for _, n_output in measured)
        print(json.dumps({"seconds": seconds, "output_tok_per_s": tokens / seconds}), flush=True)


def serve(core: EngineCore, requests: list[tuple[list[int], int]], users: int) -> float:
    """Seconds until all are answered, ``users`` of them at a time."""
    waiting = iter(enumerate(requests))
    began = time.perf_counter()

    def add(n: int) -> None:
        for i, (ids, n_output) in islice(waiting, n):
            core.add_request(str(i), ids, SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True))

    add(users)
    left = len(requests)
    while left:
        ended = sum(event.finish_reason is not None for event in core.step())
        left -= ended
        add(ended)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
