"""What import and export are expected to take: bytes over measured rates, or a sentence that says what is not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from machines import machine
from twostroke.cli.main import main
from twostroke.cli.moved_models import planned_export, planned_import
from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.ledger.store import Ledger
from twostroke.model.decoder import Decoder
from twostroke.model.save import save_model
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.work.params import count_parameters

SPEC = ModelSpec("llama", 96, 2, 32, 4, 2, 8, 48, 64)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    hardware = machine()
    monkeypatch.setattr("twostroke.planner.hardware.tables.load_hardware", lambda *_: hardware)
    return hardware


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(Decoder(SPEC), SPEC, tmp_path / "source")


def test_bytes_over_rates(model: Path, here: Hardware) -> None:
    held = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    reading = here.disk_cached_read_bytes_per_s or here.disk_write_bytes_per_s
    same = planned_import(str(model), "auto")
    assert same.values["import_s"] == pytest.approx(held / reading + held / here.disk_write_bytes_per_s)
    halved = planned_export(model, "hf", "bf16")
    assert halved.inputs == {"read_bytes": held, "written_bytes": 2 * count_parameters(SPEC).total}
    assert halved.values["export_s"] < same.values["import_s"]


def test_a_file_of_codes_is_copied_and_one_of_floats_written_in_another_type(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(bytes(1000))
    (tmp_path / "m.bin").write_bytes(bytes(1000))
    assert planned_import(str(tmp_path / "m.gguf"), "auto").inputs["written_bytes"] == 1000
    assert planned_import(str(tmp_path / "m.bin"), "bf16").inputs["written_bytes"] == 500


def test_what_is_not_known_is_a_sentence(model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(bytes(10))
    (tmp_path / "quantised").mkdir()
    (tmp_path / "quantised" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    for source, dtype, words in (
        ("owner/model", "auto", "how many bytes owner/model has is known only when they were downloaded"),
        (str(tmp_path / "m.gguf"), "bf16", "how long decoding m.gguf to bf16 takes was not measured"),
        (str(tmp_path / "quantised"), "auto", "how long decoding the quantised weights in "),
    ):
        with pytest.raises(ConfigError, match=words):
            planned_import(source, dtype)
    with pytest.raises(ConfigError, match="--to onnx --precision auto takes was not measured"):
        planned_export(model, "onnx", "auto")
    with pytest.raises(ConfigError, match="merging the adapters"):
        planned_export(tmp_path / "nothing", "hf", "auto")


@pytest.mark.parametrize("verb", ["import", "export"])
def test_the_ledger_scores_it(verb: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, str(model), str(tmp_path / "out"), "--json"])
    captured = capsys.readouterr()
    assert caught.value.code in (0, None), captured.err
    document = json.loads(captured.out)
    run = Ledger().get(document["run_id"])
    name = f"{verb}_s"
    assert run.prediction[name]["value"] == document["prediction"][name] > 0
    assert run.prediction[name]["low"] < run.prediction[name]["value"] < run.prediction[name]["high"]
    assert run.measurement[name] == document["measurement"][name] > 0
