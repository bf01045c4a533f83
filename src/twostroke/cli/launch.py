"""Starts the ranks of a run, again after one was lost, and turns how they ended into one exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import typer

from twostroke.cli.console import log
from twostroke.cli.hosts import Alone, Hosts
from twostroke.cli.notices import watching
from twostroke.cli.rank_processes import Ended, RankProcesses
from twostroke.core.errors import InputError, Interrupted, TwostrokeError
from twostroke.core.parallel_recipe import MAX_LOCAL_RANKS

STOPS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Launch:
    """What ``--ranks`` starts: ``n_local`` ranks on each host, which train into ``output``, or keep nothing if it is None.

    ``works_on(n)``: whether ``n`` ranks of the run divide its step. A rank that is lost is started again at most
    ``max_restarts`` times in all, with fewer ranks, but ``min_ranks``, if no step was done since the last loss. ``threads``
    are those of a rank with ``n_local`` ranks, and fewer ranks keep them, because bits depend on them. ``notice`` is polled
    (``cli.notices``).
    """

    words: Sequence[str]
    output: Path | None
    n_local: int
    threads: int
    resumes: bool
    works_on: Callable[[int], bool]
    max_restarts: int = 0
    min_ranks: int | None = None
    notice: str | None = None
    hosts: Hosts | Alone = field(default_factory=Alone)


def check_ranks(n: int) -> None:
    """Raise InputError unless ``--ranks`` can start ``n``."""
    if not 1 <= n <= MAX_LOCAL_RANKS:
        raise InputError(f"--ranks {n} must be from 1 to {MAX_LOCAL_RANKS}, the processes on this machine.")


def run_ranks(launch: Launch) -> None:
    """Run ``twostroke`` as several ranks, and exit with their code if one failed, which has said why.

    SIGTERM, Ctrl-C and an interruption notice are handed to the ranks, which write a checkpoint and end with 75; without an
    ``output`` they end, and TwostrokeError is raised. So it is if a rank was lost and may not be started again: the others have
    ended, and the last checkpoint is whole.
    """
    with counted_stops() as stops, watching(launch.notice, stops.ask):
        code = _run(launch, stops)
    if code:
        raise typer.Exit(code)


class Stops:
    """How often a stop was asked for."""

    def __init__(self) -> None:
        self.n = 0
        self._lock = threading.Lock()

    def ask(self) -> None:
        with self._lock:
            self.n += 1

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.n += 1

    def count(self) -> int:
        return self.n


@contextlib.contextmanager
def counted_stops() -> Iterator[Stops]:
    stops = Stops()
    before = {number: signal.signal(number, stops.receive) for number in STOPS}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(launch: Launch, stops: Stops) -> int:
    existed = _has_run(launch.output)
    n_local, restarts, lost_at = launch.n_local, 0, None
    settings = {"--max-restarts": launch.max_restarts, "--min-ranks": launch.min_ranks, "threads": launch.threads}
    with launch.hosts.joined(stops.count, settings):
        while True:
            placement = launch.hosts.placed(restarts, n_local)
            resumes = launch.resumes or (restarts > 0 and not existed and _has_run(launch.output))
            words = [*launch.words, *(["--resume"] if resumes else [])]
            processes = RankProcesses(words, placement, _environment(launch))
            ended = processes.watch(stops.count, lost_at, launch.hosts.lost_elsewhere)
            ended = launch.hosts.agreed(ended)
            if ended.lost is None:
                return ended.code
            if stops.n and launch.output is None:
                raise TwostrokeError(f"stopped by a signal. {_kept(None)}")
            if stops.n:
                raise Interrupted(f"stopped, and {ended.lost}. {_kept(launch.output)}")
            if restarts == launch.max_restarts:
                spent = f" after {restarts} restarts" if restarts else ""
                raise TwostrokeError(f"{ended.lost}{spent}, and the others stopped. {_kept(launch.output)}")
            restarts, lost_at = restarts + 1, ended.at
            n_local = _next_size(launch, n_local, ended)
            log(
                f"{ended.lost}. {n_local * launch.hosts.n} ranks start again ({restarts} of {launch.max_restarts} restarts). "
                f"{_kept(launch.output, continues=True)}"
            )


def _next_size(launch: Launch, n_local: int, ended: Ended) -> int:
    """Ranks of a host after one was lost: all of them, or fewer if not a step was done with the last number."""
    if ended.stepped or launch.min_ranks is None:
        return launch.n_local
    n_hosts = launch.hosts.n
    fewer = [n for n in range(n_local - 1, 0, -1) if n * n_hosts >= launch.min_ranks and launch.works_on(n * n_hosts)]
    return fewer[0] if fewer else n_local


def _has_run(output: Path | None) -> bool:
    return output is not None and (output / "recipe.json").is_file()


def _environment(launch: Launch) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(launch.threads))
    if launch.hosts.is_local:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
    return environment


def _kept(output: Path | None, continues: bool = False) -> str:
    if output is None:
        return "Nothing is kept: start again."
    from twostroke.training.checkpoint import list_checkpoints

    kept = list_checkpoints(output / "checkpoints")
    newest = kept[-1][1].name if kept else None
    if continues:
        return f"They go on from checkpoint {newest}." if newest else "No checkpoint exists yet."
    return f"Checkpoint {newest} is kept. Continue with --resume." if newest else "No checkpoint exists yet."
