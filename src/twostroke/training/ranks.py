"""The processes that train one run together: their group, what they agree on, and what the first of them does for all."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.core.errors import InputError, TwostrokeError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.policy import BUCKET_BYTES
from twostroke.training.bursts import BURSTS
from twostroke.training.exchanges import SENT, Exchange, Sending, all_gather, gather_into, wait_for
from twostroke.training.progress import Phase, Progress
from twostroke.training.tree_sums import tree_sum

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""Longest wait for another rank inside a step. A rank that was killed is noticed at once, by its closed connections."""

LONGEST_WORK = timedelta(days=1)
"""Longest wait for what the first rank does for all: preparing data, writing a model."""

AXES = ("replica", "shard", "expert", "pipeline", "context", "tensor")
"""What ranks are numbered by, the last one fastest: ranks of a replica are neighbours, and so are those of a tensor."""


class RankLost(TwostrokeError):
    """Another rank ended or hangs. ``train --ranks`` says which, so the ranks that it started do not."""


class NotJoined(InputError):
    """The other ranks did not come, or the port of the first one was taken meanwhile."""


class Part(Protocol):
    """A tensor of ``shape`` that ranks hold together."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_of_replicas(self) -> bool:
        """Whether each replica holds a piece of its own; if not, replicas hold the same."""

    def gather(self, ranks: Ranks) -> Tensor | None:
        """The whole tensor on the first rank, None on others. All ranks of the first replica call it, or of all."""


class Ranks:
    """One process of ``n``. ``layout`` is set by ``lay_out``, and gives each rank a number along each of ``AXES``."""

    def __init__(self, rank: int = 0, n: int = 1, control: Any = None) -> None:
        self.rank, self.n = rank, n
        self.layout = ParallelRecipe(data=n)
        self.parts: Callable[[], Mapping[str, Part]] = dict
        self._groups: dict[tuple[str, ...], Any] = {}
        self._meshes: dict[tuple[str, ...], Any] = {}
        self._control = control
        self._leading = False
        self.is_alone = False
        self.beside = 0
        self.progress = Progress()

    # -- who ----------------------------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def size(self, *axes: str) -> int:
        """Ranks that differ in ``axes`` alone."""
        return math.prod(self.layout.data if axis == "replica" else getattr(self.layout, axis) for axis in axes)

    def at(self, *axes: str) -> int:
        """The number of this rank among those that differ from it in ``axes`` alone."""
        return self.number_along(axes, self._places(self.rank))

    def _places(self, rank: int) -> dict[str, int]:
        """The number of ``rank`` along each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def number_along(self, axes: Iterable[str], places: Mapping[str, int]) -> int:
        """The number of the rank at ``places`` among those that differ in ``axes`` alone."""
        number = 0
        for axis in AXES:
            if axis in axes:
                number = number * self.size(axis) + places[axis]
        return number

    def rank_at(self, places: Mapping[str, int]) -> int:
        """The rank of the first replica at ``places``, and at 0 along other axes."""
        return self.number_along(AXES, dict.fromkeys(AXES, 0) | dict(places))

    def neighbour(self, axis: str, number: int) -> int:
        """The rank that is ``number`` along ``axis``, and else where this one is."""
        return self.number_along(AXES, self._places(self.rank) | {axis: number})

    def places_along(self, axes: Sequence[str]) -> list[dict[str, int]]:
        """Where the ranks are that differ in ``axes``, in their order."""
        found: list[dict[str, int]] = [{}]
        for axis in (axis for axis in AXES if axis in axes):
            found = [places | {axis: number} for places in found for number in range(self.size(axis))]
        return found

    @property
    def replica(self) -> int:
        return self.at("replica")

    @property
    def n_readers(self) -> int:
        """Ranks that compute different micro-batches."""
        return self.n // self.layout.together

    def of_readers(self, by_rank: list[T]) -> list[T]:
        """Of what each rank found, that of one rank of each micro-batch."""
        return by_rank[:: self.layout.together]

    def of_tokens(self, by_rank: list[T]) -> list[T]:
        """Of what each rank found, that of one rank of each token: of the last stage, and the first of a tensor's."""
        last = {"pipeline": self.layout.pipeline - 1, "tensor": 0}
        return [found for rank, found in enumerate(by_rank) if last.items() <= self._places(rank).items()]

    def lay_out(self, layout: ParallelRecipe) -> None:
        """Use ``layout``, which ``ParallelRecipe.on`` has filled in. Raises InputError if ranks here cannot hold its pace."""
        if layout.pace_mbit and (torch.cuda.is_available() or sys.platform != "linux"):
            raise InputError(
                f"parallel.pace_mbit={layout.pace_mbit:g} holds TCP connections of ranks to a rate, which works on CPUs and on "
                "Linux. Leave it out."
            )
        self.layout, self._groups, self._meshes = layout, {}, {}

    def group(self, *axes: str) -> Any:
        """The ranks that differ from this one in ``axes`` alone, in their order. All ranks ask for the same axes in the same
        order."""
        key = tuple(axis for axis in AXES if axis in axes and self.size(axis) > 1)
        if key not in self._groups:
            members: dict[tuple[int, ...], list[int]] = {}
            for rank in range(self.n):
                places = self._places(rank)
                members.setdefault(tuple(places[axis] for axis in AXES if axis not in key), []).append(rank)
            is_watched = key and not torch.cuda.is_available()
            with BURSTS.connecting(self.layout.pace_mbit * 1e6 / 8) if is_watched else contextlib.nullcontext():
                self._groups[key], _ = dist.new_subgroups_by_enumeration(list(members.values()), TIMEOUT)
        return self._groups[key]

    def mesh(self, *axes: str) -> Any:
        """``group`` as torch's mesh of one dimension, for accelerators where there are some."""
        from torch.distributed.device_mesh import DeviceMesh

        key = tuple(axis for axis in AXES if axis in axes)
        if key not in self._meshes:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
            self._meshes[key] = DeviceMesh.from_group(self.group(*axes), device_type)
        return self._meshes[key]

    def micro_batches(self, n: int) -> list[int]:
        """Numbers of those of a step's ``n`` micro-batches that this rank computes.

        Replicas take whole branches of the sum's tree, so that they exchange gradients once a step; the ranks of a replica,
        whose gradients are reduced after each pass, take neighbours.
        """
        each = n // self.layout.data
        number, apart = self.at("shard", "expert"), self.size("shard", "expert")
        return list(range(self.replica * each + number, (self.replica + 1) * each, apart))

    @property
    def sums(self) -> str:
        """In which order gradients are added."""
        if self.is_alone:
            return "one after another"
        order = "in a tree" if self.layout.exact else f"by {self.n} ranks"
        cut = self.size("tensor", "context", "expert")
        return order if cut == 1 else f"{order}, of products on {cut} ranks"

    @property
    def n_local(self) -> int:
        """Processes on this machine that share its cores: the ranks, or a lone process and the runs ``beside`` it."""
        return 1 + self.beside if self.n == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", self.n))

    def sharing(self, device_type: str) -> int:
        """Ranks that share the cores of one machine, if these are "cpu"; 1 where each has a device of its own."""
        return self.n_local if device_type == "cpu" else 1

    def told(self, error: TwostrokeError) -> TwostrokeError:
        """``error``, which every rank raises; the first one tells it."""
        error.is_told = not self.is_first
        return error

    # -- agreeing -----------------------------------------------------------------------------------------------------------

    def gathered(self, found: T) -> list[T]:
        """What every rank found, by rank."""
        if self.n == 1:
            return [found]
        everything: list[Any] = [None] * self.n
        dist.all_gather_object(everything, found, group=self._control)
        return everything

    def of_last_layer(self, found: T) -> T:
        """What a rank found that has the last layer, on all ranks."""
        return self.gathered(found)[self.rank_at({"pipeline": self.layout.pipeline - 1})]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        if self.n == 1:
            return flag
        one = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(one, dist.ReduceOp.MAX, group=self._control)
        return bool(one.item())

    def numbers(self, own: Sequence[float]) -> list[list[float]]:
        """``own`` of every rank, which are equally many."""
        if self.n == 1:
            return [list(own)]
        sent = torch.tensor(list(own), dtype=torch.float64)
        found = torch.empty(self.n * len(sent), dtype=torch.float64)
        all_gather(found, sent, group=self._control)
        return found.view(self.n, -1).tolist()

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A context whose errors are raised on every rank. The first rank that has one tells it."""
        error: TwostrokeError | None = None
        try:
            yield
        except TwostrokeError as raised:
            error = raised
        errors = self.gathered(error)
        found = next(((rank, e) for rank, e in enumerate(errors) if e is not None), None)
        if found is not None:
            teller, first = found
            first.is_told = teller != self.rank
            raise first

    def led(self, work: Callable[[], T], phase: Phase | None = None) -> T:
        """What ``work``, of ``phase``, returns on the first rank, which alone does it, on all ranks; its errors likewise.

        The others wait, and hand over the parts of tensors that ``Whole`` asks for.
        """
        if self.n == 1:
            return work()
        if not self.is_first:
            self._hand_over()
            value, error = self._sent(None)
            if error is not None:
                error.is_told = True
                raise error
            return value
        outcome: tuple[Any, TwostrokeError | None] = (None, None)
        self._leading = True
        try:
            with self.progress.doing(phase) if phase is not None else contextlib.nullcontext():
                outcome = (work(), None)
        except TwostrokeError as error:
            outcome = (None, error)
        finally:
            self._leading = False
        self._ask(-1)
        value, failure = self._sent(outcome)
        if failure is not None:
            raise failure
        return value

    def _sent(self, value: Any) -> Any:
        """``value`` of the first rank."""
        box = [value]
        dist.broadcast_object_list(box, 0, group=self._control)
        return box[0]

    def _ask(self, number: int) -> int:
        message = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(message, 0, group=self._control)
        return int(message.item())

    def _hand_over(self) -> None:
        parts: list[Part] | None = None
        while (number := self._ask(0)) >= 0:
            if parts is None:
                found = self.parts()
                parts = [found[name] for name in sorted(found)]
            if self.replica == 0 or parts[number].is_of_replicas:
                parts[number].gather(self)

    def dealt(self, values: Sequence[T] | None) -> T:
        """This rank's of ``values``, of which the first one has one for every rank, and the others None."""
        if self.n == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, None if values is None else list(values), 0, group=self._control)
        own: T = box[0]
        return own

    def collected(self, found: T) -> list[T] | None:
        """What every rank found, by rank, on the first one; None on others."""
        if self.n == 1:
            return [found]
        everything: list[Any] | None = [None] * self.n if self.is_first else None
        dist.gather_object(found, everything, 0, group=self._control)
        return everything

    def whole(self, name: str, found: Mapping[str, Part]) -> Tensor:
        """The tensor of which ``found``, the first rank's ``parts``, has a part by ``name``. Inside ``led`` only."""
        if self.n > 1:
            if not self._leading:
                raise RuntimeError(f"{name} is gathered outside of led()")
            self._ask(sorted(found).index(name))
        tensor = found[name].gather(self)
        assert tensor is not None
        return tensor

    # -- tensors ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sum_along(self, axes: Sequence[str], tensors: Sequence[Tensor], wire: torch.dtype | None = None) -> None:
        """Replace ``tensors`` by their sums over the ranks along ``axes``, as ``summing`` does, and wait for all of them."""
        for bucket in buckets(tensors):
            wait_for(self.summing(axes, bucket, wire))

    def summing(self, axes: Sequence[str], bucket: Sequence[Tensor], wire: torch.dtype | None = None) -> Exchange:
        """Replaces ``bucket`` by its sums over the ranks along ``axes``, sent as ``wire``, the type that holds each of them
        exactly, by default their own.

        It is one exchange, which sends 2·(n − 1)/n of them over n ranks: one after another for each axis would send up to twice
        that. Replicas are added first, so that their number does not change the bits. Without ``exact`` accelerators add in the
        order of their own all-reduce.
        """
        if self.size(*axes) == 1:
            return iter(())
        if not self.layout.exact and bucket[0].device.type != "cpu":
            return _reducing(bucket, self.group(*axes), _kind(axes))
        return _summing_in_order(bucket, self.group(*axes), _kind(axes), wire, self.layout.data if "replica" in axes else 1)

    def sum_counts(self, tensors: Sequence[Tensor]) -> None:
        """Replace ``tensors`` of counts, whose sums are exact in any order, by their sums over all ranks."""
        if self.n > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)


