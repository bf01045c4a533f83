"""Codes that are fitted to a model which is read block by block, and that wait on disk, are those of a model in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_models import saved
from twostroke.kernels.codes import Codes
from twostroke.model.load import load_model
from twostroke.model.streamed import stream_model
from twostroke.quantization.fitting import fit_codes
from twostroke.quantization.kept_codes import KeptCodes
from twostroke.quantization.roundings import ROUNDINGS


@pytest.mark.parametrize(("name", "rounding"), [("llama", "gptq"), ("gpt2", "awq"), ("olmoe", "gptq")])
def test_codes_are_those_of_a_model_in_memory(name: str, rounding: str, tmp_path: Path) -> None:
    _, directory = saved(name, tmp_path / "model")
    rows = torch.randint(2, 97, (24, 40), generator=torch.Generator().manual_seed(0))
    batches, how, most = list(rows.split(8)), ROUNDINGS[rounding], 1e-4  # nats, so that some matrices go to int8
    wanted = fit_codes(load_model(directory), batches, 32, most, rounding=how)
    found = fit_codes(stream_model(directory), batches, 32, most, rounding=how, folder=tmp_path / "codes")
    assert found.int8 == wanted.int8
    assert found.int8
    assert found.judgement == wanted.judgement
    assert list(found.codes) == list(wanted.codes)
    for canonical, codes in wanted.codes.items():
        assert all(torch.equal(a, b) for a, b in zip(found.codes[canonical], codes, strict=True)), canonical
    assert not list((tmp_path / "codes").iterdir()), "the file has no name"


def test_kept_codes_come_back_as_they_were(tmp_path: Path) -> None:
    kept = KeptCodes(tmp_path)
    first = Codes(torch.arange(12, dtype=torch.uint8).view(3, 4).t(), torch.rand(4, 2), torch.ones(4, 2, dtype=torch.uint8))
    second = Codes(torch.tensor([[-3]], dtype=torch.int8), torch.rand(1))
    kept["a"], kept["b"] = first, second
    kept["a"] = first
    assert list(kept) == ["a", "b"]
    assert all(torch.equal(a, b) for a, b in zip(kept["a"], first, strict=True))
    assert kept["b"].zero is None
    assert torch.equal(kept["b"].codes, second.codes)
    del kept["a"]
    assert len(kept) == 1
