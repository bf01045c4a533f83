"""Starts a benchmark's script as several ranks of this machine, as torchrun would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence


def answers(
    name: str, commands: Sequence[Sequence[str]], port: int, more: Mapping[str, str], address: str = "127.0.0.1"
) -> list[str]:
    """What each of ``commands``, one a rank, printed. ``more`` is added to their environment. Exits with the last words of one
    that failed in ``name``."""
    n, processes = len(commands), []
    for rank, words in enumerate(commands):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": address, "MASTER_PORT": str(port), **more,
        }  # fmt: skip
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
    said = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise SystemExit(f"{name}: a process ended with {process.returncode}:\n{errors[-2000:]}")
    return [answer for answer, _ in said]
