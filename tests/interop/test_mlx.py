"""Directories for mlx-lm: what the files hold, and (in ``make soak``) that mlx-lm on a CPU computes what we compute."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import ask, assert_answers_as_we_do
from safetensors.torch import load_file
from torch import Tensor

from small_models import EVERY, lively, saved
from twostroke.core.errors import ConfigError
from twostroke.core.spec import Departures, ModelSpec, MoeSpec
from twostroke.interop.export_model import export_model
from twostroke.interop.mlx import BITS, GROUP, READ, in_groups, of_groups
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.model.save import save_model

LOGITS = """
import json, sys
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import load_model
from pathlib import Path
mx.set_default_device(mx.cpu)
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model, _ = load_model(folder)
    model.update(tree_map(lambda x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x, model.parameters()))
    found[folder.name] = model(mx.array([json.loads(sys.argv[2])]))[0].tolist()
print("FOUND", json.dumps(found))
"""
GREEDY = """
import json, sys
import mlx.core as mx
from mlx_lm import load, stream_generate
mx.set_default_device(mx.cpu)
model, tokenizer = load(sys.argv[1])
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "import os"}], add_generation_prompt=True)
tokens = [answer.token for answer in stream_generate(model, tokenizer, prompt, max_tokens=64)]
print("FOUND", json.dumps([list(map(int, prompt)), tokens]))
"""
IDS = torch.randint(2, 97, (1, 24), generator=torch.Generator().manual_seed(5))


def model_specs() -> dict[str, ModelSpec]:
    """One of each family in ``READ``, without windows that mlx-lm leaves out and with the layers that it expects."""
    llama, plain = EVERY["llama"], {"sliding_window": None, "sliding_window_layers": None}
    own = {
        "mistral": EVERY["mistral"].with_(**plain),
        "qwen2": EVERY["qwen2"].with_(**plain),
        "mixtral": EVERY["mixtral"].with_(**plain),
        "gemma": EVERY["gemma2"].with_(
            family="gemma", **plain, departures=Departures(norm_offset=True, embedding_scale=48**0.5)
        ),
        "gemma2": EVERY["gemma2"].with_(sliding_window=64),
        "gemma3_text": EVERY["gemma3_text"].with_(n_layers=6, sliding_window_layers=(0, 1, 2, 3, 4)),
        "cohere": EVERY["cohere2"].with_(
            family="cohere", **plain, departures=dataclasses.replace(EVERY["cohere2"].departures, unrotated_layers=())
        ),
        "cohere2": EVERY["cohere2"].with_(
            n_layers=4, sliding_window_layers=(0, 1, 2),
            departures=dataclasses.replace(EVERY["cohere2"].departures, unrotated_layers=(3,)),
        ),
        "stablelm": llama.with_(family="stablelm", norm="layernorm", departures=Departures(rotary_dim=2)),
        "starcoder2": EVERY["falcon"].with_(
            family="starcoder2", activation="gelu_tanh", tied_embeddings=False, departures=Departures()
        ),
        "gpt_bigcode": EVERY["gpt2"].with_(family="gpt_bigcode", n_kv_heads=1),
        "gpt_neox": EVERY["gpt_neox"].with_(d_ff=192),
        "ernie4_5": llama.with_(family="ernie4_5", departures=Departures(neighbours_turn=True)),
        "seed_oss": llama.with_(family="seed_oss", qkv_bias=True),
        "qwen2_moe": EVERY["qwen2_moe"].with_(moe=MoeSpec(6, 3, 32, 1, 48, shared_gate=True, normalised=False)),
        "qwen3_moe": EVERY["qwen3"].with_(family="qwen3_moe", tied_embeddings=False, moe=MoeSpec(5, 2, 80)),
        "kimi_k2": EVERY["deepseek_v3"].with_(family="kimi_k2"),
    }  # fmt: skip
    return {family: own.get(family) or EVERY[family] for family in sorted(READ)}


def of_matrices(directory: Path, bits: int) -> dict[str, Tensor]:
    """The tensors of an exported directory, codes as the numbers that they stand for."""
    held = load_file(directory / "model.safetensors")
    return {
        name.replace(".scales", ".weight"): of_groups(
            held[name.replace(".scales", ".weight")], tensor, held[name.replace(".scales", ".biases")], bits
        )
        for name, tensor in held.items()
        if name.endswith(".scales")
    }


def wide(directory: Path) -> Path:
    """A llama whose rows are whole groups."""
    return saved("llama", directory, d_model=128, d_ff=192, n_heads=8, n_kv_heads=4, head_dim=16)[1]


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_hold_numbers_to_half_a_step(bits: int) -> None:
    weight = torch.randn(6, 2 * GROUP, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.25  # a group of one number
    words, scales, biases = in_groups(weight, bits)
    assert (words.dtype, words.shape) == (torch.uint32, (6, 2 * GROUP * bits // 32))
    error = (of_groups(words, scales, biases, bits) - weight).view(6, 2, GROUP).abs()
    assert (error <= 0.5001 * scales.abs()[..., None]).all()
    assert torch.equal(of_groups(words, scales, biases, bits)[3], weight[3])


def test_the_first_code_is_in_the_lowest_bits() -> None:
    weight = torch.arange(GROUP).float().remainder(16)[None]  # from 0 to 15 upwards; the farthest from zero is 15
    words, scales, biases = in_groups(weight, 4)
    assert (scales.item(), biases.item()) == (-1.0, 15.0)
    assert hex(int(words[0, 0])) == "0x89abcdef"


@pytest.mark.parametrize("precision", sorted(BITS))
def test_a_directory_holds_every_matrix_in_groups(precision: str, tmp_path: Path) -> None:
    source, bits = wide(tmp_path / "source"), BITS[precision]
    report = export_model(source, tmp_path / "out", to="mlx", precision=precision)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"] == {"group_size": 64, "bits": bits}
    before, found = load_file(source / "model.safetensors"), of_matrices(tmp_path / "out", bits)
    assert set(found) == {name for name, tensor in before.items() if tensor.ndim == 2}
    for name, tensor in found.items():
        # half a step, and roundings of weight and scale to bf16
        assert (tensor - before[name]).abs().max() < before[name].abs().max() * (1.01 / (2**bits - 1) + 2 / 256)
    assert report.n_bytes < sum(tensor.nbytes for tensor in before.values()) * (bits + 1) / 32


def test_what_mlx_lm_does_not_open_is_refused(tmp_path: Path) -> None:
    for name, precision, sentence in (
        ("falcon", "bf16", "does not open model_type='falcon'"),
        ("qwen2_moe", "bf16", "only if every layer has experts"),
        ("gpt2", "int4", "turns the matrices of gpt2 around"),
    ):
        _, source = saved(name, tmp_path / name)
        with pytest.raises(ConfigError, match=sentence):
            export_model(source, tmp_path / "out", to="mlx", precision=precision)
        assert not (tmp_path / "out").exists()
    report = export_model(saved("mistral", tmp_path / "windowed")[1], tmp_path / "out", to="mlx")
    assert report.notes == ("mlx-lm computes no sliding window in mistral: beyond 11 tokens it differs from us.",)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@torch.no_grad()
def test_mlx_lm_computes_what_we_compute(tmp_path: Path) -> None:
    """fp32: 6e-6 of the largest logit and less, 4e-3 where it computes GELU by another formula (gemma, gpt2)."""
    wanted: dict[str, Tensor] = {}
    for family, spec in model_specs().items():
        decoder = lively(Decoder(spec), 0)
        export_model(
            save_model(decoder, spec, tmp_path / "sources" / family), tmp_path / "out" / family, to="mlx", precision="fp32"
        )
        wanted[family] = decoder(IDS)[0]
    for precision, bits in BITS.items():
        name, source = f"llama {precision}", wide(tmp_path / precision)
        export_model(source, tmp_path / "out" / name, to="mlx", precision=precision)
        held = load_file(source / "model.safetensors")
        held = {key: tensor.bfloat16().float() for key, tensor in held.items()} | of_matrices(tmp_path / "out" / name, bits)
        from safetensors.torch import save_file

        save_file(held, source / "model.safetensors", metadata={"format": "pt"})
        wanted[name] = load_model(source)(IDS)[0]
    found: dict[str, Any] = ask("mlx", LOGITS, tmp_path / "out", json.dumps(IDS[0].tolist()))
    for name, logits in wanted.items():
        tolerance = 1e-2 if "gelu" in getattr(model_specs().get(name), "activation", "") else 1e-4
        assert (torch.tensor(found[name]) - logits).abs().max() < tolerance * logits.abs().max(), name


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_mlx_lm_answers_as_we_do(tmp_path: Path) -> None:
    """64 greedy tokens of a chat, with our tokenizer and template."""
    assert_answers_as_we_do("mlx", GREEDY, tmp_path)
