"""``twostroke bench``: a load on a server of its own, the engine alone, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli.main import main
from twostroke.ledger.store import Ledger

pytestmark = pytest.mark.usefixtures("children_run_from_source")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command."""
    try:
        main(["bench", *args])
    except SystemExit as ended:
        code = int(ended.code or 0)
    else:
        code = 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_load_on_a_server_of_its_own_is_measured_and_recorded(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    raw = tmp_path / "raw.jsonl"
    options = ["--requests", "6", "--users", "3", "--prompt-tokens", "8:16", "--output-tokens", "6", "--slo", "e2e=60"]
    code, out, err = run(capsys, "serve", str(model), *options, "--output", str(raw), "--json")
    assert code == 0, err
    document = json.loads(out)
    summary = document["summary"]
    assert (summary["n_completed"], summary["failures"], summary["output_tokens"], summary["slo_met"]) == (6, {}, 36, 6)
    assert 6 * 7 <= summary["prompt_tokens"] <= 6 * 17  # a merge across a cut can make a prompt a token shorter or longer
    assert len(raw.read_text().splitlines()) == 7
    assert {run.kind for run in Ledger().runs()} == {"bench", "serve"}
    bench = Ledger().get(document["run_id"])
    assert bench.status == "finished"
    assert bench.measurement["output_tok_per_s"] == pytest.approx(summary["output_tok_per_s"])
    assert bench.measurement["ttft_s"] == pytest.approx(summary["ttft_s"]["median"])
    for process in ("peak_memory_bytes", "http_peak_memory_bytes"):
        assert 2e7 < bench.measurement[process] < 4e9
    assert set(bench.prediction) <= set(bench.measurement) | set(bench.measurement["not_measured"])


def test_raw_times_that_a_full_disk_refuses_cost_no_result(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    options = ["--requests", "2", "--users", "1", "--prompt-tokens", "8", "--output-tokens", "4", "--output", "/dev/full"]
    code, out, err = run(capsys, "serve", str(model), *options)
    assert code == 1
    assert "2 of 2 requests completed" in out
    assert "error: the raw times cannot be written to /dev/full: No space left on device." in err


def test_the_engine_alone_is_measured_by_batch(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    options = ["--batch", "1", "--batch", "4", "--prompt-tokens", "16", "--output-tokens", "16", "--repeats", "1"]
    code, out, err = run(capsys, "offline", str(model), *options, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert [point["batch"] for point in document["points"]] == [1, 4]
    for point in document["points"]:
        assert point["prefill_tok_per_s"] == pytest.approx(point["batch"] * 16 / point["prefill_s"])
        assert point["decode_tok_per_s"] == pytest.approx(point["batch"] / point["tpot_s"])
        assert {"prefill_flop_per_s", "decode_bytes_per_s"} <= point.keys()
    assert len(Ledger().runs("bench")) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give a model directory"),
        (["--url", "nowhere"], "must look like http"),
        (["--url", "http://127.0.0.1:1", "--users", "2", "--rate", "3"], "exactly one"),
        (["--url", "http://127.0.0.1:1", "--prompt-tokens", "many"], "--prompt-tokens 'many'"),
        (["--url", "http://127.0.0.1:1", "--output-tokens", "9:3"], "--output-tokens 9:3"),
        (["--url", "http://127.0.0.1:1", "--slo", "soon"], "--slo"),
        (["--url", "http://127.0.0.1:1", "--endpoint", "embeddings"], "embeddings"),
        (["--url", "http://127.0.0.1:1", "--output", "/nonexistent/raw"], "does not exist"),
        (["--url", "http://127.0.0.1:1", "--prompt-text", "/nonexistent"], "/nonexistent cannot be read"),
        (["/nonexistent"], "does not exist"),
        (["--url", "http://127.0.0.1:1", "--arrivals", "bursts", "--rate", "2"], "--arrivals bursts"),
        (["--url", "http://127.0.0.1:1", "--arrivals", "constant"], "no effect"),
        (["--url", "http://127.0.0.1:1", "--trace", "/nonexistent.csv"], "/nonexistent.csv cannot be read"),
        (["--url", "http://127.0.0.1:1", "--clients", "/nonexistent.toml"], "/nonexistent.toml cannot be read"),
        (["--url", "http://127.0.0.1:1", "--trace", "t.csv", "--users", "2"], "exactly one"),
        (["--url", "http://127.0.0.1:1", "--turns", "0"], "--turns 0"),
        (["--url", "http://127.0.0.1:1", "--sweep", "fast"], "--sweep 'fast'"),
        (["--url", "http://127.0.0.1:1", "--sweep", "1,2", "--rate", "3"], "--sweep sets the rates"),
        (["--url", "http://127.0.0.1:1", "--each", "kv-dtype=all"], "--each starts servers"),
        (["/nonexistent", "--each", "kv-typ=all"], "kv-dtype"),
        (["--url", "http://127.0.0.1:1", "--report", "/nonexistent/page.html"], "does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(capsys: pytest.CaptureFixture[str], options: list[str], sentence: str) -> None:
    code, _, err = run(capsys, "serve", *options)
    assert code == 2
    assert sentence in err
    assert err.count("\n") == 1


def test_what_its_own_server_refuses_is_told_once(capfd: pytest.CaptureFixture[str], model: Path) -> None:
    """The server is a child that shares our stderr, and tells its error there."""
    code, out, err = run(capfd, "serve", str(model), "--kv-cache-gib", "1e-7", "--json")
    assert code == 2
    assert "less than one page" in json.loads(out)["error"]
    assert err.count("error: ") == err.count("less than one page") == 1


def test_a_server_that_is_not_there_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "serve", "--url", "http://127.0.0.1:1", "--requests", "1")
    assert code == 1
    assert "does not answer: connection refused" in err


def test_lengths_beyond_the_context_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    for command in (["serve"], ["offline"]):
        code, _, err = run(capsys, *command, str(model), "--prompt-tokens", "500", "--output-tokens", "100")
        assert code == 2
        assert "512" in err


@pytest.mark.parametrize("repeats", ["0", "1000000"])
def test_repeats_have_a_bound(capsys: pytest.CaptureFixture[str], model: Path, repeats: str) -> None:
    code, _, err = run(capsys, "offline", str(model), "--repeats", repeats)
    assert code == 2
    assert f"--repeats {repeats} must be " in err


def test_a_batch_beyond_what_runs_at_once_is_refused(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code, _, err = run(capsys, "offline", str(model), "--batch", "5", "--max-running", "4")
    assert code == 2
    assert "from 1 to 4" in err


def test_a_sweep_of_conversations_predicts_and_records_each_rate(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    page = tmp_path / "load.html"
    options = ["--sweep", "20,40", "--requests", "6", "--turns", "2", "--prompt-tokens", "8:16", "--output-tokens", "4"]
    code, out, err = run(capsys, "serve", str(model), *options, "--keep-late", "--report", str(page), "--json")
    assert code == 0, err
    document = json.loads(out)
    points = document["sweep"]["points"]
    assert [point["rate_per_s"] for point in points] in ([20.0, 40.0], [20.0])  # a slow machine is full at the first
    assert document["sweep"]["knee_per_s"] in (20.0, 40.0)
    assert len(Ledger().runs("bench")) == len(points) == len(document["runs"])
    assert document["runs"][0]["load"]["turns"] == 2
    text = page.read_text(encoding="utf-8")
    assert "knee" in text
    assert "By rate" in text


def test_each_value_of_an_engine_option_is_measured_and_a_refused_one_is_told(
    capfd: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    page = tmp_path / "load.html"
    options = [
        "--each",
        "kv-dtype=fp32,bf16",
        "--requests",
        "4",
        "--users",
        "2",
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "4",
    ]
    code, out, err = run(capfd, "serve", str(model), *options, "--report", str(page), "--json")
    assert code == 0, err
    variants = json.loads(out)["variants"]
    assert [variant["variant"] for variant in variants] == ["kv-dtype=fp32", "kv-dtype=bf16"]
    assert all(variant["summary"]["n_completed"] == 4 for variant in variants)
    assert [Ledger().get(variant["run_id"]).inputs.get("kv_dtype") for variant in variants] == ["fp32", "bf16"]
    assert "Side by side" in page.read_text(encoding="utf-8")
