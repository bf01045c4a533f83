from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_models import decoder_of
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.families import read_spec
from twostroke.core.schemes import SCHEMES
from twostroke.engine.core import EngineCore
from twostroke.engine.scoring import token_scores
from twostroke.kernels.int4 import dequantize_groups, group_scales, round_to_groups
from twostroke.kernels.words import pack_words, unpack_words
from twostroke.model.load import load_model, load_state
from twostroke.model.published.compressed_tensors import PackedIntegers
from twostroke.model.published.registry import storage_of
from twostroke.model.save import save_model
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.directory import Quantisation
from twostroke.quantization.gptq import round_with_compensation
from twostroke.quantization.held import Held, held
from twostroke.quantization.load import load_any_state


def make(name: str, directory: Path) -> Path:
    decoder = decoder_of(name, d_model=96, head_dim=16, d_ff=160)
    return save_model(decoder, decoder.spec, directory)


@pytest.mark.parametrize("k", [1, 8, 13, 64])
def test_words_hold_eight_codes_the_first_lowest(k: int) -> None:
    codes = torch.randint(0, 16, (5, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(k))
    words = pack_words(codes)
    assert words.dtype == torch.int32
    for i in range(5):
        value = sum(int(codes[i, j]) << (4 * j) for j in range(min(k, 8)))
        assert int(words[i, 0]) % 2**32 == value
    assert torch.equal(unpack_words(words, k), codes)


def test_a_group_is_never_rounded_worse_than_by_its_whole_range() -> None:
    weight = torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    weight[3, 7] = 9.0  # an outlier, whose group gains by cutting it off or not at all
    scale, zero = group_scales(weight, 64)
    ours = (dequantize_groups(round_to_groups(weight, scale, zero, 64), scale, zero, 64) - weight).square()
    padded = torch.nn.functional.pad(weight, (0, 56)).view(40, 4, 64)
    low, high = padded.amin(2).clamp_max(0), padded.amax(2).clamp_min(0)
    step = (high - low) / 15
    zero_point = (-low / step).round()
    plain = ((padded / step[..., None]).round() + zero_point[..., None]).clamp(0, 15)
    whole = (((plain - zero_point[..., None]) * step[..., None]).view(40, -1)[:, :200] - weight).square()
    assert float(ours.sum()) < 0.95 * float(whole.sum())
    assert float(ours.mean().sqrt()) < 0.12  # 15 steps over about ±2.4σ


def test_compensation_lowers_the_error_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 128, generator=generator)
    mixing = torch.randn(128, 20, generator=generator)
    inputs = torch.randn(2000, 20, generator=generator) @ mixing.t() + 0.1 * torch.randn(2000, 128, generator=generator)
    hessian = inputs.t() @ inputs
    scale, zero = group_scales(weight, 32)
    nearest = dequantize_groups(round_to_groups(weight, scale, zero, 32), scale, zero, 32)
    compensated = dequantize_groups(*round_with_compensation(weight, hessian, 32), 32)
    exact = inputs @ weight.t()
    errors = [float((inputs @ w.t() - exact).norm() / exact.norm()) for w in (nearest, compensated)]
    assert errors[1] < 0.5 * errors[0]


def test_compensation_for_unrelated_inputs_is_the_nearest_code() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    codes, scale, zero = round_with_compensation(weight, torch.eye(64), 32)
    expected_scale, expected_zero = group_scales(weight, 32)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(zero, expected_zero)
    assert torch.equal(codes, round_to_groups(weight, scale, zero, 32))


def test_weights_are_moved_to_bring_the_exact_output_back_from_other_inputs() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(24, 64, generator=generator)
    meant = torch.randn(1500, 64, generator=generator)
    found = meant + 0.3 * torch.randn(1500, 64, generator=generator) @ torch.randn(64, 64, generator=generator) / 8
    hessian, cross = found.t() @ found, (meant - found).t() @ found
    exact = meant @ weight.t()
    errors = [
        float((found @ dequantize_groups(*round_with_compensation(weight, hessian, 32, c), 32).t() - exact).norm())
        for c in (None, cross)
    ]
    assert errors[1] < 0.98 * errors[0]
    same = round_with_compensation(weight, hessian, 32, torch.zeros(64, 64))
    assert all(torch.equal(a, b) for a, b in zip(same, round_with_compensation(weight, hessian, 32), strict=True))


