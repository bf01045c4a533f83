"""The report shows what the ledger holds, escapes what it is given, and asks nothing of the network."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from machines import machine, profile, small_llama
from twostroke.core.profile import read_fingerprint, save_profile
from twostroke.ledger.store import Ledger, Measurement, Run
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.intervals import with_intervals
from twostroke.report import figures
from twostroke.report.cards import Card, Table
from twostroke.report.money import crossover
from twostroke.report.page import write_report
from twostroke.report.plot import log_ticks
from twostroke.report.roofline import roofline

QUANTILES = {"percent": [0.0, 50.0, 100.0], "ttft_s": [0.1, 0.2, 0.4], "itl_s": [0.01, 0.02, 0.03]}


def ledger_with_runs(tmp_path: Path) -> Ledger:
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    lines = [{"step": i, "tokens": 64 * i, "loss": 5.0 - i, "tok_per_s": 100.0 + i} for i in range(1, 4)]
    (run_directory / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    ledger = Ledger(tmp_path / "ledger.sqlite")
    prediction = {"step_time_s": 0.5, "forward_s": 0.2, "train_tok_per_s": 120.0, "weights_bytes": 2**20}
    frozen = with_intervals(prediction, "measured", "train")
    train = ledger.freeze("train", "<script>alert(1)</script>", {"run_directory": str(run_directory)}, frozen)
    ledger.measure(train, {"step_time_s": 0.4, "forward_s": 0.25, "weights_bytes": 2**20, "train_tok_per_s": 150.0})
    bench = ledger.freeze("bench", "model", {}, {"ttft_s": 0.1})
    ledger.measure(bench, {"ttft_s": 0.2, "ttft_median_s": 0.2, "ttft_p99_s": 0.4, "latency_quantiles": QUANTILES})
    return ledger


class Loads(HTMLParser):
    """Everything of a page that a browser would fetch, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action") and value and not value.startswith(("data:", "#")):
                self.fetched.append(f"{tag} {name}={value}")


def test_the_page_shows_prediction_measurement_and_error_and_loads_nothing(tmp_path: Path) -> None:
    comparison = Table("Training beside inference", ("", "training", "decode"), [["Memory"], ["weights", "1 MiB", "0.5 MiB"]])
    page = write_report(
        tmp_path / "out" / "report.html", ledger_with_runs(tmp_path), comparison, [Card("machine", "a & b", "two letters")]
    )
    html = page.read_text()
    assert "+25.0%" in html
    assert "Training beside inference" in html
    assert "a &amp; b" in html
    assert "<script>alert(1)</script>" not in html
    assert "Loss fell from 4.00 to 2.00" in html
    assert "0.2" in html
    loads = Loads()
    loads.feed(html)
    assert loads.fetched == []
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_a_run_without_a_prediction_shows_what_was_measured_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.measure(ledger.freeze("train", "model", {}, {}), {"step_time_s": 0.4, "train_tok_per_s": 150.0})
    html = write_report(tmp_path / "r.html", ledger).read_text()
    assert "<th></th><th>measured</th></tr>" in html
    assert '<td>step_time_s</td><td class="value">400 ms</td></tr>' in html
    assert "<code>twostroke calibrate</code>" in html  # of a sentence with `backticks`, as on a terminal


def test_a_note_of_a_missing_profile_names_no_option_of_another_command(tmp_path: Path) -> None:
    html = write_report(tmp_path / "r.html", ledger_with_runs(tmp_path)).read_text()
    assert "No roofline and no crossover: this machine has no profile yet. Run <code>twostroke calibrate</code> once" in html
    assert "--hardware" not in html


def test_plotlys_script_is_there_once_and_the_page_stays_below_six_megabytes(tmp_path: Path) -> None:
    html = write_report(tmp_path / "r.html", ledger_with_runs(tmp_path)).read_text()
    assert html.count("plotly.js v") == 1
    assert 4e6 < len(html.encode()) < 6e6  # 4.8 MB of it are the script


