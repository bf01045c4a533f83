"""The report shows what the ledger holds, and escapes what it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.core.errors import InputError
from twostroke.ledger.store import Ledger
from twostroke.report import figures
from twostroke.report.page import Table, write_report


def ledger_with_runs(tmp_path: Path) -> Ledger:
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    lines = [{"step": i, "tokens": 64 * i, "loss": 5.0 - i, "tok_per_s": 100.0 + i} for i in range(1, 4)]
    (run_directory / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    ledger = Ledger(tmp_path / "ledger.sqlite")
    prediction = {"step_time_s": 0.5, "forward_s": 0.2, "train_tok_per_s": 120.0, "weights_bytes": 2**20}
    train = ledger.freeze("train", "<script>alert(1)</script>", {"run_directory": str(run_directory)}, prediction)
    ledger.measure(train, {"step_time_s": 0.4, "forward_s": 0.25, "weights_bytes": 2**20})
    bench = ledger.freeze("bench", "model", {}, {"ttft_s": 0.1})
    ledger.measure(bench, {"ttft_s": 0.2, "ttft_median_s": 0.2, "ttft_p99_s": 0.4})
    return ledger


def test_the_page_shows_prediction_measurement_and_error_and_loads_nothing(tmp_path: Path) -> None:
    comparison = Table("Training beside inference", ("", "training", "decode"), [["Memory"], ["weights", "1 MiB", "0.5 MiB"]])
    page = write_report(tmp_path / "out" / "report.html", ledger_with_runs(tmp_path), comparison, {"machine": "a & b"})
    html = page.read_text()
    assert "+25.0%" in html
    assert "Training beside inference" in html
    assert "a &amp; b" in html
    assert "<script>alert(1)</script>" not in html
    assert 'src="http' not in html
    assert "Training loss" in html


def test_an_empty_ledger_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no runs yet"):
        write_report(tmp_path / "r.html", Ledger(tmp_path / "l.sqlite"))
    assert not (tmp_path / "r.html").exists()


def test_a_figure_without_data_is_left_out() -> None:
    assert figures.training_curve([]) is None
    assert figures.step_split(None) is None
    assert figures.latencies(None) is None
    assert figures.memory_by_term([]) is None
    assert figures.errors([]) is None
