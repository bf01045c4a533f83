"""transformers reads our quantised directories with the compressed-tensors package: the numbers that codes stand for, and
products of inputs that are rounded as a directory asks. What the two refuse is held here too, and named in docs/formats.md."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import Run, environment, error
from torch import Tensor, nn

from real_model import greedy_reference, spread_model
from twostroke.core.families import layout
from twostroke.core.schemes import SCHEMES, WRITTEN
from twostroke.kernels.codes import quantize
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model, load_state
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.fitting import Fitted

VERSION = "0.20.0"
IDS = [random.Random(1).randrange(1, 500) for _ in range(48)]
N_PROMPT = 8
DENSE = tuple(dict.fromkeys(SCHEMES[name].here.name for name in WRITTEN))

OPEN = """
import json, sys
sys.path.append(sys.argv[1])  # after our own packages
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
ids, n_prompt = torch.tensor([json.loads(sys.argv[3])]), int(sys.argv[4])
found = {}
for name, (folder, dequantised) in json.loads(sys.argv[2]).items():
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantised else {}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **how)
        with torch.no_grad():
            logits = model(ids).logits[0].tolist()
            tokens = model.generate(ids[:, :n_prompt], max_new_tokens=64, do_sample=False)[0, n_prompt:].tolist()
        found[name] = {"logits": logits, "tokens": tokens, "missing": sorted(loading["missing_keys"])}
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
print("FOUND", json.dumps(found))
"""


def opened(directories: dict[str, Path], dequantised: bool) -> dict[str, Any]:
    """Logits of ``IDS``, 64 greedy tokens after the first of them, and names of weights that transformers does not find in each
    directory, or why it refuses it. ``dequantised``: it is told to expand codes while it loads."""

    def install(python: Path, run: Run) -> None:
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", f"compressed-tensors=={VERSION}", "loguru")

    (site,) = environment("compressed-tensors", install).parents[1].glob("lib/python*/site-packages")
    asked = json.dumps({name: (str(folder), dequantised) for name, folder in directories.items()})
    command = [sys.executable, "-W", "ignore", "-c", OPEN, str(site), asked, json.dumps(IDS), str(N_PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def mixed(source: Path, directory: Path) -> Path:
    """int4 with two matrices in int8."""
    spec, state = load_state(source)
    in_int8 = frozenset({"blocks.0.attn.qkv.weight", "blocks.1.mlp.down.weight"})
    names = [entry.canonical for entry in layout(spec) if entry.matrix is not None and entry.canonical not in in_int8]
    codes = {name: quantize(state[name].float(), SCHEMES["int4-g32"]) for name in names}
    quantize_model(source, directory, "int4-g32", fitted=Fitted(codes, in_int8, None, 0))
    return directory


def with_rounded_inputs(decoder: Decoder, scheme: str) -> Decoder:
    """Each row that a block's matrix reads is rounded by its largest number, as compressed-tensors does where a directory asks
    for 8 bits a token: in steps of 1/127.5 of it, or to E4M3 with it at 448."""

    def rounded(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        largest = inputs[0].abs().amax(dim=-1, keepdim=True)
        if scheme.startswith("fp8"):
            scale = largest / 448
            return ((inputs[0] / scale).to(torch.float8_e4m3fn).float() * scale,)
        scale = largest / 127.5
        return ((inputs[0] / scale).round().clamp(-128, 127) * scale,)

    for module in decoder.blocks.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(rounded)
    return decoder


@torch.no_grad()
def logits_of(decoder: Decoder) -> Tensor:
    return decoder(torch.tensor([IDS]))[0]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One for each scheme that ``quantize`` writes, of a dense model; of a mixture of experts; and one of two schemes."""
    folder = tmp_path_factory.mktemp("quantised")
    dense, experts = (spread_model(folder / size, size) for size in ("6M", "experts"))
    made = {"mixed": mixed(dense, folder / "mixed")}
    for scheme in DENSE:
        made[scheme] = folder / scheme
        quantize_model(dense, made[scheme], scheme)
    for scheme in ("int8", "fp8-channel", "int4-g64"):
        made[f"experts-{scheme}"] = folder / f"experts-{scheme}"
        quantize_model(experts, made[f"experts-{scheme}"], scheme)
    return made


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_transformers_expands_codes_to_the_numbers_that_they_stand_for(directories: dict[str, Path]) -> None:
    found = opened({name: directories[name] for name in (*DENSE, "experts-fp8-channel")}, dequantised=True)
    for name, answer in found.items():
        assert answer.get("missing") == [], (name, answer)
        assert error(answer["logits"], logits_of(load_model(directories[name]))) < 1e-5, name
        ours, _ = greedy_reference(directories[name], IDS[:N_PROMPT], 64)
        assert answer["tokens"] == ours[: len(answer["tokens"])], name
        assert len(answer["tokens"]) == 64 or answer["tokens"][-1] == 0, name  # it stops at the end of the text


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["int8", "fp8-channel"])
def test_transformers_rounds_inputs_as_a_directory_asks(scheme: str, directories: dict[str, Path]) -> None:
    """A number at the middle between two codes may go either way; without rounding the difference is ten times as large."""
    answer = opened({scheme: directories[scheme]}, dequantised=False)[scheme]
    assert answer.get("missing") == [], answer
    plain = load_model(directories[scheme])
    exact = logits_of(plain)
    ours = logits_of(with_rounded_inputs(plain, scheme))
    assert error(answer["logits"], ours) < error(exact.tolist(), ours) / 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_what_transformers_refuses(directories: dict[str, Path]) -> None:
    """The reasons are theirs. While a model has no memory yet, compressed-tensors makes room for zero points as they are before
    its own packing. transformers expands all dense matrices as the first group says, and of experts int8 codes and zero points
    not at all."""
    mismatch, conversion = "ignore_mismatched_sizes", "automatic conversion"
    zeros = [name for name in DENSE if SCHEMES[name].has_zeros]
    found = opened({name: directories[name] for name in (*zeros, "mixed")}, dequantised=False)
    assert all(mismatch in answer.get("error", "") for answer in found.values()), found
    found = opened({name: directories[name] for name in ("mixed", "experts-int8", "experts-int4-g64")}, dequantised=True)
    assert all(conversion in answer.get("error", "") for answer in found.values()), found
