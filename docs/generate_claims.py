"""Writes ``docs/claims.md`` from ``twostroke.planner.claims``. Run it after changing the planner, a price or a device; a test
fails while the page is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "claims.md"


def main() -> None:
    from twostroke.planner.claims.catalogue import page

    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote docs/{PAGE.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
