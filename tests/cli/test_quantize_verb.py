"""``twostroke quantize --scheme int4``: fitted to text, with what it cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real_model import make_model
from twostroke.cli.main import main
from twostroke.core.families import read_spec
from twostroke.quantization.held import held
from twostroke.quantization.roundings import ROUNDINGS
from twostroke.quantization.survey import SurveyRow, _beaten_by


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def quantize(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["quantize", *map(str, args)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(caught.value.code or 0), out, err


def test_int4_is_fitted_to_named_text_and_says_what_it_cost(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("".join(f"def f{i}(self, name={i * i}):\n    return {i} ** self\n" for i in range(300)))
    text = ("--scheme", "int4-g32", "--calibration", tmp_path / "a.txt")
    code, out, err = quantize(capsys, model, tmp_path / "free", *text, "--max-kl", "100", "--json")
    assert code == 0, err
    free = json.loads(out)
    assert free["n_int8_matrices"] == 0
    assert free["fitted_to_tokens"] > 0
    assert 0 < free["kl_nats"] < 100
    assert free["perplexity_ratio"] == pytest.approx(1.0, abs=0.5)
    code, out, err = quantize(capsys, model, tmp_path / "held", *text, "--max-kl", "0")
    assert code == 0, err
    found = held(tmp_path / "held", read_spec(model))
    assert found.in_int8 or found.scheme == "int8"  # some of them, or all: how many depends on how sums round here
    assert "of them in int8" in out
    assert "KL" in out
    assert "above 0, with" in err


def test_what_fits_int4_is_refused_beside_int8_and_nearest(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nearest = ("--rounding", "nearest")
    for options in (("--max-kl", "0.1"), ("--scheme", "int4", *nearest, "--max-kl", "0.1"), ("--calibration", "a.txt")):
        code, _, err = quantize(capsys, model, tmp_path / "q", *options)
        assert code == 2
        assert "Use them with --scheme int4, int4-g32, int4-g64, int4-g128, and not with --rounding nearest" in err


def test_a_model_of_no_run_is_fitted_to_text_that_it_writes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = quantize(capsys, model, tmp_path / "q", "--scheme", "int4", "--max-kl", "100", "--json")
    assert code == 0, err
    assert "fitted to text that it writes" in err
    assert json.loads(out)["fitted_to_tokens"] > 0


def test_a_model_of_no_run_that_does_not_fit_in_memory_asks_for_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.engine.loading.available_bytes", lambda: 1000)
    code, _, err = quantize(capsys, model, tmp_path / "q", "--scheme", "int4")
    assert code == 2
    told = err.strip().splitlines()[-1]
    assert "is to write text: the weights in " in told
    assert "and 1000 B of memory is free. Name text with --calibration TEXT, or need none with --rounding nearest." in told
    assert "Use weights of fewer bits" not in err
    assert not (tmp_path / "q").exists()
    code, _, err = quantize(capsys, model, "--survey")
    assert (code, err.strip().endswith("Name text with --calibration TEXT.")) == (2, True)
    (tmp_path / "a.txt").write_text("".join(f"def f{i}(self, name={i * i}):\n    return {i} ** self\n" for i in range(300)))
    for name, options in (("text", ("--calibration", tmp_path / "a.txt")), ("nearest", ("--rounding", "nearest"))):
        code, _, err = quantize(capsys, model, tmp_path / name, "--scheme", "int4", *options)
        assert code == 0, err


def test_a_survey_is_a_table_of_all_schemes_and_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("".join(f"def f{i}(self, name={i * i}):\n    return {i} ** self\n" for i in range(120)))
    code, out, err = quantize(capsys, model, "--survey", "--calibration", tmp_path / "a.txt", "--max-kl", "0.00001", "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = found["rows"]
    kinds = {(row["scheme"], row["rounding"]) for row in rows}
    assert {("bf16", ""), ("int8", ""), ("int8_weight_only", ""), ("fp8", "")} <= kinds
    assert {(f"int4-g{group}", rounding) for group in (32, 64, 128) for rounding in ROUNDINGS} <= kinds
    assert [row["bytes"] for row in rows] == sorted(row["bytes"] for row in rows)
    by_kind = {(row["scheme"], row["rounding"]): row for row in rows if not row["n_int8_matrices"]}
    assert by_kind["bf16", ""]["kl_nats"] is None
    assert by_kind["int8", ""]["kl_nats"] < by_kind["int4-g128", "nearest"]["kl_nats"]
    bits = [by_kind[f"int4-g{group}", "gptq"]["bits_per_weight"] for group in (32, 64, 128)]
    assert bits == pytest.approx([4 + 36 / 32, 4 + 36 / 64, 4.5])  # of groups of 128 most matrices, 64 wide, fill only half
    assert any(row["n_int8_matrices"] for row in rows)  # a budget that groups alone exceed
    for row in rows:
        assert (row["beaten_by"] == "") or row["kl_nats"] is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_what_a_survey_has_no_use_for_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, sentence in (
        ((tmp_path / "q", "--survey"), "Leave out DIRECTORY"),
        (("--survey", "--scheme", "int8", "--replace"), "Leave out --scheme, --replace"),
        ((), "needs a DIRECTORY"),
        ((tmp_path / "q", "--rounding", "gptq"), "--rounding is of groups"),
        ((tmp_path / "q", "--scheme", "int4", "--rounding", "up"), "Use one of nearest, gptq, awq, awq-gptq"),
    ):
        code, _, err = quantize(capsys, model, *options)
        assert (code, sentence in err) == (2, True), err
    assert not (tmp_path / "q").exists()


def test_a_row_is_beaten_by_one_that_is_better_in_everything_that_is_known() -> None:
    def row(scheme: str, size: float, kl: float, rate: float | None) -> SurveyRow:
        return SurveyRow(scheme, scheme, "", 0, size, 8.0, kl, 1.0, rate, rate)

    slow, fast, larger = row("int8_weight_only", 9, 0.1, 10.0), row("int8", 9, 0.2, 20.0), row("fp8", 9, 0.3, 10.0)
    assert [_beaten_by(one, [slow, fast, larger]) for one in (slow, fast, larger)] == ["", "", "int8_weight_only"]
    unknown = [row(one.scheme, one.bytes, one.kl_nats or 0.0, None) for one in (slow, fast, larger)]
    assert [_beaten_by(one, unknown) for one in unknown] == ["", "", ""]  # int8 may be the faster one
    again = row("int8", 9, 0.5, None)
    assert _beaten_by(again, [*unknown, again]) == "int8"
