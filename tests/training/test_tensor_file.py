from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from twostroke.model.safetensors_file import read_header
from twostroke.training import tensor_file
from twostroke.training.tensor_file import HashedFile, write_tensors

TENSORS = {
    "b": torch.arange(300_000, dtype=torch.float32).reshape(3, 100, 1000),
    "a.weight": torch.randn(5, 7).bfloat16(),
    "step": torch.tensor(12.0),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "none": torch.empty(0, 4),
    "half": torch.ones(3, dtype=torch.float16),
    "codes": torch.arange(5, dtype=torch.uint8),
    "count": torch.tensor([2**40]),
    "flag": torch.tensor([True, False]),
}


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    with HashedFile(file) as stream:
        write_tensors(stream, TENSORS)
    read_header(file)  # raises where sizes, offsets and shapes do not agree
    loaded = load_file(file)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert stream.n_bytes == file.stat().st_size
    assert stream.sha256() == hashlib.sha256(file.read_bytes()).hexdigest()


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    with HashedFile(tmp_path / "t.safetensors") as stream:
        write_tensors(stream, {})
    assert load_file(tmp_path / "t.safetensors") == {}


def test_a_system_that_takes_less_than_given_gets_the_rest_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(tensor_file.os, "write", lambda descriptor, data: original(descriptor, data[:1000]))
    with HashedFile(tmp_path / "f") as stream:
        stream.write(content := bytes(range(256)) * 50)
    assert (tmp_path / "f").read_bytes() == content
    assert stream.sha256() == hashlib.sha256(content).hexdigest()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "f")
    assert (tmp_path / "f").read_text() == "mine"
