"""Every verb that opens a model says what is wrong with a damaged one, in one JSON document, and writes nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import machines
from real_model import make_model
from twostroke.cli.main import main
from twostroke.core.profile import read_fingerprint, save_profile

MATRIX, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def this_machine_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "300")
    save_profile(replace(machines.profile(), fingerprint=read_fingerprint()))


def rewritten(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").unlink()  # not in place: it may be mapped
    (directory / "model.safetensors").write_bytes(content)


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    def damage(directory: Path) -> None:
        file = directory / "model.safetensors"
        changed = {name: t.contiguous().clone() for name, t in change(load_file(file)).items()}
        file.unlink()
        save_file(changed, file, metadata={"format": "pt"})

    return damage


def header(change: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(directory: Path) -> None:
        content = (directory / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        document = json.loads(content[8:end])
        change(document)
        raw = json.dumps(document).encode()
        rewritten(directory, struct.pack("<Q", len(raw)) + raw + content[end:])

    return damage


def poisoned(name: str, value: float) -> Damage:
    return tensors(lambda found: found | {name: torch.full_like(found[name], value)})


def overlapping(document: dict[str, Any]) -> None:
    first, second = [name for name in document if name != "__metadata__"][:2]
    document[second] = document[first]


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated": (lambda d: rewritten(d, (d / "model.safetensors").read_bytes()[:-100]), "truncated or padded"),
    "overlapping": (header(overlapping), "a hole or an overlap"),
    "missing": (tensors(lambda found: {k: t for k, t in found.items() if k != MATRIX}), f"has no tensor '{MATRIX}'"),
    "extra": (tensors(lambda found: found | {"model.layers.9.x": torch.zeros(3)}), "such as 'model.layers.9.x'"),
    "another shape": (tensors(lambda found: found | {MATRIX: torch.zeros(3, 3)}), "has shape [3, 3]"),
    "another type": (tensors(lambda found: found | {MATRIX: found[MATRIX].int()}), "is I32; weights must be"),
    "NaN matrix": (poisoned(MATRIX, float("nan")), "not finite"),
    "infinite norm": (poisoned(NORM, float("inf")), "not finite"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_a_sentence_of_every_verb(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, sentence = DAMAGES[name]
    directory, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(model, directory)
    damage(directory)
    text.write_text("def add_argument(self, name): pass\n" * 20)
    out = tmp_path / "out"
    verbs = [
        ("generate", directory, "--prompt", "def", "--max-tokens", "2", "--threads", "1"),
        ("eval", directory, "--data", text),
        ("quantize", directory, out),
        ("import", directory, out),
        ("export", directory, out),
    ]
    for verb in verbs:
        with pytest.raises(SystemExit) as caught:
            main([*map(os.fspath, verb), "--json"])
        answer, log = capsys.readouterr()
        assert caught.value.code in (1, 2), verb
        assert sentence in json.loads(answer)["error"], verb
        assert "Traceback" not in log
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"], verb
