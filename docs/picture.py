"""Take the picture of a report that README.md shows, with Chromium.

    python docs/picture.py runs/demo/300s/report.html docs/report.png

The head of the page, as a reader with a screen of 1280 pixels sees it, in 128 colours: below 300 kB.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

WIDTH, HEIGHT = 1280, 1000
MOST_BYTES = 300_000


def take(report: Path) -> bytes:
    """PNG of the head of the page at ``report``."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("docs/picture.py needs Chromium (Debian: apt-get install chromium).")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 0")
        picture = page.screenshot()
        browser.close()
    small = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(128).save(small, "PNG", optimize=True)
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    picture = take(given.report)
    if len(picture) > MOST_BYTES:
        raise SystemExit(f"the picture has {len(picture)} bytes, more than {MOST_BYTES}.")
    given.out.write_bytes(picture)


if __name__ == "__main__":
    main()
