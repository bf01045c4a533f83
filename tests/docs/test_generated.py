"""Generated pages are what the code generates today."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_up_to_date() -> None:
    # In a child: the generator fixes the terminal's width through the environment.
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'docs')!r}); import generate\n"
        "for path, text in generate.generated().items():\n"
        "    assert path.is_file() and path.read_text() == text, f'{path} is out of date: run `make docs`'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_every_room_is_in_the_tree() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    rooms = {p.parent.name for p in (ROOT / "src" / "twostroke").glob("*/__init__.py")}
    assert rooms == set(generate.ROOMS)


def test_links_in_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
