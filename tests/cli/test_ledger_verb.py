"""`twostroke ledger` lists, shows and compares runs, and leaves damaged files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli.main import main
from twostroke.ledger.store import Ledger


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["ledger", *args])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.fixture
def run_id() -> str:
    ledger = Ledger()
    found = ledger.freeze("train", "demo model", {"steps": 3}, {"step_time_s": 1.0, "peak_memory_bytes": 2**30})
    ledger.measure(found, {"step_time_s": 1.25})
    ledger.freeze("bench", "other", {}, {"ttft_s": 0.1})
    return found


def test_list_shows_every_run_or_those_of_a_kind(capsys: pytest.CaptureFixture[str], run_id: str) -> None:
    _, text, _ = run(capsys, "list")
    assert run_id in text
    assert "demo model" in text
    assert len(text.strip().split("\n")) == 3
    _, out, _ = run(capsys, "list", "--kind", "train", "--json")
    assert [r["run_id"] for r in json.loads(out)["runs"]] == [run_id]


def test_show_holds_everything_stored(capsys: pytest.CaptureFixture[str], run_id: str) -> None:
    _, out, _ = run(capsys, "show", run_id, "--json")
    record = json.loads(out)
    assert record["inputs"] == {"steps": 3}
    assert record["measurement"] == {"step_time_s": 1.25}
    assert record["code_version"]
    assert record["fingerprint"]
    _, text, _ = run(capsys, "show", run_id)
    assert "-20.0%" in text
    assert "steps=3" in text


def test_show_says_why_a_prediction_was_not_measured(capsys: pytest.CaptureFixture[str], run_id: str) -> None:
    reasons = {"peak_memory_bytes": "no such file.", "cost_usd": "no bill is read.", "energy_kwh": "no bill is read."}
    Ledger().measure(run_id, {"not_measured": reasons})
    _, text, _ = run(capsys, "show", run_id)
    shown = " ".join(text.split())
    assert "not measured peak_memory_bytes: no such file. cost_usd, energy_kwh: no bill is read." in shown


def test_compare_gives_the_error_in_percent(capsys: pytest.CaptureFixture[str], run_id: str) -> None:
    _, text, _ = run(capsys, "compare", run_id[:-2])
    assert "-20.0%" in text
    _, out, _ = run(capsys, "compare", run_id, "--json")
    rows = {r["name"]: r for r in json.loads(out)["rows"]}
    assert rows["step_time_s"]["error_percent"] == pytest.approx(-20.0)
    assert rows["peak_memory_bytes"]["measured"] is None


def test_a_miss_is_attributed_to_its_term(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger()
    found = ledger.freeze("train", "demo", {}, {"step_time_s": 1.0, "forward_s": 0.4, "backward_s": 0.6})
    ledger.measure(found, {"step_time_s": 2.0, "forward_s": 0.4, "backward_s": 1.6})
    for args in (("show", found), ("compare", found)):
        _, out, _ = run(capsys, *args, "--json")
        (step,) = json.loads(out)["attribution"]
        assert {s["part"]: s["percent"] for s in step["shares"]}["backward_s"] == pytest.approx(-50)
        assert "which term missed" in run(capsys, *args)[1]
    _, out, _ = run(capsys, "compare", "--json")
    assert json.loads(out)["attribution"][0]["part"] == "backward_s"
    assert "which term misses most" in run(capsys, "compare")[1]


def test_compare_without_a_run_scores_all(capsys: pytest.CaptureFixture[str], run_id: str) -> None:
    _, out, _ = run(capsys, "compare", "--json")
    (score,) = json.loads(out)["scores"]
    assert (score["name"], score["n_runs"]) == ("step_time_s", 1)
    _, text, _ = run(capsys, "compare", "--kind", "bench")
    assert "No run" in text


def test_an_empty_ledger_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "list")
    assert code == 0
    assert "no runs yet" in text


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("show", "nobody"), "not in the ledger"),
        (("compare", "nobody"), "not in the ledger"),
        (("list", "--kind", "trian"), "Did you mean 'train'"),
        (("list", "--limit", "0"), "--limit 0"),
    ],
)
def test_bad_input_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], run_id: str, args: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(capsys, *args)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err


def test_a_corrupt_ledger_is_a_sentence_and_stays_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "broken.sqlite"
    path.write_bytes(b"nonsense" * 100)
    for args in (("list",), ("show", "x"), ("compare",)):
        code, _, err = run(capsys, *args, "--ledger", str(path))
        assert code == 2
        assert "not a Twostroke ledger" in err
    assert path.read_bytes() == b"nonsense" * 100


def test_damaged_pages_are_found_by_every_verb_and_left_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "damaged.sqlite"
    ledger = Ledger(path)
    for i in range(40):
        ledger.freeze("train", "a", {"filler": "x" * 500, "i": i}, {})
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = b"\xa5" * (len(data) - len(data) // 2)
    path.write_bytes(bytes(data))
    out = str(tmp_path / "r.html")
    for args in (("list", "--limit", "1"), ("show", "last"), ("compare",), ("compare", "last"), ("report", "--out", out)):
        code, _, err = run(capsys, *args, "--ledger", str(path))
        assert code == 2, args
        assert "damaged" in err
        assert "Traceback" not in err
    assert path.read_bytes() == bytes(data)
    assert not (tmp_path / "r.html").exists()


def test_a_report_that_cannot_be_written_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path, tmp_path / "file" / "r.html"):
        code, _, err = run(capsys, "report", "--out", str(place))
        assert code == 2
        assert str(place) in err
        assert "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_an_empty_ledger_still_gives_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "report", "--out", str(tmp_path / "r.html"), "--json")
    assert code == 0
    assert "nothing to report yet" in Path(json.loads(out)["report"]).read_text()
