"""``twostroke import`` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli.main import main
from twostroke.core.spec import ModelSpec
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.model.save import save_model

SPEC = ModelSpec("llama", 96, 2, 32, 4, 2, 8, 48, 64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(Decoder(SPEC), SPEC, tmp_path / "source")


def run(*args: str) -> int:
    try:
        main(["import", *args])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_directory_is_imported_and_described(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(source), str(tmp_path / "m")) == 0
    out = capsys.readouterr().out
    assert "a llama model of" in out
    assert "Tokenizer: none." in out
    assert load_model(tmp_path / "m").spec == SPEC


def test_json_is_one_document_on_stdout(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(source), str(tmp_path / "m"), "--dtype", "bf16", "--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["kind"], document["family"], document["dtype"]) == ("Hugging Face", "llama", "bf16")
    assert captured.err.startswith("no predicted time: this machine has no profile yet.")
    assert "\nimporting " in captured.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "m"], "does not exist"),
        (["source", "source"], "is not empty"),
        (["source", "m", "--dtype", "int4"], "--dtype int4"),
        (["source", "m", "--tokenizer", "nowhere.json"], "tokenizer nowhere.json does not exist"),
        (["source"], "Missing argument 'directory'"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert "Traceback" not in err


def test_replace_is_needed_and_enough_to_overwrite(source: Path, tmp_path: Path) -> None:
    assert run(str(source), str(tmp_path / "m")) == 0
    assert run(str(source), str(tmp_path / "m")) == 2
    assert run(str(source), str(tmp_path / "m"), "--replace") == 0
