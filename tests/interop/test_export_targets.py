"""What every format of ``twostroke export`` shares: refusals, and a result that is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_models import saved
from twostroke.core.errors import ConfigError, InputError
from twostroke.interop.export_model import export_model
from twostroke.interop.export_targets import TARGETS, ExportSource, ExportTarget


def write_names(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """A format of one file: the names of all tensors. In "broken" it fails half way."""
    with out.open("w") as stream:
        for name in source.state:
            stream.write(f"{name} {list(source.state[name].shape)}\n")
            if precision == "broken":
                raise OSError("the disk is full")
    return ("written",)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    row = ExportTarget("names", "names", ("whole", "broken"), f"{__name__}:write_names", suffix=".txt")
    monkeypatch.setitem(TARGETS, "names", row)
    monkeypatch.setitem(
        TARGETS, "lacking", ExportTarget("lacking", "", ("fp32",), packages={"no_such_module": "such-a-package"})
    )
    return saved("llama", tmp_path / "source")[1]


def test_a_format_of_one_file_appears_whole_or_not_at_all(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "names.txt"
    with pytest.raises(OSError, match="disk is full"):
        export_model(source, out, to="names", precision="broken")
    assert list(out.parent.iterdir()) == []
    report = export_model(source, out, to="names")
    assert (report.precision, report.notes, report.n_bytes) == ("whole", ("written",), out.stat().st_size)
    before = out.read_text()
    with pytest.raises(InputError, match="or replace it with --replace"):
        export_model(source, out, to="names")
    with pytest.raises(OSError, match="disk is full"):
        export_model(source, out, to="names", precision="broken", replace=True)
    assert out.read_text() == before
    out.write_text("old")
    export_model(source, out, to="names", replace=True)
    assert out.read_text() == before
    for wrong, sentence in (
        (out.parent, "is a directory, and this format is one file"),
        (tmp_path / "a.bin", "must end in .txt"),
    ):
        with pytest.raises(InputError, match=sentence):
            export_model(source, wrong, to="names")


def test_what_cannot_be_written_says_what_is_missing(source: Path, tmp_path: Path) -> None:
    for to, precision, kind, sentence in (
        ("lacking", "auto", InputError, "Run: pip install such-a-package"),
        ("onnx", "bf16", ConfigError, "precision='bf16' is not written by --to onnx. Use auto, fp32, fp16, int8, int4"),
        ("names2", "auto", ConfigError, "is not a format to export to. Use hf, mlx, onnx"),
    ):
        with pytest.raises(kind, match=sentence):
            export_model(source, tmp_path / "out", to=to, precision=precision)
        assert not (tmp_path / "out").exists()


def test_a_directory_is_replaced_by_another_format_and_never_with_foreign_files(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_model(source, out, to="onnx")
    export_model(source, out, to="mlx", replace=True)
    assert not (out / "model.onnx").exists()
    export_model(source, out, to="onnx", precision="int4", replace=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'notes\.txt', which Twostroke did not write"):
        export_model(source, out, to="onnx", replace=True)
    assert (out / "notes.txt").exists()
