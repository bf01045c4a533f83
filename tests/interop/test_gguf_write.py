"""GGUF files that are written: every architecture comes back as it was, in our reader and number by number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gguf_files import reference_model
from interop.test_gguf_families import CASES, SIZES
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.gguf_export import write_gguf
from twostroke.interop.gguf_model import read_gguf
from twostroke.model.load import load_state


@pytest.fixture(params=CASES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    _, model_type, _, changes, _ = CASES[request.param]
    reference_model(model_type, **(SIZES | changes)).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_every_architecture_comes_back(directory: Path) -> None:
    spec, state = load_state(directory)
    file = directory.parent / "m.gguf"
    write_gguf(ExportSource(directory, spec, state, None), file, "F32")
    source = read_gguf(file)
    assert set(source.state) == set(state)
    for name, tensor in state.items():
        if spec.departures.norm_offset and name.endswith("norm.weight"):
            assert (source.state[name] - tensor).abs().max() <= 2**-23  # 1 is added and taken off, in fp32
        else:
            assert torch.equal(source.state[name], tensor), name
