"""What an A/B test found, in lines and on a page that Chromium draws."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from browser import CONTRAST, FAULTS, SIZES, browser, pictures, shown
from twostroke.core.errors import InputError
from twostroke.evaluation.arms import Comparison, compare_arms
from twostroke.report.arms_page import arms_text, write_arms_page

__all__ = ["browser", "pictures"]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """B is slower and better liked; its first tokens come as soon."""
    chance, lines = random.Random(7), list[dict[str, Any]]()
    for client in range(80):
        arm = "base" if client % 2 else "candidate"
        for i in range(8):
            own = {"id": f"c{client}-{i}", "key": None, "arm": arm, "unit": f"u{client}"}
            first, more = chance.lognormvariate(-3, 0.4), chance.lognormvariate(-1, 0.3)
            whole = first + more * (1 if arm == "base" else 1.6)
            lines.append(own | {
                "time": chance.random() * 500, "model": "base", "outcome": "complete", "prompt_tokens": 9, "cached_tokens": 0,
                "completion_tokens": 30, "finish_reasons": {"stop": 1}, "ttft_s": first, "e2e_s": whole, "share": 0.5,
            })  # fmt: skip
            if i < 3:
                good = chance.random() < (0.4 if arm == "base" else 0.8)
                lines.append(own | {"time": 0.0, "choice": 0, "rating": 1.0 if good else -1.0})
    return compare_arms(lines, 0.08)


def test_lines_say_which_arm_is_better_and_what_is_noise(comparison: Comparison) -> None:
    rows = {line.partition("  ")[0]: line for line in arms_text(comparison).splitlines() if "  " in line}
    assert "base is better" in rows["E2E median"]
    assert "candidate is better" in rows["good ratings"]
    assert "not told from noise" in rows["TTFT median"]
    assert rows["A"].endswith("base: 320 requests of 40 clients, 120 ratings")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_of_the_page_is_cut_off_and_all_is_legible(
    browser: Any, pictures: Path, comparison: Comparison, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    page_file = write_arms_page(tmp_path / "ab.html", comparison, "$0.08 an hour (given)")
    with shown(browser, page_file.as_uri(), width, height, scheme) as page:
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        assert page.locator(".plots > section").count() == page.locator(".js-plotly-plot").count() == 3
        assert page.locator(".card").count() == 4
        picture = pictures / f"ab-{width}-{scheme}.png"
        page.screenshot(path=picture, full_page=True)
        print(f"screenshot: {picture}")
        for summary in page.locator("summary").all():
            summary.click()
        assert page.evaluate(FAULTS) == []
        assert page.evaluate(CONTRAST) == []


def test_names_are_text_on_the_page(comparison: Comparison, tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    comparison.b.name, before = name, comparison.b.name
    try:
        html = write_arms_page(tmp_path / "ab.html", comparison, "$1").read_text()
    finally:
        comparison.b.name = before
    assert name not in html


def test_a_page_that_cannot_be_written_is_said(comparison: Comparison, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_arms_page(tmp_path, comparison, "$1")
