"""What docs/architecture.md names exists: files, and functions or classes in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`([\w/]+\.(?:py|cpp|h))(?:::([\w.]+))?`", (ROOT / "docs" / "architecture.md").read_text())


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_what_the_walks_name_is_there(file: str, name: str) -> None:
    path = ROOT / "src" / "twostroke" / file
    assert path.is_file() or (ROOT / file).is_file(), f"docs/architecture.md names {file}, which is not there"
    scope: list[ast.stmt] = ast.parse(path.read_text()).body if name else []
    for part in filter(None, name.split(".")):
        found = [node for node in scope if getattr(node, "name", None) == part]
        assert found, f"docs/architecture.md names {name}, which {file} does not define"
        scope = found[0].body if isinstance(found[0], ast.ClassDef) else []


def test_both_walks_are_found() -> None:
    assert sum(bool(name) for _, name in NAMED) > 10
