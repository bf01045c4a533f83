"""The same recipe and seed give the same weights on the same machine; what breaks it is named."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twostroke.core.described import plain
from twostroke.core.errors import Interrupted
from twostroke.training.environment import differences, environment, weights_sha256
from twostroke.training.run_directory import RunDirectory
from twostroke.training.start import train

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "optimizer"), [("fp32", "adamw"), ("bf16", "muon")])
def test_the_same_recipe_gives_the_same_weights(make_recipe, dtype: str, optimizer: str) -> None:
    sizes = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48, "dropout": 0.1}
    settings = {"steps": 5, "dtype": dtype, "optimizer": optimizer, "checkpoint_every": 2}
    first, second = (train(make_recipe(name, model=sizes, **settings)).summary for name in ("a", "b"))
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["environment"] == second["environment"]
    other = train(dataclasses.replace(make_recipe("c", model=sizes, **settings), seed=1)).summary
    assert other["weights_sha256"] != first["weights_sha256"]


@pytest.mark.alone
def test_another_process_gives_the_same_weights_with_two_threads(make_recipe, tmp_path: Path) -> None:
    code = (
        "import json, sys, torch\n"
        "torch.set_num_threads(2)\n"
        "from twostroke.core.recipe import recipe_from_dict\n"
        "from twostroke.training.start import train\n"
        "print(train(recipe_from_dict(json.loads(sys.argv[1]))).summary['weights_sha256'])\n"
    )
    # large enough that torch divides its loops between both threads
    sizes = {"family": "llama", "n_layers": 1, "d_model": 256, "n_heads": 4, "d_ff": 512}
    hashes = []
    for name in ("first", "second"):
        recipe = plain(make_recipe(name, model=sizes, steps=2, batch_size=8))
        command = [sys.executable, "-c", code, json.dumps(recipe)]
        hashes.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    assert len(hashes[0]) == 64
    assert hashes[0] == hashes[1]


def test_the_hash_is_of_names_types_shapes_and_every_bit() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
    found = weights_sha256(weights)
    assert weights_sha256(dict(reversed(weights.items()))) == found
    flipped = weights["a"].clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [
        weights | {"a": flipped},
        weights | {"a": weights["a"].reshape(3, 2)},
        weights | {"a": weights["a"].view(torch.int32)},
        {"a": weights["a"], "c": weights["b"]},
        {"a": weights["a"]},
    ]
    assert len({found, *map(weights_sha256, others)}) == 6


def test_what_differs_is_named_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment(CPU, compile=False, sums="one after another")
    json.dumps(here)
    assert differences(here, here) == []
    assert differences(here | {"torch": "1.0", "compiled": True}, here) == [
        f"torch 1.0 → {here['torch']}",
        "compiled yes → no",
    ]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    now = environment(CPU, compile=False, sums="one after another")
    assert differences(here, now) == ["switches none → ONEDNN_MAX_CPU_ISA=AVX2"]
    assert differences({"of another release": 1}, here) == []


def test_resuming_elsewhere_says_what_differs(make_recipe) -> None:
    recipe = make_recipe(steps=3)
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda step: step == 1)
    file = RunDirectory(Path(recipe.output)).recipe
    stored = json.loads(file.read_text())
    stored["resolved"]["environment"] |= {"n_threads": 64, "cpu_capability": "AVX9000"}
    file.write_text(json.dumps(stored))
    lines: list[str] = []
    train(recipe, resume=True, log=lines.append)
    (told,) = [line for line in lines if "another environment" in line]
    assert "n_threads 64 → 1" in told
    assert f"cpu_capability AVX9000 → {torch.backends.cpu.get_cpu_capability()}" in told
    assert "torch " not in told


def test_a_run_of_the_first_release_is_resumed(make_recipe) -> None:
    recipe = make_recipe(steps=3)
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda step: step == 1)
    file = RunDirectory(Path(recipe.output)).recipe
    stored = json.loads(file.read_text())
    del stored["resolved"]["environment"]
    stored["resolved"] |= {"torch_version": "2.0", "n_threads": 1, "device": "cpu"}
    file.write_text(json.dumps(stored))
    lines: list[str] = []
    assert train(recipe, resume=True, log=lines.append).summary["steps"] == 3
    assert any("torch 2.0 → " in line for line in lines)
