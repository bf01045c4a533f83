"""Mixtures of experts are quantised expert by expert, and the copies are read back, however a family stores its experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.families import layout
from twostroke.core.schemes import SCHEMES
from twostroke.engine.core import EngineCore
from twostroke.engine.scoring import token_scores
from twostroke.kernels.codes import quantize
from twostroke.model.load import load_model
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.fitting import fit_codes
from twostroke.quantization.load import expanded, load_any_state
from twostroke.quantization.roundings import ROUNDINGS

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


@pytest.mark.parametrize("rounding", ["gptq", "awq-gptq"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "granitemoe", "gpt_oss", "deepseek_v3"])
def test_experts_are_fitted_to_the_rows_that_chose_them(family: str, rounding: str, tmp_path: Path) -> None:
    decoder, directory = saved(family, tmp_path / "m")
    rows = torch.randint(0, decoder.spec.vocab_size, (18, 64), generator=torch.Generator().manual_seed(3))
    fitted = fit_codes(decoder, [rows], 32, max_kl_nats=100.0, rounding=ROUNDINGS[rounding])
    matrices = {entry.canonical for entry in layout(decoder.spec) if entry.matrix is not None}
    assert set(fitted.codes) == matrices
    quantize_model(directory, tmp_path / "q", "int4-g32", fitted=fitted)
    opened = load_model(tmp_path / "q")
    for name in matrices:
        assert torch.equal(opened.tensors[name], fitted.codes[name].values()), name
    core = EngineCore(tmp_path / "q", EngineSettings(runner="torch", n_threads=1))
    ids = rows[-1].tolist()
    ((found, _),) = token_scores(core, [(ids, 1)])
    with torch.inference_mode():
        exact = opened(torch.tensor([ids]))[0].log_softmax(-1)
    nats = torch.tensor([-float(exact[i, ids[i + 1]]) for i in range(len(ids) - 1)])
    assert float((torch.tensor(found) - nats).abs().median()) < 0.1  # bf16; a router near a tie may choose another expert


def test_an_expert_that_the_text_hardly_reaches_goes_to_its_nearest_codes(tmp_path: Path) -> None:
    decoder, _ = saved("mixtral", tmp_path / "m")
    with torch.no_grad():
        for block in decoder.blocks:
            block.mlp.router.weight[3] = 0.0
            block.mlp.router.weight[:3] *= 20.0  # of any row two of the other four are above 0, but for chance
            block.mlp.router.weight[4] = -block.mlp.router.weight[2]
            block.mlp.router.weight[1] = -block.mlp.router.weight[0]
    rows = torch.randint(0, decoder.spec.vocab_size, (18, 64), generator=torch.Generator().manual_seed(3))
    fitted = fit_codes(decoder, [rows], 32, max_kl_nats=100.0)
    assert fitted.nearest == 2 * decoder.spec.n_layers
    name = "blocks.0.mlp.expert_down.weight"
    weight, codes = decoder.tensors[name].unflatten(0, (5, -1)), fitted.codes[name].values().unflatten(0, (5, -1))
    assert torch.equal(codes[3], quantize(weight[3], SCHEMES["int4-g32"]).values())
    assert not torch.equal(codes[0], quantize(weight[0], SCHEMES["int4-g32"]).values())
