"""What ranks send each other of tensors, beside other work if they like.

On a CPU these are sends and receives of gloo, each receive asked for before anything is sent. gloo's own exchange sends first:
its request for what is to come then waits behind what goes out, on the one connection between two ranks, and a link that could
carry both directions at once carries one after the other (3.5 MB each way at 1 Gbit/s: 30 ms instead of 29 to 57). Its
gathers and reductions copy what comes in their own threads' heaps, 60 and 124 MB that stay for messages of 20 MB.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.training.bursts import BURSTS

SENT: Counter[str] = Counter()
"""Bytes of gradients, weights and activations that this process sent to other ranks, by the kind of parallelism."""

Exchange = Iterator[dist.Work]
"""Tensors that ranks exchange: it yields what it waits for, and is to be asked again once that has ended."""

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Of one tensor, by their names since torch 2.13 or before."""

_FIRST_TAG, _N_TAGS = 2**10, 2**30
"""Of exchanges, which ranks number alike in each group. Smaller ones are those of ``dist.send`` and ``dist.recv``."""

_numbers: Counter[str] = Counter()


class _All(dist.Work):
    """Several works as one. It keeps the tensors that they read and write."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._works, self._tensors = works, tensors

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True


def all_to_all(
    came: Tensor, sent: Tensor, group: Any, n_came: Sequence[int] | None = None, n_sent: Sequence[int] | None = None
) -> dist.Work:
    """Begin to send the i-th part of ``sent`` to rank i of ``group``, and to fill ``came`` with what comes from its ranks, in
    their order. Parts are equal, or ``n_sent`` and ``n_came`` rows."""
    if sent.device.type != "cpu":
        work: dist.Work = dist.all_to_all_single(came, sent, n_came, n_sent, group=group, async_op=True)
        return work
    n = dist.get_world_size(group)
    parts = sent.flatten().chunk(n) if n_sent is None else sent.split(list(n_sent))
    places = came.flatten().chunk(n) if n_came is None else came.split(list(n_came))
    return _begun(places, parts, group)


def gather_into(found: Tensor, own: Tensor, group: Any, kind: str | None) -> dist.Work:
    """Begin to fill ``found`` with ``own`` of each rank of ``group``, in their order, counted as ``kind`` if that is given."""
    n = dist.get_world_size(group)
    if kind is not None:
        SENT[kind] += (n - 1) * own.numel() * own.element_size()
    if own.device.type != "cpu":
        work: dist.Work = all_gather(found.view(-1), own.flatten(), group=group, async_op=True)
        return work
    return _begun(list(found.view(n, -1)), [own.flatten()] * n, group)


def _begun(places: Sequence[Tensor], parts: Sequence[Tensor], group: Any) -> dist.Work:
    n, own = len(parts), dist.get_rank(group)
    here, there = parts[own], places[own]
    if (here.untyped_storage()._cdata, here.storage_offset()) != (there.untyped_storage()._cdata, there.storage_offset()):
        there.copy_(here)
    tag = _FIRST_TAG + _numbers[group.group_name] % _N_TAGS
    _numbers[group.group_name] += 1
    BURSTS.begin()
    others = [(own + apart) % n for apart in range(1, n)]
    works = [group.recv([places[rank]], rank, tag) for rank in reversed(others) if places[rank].numel()]
    works += [group.send([parts[rank]], rank, tag) for rank in others if parts[rank].numel()]
    return _All(works, [*places, *parts])


class Sending:
    """An exchange of n equal pieces of ``sent`` with the ranks of ``group``, counted as ``kind``."""

    def __init__(self, sent: Tensor, group: Any, kind: str) -> None:
        self._n = n = dist.get_world_size(group)
        self._came = torch.empty_like(sent)
        SENT[kind] += (n - 1) * sent.numel() * sent.element_size() // n
        self.work = all_to_all(self._came, sent, group)

    def pieces(self) -> list[Tensor]:
        """What came from the group's ranks, in their order, once ``work`` has ended."""
        return list(self._came.view(self._n, -1))


def gathered(own: Tensor, group: Any, kind: str | None = None) -> Tensor:
    """(ranks, n): ``own`` of each rank of ``group``, of equal length, counted as ``kind`` if that is given."""
    n = dist.get_world_size(group)
    found = torch.empty(n * own.numel(), dtype=own.dtype, device=own.device)
    gather_into(found, own, group, kind).wait()
    return found.view(n, -1)


class UnderWay:
    """Exchanges that go on beside other work. All ranks of a group begin theirs in one order.

    When one begins, those before it go on to their next wait, in their order, whether what they wait for has come or not: so
    ranks of different speed send in one order, and no more is held than an exchange has stages.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Exchange, dist.Work]] = deque()

    @torch.no_grad()
    def begin(self, exchange: Exchange) -> None:
        self._go_on()
        self._run(exchange)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all of them."""
        while self._waiting:
            self._go_on()

    def _go_on(self) -> None:
        for _ in range(len(self._waiting)):
            exchange, work = self._waiting.popleft()
            work.wait()
            del work  # it holds what was sent
            self._run(exchange)

    def _run(self, exchange: Exchange) -> None:
        work = next(exchange, None)
        if work is not None:
            self._waiting.append((exchange, work))


def wait_for(exchange: Exchange) -> None:
    """Let ``exchange`` come to its end."""
    running = UnderWay()
    running.begin(exchange)
    running.finish()
