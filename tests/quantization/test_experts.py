"""Mixtures of experts are quantised expert by expert, and the copies are read back, however a family stores its experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from small_models import saved
from twostroke.core.errors import ConfigError
from twostroke.core.families import layout
from twostroke.kernels.codes import quantize
from twostroke.core.schemes import SCHEMES
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.load import expanded, load_any_state

MIXTURES = ("mixtral", "qwen2_moe", "olmoe", "granitemoe", "glm4_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "fp8"])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_copy_of_a_mixture_holds_each_experts_matrix(family: str, scheme: str, tmp_path: Path) -> None:
    decoder, directory = saved(family, tmp_path / "m")
    quantize_model(directory, tmp_path / "q", scheme)
    _, state = load_any_state(tmp_path / "q")
    entries = {entry.canonical: entry for entry in layout(decoder.spec)}
    for name, weight in decoder.tensors.items():
        if entries[name].matrix is None:
            assert torch.equal(state[name].float(), weight.bfloat16().float()), name
        else:
            assert torch.equal(expanded(state, name).float(), quantize(weight, SCHEMES[scheme].here).values()), name


def test_experts_in_one_tensor_are_refused_where_a_method_has_no_layout_for_them(tmp_path: Path) -> None:
    _, directory = saved("granitemoe", tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"experts": {"targets": ["re:.*block_sparse_moe.*put_linear"], "weights": weights}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="stored as one tensor"):
        load_any_state(directory)
