"""Checkpoints that other tools quantise: read, held in codes where that is exact, and planned as they are held."""

from __future__ import annotations

import functools
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from machines import native
from published_layouts import LAYOUTS, Layout, int8, integers, packed_integers, publish
from twostroke.cli.plan.subject import read_subject, serving_shape
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, CorruptFileError, TwostrokeError
from twostroke.core.families import read_spec
from twostroke.core.schemes import SCHEMES
from twostroke.engine.core import EngineCore
from twostroke.engine.scoring import token_scores
from twostroke.interop.import_model import import_model
from twostroke.kernels.features import has_packed_linear
from twostroke.kernels.native_library import library
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.model.published.fp4 import mxfp4_values
from twostroke.model.published.patterns import Budget, named, pattern
from twostroke.model.published.registry import METHODS, storage_of
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.native_products import native_read_bytes, native_weights_bytes
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.held import Held, held
from twostroke.quantization.load import expanded, load_any_state

FAMILIES = ["qwen2", "phi3", "gpt_neox", "gpt2", "glm4", "falcon", "cohere2"]
"""Beside llama: biases, fused products, rows by group, transposed storage, norms around, tied heads, branches side by side."""

TOKENS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(3))
RUNNERS = ["torch", "native"] if library() is not None else ["torch"]


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Decoder, Path]]:
    """A llama of each layout, written once."""
    return functools.cache(lambda name: publish("llama", tmp_path_factory.mktemp(name), LAYOUTS[name]))


Published = Callable[[str], tuple[Decoder, Path]]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def check(wanted: Decoder, directory: Path, name: str) -> None:
    found = load_model(directory)
    with torch.inference_mode():
        assert relative(found(TOKENS), wanted(TOKENS)) < 1e-4
    spec, state = load_any_state(directory)
    assert spec == found.spec
    for parameter, weight in wanted.named_parameters():
        assert relative(expanded(state, parameter).float(), weight.detach()) < 1e-6, parameter
    coded = {tensor for tensor in state if f"{tensor.removesuffix('.weight')}.scale" in state}
    assert bool(coded) == (LAYOUTS[name].scheme is not None)
    assert held(directory, spec) == Held(LAYOUTS[name].scheme or "bf16")


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_checkpoint_stands_for_the_numbers_that_its_format_defines(name: str, of_llama: Published) -> None:
    check(*of_llama(name), name)


@pytest.mark.parametrize("name", ["gptq-4-32-asym", "awq-32", "ct-int8-channel", "fp8-block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_of_a_dense_family_is_read(family: str, name: str, tmp_path: Path) -> None:
    check(*publish(family, tmp_path, LAYOUTS[name]), name)


def test_every_method_and_every_example_is_one_that_is_tested() -> None:
    written = {layout.config["quant_method"] for layout in LAYOUTS.values()}
    by_files = {"gguf"}  # tests/interop/test_gguf_families.py: files of every architecture and type
    assert written == set(METHODS) - by_files
    for method in (METHODS[name] for name in written):
        made = [storage_of({"quantization_config": each.config}) for each in LAYOUTS.values()]
        kinds = {type(of("model.layers.0.mlp.up_proj")) for of in made if of is not None}
        assert {type(example) for example in method.examples} <= kinds


def check_scores(core: EngineCore, wanted: Decoder, within: float = 0.05) -> None:
    """bf16, or activations in 8 bits, against fp32."""
    ids = TOKENS[0].tolist()
    with torch.inference_mode():
        exact = wanted(TOKENS[:1])[0].log_softmax(dim=-1)
    ((nats, _),) = token_scores(core, [(ids, 1)])
    assert list(nats) == pytest.approx([-float(exact[i, ids[i + 1]]) for i in range(len(ids) - 1)], rel=within, abs=2 * within)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ["gptq-4-128", "awq-32", "ct-w4-channel-asym", "bnb-int8", "fp8-tensor", "gptq-4-act-order"])
def test_the_engine_computes_with_the_codes_and_is_planned_so(name: str, runner: str, of_llama: Published) -> None:
    wanted, directory = of_llama(name)
    core = EngineCore(directory, EngineSettings(n_threads=1, runner=runner, kv_cache_bytes=2**20))
    check_scores(core, wanted)
    scheme = LAYOUTS[name].scheme
    plain = "bf16" if runner == "native" or has_packed_linear(torch.bfloat16) else "fp32"
    assert core.dtype == (SCHEMES[scheme].family if scheme else plain)
    assert any("What rounding lost stays lost" in note for note in core.spec.notes)
    if runner == "native":
        check_plan(core, directory)


def check_plan(core: EngineCore, directory: Path) -> None:
    shape = ServingShape(**held(directory, core.spec)._asdict(), prompt_tokens=32, output_tokens=8)
    assert native_read_bytes(core.spec, shape.scheme, shape.head, shape.others) == core.plan.step_bytes
    assert native_weights_bytes(core.spec, shape.scheme, shape.head, shape.others) == core.weights_bytes
    if core.spec.moe is None:  # experts need rates that this machine has not
        assert plan_serving(core.spec, shape, native()).memory_bytes["weights"] == core.weights_bytes


@pytest.mark.parametrize(
    ("name", "here", "there"),
    [("awq-32", "int4-g32", "int4"), ("gptq-4-act-order", "bf16", "int4"), ("fp8-block", "bf16", "fp8")],
)
def test_a_plan_says_what_the_engine_will_hold_and_what_accelerators_serve(
    name: str, here: str, there: str, of_llama: Published
) -> None:
    _, directory = of_llama(name)
    ours, theirs = (read_subject(str(directory), [], hardware) for hardware in (native(), load_hardware("h100")))
    assert (ours.scheme("auto"), theirs.scheme("auto")) == (here, there)
    assert ours.notes == (f"published in {there}: our engine holds it in {here}.",)
    assert serving_shape(ours, "auto", 1, 8, 8).scheme == here
    assert serving_shape(ours, "bf16", 1, 8, 8).scheme == "bf16"


MIXED = Layout(
    {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "format": "int-quantized", "weights": integers(8, "channel")},
            "group_1": {
                "targets": [r"re:.*self_attn\.[qkvo]_proj"], "format": "pack-quantized", "weights": integers(4, "group", 32),
            },
        },
    }, packed_integers(4, 32), "int4-g32",
)  # fmt: skip