def alone(beside: int = 0) -> Ranks:
    """A process whose recipe has no ``[parallel]``, with as many other runs ``beside`` it on this machine."""
    ranks = Ranks()
    ranks.is_alone, ranks.beside = True, beside
    return ranks


ALONE = alone()


def _kind(axes: Sequence[str]) -> str:
    """As what sums along ``axes`` are counted."""
    return "tensor" if "tensor" in axes else "data"


def _summing_in_order(bucket: Sequence[Tensor], group: Any, kind: str, wire: torch.dtype | None, n_replicas: int) -> Exchange:
    """Replaces ``bucket`` by its sums over ``group``, sent as ``wire``, by default as they are: each rank adds up a piece in
    the tree's order, those of ``n_replicas``, by which ranks are numbered first, before others, and all get it."""
    n = dist.get_world_size(group)
    # Plans count what is held here at once (``planner.training.exchanging``): message and answer, then a piece and its sum,
    # sent to all and come from all.
    dtype, n_elements = bucket[0].dtype, sum(tensor.numel() for tensor in bucket)
    own = -(-n_elements // n)
    filled = [*(tensor.reshape(-1) for tensor in bucket), bucket[0].new_zeros(own * n - n_elements)]
    sending = Sending(torch.cat([part.to(wire or dtype) for part in filled]), group, kind)
    del filled
    yield sending.work
    pieces = sending.pieces()
    del sending
    order = [rank for first in range(n // n_replicas) for rank in range(first, n, n // n_replicas)]
    mine = tree_sum([pieces[rank] for rank in order]).to(dtype, copy=True)  # of fp32 a piece of what has come
    del pieces
    whole = mine.new_empty(n * own)
    yield gather_into(whole, mine, group, kind)
    _split(whole[:n_elements], bucket)


def _reducing(bucket: Sequence[Tensor], group: Any, kind: str) -> Exchange:
    """Replaces ``bucket`` by its sums over ``group`` in the order of torch's own all-reduce."""
    n = dist.get_world_size(group)
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    SENT[kind] += 2 * (n - 1) * flat.numel() * flat.element_size() // n
    yield dist.all_reduce(flat, group=group, async_op=True)
    _split(flat, bucket)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """``tensors`` that are sent at once, in their order."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(t.numel() * t.element_size() for t in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def named_buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """``buckets`` of ``tensors`` with their names."""
    in_order = iter(tensors.items())
    for bucket in buckets(list(tensors.values())):
        yield dict(itertools.islice(in_order, len(bucket)))


def _split(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


@contextlib.contextmanager
def joined(remedy: str = "Continue with --resume.") -> Iterator[Ranks]:
    """The rank that the environment describes, in a group with the others until the end of the context.

    On a GPU it is that of ``LOCAL_RANK``. Raises InputError if the environment is incomplete, and if the others do not come;
    RankLost, with the ``remedy``, if one of them is lost.
    """
    try:
        rank, n, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        _ = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise InputError(
            f"RANK and WORLD_SIZE are set, but not {error} as torchrun sets it. Start with torchrun, or with --ranks N."
        ) from None
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise InputError(f"rank {rank} has LOCAL_RANK={local}, and this machine has {torch.cuda.device_count()} GPUs.")
        torch.cuda.set_device(local)
    progress = Progress.of_this_process(on_gpu)
    progress.mark(Phase.JOINING)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=LONGEST_WORK)
    except (RuntimeError, ValueError) as error:
        raise NotJoined(
            f"rank {rank} could not join {n} ranks at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: "
            f"{_first_line(error)}."
        ) from None
    progress.stood()
    ranks = Ranks(rank, n, control)
    ranks.progress = progress
    try:
        with progress.counting_waits():
            yield ranks
        progress.mark(Phase.ENDING)
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise RankLost(f"rank {rank} lost another one: {_first_line(error)}. {remedy}") from error
    finally:
        BURSTS.close()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether ``error`` is that of a collective whose other ranks are gone or hang."""
    words = ("connection closed by peer", "connection reset", "timed out", "broken pipe", "socket", "gloo", "nccl")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
