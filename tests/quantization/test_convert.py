from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from small_models import decoder_of
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec
from twostroke.engine.llm import LLM
from twostroke.kernels.matrix import quantize_columns
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_state
from twostroke.model.save import save_model
from twostroke.quantization import convert
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.held import Held, held
from twostroke.quantization.load import load_any_state
from twostroke.scheduling.sampling_params import SamplingParams


def make(name: str, directory: Path) -> Path:
    decoder = decoder_of(name, d_model=96, head_dim=16, d_ff=160)
    return save_model(decoder, decoder.spec, directory, "bf16")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_quantised_directory_holds_the_codes_of_the_weights(name: str, tmp_path: Path) -> None:
    source = make(name, tmp_path / "m")
    report = quantize_model(source, tmp_path / "q")
    spec, state = load_state(source)
    found_spec, found = load_any_state(tmp_path / "q")
    assert found_spec == spec
    n_matrices = 0
    for tensor_name, tensor in state.items():
        if found[tensor_name].dtype == torch.int8:
            codes, scale = quantize_columns(tensor)
            assert torch.equal(found[tensor_name], codes)
            assert torch.equal(found[tensor_name.removesuffix(".weight") + ".scale"], scale)
            n_matrices += 1
        else:
            assert torch.equal(found[tensor_name], tensor.bfloat16())
    assert n_matrices == report.n_matrices == 4 * spec.n_layers
    assert report.bytes < 0.65 * report.source_bytes  # of bf16; the embedding stays
    assert 0 < report.relative_error <= report.worst_relative_error < 0.02  # a code is off by at most half of 1/127


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_llm_says_the_same_from_the_directory_as_when_it_quantises_itself(name: str, tmp_path: Path) -> None:
    source = make(name, tmp_path / "m")
    quantize_model(source, tmp_path / "q")
    prompts = [[random.Random(i).randrange(97) for _ in range(5 + i)] for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = [
        [o.outputs[0].token_ids for o in LLM(directory, dtype=dtype, n_threads=1).generate(prompts, params)]
        for directory, dtype in ((source, "int8"), (tmp_path / "q", "auto"))
    ]
    assert found[0] == found[1]


def test_the_copy_says_what_it_is_and_brings_its_tokenizer(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "m")
    (source / "tokenizer.json").write_text("{}")
    quantize_model(source, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert held(tmp_path / "q", read_spec(source)) == Held("int8")
    assert config["torch_dtype"] == "bfloat16"
    assert (tmp_path / "q" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "q" / "generation_config.json").is_file()


def test_large_models_come_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make("llama", tmp_path / "m")
    quantize_model(source, tmp_path / "whole")
    monkeypatch.setattr(convert, "MAX_SHARD_BYTES", 40_000)
    quantize_model(source, tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) > 2
    whole, parts = load_any_state(tmp_path / "whole")[1], load_any_state(tmp_path / "parts")[1]
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_wrong_uses_are_sentences_and_leave_nothing_behind(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "m")
    quantize_model(source, tmp_path / "q")
    with pytest.raises(ConfigError, match="scheme='int3'"):
        quantize_model(source, tmp_path / "x", "int3")
    with pytest.raises(InputError, match="not empty"):
        quantize_model(source, tmp_path / "q")
    with pytest.raises(InputError, match="the model itself"):
        quantize_model(source, source, replace=True)
    with pytest.raises(InputError, match="nowhere"):
        quantize_model(tmp_path / "nowhere", tmp_path / "x")
    assert {p.name for p in tmp_path.iterdir()} == {"m", "q"}
    quantize_model(source, tmp_path / "q", replace=True)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    decoder = Decoder(ModelSpec("llama", 20, 1, 16, 2, 2, 8, 32, 32))
    with torch.no_grad():
        decoder.blocks[0].mlp.down.weight[3, 3] = float("inf")
    save_model(decoder, decoder.spec, tmp_path / "m")
    with pytest.raises(CorruptFileError, match=r"down_proj\.weight.*not finite"):
        quantize_model(tmp_path / "m", tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_int8_weights_are_not_used_as_anything_else(tmp_path: Path) -> None:
    quantize_model(make("llama", tmp_path / "m"), tmp_path / "q")
    with pytest.raises(ConfigError, match="holds int8 weights, which cannot be used as dtype='int4'"):
        LLM(tmp_path / "q", dtype="int4")
    assert LLM(tmp_path / "q", dtype="bf16", n_threads=1).engine.dtype == "bf16"  # the numbers that the codes stand for


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.weight_scale"), "no tensor"),
        (lambda t: t.update({"extra": torch.zeros(1)}), "'extra'"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(160, 96)}), "F32"),
        (lambda t: t["model.layers.1.mlp.up_proj.weight_scale"].fill_(float("nan")), "positive and finite"),
        (lambda t: t["model.layers.1.mlp.up_proj.weight_scale"].fill_(-1.0), "positive and finite"),
    ],
)
def test_a_damaged_copy_is_refused_by_name(change: object, sentence: str, tmp_path: Path) -> None:
    quantize_model(make("llama", tmp_path / "m"), tmp_path / "q")
    file = tmp_path / "q" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)  # type: ignore[operator]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CorruptFileError, match=sentence):
        dict(load_any_state(tmp_path / "q")[1])


def test_the_file_is_one_that_safetensors_opens(tmp_path: Path) -> None:
    quantize_model(make("gpt2", tmp_path / "m"), tmp_path / "q")
    with safe_open(str(tmp_path / "q" / "model.safetensors"), framework="pt") as file:
        weight, scale = (
            file.get_tensor("transformer.h.0.attn.c_attn.weight"),
            file.get_tensor("transformer.h.0.attn.c_attn.weight_scale"),
        )
    assert (weight.dtype, tuple(weight.shape), tuple(scale.shape)) == (torch.int8, (96, 288), (288, 1))
