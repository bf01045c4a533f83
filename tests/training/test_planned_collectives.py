"""Collectives of published models at 8 to 512 ranks, counted without data: torch's fake group and fake tensors beside plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from twostroke.core.families import named_model
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import recipe_from_dict
from twostroke.core.spec import ModelSpec
from twostroke.model.decoder import Decoder
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.exchanges import SENT
from twostroke.training.parallelize import CountedAllGather, OrderedReduceScatter
from twostroke.training.ranked_masters import ShardedMasters
from twostroke.training.ranks import Ranks
from twostroke.training.tensor_parallel import cut_decoder

LAYERS, TOKENS = 2, 512
"""Layers of the published width: each sends what any other does."""

EXCHANGES = ("twostroke::gather_sequence", "twostroke::scatter_sequence")


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Rank 0 of a group in which nothing travels."""
    layout = ParallelRecipe(**request.param)
    dist.init_process_group("fake", rank=0, world_size=layout.of_a_replica, store=FakeStore())
    found = Ranks(0, layout.of_a_replica)
    found.lay_out(layout.on(found.n, found.n))
    found.mesh("shard" if layout.shard > 1 else "tensor")  # made of numbers, which fake tensors have not
    SENT.clear()
    try:
        yield found
    finally:
        dist.destroy_process_group()
        SENT.clear()


def _spec(name: str) -> ModelSpec:
    return named_model(name).spec.with_(n_layers=LAYERS)


def _empty(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """A decoder of tensors without memory, inside ``FakeTensorMode``."""
    decoder = Decoder(spec, device="meta")
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
    return decoder.train()


def _pass(decoder: Decoder) -> None:
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    hidden = decoder.hidden(ids, torch.arange(TOKENS)[None], ids)
    nn.functional.linear(hidden, decoder.head_weight).float().sum().backward()


def _plan(spec: ModelSpec, ranks: Ranks) -> TrainingPlan:
    settings = {"steps": 1, "batch_size": 1, "sequence_length": TOKENS, "dtype": "bf16"}
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 1, "d_ff": 8}
    layout = {"shard": ranks.layout.shard, "tensor": ranks.layout.tensor}
    recipe = recipe_from_dict({"train": settings, "model": sizes, "parallel": layout})
    return plan_training(spec, TrainingShape.from_recipe(recipe), load_hardware("h100"), layout_of(recipe.parallel, spec))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("meta-llama/Llama-3.1-8B", {"shard": 8}),
        ("meta-llama/Llama-3.1-70B", {"shard": 64}),
        ("meta-llama/Llama-3.1-405B", {"shard": 512}),
    ],
    indirect=["ranks"],
)
def test_shards_gather_and_reduce_what_is_planned(name: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding and head and the first block stay gathered for the next micro-batch, the last block from forward to
    backward."""
    counted: Counter[str] = Counter()
    for kind in (CountedAllGather, OrderedReduceScatter):

        def call(self: Any, *arguments: Any, kind: Any = kind, original: Any = kind.__call__, **named: Any) -> Any:
            counted[kind.__name__] += 1
            return original(self, *arguments, **named)

        monkeypatch.setattr(kind, "__call__", call)
    spec = _spec(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoder = _empty(spec, torch.float32)
        masters = ShardedMasters(decoder, torch.bfloat16, torch.float32, ranks)
        _pass(decoder)
        masters.accumulate()
        one = Counter(counted)
        sent = SENT["data"]
        _pass(decoder)
        masters.accumulate()
        both = Counter(counted)
    once, gathered, again, reduced = _plan(spec, ranks).traffic
    assert one == {"CountedAllGather": 2 * LAYERS, "OrderedReduceScatter": LAYERS + 1}
    assert both - one == {"CountedAllGather": 2 * LAYERS - 2, "OrderedReduceScatter": LAYERS + 1}
    assert (once.bursts, gathered.bursts, again.bursts, reduced.bursts) == (2, LAYERS - 1, LAYERS - 1, LAYERS + 1)
    planned = once.sent_bytes + gathered.sent_bytes + again.sent_bytes + reduced.sent_bytes
    assert sent == pytest.approx(planned, rel=3e-3)  # rows are filled up to a multiple of the ranks


class _Calls(TorchDispatchMode):
    """Counts ``EXCHANGES``, and the bytes of the whole sequences that they gather or scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.n: Counter[str] = Counter()
        self.whole_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.name() in EXCHANGES:
            self.n[func.name()] += 1
            self.whole_bytes += max(t.numel() * t.element_size() for t in (args[0], found))
        return found


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("meta-llama/Llama-3.1-8B", {"tensor": 8}), ("meta-llama/Llama-3.1-405B", {"tensor": 8})],
    indirect=["ranks"],
)
def test_matrices_are_shared_by_as_many_exchanges_as_planned(name: str, ranks: Ranks) -> None:
    spec = _spec(name)
    with FakeTensorMode(allow_non_fake_inputs=True), _Calls() as calls:
        decoder = _empty(spec, torch.bfloat16)
        cut_decoder(decoder, ranks)
        _pass(decoder)
    planned, _ = _plan(spec, ranks).traffic  # the other comes after the passes
    assert calls.n == dict.fromkeys(EXCHANGES, planned.bursts)
    assert (ranks.n - 1) / ranks.n * calls.whole_bytes == pytest.approx(planned.sent_bytes)
