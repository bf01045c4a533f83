"""What ranks hold while they exchange gradients is what plans count: bytes an element of a bucket, or of a unit of shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranked import RankRunner
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.policy import BUCKET_BYTES
from twostroke.planner.training.exchanging import exchanged_bytes, largest_buckets, reducing_bytes, under_way_bytes
from twostroke.planner.training.memory import FP32
from twostroke.planner.training.shape import TrainingShape

RANKS, COLUMNS = 2, 1024
SIZES = [(1001, COLUMNS), (2999, COLUMNS), (COLUMNS,), (4000, COLUMNS), (700, COLUMNS)]
"""Of gradients that go into buckets, the first of which is filled up for the ranks to share."""


class Held(TorchDispatchMode):
    """The most bytes that tensors made inside have taken at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in given:
                self._alive[key] = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.most = max(self.most, sum(n_bytes for _, n_bytes in self._alive.values()))
        return found


def _sum_of_replicas(ranks: Any, exact: bool, wire: torch.dtype) -> int:
    ranks.lay_out(ParallelRecipe(data=RANKS, exact=exact))
    tensors = [torch.ones(size).to(wire).float() for size in SIZES]
    ranks.group("replica")
    with Held() as held:
        ranks.sum_along(("replica",), tensors, wire)
    assert all(bool((tensor == RANKS).all()) for tensor in tensors)
    return held.most


def _behind_each_other(ranks: Any) -> int:
    from twostroke.training.exchanges import UnderWay
    from twostroke.training.ranks import buckets

    ranks.lay_out(ParallelRecipe(data=RANKS, exact=True))
    tensors = [torch.ones(size) for size in SIZES]
    ranks.group("replica")
    under_way = UnderWay()
    with Held() as held:
        for bucket in buckets(tensors):
            under_way.begin(ranks.summing(("replica",), bucket))
        under_way.finish()
    assert all(bool((tensor == RANKS).all()) for tensor in tensors)
    return held.most


def _reduced(ranks: Any, wire: torch.dtype, n_elements: int) -> int:
    from twostroke.training.exchanges import UnderWay
    from twostroke.training.parallelize import OrderedReduceScatter

    ranks.lay_out(ParallelRecipe(data=1, shard=RANKS))
    message, own = torch.ones(n_elements), torch.empty(n_elements // RANKS)
    group = ranks.group("shard")
    under_way = UnderWay()
    with Held() as held:
        OrderedReduceScatter(wire, ranks, under_way)(own, message, group, None)
        under_way.finish()
    assert bool((own == RANKS).all())
    return held.most + sum(tensor.numel() * tensor.element_size() for tensor in (message, own))


@pytest.mark.parametrize(("dtype", "wire"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("exact", [True, False])
def test_replicas_hold_the_buffers_of_one_bucket(runner: RankRunner, exact: bool, dtype: str, wire: torch.dtype) -> None:
    """Beside them are the few numbers that fill a bucket up, and a count."""
    bucket, _ = largest_buckets(float(torch.Size(size).numel()) for size in SIZES)
    assert FP32 * bucket > BUCKET_BYTES
    sums = 1 if exact else 2  # one gradient alone is sent in its own type
    planned = exchanged_bytes(TrainingShape(dtype=dtype, exact=exact, gradient_sums=sums), bucket, 0.0, RANKS, False)
    for _, most, _ in runner.call(_sum_of_replicas, RANKS, exact, wire if exact else torch.float32):
        assert most == pytest.approx(planned, rel=1e-3)


@pytest.mark.parametrize(("dtype", "wire"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_shards_hold_a_unit_as_its_message_and_what_has_come(runner: RankRunner, dtype: str, wire: torch.dtype) -> None:
    n_elements = 2**20
    shape = TrainingShape(dtype=dtype, exact=True, gradient_sums=1)
    for _, most, _ in runner.call(_reduced, RANKS, wire, n_elements):
        assert most == pytest.approx(n_elements * reducing_bytes(shape, RANKS, False), rel=1e-3)


def test_a_bucket_stands_beside_the_one_before_it(runner: RankRunner) -> None:
    bucket, before = largest_buckets(float(torch.Size(size).numel()) for size in SIZES)
    assert 0 < before < bucket
    planned = exchanged_bytes(TrainingShape(dtype="fp32", exact=True, gradient_sums=1), bucket, before, RANKS, False)
    for _, most, _ in runner.call(_behind_each_other, RANKS):
        assert most == pytest.approx(planned, rel=1e-3)


def _two_units(ranks: Any, wire: torch.dtype, n_elements: int) -> int:
    from twostroke.training.exchanges import UnderWay
    from twostroke.training.parallelize import OrderedReduceScatter

    ranks.lay_out(ParallelRecipe(data=1, shard=RANKS))
    group, under_way = ranks.group("shard"), UnderWay()
    reduce = OrderedReduceScatter(wire, ranks, under_way)
    own = [torch.empty(n_elements // RANKS) for _ in range(2)]
    first, second = torch.ones(n_elements), torch.ones(n_elements)
    with Held() as held:
        reduce(own[0], first, group, None)
    of_one = held.most + FP32 * n_elements
    reduce(own[1], second, group, None)
    under_way.finish()
    assert all(bool((rows == RANKS).all()) for rows in own)
    return of_one


@pytest.mark.parametrize(("dtype", "wire"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_unit_is_under_way_until_the_next_one_is_there(runner: RankRunner, dtype: str, wire: torch.dtype) -> None:
    n_elements = 2**20
    shape = TrainingShape(dtype=dtype, exact=True, gradient_sums=1)
    for _, of_one, _ in runner.call(_two_units, RANKS, wire, n_elements):
        assert of_one == n_elements * under_way_bytes(shape, False)[0]
