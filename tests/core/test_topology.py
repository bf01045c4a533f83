"""Threads are placed by cores and nodes, over machines that a folder describes as ``/sys`` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError
from twostroke.core.topology import CORES, NODES, placed, processors_of


def machine(folder: Path, cores: list[tuple[int, int, int, int]], nodes: dict[int, str]) -> Path:
    """(processor, package, core, node) each; ``nodes``: their lists of processors."""
    for number, package, core, _ in cores:
        topology = folder / "cpu" / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    for node, text in nodes.items():
        (folder / "node" / f"node{node}").mkdir(parents=True)
        (folder / "node" / f"node{node}" / "cpulist").write_text(text)
    (folder / "node" / "has_cpu").parent.mkdir(exist_ok=True)
    (folder / "node" / "has_cpu").write_text("0-1\n")
    return folder


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two packages, each a node of 4 cores; processors 8 to 15 are the second threads of 0 to 7."""
    cores = [(i, i % 8 // 4, i % 4, i % 8 // 4) for i in range(16)]
    return machine(tmp_path, cores, {0: "0-3,8-11\n", 1: "4-7,12-15\n"})


def test_cores_and_nodes_are_read(two_sockets: Path) -> None:
    found = processors_of(range(16), two_sockets)
    assert [p.node for p in found] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert found[1].core == found[9].core != found[2].core
    assert found[0].core != found[4].core  # the same number in another package


@pytest.mark.parametrize(
    ("n", "how", "expected"),
    [
        (1, CORES, [0]),
        (4, CORES, [0, 1, 2, 3]),  # one node's memory and caches
        (6, CORES, [0, 1, 2, 3, 4, 5]),  # cores before second threads of cores
        (10, CORES, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (1, NODES, [0]),
        (2, NODES, [0, 4]),
        (5, NODES, [0, 1, 2, 4, 5]),
        (8, NODES, [0, 1, 2, 3, 4, 5, 6, 7]),
        (10, NODES, [0, 1, 2, 3, 8, 4, 5, 6, 7, 12]),
        (16, NODES, [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]),
    ],
)
def test_threads_take_cores_first_and_neighbours_share_a_node(two_sockets: Path, n: int, how: str, expected: list[int]) -> None:
    assert placed(processors_of(range(16), two_sockets), n, how) == expected


def test_only_what_the_process_may_use_is_used(two_sockets: Path) -> None:
    """As a container or taskset leaves it: one core of node 0, three of node 1."""
    allowed = processors_of([3, 11, 4, 5, 6], two_sockets)
    assert placed(allowed, 2, CORES) == [4, 5]  # the node that has two cores
    assert placed(allowed, 4, CORES) == [4, 5, 6, 3]
    assert placed(allowed, 4, NODES) == [3, 11, 4, 5]
    with pytest.raises(ConfigError, match="6 threads cannot be pinned to 5 processors"):
        placed(allowed, 6, NODES)


def test_uneven_nodes_get_what_they_have_room_for(tmp_path: Path) -> None:
    """A node of memory alone has no processors, and one of two cores gets no more than two threads."""
    system = machine(tmp_path, [(i, 0, i, 0) for i in range(8)], {0: "0-5\n", 1: "6-7\n", 2: "\n"})
    assert placed(processors_of(range(8), system), 7, NODES) == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("text", ["", "x", "3-", "-3", "1-2-3", "9" * 40])
def test_a_system_that_does_not_tell_is_one_node_of_cores(tmp_path: Path, text: str) -> None:
    system = machine(tmp_path, [], {1: text})
    found = processors_of([2, 5], system)
    assert [(p.number, p.node) for p in found] == [(2, 0), (5, 0)]
    assert found[0].core != found[1].core
    assert placed(found, 2, NODES) == [2, 5]
    assert placed(processors_of([2, 5], tmp_path / "nothing"), 2, CORES) == [2, 5]


def test_this_machine_has_a_place_for_each_processor() -> None:
    import os

    allowed = os.sched_getaffinity(0)
    for how in (CORES, NODES):
        assert set(placed(processors_of(allowed), len(allowed), how)) == allowed
