from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.core.errors import Interrupted
from twostroke.core.recipe import ModelRecipe, spec_from_recipe
from twostroke.data.loader import Batch
from twostroke.model.decoder import Decoder
from twostroke.training.diagnostics import (
    SAMPLED_PER_TENSOR,
    WeightSample,
    activation_statistics,
    evaluating,
    update_ratios,
)
from twostroke.training.start import train


def _log(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def _decoder(**sizes: Any) -> Decoder:
    recipe = ModelRecipe(**{"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24} | sizes)
    return Decoder(spec_from_recipe(recipe, vocab_size=40, sequence_length=8))


def _batch() -> Batch:
    tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(8).expand(2, 8)
    return Batch(tokens, tokens, positions, torch.zeros_like(tokens), 16)


def test_statistics_are_those_of_the_plain_forward_pass() -> None:
    decoder, batch = _decoder(), _batch()
    found = activation_statistics(decoder, batch)
    streams, inner = [], []
    with torch.no_grad():  # the same by hand, block after block
        from twostroke.model.rope import rope_tables

        x, rope = decoder.embed(batch.tokens), rope_tables(decoder.spec, batch.positions)
        for block in decoder.blocks:
            after_attention = x + block.attn(block.attn_norm(x), rope, None)
            gate, up = block.mlp.gate_up(block.mlp_norm(after_attention)).chunk(2, dim=-1)
            inner.append(torch.nn.functional.silu(gate) * up)
            x = block(x, rope, None)
            streams.append(x)
    for name, values in {
        "residual_rms": [float(x.square().mean().sqrt()) for x in streams],
        "residual_max": [float(x.abs().max()) for x in streams],
        "mlp_rms": [float(x.square().mean().sqrt()) for x in inner],
        "mlp_max": [float(x.abs().max()) for x in inner],
    }.items():
        assert found[name] == pytest.approx(values, rel=1e-5)  # six digits are kept
    assert found["mlp_zero_share"] == [0.0, 0.0]
    assert len(found["mlp_dead_share"]) == 2


def test_channels_that_never_answer_are_counted_dead() -> None:
    decoder = _decoder()
    with torch.no_grad():
        decoder.blocks[1].mlp.gate_up.weight[24:30] = 0.0  # six of 24 up channels
    found = activation_statistics(decoder, _batch())
    assert found["mlp_zero_share"] == pytest.approx([0.0, 0.25])
    assert found["mlp_dead_share"][1] - found["mlp_dead_share"][0] == pytest.approx(0.25, abs=1 / 24)


def _never_called(*args: Any) -> None:
    raise AssertionError("a compiled block was run, on a shape it was not compiled for")


def test_looking_leaves_random_state_mode_hooks_and_compiled_blocks_as_they_were() -> None:
    decoder = _decoder(family="gpt2", dropout=0.5)
    decoder.train()
    for block in decoder.blocks:
        block._compiled_call_impl = _never_called  # what block.compile() sets
    before, compiled = torch.get_rng_state(), [block._compiled_call_impl for block in decoder.blocks]
    assert activation_statistics(decoder, _batch()) == activation_statistics(decoder, _batch())  # no dropout
    with evaluating(decoder):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in decoder.modules())
    assert [block._compiled_call_impl for block in decoder.blocks] == compiled
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in decoder.modules())


def test_update_ratio_is_the_norm_of_the_change_over_the_norm_before() -> None:
    weights = {"embed.weight": torch.ones(4, 4), "blocks.0.a": torch.full((3,), 2.0), "blocks.0.b": torch.zeros(5)}
    sample = WeightSample(weights | {"blocks.1.zeros": torch.zeros(2)})
    after = {"embed.weight": torch.full((4, 4), 1.25), "blocks.0.a": torch.full((3,), 2.0), "blocks.0.b": torch.ones(5)}
    ratios = update_ratios([sample.squares(after | {"blocks.1.zeros": torch.ones(2)})])
    assert ratios == {"embed": 0.25, "blocks.0": pytest.approx(math.sqrt(5 / 12), rel=1e-5)}


def test_update_ratio_of_a_large_tensor_is_near_the_whole_tensors_and_sees_every_column() -> None:
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(3000, 400, generator=draw)
    after = before.clone()
    after[:, 7] += 1.0  # one column in 400
    exact = float((after - before).norm() / before.norm())
    found = update_ratios([WeightSample({"head.weight": before}).squares({"head.weight": after})])["head"]
    assert before.numel() > 10 * SAMPLED_PER_TENSOR
    assert found == pytest.approx(exact, rel=0.15)  # about 160 of the column's values are in the sample: 1/√160 is 8%


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "pure_bf16"])
def test_a_run_with_diagnostics_ends_in_the_same_weights_and_logs_them_where_due(make_recipe, dtype: str) -> None:
    sizes = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48, "dropout": 0.2}
    plain = train(make_recipe("plain", model=sizes, steps=5, dtype=dtype))
    watched = train(make_recipe("watched", model=sizes, steps=5, dtype=dtype, diagnostics_every=2))
    files = [result.model / "model.safetensors" for result in (plain, watched)]
    assert files[0].read_bytes() == files[1].read_bytes()
    lines = _log(watched.directory)
    assert ["activations" in line for line in lines] == [False, True, False, True, False]
    assert ["update_ratios" in line for line in lines] == [False, True, False, True, False]
    assert len(lines[1]["activations"]["residual_rms"]) == 2
    assert lines[1]["update_ratios"].keys() == lines[1]["block_grad_norms"].keys()
    assert all(0 < ratio < 1 for ratio in lines[1]["update_ratios"].values())
    total = math.sqrt(sum(norm**2 for norm in lines[1]["block_grad_norms"].values()))
    assert total == pytest.approx(lines[1]["grad_norm"], rel=1e-4)
    for line in lines:
        assert line["data_wait_share"] == pytest.approx(line["data_s"] / line["step_time_s"], rel=1e-4)
    assert [line["elapsed_s"] for line in lines] == sorted(line["elapsed_s"] for line in lines)


def test_resumed_before_a_step_to_look_at_it_looks_all_the_same(make_recipe) -> None:
    recipe = make_recipe("resumed", steps=4, diagnostics_every=2)
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda step: step == 1)
    resumed, whole = train(recipe, resume=True), train(make_recipe("whole", steps=4, diagnostics_every=2))
    for a, b in zip(_log(resumed.directory), _log(whole.directory), strict=True):
        assert a.get("update_ratios") == b.get("update_ratios")
        assert a.get("activations") == b.get("activations")
