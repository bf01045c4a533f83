"""The real HTTP process in front of the echo engine: prints its URL when ready, serves until a signal.

``--set connections.SEND_TIMEOUT_S=1`` changes a limit of a server module, so that a test need not wait for it. ``--model
NAME=DIR`` serves another model, whose engine has the options of ``--engine-of NAME=OPTION``. ``--plain`` takes h11 and
asyncio's loop, as if httptools and uvloop were not installed. ``--real '{"n_threads": 1}'`` takes a real engine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import TwostrokeError
from twostroke.server.json_logs import log_as_json
from twostroke.server.launch import CaptureSettings, KVEventSettings, PoolSettings, ServeSettings, bind
from twostroke.server.run import Started, serve_model


@dataclass(frozen=True)
class EchoSettings(ServeSettings):
    extra: tuple[str, ...] = ()
    real: bool = False

    def engine_command(self) -> list[str]:
        if self.real:
            return super().engine_command()
        return [sys.executable, str(Path(__file__).with_name("echo_engine.py")), *self.extra]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--max-concurrent", type=int, default=128)
    parser.add_argument("--grace-s", type=float, default=30.0)
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--files-dir", type=Path)
    parser.add_argument("--admin", action="store_true")
    parser.add_argument("--capture", type=Path)
    parser.add_argument("--log-json", action="store_true")
    parser.add_argument("--capture-bytes", type=int, default=2**20)
    parser.add_argument("--redact", type=Path)
    parser.add_argument("--redact-command")
    parser.add_argument("--response-cache", type=Path)
    parser.add_argument("--response-cache-bytes", type=int, default=10**6)
    parser.add_argument("--max-queued-tokens", type=int)
    parser.add_argument("--max-running", type=int)
    parser.add_argument("--usage-log", type=Path)
    parser.add_argument("--kv-events")
    parser.add_argument("--kv-events-replay")
    parser.add_argument("--otlp-endpoint")
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--model", action="append", default=[], dest="models")
    parser.add_argument("--engine-of", action="append", default=[])
    parser.add_argument("--models-memory", type=float, default=1e9)
    parser.add_argument("--model-wait-s", type=float, default=20.0)
    parser.add_argument("--ab")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--real", type=json.loads, help="settings of a real engine, in the place of the echo engine")
    args = parser.parse_args()
    if args.plain:
        sys.modules.update({"httptools": None, "uvloop": None})  # type: ignore[dict-item]
    for change in args.set:
        name, _, value = change.partition("=")
        module, _, constant = name.rpartition(".")
        place = importlib.import_module(f"twostroke.server.{module}")
        assert hasattr(place, constant), name
        setattr(place, constant, json.loads(value))
    if args.log_json:
        log_as_json()
    else:
        logging.basicConfig(level=logging.INFO)
    running: dict[str, Any] = {} if args.max_running is None else {"max_running": args.max_running}
    settings = EchoSettings(
        Path(args.model),
        EngineSettings(**running, **(args.real or {})),
        ("echo",),
        args.api_key_file,
        args.max_concurrent,
        args.grace_s,
        files_dir=args.files_dir,
        replicas=args.replicas,
        admin=args.admin,
        log_requests=args.log_json,
        capture=args.capture and CaptureSettings(args.capture, args.capture_bytes, args.redact, args.redact_command),
        response_cache=args.response_cache,
        response_cache_bytes=args.response_cache_bytes,
        usage_log=args.usage_log,
        max_queued_tokens=args.max_queued_tokens,
        kv_events=args.kv_events
        and KVEventSettings(None if args.kv_events == "http" else args.kv_events, args.kv_events_replay, "kv@here@echo"),
        otlp_endpoint=args.otlp_endpoint,
        real=args.real is not None,
        extra=(*args.engine, *(f"--{name.replace('_', '-')}={value}" for name, value in running.items())),
    )
    if args.models:
        others = []
        for name, _, directory in (each.partition("=") for each in args.models):
            own = [each.removeprefix(f"{name}=") for each in args.engine_of if each.startswith(f"{name}=")]
            others.append(replace(settings, directory=Path(directory), names=(name,), extra=(*args.engine, *own)))
        name, _, share = (args.ab or "").partition("=")
        split = (name, float(share)) if share else None
        settings = replace(settings, pool=PoolSettings(tuple(others), args.models_memory, args.model_wait_s, split))
    listener = bind(args.host, 0)
    child = settings.launches()[0]()

    def announce(started: Started) -> None:
        print(json.dumps({"url": started.url, "engine_pid": child.process.pid}), flush=True)

    try:
        totals = serve_model(settings, listener, child, announce)
    except TwostrokeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return error.exit_code
    finally:
        child.kill()
    print(json.dumps(totals), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
