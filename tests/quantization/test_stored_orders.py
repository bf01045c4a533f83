"""Matrices that a family stores in another order of rows are quantised and read back as the decoder holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_models import saved
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.load import expanded, load_any_state


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("family", ["gpt_neox", "falcon", "phi3"])
def test_a_quantised_copy_holds_the_rows_of_its_model(family: str, scheme: str, tmp_path: Path) -> None:
    decoder, directory = saved(family, tmp_path / "m")
    quantize_model(directory, tmp_path / "q", scheme)
    _, state = load_any_state(tmp_path / "q")
    for name, weight in decoder.state_dict().items():
        lost = (expanded(state, name).float() - weight).norm() / weight.norm()
        assert lost < (0.02 if scheme == "int8" else 0.15), name  # rows in another order would lose more than 1
    assert torch.isfinite(expanded(state, "blocks.0.attn.qkv.weight")).all()
