"""The page of a load: made of the command's document alone, escaped, and without the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.bench.definitions import RequestRecord, Slo, summarise
from twostroke.bench.load import LoadResult
from twostroke.bench.load_spec import LoadSpec
from twostroke.bench.prediction import first_tokens, latency_quantiles, measured_values
from twostroke.bench.sweep import Sweep, SweepPoint
from twostroke.core.described import plain
from twostroke.core.errors import InputError
from twostroke.report.load_page import write_load_page


def run(name: str = "m", late_s: float = 0.0, failed: bool = False) -> tuple[LoadResult, dict[str, Any]]:
    records = [
        RequestRecord(i, i, i + late_s, (i + 0.5, i + 0.6, i + 0.7), i + 0.7, 9, 3, "http 500" if failed else None, ready_s=i)
        for i in range(5)
    ]
    slo = Slo(ttft_s=1.0)
    result = LoadResult(
        "http://x", name, LoadSpec(n_requests=5, request_rate=1.0), slo, tuple(records), summarise(records, slo)
    )
    document = json.loads(json.dumps(plain(result)))
    measured = measured_values(result.summary, records)
    document |= {"prediction": {"ttft_s": 0.4}, "measurement": measured, "run_id": None, "server": {}}
    return result, document | {"latency_quantiles": latency_quantiles(records), "first_tokens": first_tokens(records)}


def test_a_runs_page_shows_it_and_escapes_what_a_server_says(tmp_path: Path) -> None:
    _, document = run("<script>alert(1)</script>")
    text = write_load_page(tmp_path / "p.html", document).read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "TTFT from sent" in text
    assert "sent − when it was due" in text
    assert "5 of 5" in text
    assert "Predicted beside measured" in text
    assert 'src="http' not in text


def test_a_refused_run_says_so_first(tmp_path: Path) -> None:
    result, document = run(late_s=0.1)
    assert result.refusal is not None
    text = write_load_page(tmp_path / "p.html", document).read_text(encoding="utf-8")
    assert "Refused: the load generator was late" in text


def test_a_run_without_an_answer_has_a_page(tmp_path: Path) -> None:
    _, document = run(failed=True)
    text = write_load_page(tmp_path / "p.html", document).read_text(encoding="utf-8")
    assert "5 × http 500" in text


def test_sweeps_and_variants_stand_side_by_side(tmp_path: Path) -> None:
    result, document = run()
    sweep = Sweep(tuple(SweepPoint.of(rate, result.summary, None) for rate in (1.0, 2.0)))
    swept = {"variant": "kv-dtype=bf16", "sweep": plain(sweep), "runs": [document, document]}
    failed = {"variant": "kv-dtype=int4", "error": "int4 does not go with heads of 7"}
    whole = {"variants": [swept, failed, document | {"variant": "kv-dtype=int8"}]}
    text = write_load_page(tmp_path / "p.html", whole).read_text(encoding="utf-8")
    for words in ("Side by side", "kv-dtype=bf16", "knee", "int4 does not go with heads of 7", "By rate"):
        assert words in text


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_load_page(tmp_path / "none" / "p.html", run()[1])
