"""The engine in a process of its own: ``python -m twostroke.server.engine_process --socket PATH --model DIR``.

It ends on a ``Shutdown``, on its parent's death, and on an exception inside a step: then the state of every request is in
doubt, and the supervisor starts a new process. It ignores SIGINT and SIGTERM, which a terminal or a service manager sends to
the whole group while the HTTP process still finishes the requests in flight.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from twostroke.core.engine_settings import engine_settings
from twostroke.core.errors import InputError, TwostrokeError
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import wire
from twostroke.server.engine_connection import listen
from twostroke.server.engine_server import Engine, EngineServer


def die_with_parent(parent_pid: int | None) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere the heartbeat thread notices)."""
    if parent_pid is None:
        return
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent died before the call above


def serve_engine(
    socket_path: Path,
    parent_pid: int | None,
    load: Callable[[], tuple[Engine, wire.Ready]],
    join: Callable[[EngineServer, Engine], None] | None = None,
) -> int:
    """Listen, load and serve, and return the exit code. Heartbeats say that the engine is loading while ``load`` runs. ``join``
    is called then, to bring it together with other engines."""
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    server = EngineServer(listen(socket_path), parent_pid)
    try:
        engine, ready = load()
        if join is not None:
            join(server, engine)
    except TwostrokeError as error:
        server.report_failure("input" if isinstance(error, InputError) else "engine", str(error))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        server.report_failure("engine", f"the model could not be loaded ({type(error).__name__}).")
        return 1
    gc.collect()
    gc.freeze()  # modules and the model: a full collection of their 180,000 objects stopped the steps for 90 to 160 ms
    try:
        server.run(engine, ready)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def load_model(args: argparse.Namespace) -> tuple[Engine, wire.Ready]:
    """Load the real engine, and warm it up with a few tokens: what torch does once must not delay the first request."""
    began = time.perf_counter()
    from twostroke.engine.core import EngineCore  # here, because torch takes seconds in which the socket answers already

    core = EngineCore(args.model, engine_settings(args.settings))
    n_prompt = min(8, core.max_model_len - 2)
    if n_prompt > 0:
        core.add_request("warm-up", [0] * n_prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        while core.has_work:
            core.step()
    ready = wire.Ready(
        dtype=core.dtype,
        max_model_len=core.max_model_len,
        page_tokens=core.scheduler.config.page_tokens,
        weights_bytes=core.weights_bytes,
        kv_cache_bytes=core.kv_cache_bytes,
        load_s=time.perf_counter() - began,
        loaded_packed=core.loaded_packed,
        notes=list(core.spec.notes),
        fingerprint=core.fingerprint,
    )
    return core, ready


def join_engines(settings: str, server: EngineServer, engine: Engine) -> None:
    """Compute prompts for other engines, or let them compute those of ``engine``, as ``settings`` say."""
    from twostroke.engine.core import EngineCore
    from twostroke.server.handover.borrower import Borrower
    from twostroke.server.handover.lender import Lender
    from twostroke.server.handover.settings import handover_settings

    known = handover_settings(settings)
    assert isinstance(engine, EngineCore)
    if known.listen is not None:
        server.lender = Lender(engine, known, server.wake, server.busy_s)
    if known.peers:
        server.borrower = Borrower(engine, known, server.wake)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="twostroke.server.engine_process", description="The engine behind a Unix socket.")
    parser.add_argument("--socket", required=True, type=Path, help="where to listen; in a directory that only this user enters")
    parser.add_argument("--parent-pid", type=int, help="end when this process does")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--settings", default="{}", help="those of EngineSettings that are not at their default, as JSON")
    parser.add_argument("--handover", help="HandoverSettings as JSON: whom it computes prompts for, or who does so for it")
    args = parser.parse_args(argv)
    join = None if args.handover is None else functools.partial(join_engines, args.handover)
    return serve_engine(args.socket, args.parent_pid, lambda: load_model(args), join)


if __name__ == "__main__":
    sys.exit(main())
