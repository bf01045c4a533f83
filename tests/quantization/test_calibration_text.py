from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from twostroke.core.errors import DataError
from twostroke.core.recipe import DataRecipe
from twostroke.core.spec import ModelSpec
from twostroke.data.prepare import prepare
from twostroke.data.shards import PreparedData
from twostroke.quantization.calibration_text import N_TOKENS, calibration_batches

SPEC = ModelSpec("llama", 512, 1, 16, 2, 2, 8, 32, 64)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        (folder / f"{i}.txt").write_text(" ".join(f"word{(i * 7 + j * j) % 997}" for j in range(400)))
    return prepare(DataRecipe(sources=(str(folder),), vocab_size=400), folder / "cache")


def run_of(prepared: PreparedData, folder: Path) -> Path:
    (folder / "model").mkdir()
    (folder / "recipe.json").write_text(json.dumps({"resolved": {"data_directory": str(prepared.directory)}}))
    return folder / "model"


def test_rows_come_from_what_the_run_trained_on(prepared: PreparedData, tmp_path: Path) -> None:
    batches = calibration_batches(run_of(prepared, tmp_path), SPEC)
    rows = torch.cat(batches)
    assert rows.shape[1] == SPEC.max_positions
    assert 0 < rows.numel() <= min(N_TOKENS, prepared.n_train_tokens)
    text = torch.from_numpy(prepared.train_tokens()[:].astype("int64"))
    windows = text.unfold(0, SPEC.max_positions, 1)
    assert all(bool((windows == row).all(dim=1).any()) for row in rows)


def test_a_model_of_no_run_has_none_and_named_files_are_read(prepared: PreparedData, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    assert calibration_batches(tmp_path / "alone", SPEC) == []
    (tmp_path / "alone" / "tokenizer.json").write_bytes(prepared.tokenizer_path.read_bytes())
    (tmp_path / "some.txt").write_text("word1 word2 " * 200)
    assert torch.cat(calibration_batches(tmp_path / "alone", SPEC, [str(tmp_path / "some.txt")])).shape[1] == 64
    (tmp_path / "short.txt").write_text("word1")
    with pytest.raises(DataError, match="calibration needs 64"):
        calibration_batches(tmp_path / "alone", SPEC, [str(tmp_path / "short.txt")])
