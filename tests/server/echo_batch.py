"""``twostroke batch`` with the echo engine: a process that tests kill. Exits as the verb does."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import Interrupted, TwostrokeError
from twostroke.core.families import read_spec
from twostroke.ledger.meter import Meter
from twostroke.server import engine_client
from twostroke.server.batch import job as batch_job
from twostroke.server.batch.job import BatchPaths, about, compute, opened_job
from twostroke.server.launch import launch_engine
from twostroke.server.text import ModelText


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("given", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--at-once", type=int, default=batch_job.AT_ONCE)
    parser.add_argument("--engine", action="append", default=[])
    args = parser.parse_args()
    batch_job.AT_ONCE = args.at_once
    engine_client.BACKOFF_S = (0.01,)  # a test need not wait for an engine's restart
    names, engine = ("echo",), EngineSettings()
    command = [sys.executable, str(Path(__file__).with_name("echo_engine.py")), *args.engine]
    paths = BatchPaths(args.given, args.output, args.output.with_suffix(".errors"))
    try:
        with opened_job(paths, about(args.model, engine, names, {}), names, args.resume) as job:
            if job is None:
                return 0
            child = launch_engine(command)
            try:
                text, spec = ModelText(args.model), read_spec(args.model)
                found = asyncio.run(
                    compute(job, command, child, text, spec, names, {}, Meter([]), lambda _: None, lambda *_: None)
                )
            finally:
                child.kill()
            if found.stopped:
                return Interrupted.exit_code
            job.finish()
    except TwostrokeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
