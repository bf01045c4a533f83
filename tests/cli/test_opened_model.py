"""A GGUF file in the place of a model directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gguf_files import small_file
from twostroke.cli.main import main
from twostroke.cli.opened_model import opened_model
from twostroke.core.errors import CorruptFileError, DataError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_file_is_imported_once_and_again_when_it_has_changed(tmp_path: Path, home: Path) -> None:
    file = small_file(tmp_path / "small model.gguf", "phi3")
    directory = opened_model(file)
    assert directory.name == "small model"
    assert home in directory.parents
    written = (directory / "model.safetensors").stat()
    assert opened_model(file) == directory
    assert (directory / "model.safetensors").stat().st_ino == written.st_ino
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(file, copy)
    copy.replace(file)
    assert opened_model(file) == directory
    assert (directory / "model.safetensors").stat().st_ino != written.st_ino
    assert len(list((home / "imported").iterdir())) == 1


def test_a_broken_file_leaves_no_model(tmp_path: Path, home: Path) -> None:
    file = small_file(tmp_path / "m.gguf", "phi3")
    directory = opened_model(file)
    file.write_bytes(file.read_bytes()[:-500])
    for _ in range(2):
        with pytest.raises(CorruptFileError, match="truncated"):
            opened_model(file)
    assert not (directory.parent / "source").exists()


def test_directories_and_other_files_are_as_before(tmp_path: Path) -> None:
    directory = opened_model(small_file(tmp_path / "m.gguf", "gemma3"))
    assert opened_model(directory) == directory
    (tmp_path / "m.bin").write_bytes(b"GGU")
    with pytest.raises(DataError, match="neither a model directory nor a GGUF file"):
        opened_model(tmp_path / "m.bin")


def test_generate_takes_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = small_file(tmp_path / "m.gguf", "phi3")
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(file), "--prompt", "ab", "--max-tokens", "4", "--ignore-eos", "--json"])
    assert not ended.value.code
    assert json.loads(capfd.readouterr().out)["outputs"]
