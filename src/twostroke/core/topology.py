"""Where threads go on a machine's processors: its cores and NUMA nodes, as Linux tells them under ``/sys``."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from twostroke.core.errors import ConfigError

SYSTEM = Path("/sys/devices/system")

CORES, NODES = "cores", "nodes"
"""Ways to place threads: as near together as they go, each on a core of its own; evenly over all nodes, so that each reads its
part of the weights from its own node's memory."""


@dataclass(frozen=True)
class Processor:
    """A logical processor: those of one ``core`` (package, number) share its units, those of one ``node`` a memory."""

    number: int
    core: tuple[int, int]
    node: int


def processors_of(allowed: Collection[int], system: Path = SYSTEM) -> list[Processor]:
    """The ``allowed`` processors. What the system does not tell is a core of its own, and node 0."""
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for number in _numbers(folder / "cpulist")
    }
    found = []
    for number in sorted(allowed):
        folder = system / "cpu" / f"cpu{number}" / "topology"
        package, core = _number(folder / "physical_package_id", -1), _number(folder / "core_id", -1)
        found.append(Processor(number, (package, core) if core >= 0 else (-2, number), nodes.get(number, 0)))
    return found


def placed(processors: Collection[Processor], n_threads: int, how: str) -> list[int]:
    """The processor of each of ``n_threads``. Threads of one node are neighbours. Raises ConfigError for more threads than
    processors."""
    if n_threads > len(processors):
        raise ConfigError(
            f"{n_threads} threads cannot be pinned to {len(processors)} processors, all that this process may use. Use fewer "
            "threads."
        )
    by_node: dict[int, list[int]] = {}
    for node in sorted({p.node for p in processors}):
        by_node[node] = _cores_first([p for p in processors if p.node == node])
    if how == NODES:
        return [
            number for node, n in _evenly({k: len(v) for k, v in by_node.items()}, n_threads) for number in by_node[node][:n]
        ]
    n_cores = {node: len({p.core for p in processors if p.node == node}) for node in by_node}
    # The smallest node that has a core for each thread, else the nodes with the most cores.
    fitting = sorted((n, node) for node, n in n_cores.items() if n >= n_threads)
    order = [fitting[0][1]] if fitting else sorted(by_node, key=lambda node: (-n_cores[node], node))
    firsts = [number for node in order for number in by_node[node][: n_cores[node]]]
    seconds = [number for node in order for number in by_node[node][n_cores[node] :]]
    return (firsts + seconds)[:n_threads]


def _cores_first(processors: Collection[Processor]) -> list[int]:
    """One processor of each core, then the second ones of cores that have them, and so on."""
    seen: dict[tuple[int, int], int] = {}
    ranked = []
    for p in sorted(processors, key=lambda p: p.number):
        seen[p.core] = rank = seen.get(p.core, -1) + 1
        ranked.append((rank, p.number))
    return [number for _, number in sorted(ranked)]


def _evenly(room: dict[int, int], n: int) -> list[tuple[int, int]]:
    """(node, how many of ``n`` it gets), one after another to the node that has the fewest and room for more."""
    got = dict.fromkeys(room, 0)
    for _ in range(n):
        got[min((node for node in room if got[node] < room[node]), key=lambda node: (got[node], node))] += 1
    return sorted(got.items())


def _number(file: Path, default: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return default


def _numbers(file: Path) -> list[int]:
    """Of a list as "0-3,8": none where it cannot be read."""
    try:
        text = file.read_text().strip()
    except (OSError, ValueError):
        return []
    found: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            return []
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