def test_an_empty_ledger_gives_a_page_that_says_what_to_do(tmp_path: Path) -> None:
    html = write_report(tmp_path / "r.html", Ledger(tmp_path / "l.sqlite")).read_text()
    assert "nothing to report yet" in html
    assert "twostroke calibrate" in html
    assert len(html) < 20_000  # no plots, so no script for them
    assert not (tmp_path / "l.sqlite").exists()


def test_a_figure_without_data_is_left_out() -> None:
    assert figures.training_curve([], {}) is None
    assert figures.step_split(None) is None
    assert figures.latencies(None) is None
    assert figures.memory_by_term([]) is None
    assert figures.predicted_against_measured([]) is None
    assert figures.residual_by_term([]) is None
    assert crossover({}, {"output_tok_per_s": 5.0}, machine(), machine()) is None
    assert crossover({"train_time_s": 5.0}, {}, machine(), machine()) is None


def newest(ledger: Ledger, kind: str) -> Run:
    return ledger.runs(kind)[0]


def test_predicted_against_measured_draws_each_number_with_its_interval(tmp_path: Path) -> None:
    plot = figures.predicted_against_measured(ledger_with_runs(tmp_path).runs())
    assert plot is not None
    marks = [t for t in plot.figure.data if t.mode == "markers"]
    drawn = sorted((round(x, 6), round(y, 6)) for t in marks for x, y in zip(t.x, t.y, strict=True))
    # Seconds, MiB and tokens per second, as they were frozen and measured above.
    assert drawn == [(0.2, 0.1), (0.25, 0.2), (0.4, 0.5), (1.0, 1.0), (150.0, 120.0)]
    step = next(t for t in marks for x in t.x if x == 0.4)
    place = list(step.x).index(0.4)
    # intervals.toml: e^-0.10 to e^0.35 of 0.5 s around the step, unless it was fitted since.
    assert step.error_y["array"][place] > 0
    assert step.error_y["arrayminus"][place] > 0
    assert "within 20%" in plot.title  # errors: 25, 20, 0, 20 and 50%


def test_shares_of_the_error_add_up_in_the_plot(tmp_path: Path) -> None:
    plot = figures.residual_by_term(ledger_with_runs(tmp_path).runs())
    assert plot is not None
    (bars,) = plot.figure.data
    assert sum(bars.x) == pytest.approx(25.0)  # a step of 0.4 s predicted as 0.5 s
    assert "training step at +25%" in plot.title


def test_latencies_are_the_kept_distribution_or_its_percentiles(tmp_path: Path) -> None:
    run = newest(ledger_with_runs(tmp_path), "bench")
    plot = figures.latencies(run)
    assert plot is not None
    ttft = next(t for t in plot.figure.data if t.name == "TTFT")
    assert list(ttft.x) == [100.0, 200.0, 400.0]
    assert "200 ms" in plot.title
    older = Run(**{**vars(run), "measurements": run.measurements})
    older.measurements[0].values.pop("latency_quantiles")
    plot = figures.latencies(older)
    assert plot is not None
    assert list(plot.figure.data[0].y) == [50.0, 99.0]


def test_memory_terms_fill_the_measured_peak() -> None:
    values = {"weights_bytes": 2**20, "activations_bytes": 2**21, "peak_memory_bytes": 5 * 2**20}
    plot = figures.memory_by_term([run_of(values, values)])
    assert plot is not None
    assert {t.name: list(t.x) for t in plot.figure.data} == {
        "weights": [1.0, 1.0],
        "activations": [2.0, 2.0],
        "process, loss, buffers": [2.0, 2.0],
    }
    without_peak = figures.memory_by_term([run_of(values, {"weights_bytes": 2**20})])
    assert without_peak is not None
    assert "process, loss, buffers" not in {t.name for t in without_peak.figure.data}


def run_of(prediction: dict[str, Any], measured: dict[str, Any]) -> Run:

    row = Measurement("2026-01-01T00:00:00Z", "finished", measured, None)
    return Run("train-1", "train", "demo", "2026-01-01T00:00:00Z", "0.1.0", "abc", {}, prediction, (row,))


