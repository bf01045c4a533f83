"""Pages in Chromium: pictures that are kept, and what a person would see wrong in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = ((1280, 900), (420, 860))

FAULTS = (Path(__file__).parent / "faults.js").read_text()
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots are kept: ``TWOSTROKE_SCREENSHOTS``, else a folder of this run of pytest."""
    named = os.environ.get("TWOSTROKE_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.getbasetemp() / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def shown(
    browser: Any, url: str, width: int, height: int, scheme: str = "light", expected: str | None = None, touch: bool = False
) -> Iterator[Any]:
    """The page at ``url``; afterwards whatever it wrote to the console as a warning or an error fails the test, unless it holds
    ``expected``, as the browser's own line of a request that was refused."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=touch, is_mobile=touch
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(url)
        yield page
        assert [text for text in complaints if expected is None or expected not in text] == []
    finally:
        context.close()
