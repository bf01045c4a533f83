"""Sums in a tree: the same bits however many ranks share the leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.training.ranks import Ranks
from twostroke.training.tree_sums import TreeSum, tree_sum


def added(leaves: list[torch.Tensor]) -> torch.Tensor:
    total = TreeSum()
    for leaf in leaves:
        total.add([leaf.clone()])
    return total.total()[0]


@settings(deadline=None)
@given(
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_layouts_add_in_one_order(micro: int, data: int, shard: int, dtype: torch.dtype, seed: int) -> None:
    """Each rank adds its own micro-batches, the ranks of a replica pass by pass, replicas at the end."""
    n = 2 ** max(micro, data + shard)
    torch.manual_seed(seed)
    leaves = [(torch.randn(7) * 10 ** float(torch.randn(()))).to(dtype) for _ in range(n)]
    ranks = [Ranks(rank, 2 ** (data + shard)) for rank in range(2 ** (data + shard))]
    for rank in ranks:
        rank.layout = ParallelRecipe(data=2**data, shard=2**shard)
    replicas = []
    for replica in range(2**data):
        members = [rank.micro_batches(n) for rank in ranks if rank.replica == replica]
        passes = [tree_sum([leaves[number].clone() for number in together]) for together in zip(*members, strict=True)]
        replicas.append(added(passes))
    assert torch.equal(tree_sum(replicas), added(leaves))
    assert sorted(number for rank in ranks for number in rank.micro_batches(n)) == list(range(n))


@pytest.mark.parametrize("n", range(1, 18))
def test_a_tree_holds_few_partial_sums(n: int) -> None:
    total, leaves = TreeSum(), [torch.tensor([float(value)]) for value in range(n)]
    for leaf in leaves:
        total.add([leaf])
        assert sum(level is not None for level in total._levels) <= n.bit_length()
    found = total.total()[0]
    assert found.item() == n * (n - 1) / 2
    assert found is leaves[0]
