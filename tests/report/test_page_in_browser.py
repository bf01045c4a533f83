"""Chromium draws the report at the width of a desk and of a phone: pictures are kept, and what they would show is checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_page import QUANTILES, RECIPE

from browser import CONTRAST, FAULTS, SIZES, browser, pictures, shown
from machines import profile, small_llama
from twostroke.core.profile import read_fingerprint, save_profile
from twostroke.ledger.store import Ledger
from twostroke.planner.choosing.comparison import compare
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.intervals import with_intervals
from twostroke.report.cards import Card
from twostroke.report.page import write_report
from twostroke.report.phases import phases_table

__all__ = ["browser", "pictures"]


def _missed(prediction: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A measurement near each predicted number, some a tenth off and some half."""
    off = (1.02, 0.9, 1.5, 0.97, 1.1)
    numbers = {name: value for name, value in prediction.items() if isinstance(value, int | float)}
    return {name: value * off[i % len(off)] for i, (name, value) in enumerate(numbers.items())} | more


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A page with every plot, card and table there is, of predictions that missed."""
    save_profile(dataclasses.replace(profile(), fingerprint=read_fingerprint()))
    spec, hardware, ledger = small_llama(), load_hardware("this"), Ledger(tmp_path / "ledger.sqlite")
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    lines = [{"step": i, "tokens": 2048 * i, "loss": 9.0 / i**0.3, "tok_per_s": 9e3 + 500 * (i % 7)} for i in range(1, 151)]
    (run_directory / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shape, load = TrainingShape(steps=150), ServingShape(scheme="int8", batch=4, prompt_tokens=64, output_tokens=64)
    training, serving = (
        plan.prediction() for plan in (plan_training(spec, shape, hardware), plan_serving(spec, load, hardware))
    )
    inputs = {"spec": dataclasses.asdict(spec), "recipe": RECIPE, "steps": 150, "run_directory": str(run_directory)}
    score = {"heldout_bits_per_byte": 2.1627, "xz_bits_per_byte": 1.3904}
    train = ledger.freeze("train", "a small llama", inputs, with_intervals(training, "measured", "train"))
    ledger.measure(train, _missed(training, **score))
    server = ledger.freeze("serve", "int8", {}, with_intervals({"startup_s": 1.05, **serving}, "measured", "serve"))
    ledger.measure(server, {"startup_s": 1.5, "weights_bytes": 2e6, "kv_cache_bytes": 6e7})
    asked = {"prompt_tokens": 64, "output_tokens": 64, "scheme": "int8", "users": 4}
    bench = ledger.freeze("bench", "int8 over HTTP", asked, with_intervals(serving, "measured", "serve"))
    ledger.measure(bench, _missed(serving, ttft_p99_s=0.4, latency_quantiles=QUANTILES | {"tpot_s": [0.01, 0.011, 0.02]}))
    comparison = phases_table(compare(spec, shape, load, hardware, spec.family))
    return write_report(
        tmp_path / "r.html", ledger, comparison, [Card("Quantised to int8", "× 1.0002", "perplexity against bf16")]
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_is_cut_off_and_all_is_legible(
    browser: Any, pictures: Path, report: Path, width: int, height: int, scheme: str
) -> None:
    with shown(browser, report.as_uri(), width, height, scheme) as page:
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        n_plots = page.locator(".plots > section").count()
        assert n_plots >= 7  # predictions, terms, loss, step, memory, latencies, roofline
        assert page.locator(".js-plotly-plot").count() == n_plots
        picture = pictures / f"report-{width}-{scheme}.png"
        page.screenshot(path=picture, full_page=True)
        print(f"screenshot: {picture}")
        assert page.evaluate(FAULTS) == []
        assert page.evaluate(CONTRAST) == []
        for summary in page.locator("summary").all():
            summary.click()
        page.screenshot(path=pictures / f"report-{width}-{scheme}-unfolded.png", full_page=True)
        assert page.evaluate(FAULTS) == []
        assert page.evaluate(CONTRAST) == []


def test_a_number_of_a_table_stays_on_a_line_with_its_unit(browser: Any, report: Path) -> None:
    with shown(browser, report.as_uri(), *SIZES[1]) as page:
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        folded = """nodes => nodes.map(node => { const range = document.createRange(); range.selectNodeContents(node);
            return [node.textContent, new Set([...range.getClientRects()].map(box => box.top)).size]; })
            .filter(each => each[1] > 1)"""
        assert page.locator("td.value").count() > 50
        assert page.locator("td.value").evaluate_all(folded) == []


def test_a_card_is_one_number_and_one_line_until_it_is_unfolded(browser: Any, report: Path) -> None:
    with shown(browser, report.as_uri(), *SIZES[0]) as page:
        cards = page.locator(".card").all()
        assert len(cards) >= 6
        for card in cards:
            assert len(card.locator(".number").inner_text()) <= 20
            assert len(card.locator("p").first.inner_text()) <= 120
            assert card.bounding_box()["height"] <= 160  # a wall of text is higher
        table = page.locator(".card table").first
        assert not table.is_visible()
        page.locator(".card summary").first.click()
        assert table.is_visible()
        page.locator(".card summary").first.click()
        assert not table.is_visible()


def test_the_checks_see_a_page_that_is_wrong(browser: Any, report: Path, tmp_path: Path) -> None:
    """Each check fails on a page made wrong in its way."""
    html = report.read_text()
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        html.replace("</style>", ".card { min-width: 600px !important; } .sub { color: #eee !important; }</style>", 1)
    )
    with shown(browser, wrong.as_uri(), *SIZES[1]) as page:
        assert any("px wide" in fault or "leaves the page" in fault for fault in page.evaluate(FAULTS))
        assert any("contrast" in fault for fault in page.evaluate(CONTRAST))
