"""``fp8``: E4M3 codes with a scale a channel, in compressed-tensors' float-quantized layout, expanded where products are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from machines import native, small_llama
from small_models import decoder_of
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.engines import not_served, weights_text
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.families import read_spec
from twostroke.core.schemes import SCHEMES
from twostroke.engine.core import EngineCore
from twostroke.engine.llm import LLM
from twostroke.kernels.codes import LARGEST_E4M3, e4m3_columns, quantize
from twostroke.kernels.native_library import library
from twostroke.model.load import load_model, load_state
from twostroke.model.save import save_model
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.weights import weights_bytes
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.held import Held, held
from twostroke.quantization.load import load_any_state
from twostroke.scheduling.sampling_params import SamplingParams

OURS = SCHEMES["fp8"].here
FAMILIES = ["llama", "qwen3", "gpt2"]


def make(name: str, directory: Path) -> Path:
    decoder = decoder_of(name, d_model=96, head_dim=16, d_ff=160)
    return save_model(decoder, decoder.spec, directory, "bf16")


def test_every_weight_goes_to_the_nearest_of_the_numbers_that_e4m3_has() -> None:
    weight = torch.randn(7, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 7)[:, None]
    weight[3] = 0
    codes, scale = e4m3_columns(weight)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    assert float(numbers.max()) == LARGEST_E4M3
    distance = (weight[:, :, None] / scale[:, None, None] - numbers).abs()
    assert torch.equal((codes.float() - weight / scale[:, None]).abs(), distance.amin(dim=2))
    assert torch.equal(codes.float().abs().amax(dim=1) == LARGEST_E4M3, torch.tensor([True] * 3 + [False] + [True] * 3))
    error = (codes.float() * scale[:, None] - weight).norm() / weight.norm()
    assert error < 0.03  # half a step of three bits is 2⁻⁴, evenly spread 2⁻⁴/√3 of the largest in its binade


@pytest.mark.parametrize("name", FAMILIES)
def test_a_directory_gives_back_the_codes_that_were_written(name: str, tmp_path: Path) -> None:
    source = make(name, tmp_path / "m")
    report = quantize_model(source, tmp_path / "q", "fp8")
    assert held(tmp_path / "q", read_spec(tmp_path / "q")) == Held(OURS.name)
    assert (report.scheme, report.bytes < 0.65 * report.source_bytes) == ("fp8", True)
    (_, state), (_, found) = load_state(source), load_any_state(tmp_path / "q")
    decoder, n_matrices = dict(load_model(tmp_path / "q").named_parameters()), 0
    for tensor_name, tensor in state.items():
        if found[tensor_name].dtype is not torch.float8_e4m3fn:
            assert torch.equal(found[tensor_name], tensor.bfloat16())
            continue
        expected = quantize(tensor.float(), OURS)
        assert torch.equal(found[tensor_name].float(), expected.codes.float())
        assert torch.equal(found[tensor_name.removesuffix(".weight") + ".scale"], expected.scale)
        assert torch.equal(decoder[tensor_name], expected.values())
        n_matrices += 1
    assert n_matrices == report.n_matrices > 0


def by_hand(source: Path, directory: Path, activations: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """``source`` as another program writes it: scales a power of 2 in bf16. Returns what the matrices stand for."""
    directory.mkdir()
    written, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            written[name] = tensor
            continue
        scale = 2.0 ** (tensor.float().abs().amax(dim=1, keepdim=True) / 448).log2().ceil()
        codes = (tensor.float() / scale).to(torch.float8_e4m3fn)
        written |= {name: codes, f"{name}_scale": scale.bfloat16()}
        values[name] = codes.float() * scale
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    quantised = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantised}
    (directory / "config.json").write_text(json.dumps(config))
    return values


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True, "observer": None}


@pytest.mark.parametrize("activations", [DYNAMIC, None], ids=["FP8_DYNAMIC", "weights alone"])
def test_a_directory_made_by_hand_is_read(activations: dict[str, Any] | None, tmp_path: Path) -> None:
    source = make("llama", tmp_path / "m")
    values = by_hand(source, tmp_path / "q", activations)
    decoder = load_model(tmp_path / "q")
    assert torch.equal(decoder.get_parameter("blocks.0.mlp.down.weight"), values["model.layers.0.mlp.down_proj.weight"])
    assert LLM(tmp_path / "q", n_threads=1).engine.dtype == "fp8"


def test_what_is_not_supported_or_broken_is_a_sentence(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "m")
    by_hand(source, tmp_path / "static", DYNAMIC | {"dynamic": False, "strategy": "tensor"})
    load_any_state(tmp_path / "static")  # activations are rounded as the engine rounds them, or not at all
    config = json.loads((tmp_path / "static" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "attn_head"
    (tmp_path / "static" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="8-bit 'float' weights by 'attn_head' is not supported"):
        load_any_state(tmp_path / "static")
    by_hand(source, tmp_path / "q", None)
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].float().to(torch.int8)}, tmp_path / "q" / "model.safetensors")
    with pytest.raises(CorruptFileError, match=r"down_proj\.weight' is I8 .*; F8_E4M3"):
        load_any_state(tmp_path / "q")


@pytest.mark.parametrize("runner", ["native", "torch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_multiplies_what_the_codes_stand_for(name: str, runner: str, tmp_path: Path) -> None:
    """From the directory, quantising at loading, and in bf16 from a copy that holds the values: the same tokens."""
    if runner == "native" and library() is None:
        pytest.skip("the native library was not built")
    source = make(name, tmp_path / "m")
    quantize_model(source, tmp_path / "q", "fp8")
    decoder = load_model(tmp_path / "q")
    save_model(decoder, decoder.spec, tmp_path / "plain", "bf16")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    made = [
        LLM(directory, dtype=dtype, runner=runner, n_threads=1)
        for directory, dtype in ((source, "fp8"), (tmp_path / "q", "auto"), (tmp_path / "plain", "bf16"))
    ]
    found = [[o.outputs[0].token_ids for o in llm.generate([[5, 9, 3], [7] * 20], params)] for llm in made]
    assert found[0] == found[1] == found[2]
    assert made[1].engine.plan.step_bytes == made[2].engine.plan.step_bytes
    assert weights_text(made[1].engine.dtype, made[1].engine.runner) == "fp8 expanded to bf16"


@pytest.mark.skipif(library() is None, reason="the native library was not built")
def test_a_directory_is_planned_as_the_engine_holds_it(tmp_path: Path) -> None:
    quantize_model(make("llama", tmp_path / "m"), tmp_path / "q", "fp8")
    core = EngineCore(tmp_path / "q", EngineSettings(n_threads=1, kv_cache_bytes=2**20))
    found = held(tmp_path / "q", core.spec)
    assert found.scheme == OURS.name
    shapes = [ServingShape(scheme=name, prompt_tokens=32, output_tokens=8) for name in (found.scheme, "fp8", "bf16")]
    here, named, plain = (plan_serving(core.spec, shape, native()) for shape in shapes)
    assert here.memory_bytes["weights"] == named.memory_bytes["weights"] == core.weights_bytes
    assert here.tpot_s == named.tpot_s == plain.tpot_s  # the same products of the same bytes
    assert here.model_bytes == named.model_bytes == weights_bytes(core.spec, OURS.name) < plain.model_bytes
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert here.model_bytes == pytest.approx(sum(t.nbytes for t in stored.values()), abs=8)


def test_accelerators_are_planned_with_a_scale_a_channel_too() -> None:
    spec = small_llama()
    blocks, channels = (
        plan_serving(spec, ServingShape(scheme=name, prompt_tokens=64, output_tokens=16), load_hardware("h100"))
        for name in ("fp8", OURS.name)
    )
    assert blocks.model_bytes < channels.model_bytes < 1.1 * blocks.model_bytes
    assert channels.tpot_s == pytest.approx(blocks.tpot_s, rel=0.01)
    assert not_served(spec, weights=OURS.name) == not_served(spec, weights="fp8") == ()