@pytest.mark.skipif(library() is None, reason="the native library was not built")
def test_groups_of_layers_are_held_each_in_its_own_way(tmp_path: Path) -> None:
    by_channel = Layout({}, int8("channel"), "int8")
    others = {f"mlp.{name}_proj": by_channel for name in ("gate", "up", "down")}
    wanted, directory = publish("llama", tmp_path, MIXED, lambda module: "layers.1.mlp" not in module, others)
    spec = read_spec(directory)
    assert held(directory, spec) == Held("int4-g32", ("0.gate_up", "0.down"), ("1.gate_up", "1.down"))
    core = EngineCore(directory, EngineSettings(n_threads=1, kv_cache_bytes=2**20))
    check_plan(core, directory)
    with torch.inference_mode():
        assert relative(load_model(directory)(TOKENS), wanted(TOKENS)) < 1e-4
    check_scores(core, wanted)


def test_parts_of_one_matrix_that_are_stored_differently_become_plain_numbers(tmp_path: Path) -> None:
    config = MIXED.config | {"ignore": ["lm_head", "model.layers.0.self_attn.k_proj"]}
    config["config_groups"] = {"group_0": MIXED.config["config_groups"]["group_1"] | {"targets": ["Linear"]}}
    made = MIXED._replace(config=config)
    wanted, directory = publish("llama", tmp_path, made, lambda module: module != "model.layers.0.self_attn.k_proj")
    assert held(directory, wanted.spec) == Held("int4-g32", (), ("0.qkv",))
    with torch.inference_mode():
        assert relative(load_model(directory)(TOKENS), wanted(TOKENS)) < 1e-4


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    wanted, directory = publish("llama", tmp_path, LAYOUTS["gptq-4-32-asym"], shards=3)
    with torch.inference_mode():
        assert relative(load_model(directory)(TOKENS), wanted(TOKENS)) < 1e-4


def test_layers_that_a_method_leaves_out_stay_plain(tmp_path: Path) -> None:
    awq, gptq = LAYOUTS["awq-32"], LAYOUTS["gptq-4-128"]
    names = [[f"self_attn.{name}_proj" for name in "qkvo"], ["mlp.gate_proj", "mlp.up_proj"]]
    cases = (
        awq._replace(config=awq.config | {"modules_to_not_convert": ["mlp.down_proj", "mlp.gate"]}),
        gptq._replace(config=gptq.config | {"dynamic": {r"-:.*\.down_proj": {}}}),
        gptq._replace(config=gptq.config | {"modules_in_block_to_quantize": names}),
    )
    for i, made in enumerate(cases):
        (tmp_path / str(i)).mkdir()
        wanted, directory = publish("llama", tmp_path / str(i), made, lambda module: not module.endswith("down_proj"))
        assert held(directory, wanted.spec) == Held(made.scheme or "", (), ("0.down", "1.down"))
        with torch.inference_mode():
            assert relative(load_model(directory)(TOKENS), wanted(TOKENS)) < 1e-4