def test_the_roofline_has_both_phases_under_the_machines_roof() -> None:
    spec, hardware = small_llama(), machine()
    training = plan_training(spec, TrainingShape(steps=10), hardware)
    serving = plan_serving(spec, ServingShape(batch=1, prompt_tokens=256, output_tokens=64), hardware)
    plot = roofline(training, serving, {"forward_s": 2.0}, {"decode_step_s": 0.01})
    assert plot is not None
    roof = plot.figure.data[0]
    # The hand-written machine: bf16 at 880 GFLOP/s, 74 GB/s beyond its caches.
    assert max(roof.y) == pytest.approx(880e9)
    assert roof.x[1] == pytest.approx(880 / 74)
    names = {t.name for t in plot.figure.data}
    assert {f"{phase}, components" for phase in ("training forward", "training backward", "prefill", "decode")} <= names
    assert all(y <= 880e9 * (1 + 1e-9) for t in plot.figure.data for y in t.y)
    whole = [t for t in plot.figure.data if t.mode == "lines+markers"]
    assert len(whole) == 2  # only what was measured
    forward = sum(w.flops for w in training.forward)
    assert whole[0].y[1] == pytest.approx(forward / 2.0)


def test_the_crossover_is_where_the_money_is_equal() -> None:
    # 3600 s of training cost as much as 3600 s of serving at full load: one price an hour for both.
    plot = crossover({"train_time_s": 3600.0}, {"output_tok_per_s": 1000.0}, machine(), machine())
    assert plot is not None
    assert "3.6M tokens" in plot.title
    assert "1 h" in plot.title
    training, serving, dot = plot.figure.data[:3]
    assert dot.y[0] == pytest.approx(training.y[0])
    slope = serving.y[1] / serving.x[1]
    assert slope * dot.x[0] == pytest.approx(dot.y[0])
    shared = {"train_time_s": 3600.0, "cost_usd": machine().usd_per_hour.value / 2}  # a run of a sweep pays its part
    plot = crossover(shared, {"output_tok_per_s": 1000.0}, machine(), machine())
    assert plot is not None
    assert "1.8M tokens" in plot.title


def test_a_page_of_this_machines_runs_has_a_roofline_and_of_anothers_says_why_not(tmp_path: Path) -> None:

    spec = small_llama()
    ledger = Ledger(tmp_path / "l.sqlite")
    inputs = {"spec": json.loads(json.dumps(spec_fields(spec))), "recipe": RECIPE, "steps": 10}
    run = ledger.freeze("train", "demo", inputs, {"step_time_s": 1.0})
    ledger.measure(run, {"step_time_s": 1.1, "train_time_s": 11.0, "forward_s": 0.3})
    assert "No roofline" in write_report(tmp_path / "r.html", ledger).read_text()

    save_profile(dataclasses.replace(profile(), fingerprint=read_fingerprint()))
    html = write_report(tmp_path / "r.html", ledger).read_text()
    assert "training forward, components" in html
    assert "No roofline" not in html


RECIPE = {"output": "runs/x", "model": {"n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 128}, "train": {"steps": 10}}


def spec_fields(spec: Any) -> dict[str, Any]:

    return dataclasses.asdict(spec)


@pytest.mark.parametrize(("low", "high"), [(0.5, 3.0), (1e-3, 40.0), (1e-5, 1e5), (3.0, 9e12)])
def test_logarithmic_axes_have_plain_numbers_at_right_places(low: float, high: float) -> None:
    axis = log_ticks(low, high)
    assert 2 <= sum(low <= v <= high for v in axis["tickvals"]) <= 12
    for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True):
        scaled = re.fullmatch(r"([\d.,]+(?:e-?\d+)?)([kMGTP]?)", text)
        assert scaled is not None, text
        factor = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[scaled[2]]
        assert math.isclose(float(scaled[1].replace(",", "")) * factor, value, rel_tol=1e-6)
