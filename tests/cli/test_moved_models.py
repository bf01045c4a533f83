"""What import and export are expected to take: bytes by headers and writers, seconds by measured rates, or a sentence that says
what is not known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from machines import machine
from twostroke.cli.main import main
from twostroke.cli.moved_models import planned_export, planned_import
from twostroke.core.rates import WeightRates
from twostroke.core.spec import ModelSpec
from twostroke.data.tokenizer import train_tokenizer
from twostroke.interop.export_model import export_model
from twostroke.interop.import_model import import_model, open_source
from twostroke.ledger.store import Ledger
from twostroke.model.decoder import Decoder
from twostroke.model.save import save_model
from twostroke.planner.hardware.device import Hardware

SPEC = ModelSpec("llama", 300, 2, 64, 4, 2, 16, 128, 64)


class Every(dict[str, float]):
    """The same rate for all that might be measured."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return 1e8


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    rates = WeightRates({}, {}, None, 1e9, Every(), Every(), Every(), 1e-6)
    hardware = dataclasses.replace(machine(), weights=rates)
    monkeypatch.setattr("twostroke.planner.hardware.tables.load_hardware", lambda *_: hardware)
    return hardware


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = save_model(Decoder(SPEC), SPEC, tmp_path / "source")
    train_tokenizer(iter(["the quick brown fox jumps over the lazy dog " * 3]), 300, directory / "tokenizer.json")
    return directory


@pytest.mark.parametrize(
    ("to", "precision"),
    [
        ("hf", "bf16"), ("hf", "fp16"), ("mlx", "fp32"), ("mlx", "int8"), ("mlx", "int4"), ("onnx", "fp32"), ("onnx", "int8"),
        ("onnx", "int4"), ("gguf", "F16"), ("gguf", "Q8_0"), ("gguf", "Q4_0"),
    ],
)  # fmt: skip
def test_as_many_bytes_are_written_as_were_expected(to: str, precision: str, model: Path, tmp_path: Path) -> None:
    expected = planned_export(model, to, precision, False).values
    report = export_model(model, tmp_path / ("out.gguf" if to == "gguf" else "out"), to=to, precision=precision)
    assert expected["written_bytes"] == pytest.approx(report.n_bytes, rel=0.01, abs=2000)  # small files that packages write
    assert expected["export_s"] > 0
    assert expected["peak_memory_bytes"] > 0


def test_a_kept_file_and_a_decoded_one_are_expected_by_their_headers(model: Path, tmp_path: Path, here: Hardware) -> None:
    file = tmp_path / "m.gguf"
    export_model(model, file, to="gguf", precision="Q8_0")
    seconds = []
    for dtype in ("auto", "fp32"):
        expected = planned_import(open_source(str(file), None, dtype, None))
        report = import_model(str(file), tmp_path / dtype, dtype=dtype)
        assert expected.values["written_bytes"] == pytest.approx(report.n_bytes, rel=0.01, abs=2000)
        seconds.append(expected.values["import_s"])
    writing = here.disk_write_bytes_per_s
    assert seconds[1] > seconds[0] > file.stat().st_size / writing * 0.9


def test_without_rates_bytes_and_memory_are_known(
    model: Path, here: Hardware, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = dataclasses.replace(here, weights=WeightRates())
    monkeypatch.setattr("twostroke.planner.hardware.tables.load_hardware", lambda *_: bare)
    assert set(planned_export(model, "mlx", "int4", False).values) == {"written_bytes", "peak_memory_bytes"}
    assert "no predicted time: " in capsys.readouterr().err


@pytest.mark.parametrize(("to", "package"), [("openvino", "openvino"), ("litert", "litert-torch"), ("coreml", "coremltools")])
def test_of_a_foreign_converter_bytes_alone_are_known(
    to: str, package: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [planned_export(model, to, precision, False).values for precision in ("fp32", "int8", "int4")]
    assert [set(values) for values in sizes] == [{"written_bytes"}] * 3
    assert sizes[0]["written_bytes"] > sizes[1]["written_bytes"] > sizes[2]["written_bytes"]
    assert f"the planner does not know how {package} converts models" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["import", "export"])
def test_the_ledger_scores_it(verb: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, str(model), str(tmp_path / "out"), "--json"])
    captured = capsys.readouterr()
    assert caught.value.code in (0, None), captured.err
    document: dict[str, Any] = json.loads(captured.out)
    run = Ledger().get(document["run_id"])
    for name in (f"{verb}_s", "written_bytes", "peak_memory_bytes"):
        assert run.prediction[name]["value"] == document["prediction"][name] > 0
        assert run.prediction[name]["low"] <= run.prediction[name]["value"] <= run.prediction[name]["high"]
        assert run.measurement[name] == document["measurement"][name] > 0