def test_scales_below_zero_and_of_zero_keep_their_numbers(tmp_path: Path, of_llama: Published) -> None:
    """AutoRound's scales may be negative."""
    directory = Path(shutil.copytree(of_llama("gptq-4-32-asym")[1], tmp_path / "published"))
    file, name = directory / "model.safetensors", "model.layers.0.mlp.down_proj"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    before = load_model(directory).get_parameter("blocks.0.mlp.down.weight").clone()
    tensors[f"{name}.scales"][0] *= -1
    tensors[f"{name}.scales"][1] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    before[:, :32] *= -1
    before[:, 32:64] = 0
    assert torch.equal(load_model(directory).get_parameter("blocks.0.mlp.down.weight"), before)
    assert bool((load_any_state(directory)[1]["blocks.0.mlp.down.scale"] > 0).all())


def test_the_blocks_of_gpt_oss_are_read_expert_by_expert() -> None:
    """As transformers converts them: pairs low half first, times 2 to the exponent less 127."""
    blocks = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    exponents = torch.randint(120, 130, (3, 4, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = mxfp4_values(blocks, exponents)
    assert found.shape == (3, 4, 64)
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for place in ((0, 0, 0), (1, 3, 17), (2, 2, 40), (2, 1, 63)):
        expert, row, column = place
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        code = byte & 15 if column % 2 == 0 else byte >> 4
        sign = -1 if code & 8 else 1
        assert float(found[place]) == sign * magnitudes[code & 7] * 2.0 ** (int(exponents[expert, row, column // 32]) - 127)


def test_a_checkpoint_is_imported_and_quantised_anew_as_the_numbers_that_it_stands_for(tmp_path: Path) -> None:
    wanted, directory = publish("qwen2", tmp_path, LAYOUTS["gptq-4-act-order"])
    report = import_model(directory, tmp_path / "imported")
    assert report.dtype == "fp32"
    assert "gptq weights (4 bits, groups of 32 with zero points, inputs grouped by importance" in report.notes[0]
    for name, weight in load_model(tmp_path / "imported").named_parameters():
        assert relative(weight.detach(), wanted.get_parameter(name).detach()) < 1e-6
    from_codes, from_numbers = (
        quantize_model(source, tmp_path / source.name.replace("ed", ""), "int8")
        for source in (directory, tmp_path / "imported")
    )
    assert from_codes.notes
    assert from_codes.relative_error == pytest.approx(from_numbers.relative_error, rel=1e-6)
    assert from_codes.source_bytes < from_numbers.source_bytes


def of(suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[dict[str, torch.Tensor]], None]:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        name = f"model.layers.1.mlp.up_proj{suffix}"
        changed = change(tensors[name])
        if changed is None:
            del tensors[name]
        else:
            tensors[name] = changed

    return damage


def filled(value: float, first: bool = True) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.float()
        changed.flatten()[0] = value
        return changed.to(tensor.dtype)

    return change


BROKEN: list[tuple[str, Callable[[dict[str, torch.Tensor]], None], str]] = [
    ("gptq-4-128", of(".qweight", lambda t: None), "has no tensor"),
    ("gptq-4-128", of(".qweight", lambda t: t[:-1].clone()), "I32 \\[16, 256\\] is due"),
    ("gptq-4-128", of(".scales", lambda t: t.to(torch.int16)), "F32/BF16/F16"),
    ("gptq-4-128", of(".scales", filled(math.nan)), "scales 'scales' must be finite"),
    ("gptq-4-act-order", of(".g_idx", filled(99)), "'g_idx' must be groups from 0 to 3"),
    ("gptq-4-act-order", of(".g_idx", filled(-1)), "'g_idx' must be groups from 0 to 3"),
    ("gptq-4-32-asym", of(".g_idx", lambda t: t.flip(0)), "because desc_act is false"),
    ("gptq-8-channel", of(".scales", filled(-1.0)), "scales must be positive"),
    ("gptq-8-channel", of(".qzeros", filled(0)), "zero points must be 128"),
    ("awq-32", of(".qzeros", lambda t: t.T.contiguous()), "is due"),
    ("awq-32", of(".scales", filled(math.inf)), "must be finite"),
    ("ct-w4-64-asym", of(".weight_zero_point", lambda t: None), "has no tensor"),
    ("ct-w4-64-asym", of(".weight_shape", lambda t: t + 1), "'weight_shape' must be 256 × 128"),
    ("ct-int8-channel", of(".weight_scale", filled(0.0)), "must be positive and finite"),
    ("ct-fp8-channel", of(".weight", lambda t: t.view(torch.uint8).fill_(127).view(t.dtype)), "weights must be finite"),
    ("fp8-block", of(".weight_scale_inv", filled(math.nan)), "must be finite"),
    ("ct-nvfp4", of(".weight_global_scale", filled(0.0)), "must be positive and finite"),
    ("mxfp4", of("_scales", lambda t: t.fill_(255)), "must be finite"),
    ("bnb-nf4", of(".weight.absmax", lambda t: t[:-1].clone()), "'absmax' must have 512 scales"),
    ("bnb-nf4", of(".weight.quant_state.bitsandbytes__nf4", lambda t: t[:20].clone()), "quant_state"),
    ("bnb-int8", of(".SCB", filled(-3.0)), "must not be negative"),
    ("awq-32", lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.ones(256)}), "holds tensor"),
]


@pytest.mark.parametrize(("name", "damage", "sentence"), BROKEN)
def test_tensors_that_stand_for_no_matrix_are_a_sentence_and_nothing_is_written(
    name: str, damage: Callable[[dict[str, torch.Tensor]], None], sentence: str, tmp_path: Path, of_llama: Published
) -> None:
    directory = Path(shutil.copytree(of_llama(name)[1], tmp_path / "published"))
    file = directory / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CorruptFileError, match=sentence):
        import_model(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CorruptFileError, match=sentence):
        dict(load_any_state(directory)[1])


def test_a_bias_of_zeros_that_the_model_has_not_is_left_out(tmp_path: Path, of_llama: Published) -> None:
    wanted, source = of_llama("gptq-4-128")
    directory = Path(shutil.copytree(source, tmp_path / "published"))
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.mlp.up_proj.bias": torch.zeros(256)}, file, metadata={"format": "pt"})
    with torch.inference_mode():
        assert relative(load_model(directory)(TOKENS), wanted(TOKENS)) < 1e-4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0 must be -1 or from 1"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 10**9}, "group_size=1000000000 must be -1 or from 1"),
    ({"quant_method": "gptq", "bits": 3}, "bits=3 is not supported"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
    ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "lm_head=true is not supported"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(a*)*b": {}}}, "none of a group"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "is broken"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv' is not supported"),
    ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "all"}, "must be a list of names"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "must be two numbers above 0"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "'nf5' in 'uint8'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "method 'modelopt' is not read"),
    (LAYOUTS["ct-w4-128"].config | {"quantization_status": "frozen"}, "quantization_status='frozen'"),
    (LAYOUTS["ct-w4-128"].config | {"transform_config": {"config_groups": {}}}, "transform_config"),
    (LAYOUTS["ct-w4-128"].config | {"format": "marlin-24"}, "format 'marlin-24' with 4-bit"),
    (LAYOUTS["ct-w4-128"].config | {"config_groups": {}}, "must have weights"),
]


