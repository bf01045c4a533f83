"""The planner's choice of a layout for training: what fits, what is fast, and what keeps the bits of one rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from twostroke.core.errors import ConfigError
from twostroke.core.families import named_model
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.core.spec import ModelSpec
from twostroke.planner.choosing.layouts import choose_layout, every_layout
from twostroke.planner.hardware.tables import load_hardware

SPEC = named_model("meta-llama/Llama-3.1-8B").spec


def _recipe(**parallel: Any) -> TrainRecipe:
    train = {"steps": 10, "batch_size": 1, "sequence_length": 4096, "grad_accumulation": 64, "dtype": "bf16"}
    model = {"n_layers": 1, "d_model": 8, "n_heads": 1, "d_ff": 8}
    return recipe_from_dict({"train": train, "model": model, "parallel": {"layout": "auto", **parallel}})


def _any(recipe: TrainRecipe, spec: ModelSpec, layout: ParallelRecipe) -> None:
    if layout.tensor > 8 or layout.context > 1:
        raise ConfigError("left out here.")


def test_the_fastest_that_fits_is_chosen_and_said() -> None:
    h100 = load_hardware("h100")
    chosen, sentence = choose_layout(_recipe(), SPEC, 8, h100, _any)
    assert chosen.of_a_replica > 1, "8B with fp32 masters does not fit one H100"
    assert chosen.tensor == 1, "exact"
    assert not chosen.is_auto
    assert sentence.startswith("layout of 8 ranks, as planned the fastest of ")
    any_bits, _ = choose_layout(_recipe(exact=False), SPEC, 8, h100, _any)
    assert any_bits.of_a_replica > 1
    small = dataclasses.replace(SPEC, n_layers=2, vocab_size=1000)
    assert "next is data=2, shard=4, zero=2" in choose_layout(_recipe(), small, 8, h100, _any)[1]


def test_replicas_of_shards_in_stages_are_chosen_where_nodes_are_far_apart() -> None:
    """Where the network is a tenth, shards stay inside a node of 8 and stages take turns with two chunks each."""
    h100 = load_hardware("h100")
    assert choose_layout(_recipe(), SPEC, 64, h100, _any)[0].shard == 64
    slow = dataclasses.replace(h100.network, bytes_per_s=h100.network.bytes_per_s / 10)
    chosen, sentence = choose_layout(_recipe(), SPEC, 64, dataclasses.replace(h100, network=slow), _any)
    assert (chosen.data, chosen.shard, chosen.pipeline, chosen.interleave) == (2, 8, 4, 2)
    assert "data=2, shard=8, pipeline=4, zero=2, interleave=2" in sentence


def test_what_fits_nowhere_and_what_divides_nothing_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"found no layout that fits 2 ranks: the smallest, .* a rank. Start more ranks"):
        choose_layout(_recipe(), SPEC, 2, load_hardware("l4"), _any)
    with pytest.raises(ConfigError, match=r"found no layout that divides the model, train.grad_accumulation=64 and 11 ranks"):
        choose_layout(_recipe(), dataclasses.replace(SPEC, n_layers=5), 11, load_hardware("h100"), _any)
    with pytest.raises(ConfigError, match=r'parallel.layout="auto" leaves parallel.shard to the planner, and it is 2'):
        _recipe(shard=2)


def test_every_way_to_cut_is_tried_once() -> None:
    found = list(every_layout(ParallelRecipe(layout="auto"), 8))
    assert len(found) == len(set(found))
    assert {layout.ranks for layout in found} == {8}
    assert {(layout.shard, layout.zero) for layout in found} >= {(1, 3), (8, 2), (8, 3)}
    assert {(layout.data, layout.shard) for layout in found} >= {(8, 1), (4, 2), (2, 4), (1, 8)}
    assert {(layout.pipeline, layout.interleave) for layout in found} >= {(1, 1), (2, 1), (8, 8)}
    assert all(layout.interleave == 1 for layout in found if layout.pipeline == 1)
