"""Writes ``docs/plan-schema.md`` and ``docs/plan-schema.json`` from ``twostroke.planner.schema``. A test fails while either is
out of date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def generated() -> dict[Path, str]:
    """Each file with the text it should have."""
    from twostroke.planner.schema.render import json_schema, markdown

    schema = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    return {DOCS / "plan-schema.md": markdown(), DOCS / "plan-schema.json": schema}


def main() -> None:
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote docs/{path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