@pytest.mark.parametrize(("quantised", "sentence"), REFUSED)
def test_a_configuration_that_is_not_read_is_a_sentence(
    quantised: dict[str, Any], sentence: str, tmp_path: Path, of_llama: Published
) -> None:
    directory = Path(shutil.copytree(of_llama("gptq-4-128")[1], tmp_path / "published"))
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": quantised}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(TwostrokeError, match=sentence) as caught:
        load_model(directory)
    assert isinstance(caught.value, ConfigError)


def test_patterns_of_names_take_little_time() -> None:
    began = time.process_time()
    assert not pattern(".*.*.*.*x", Budget())("model.layers.1000.self_attn." * 3)
    assert time.process_time() - began < 5
    with pytest.raises(ConfigError, match="take too long"):
        pattern("model", Budget(0.0))
    fits = named(["mlp.gate", "layers.*.self_attn"])
    found = [fits(f"model.layers.0.{name}") for name in ("mlp.gate", "mlp.gate_proj", "self_attn.q_proj", "attn.q_proj")]
    assert found == [True, False, True, False]


def test_gpt_oss_is_read_as_it_is_published(tmp_path: Path) -> None:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    made = LAYOUTS["mxfp4"]._replace(config={"quant_method": "mxfp4", "modules_to_not_convert": kept})
    wanted, directory = publish("gpt_oss", tmp_path, made, lambda module: "experts" in module)
    check(wanted, directory, "mxfp4")


@pytest.mark.parametrize(
    ("family", "name"),
    [("mixtral", "gptq-4-32-asym"), ("mixtral", "ct-int8-channel"), ("deepseek_v3", "fp8-block"), ("deepseek_v3", "awq-32")],
)
def test_experts_are_read_one_by_one_and_latent_attention(family: str, name: str, tmp_path: Path) -> None:
    wanted, directory = publish(family, tmp_path, LAYOUTS[name])
    check(wanted, directory, name)
    for runner in RUNNERS:
        core = EngineCore(directory, EngineSettings(n_threads=1, runner=runner, kv_cache_bytes=2**20))
        check_scores(core, wanted, within=0.2)  # a router near a tie may choose another expert
        if runner == "native":
            check_plan(core, directory)
