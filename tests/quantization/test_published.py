"""Checkpoints that other tools quantise: read, held in codes where that is exact, and planned as they are held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from published_layouts import LAYOUTS, publish
from twostroke.core.families import read_spec
from twostroke.model.load import load_model
from twostroke.quantization.held import held
from twostroke.quantization.load import expanded, load_any_state

FAMILIES = ["qwen2", "phi3", "gpt_neox", "gpt2", "glm4", "falcon", "cohere2"]
"""Beside llama: biases, fused products, rows by group, transposed storage, norms around, tied heads, branches side by side."""

TOKENS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(3))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def check(family: str, name: str, folder: Path) -> None:
    wanted = publish(family, folder, LAYOUTS[name])
    found = load_model(folder / "published")
    with torch.inference_mode():
        assert relative(found(TOKENS), wanted(TOKENS)) < 1e-4
    spec, state = load_any_state(folder / "published")
    assert spec == found.spec
    for parameter, weight in wanted.named_parameters():
        assert relative(expanded(state, parameter).float(), weight.detach()) < 1e-6, parameter
    coded = {tensor for tensor in state if f"{tensor.removesuffix('.weight')}.scale" in state}
    assert bool(coded) == (LAYOUTS[name].scheme is not None)
    assert held(folder / "published", spec).scheme == (LAYOUTS[name].scheme or "bf16")


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_checkpoint_stands_for_the_numbers_that_its_format_defines(name: str, tmp_path: Path) -> None:
    check("llama", name, tmp_path)


@pytest.mark.parametrize("name", ["gptq-4-32-asym", "awq-32", "ct-w4-64-asym", "ct-int8-channel", "fp8-block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_of_a_dense_family_is_read(family: str, name: str, tmp_path: Path) -> None:
    check(family, name, tmp_path)
