"""Starts the ranks of a run on this machine by torchrun's agent, and turns how they ended into one exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from twostroke.core.errors import TwostrokeError

LAUNCHED = "TWOSTROKE_LAUNCHED"
"""Set for ranks that `twostroke train --ranks` started, which leave it to the launcher to say which of them was lost."""

STOPS = (signal.SIGTERM, signal.SIGINT)


def run_ranks(n: int, words: Sequence[str], output: Path, threads: int) -> int:
    """Run ``twostroke`` with ``words`` as ``n`` ranks. Returns the exit code of the first rank that failed, 0 if none did.

    SIGTERM and Ctrl-C are handed to the ranks, which write a checkpoint and end with 75. Raises TwostrokeError if a rank was
    killed; the others then end, and the last checkpoint is whole.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    package = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
    )
    found: list[BaseException] = []

    def launch() -> None:
        try:
            elastic_launch(config, sys.executable)("-m", "twostroke", *words)
        except BaseException as error:
            found.append(error)

    # Beside the main thread, because there the agent would answer signals itself, and kill ranks that write a checkpoint.
    agent = threading.Thread(target=launch, name="torchrun")
    before = {number: signal.signal(number, _hand_on) for number in STOPS}
    try:
        agent.start()
        while agent.is_alive():
            agent.join(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not found:
        return 0
    if not isinstance(found[0], ChildFailedError):
        raise TwostrokeError(f"{n} ranks could not be started: {found[0]}.") from found[0]
    return _code_of(found[0].failures, output)


def _hand_on(number: int, frame: FrameType | None) -> None:
    """Hand a signal on to the ranks."""
    import psutil

    for child in psutil.Process().children():
        child.send_signal(number)


def _code_of(failures: Any, output: Path) -> int:
    """The exit code of the first rank that failed. Raises TwostrokeError for one that was killed."""
    from twostroke.training.checkpoint import list_checkpoints

    codes = {rank: failures[rank].exitcode for rank in sorted(failures)}
    told = [code for code in codes.values() if code > 0]
    for rank, code in codes.items():
        # The agent ends those that are left by SIGTERM; what ended the first one counts.
        if code < 0 and (code != -signal.SIGTERM or not told):
            kept = list_checkpoints(output / "checkpoints")
            what = f"Checkpoint {kept[-1][1].name} is kept. Continue with --resume." if kept else "No checkpoint exists yet."
            raise TwostrokeError(f"rank {rank} was ended by {signal.Signals(-code).name}, and the others stopped. {what}")
    return int(told[0])