def test_the_largest_inputs_are_rounded_first_and_groups_stay_in_place() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(16, 200, generator=generator)
    inputs = torch.randn(900, 200, generator=generator) * torch.linspace(0.1, 3, 200) + torch.randn(900, 1, generator=generator)
    hessian = inputs.t() @ inputs
    codes, scale, zero = round_with_compensation(weight, hessian, 64)
    expected_scale, expected_zero = group_scales(weight, 64, torch.diag(hessian))
    assert torch.equal(scale, expected_scale)
    assert torch.equal(zero, expected_zero)
    last = codes[:, -1], round_to_groups(weight, scale, zero, 64)[:, -1]
    assert torch.equal(*last)  # of the largest input nothing was to be made up for
    exact = inputs @ weight.t()
    nearest = dequantize_groups(round_to_groups(weight, scale, zero, 64), scale, zero, 64)
    errors = [float((inputs @ w.t() - exact).norm()) for w in (nearest, dequantize_groups(codes, scale, zero, 64))]
    assert errors[1] < 0.85 * errors[0]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("scheme", ["int4", "int4-g32"])
def test_a_directory_gives_back_the_codes_that_were_written(name: str, scheme: str, tmp_path: Path) -> None:
    source = make(name, tmp_path / "m")
    report = quantize_model(source, tmp_path / "q", scheme)
    chosen = SCHEMES[scheme].here
    assert held(tmp_path / "q", read_spec(source)) == Held(chosen.name)
    assert chosen.group is not None
    _, state = load_state(source)
    _, found = load_any_state(tmp_path / "q")
    for tensor_name, tensor in state.items():
        stem = tensor_name.removesuffix(".weight")
        if f"{stem}.scale" not in found:
            assert torch.equal(found[tensor_name], tensor.bfloat16())
            continue
        scale, zero = group_scales(tensor, chosen.group)
        assert torch.equal(found[f"{stem}.scale"], scale)
        assert torch.equal(found[f"{stem}.zero"], zero)
        assert torch.equal(found[tensor_name], round_to_groups(tensor, scale, zero, chosen.group))
    assert 0.02 < report.relative_error < 0.15
    decoder = load_model(tmp_path / "q")
    weight = dict(decoder.named_parameters())["blocks.0.mlp.down.weight"]
    codes, scale, zero = (found[f"blocks.0.mlp.down.{part}"] for part in ("weight", "scale", "zero"))
    expected = dequantize_groups(codes, scale, zero, chosen.group)
    assert torch.equal(weight, expected)


def test_settings_that_are_not_supported_are_named() -> None:
    config = Quantisation(SCHEMES["int8"]).config()
    config["config_groups"]["group_0"]["weights"]["num_bits"] = 5
    with pytest.raises(ConfigError, match="'int-quantized' with 5-bit 'int' weights by 'channel' is not supported"):
        storage_of({"quantization_config": config})
    with pytest.raises(ConfigError, match="method 'quip' is not read"):
        storage_of({"quantization_config": {"quant_method": "quip"}})
    richer = Quantisation(SCHEMES["int4"].here).config()
    richer["config_groups"]["group_0"]["weights"] |= {"observer": "minmax", "actorder": None}
    of = storage_of({"quantization_config": richer})
    assert of is not None
    assert of("model.layers.0.mlp.up_proj") == PackedIntegers(4, 64, symmetric=False)
    assert of("lm_head") is None


def test_without_the_native_library_the_engine_computes_with_the_values_of_the_codes(tmp_path: Path) -> None:
    quantize_model(make("llama", tmp_path / "m"), tmp_path / "q", "int4-g32")
    core = EngineCore(tmp_path / "q", EngineSettings(runner="torch", n_threads=1))
    assert (core.dtype, core.runner) == ("int4", "torch")
    ids = list(range(5, 25))
    ((nats, _),) = token_scores(core, [(ids, 1)])
    with torch.inference_mode():
        exact = load_model(tmp_path / "q")(torch.tensor([ids]))[0].log_softmax(dim=-1)
    expected = [-float(exact[i, ids[i + 1]]) for i in range(len(ids) - 1)]
    assert nats.tolist() == pytest.approx(expected, abs=0.1)  # bf16 against fp32
