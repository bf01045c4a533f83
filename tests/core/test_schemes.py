"""The table of schemes is whole, and the one place that knows a scheme by its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import twostroke
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import CACHES, NATIVE_FORMATS, SCHEMES, Scheme, published_schemes, scheme_of, written_scheme

SOURCE = Path(twostroke.__file__).parent
QUANTISED = [name for name, row in SCHEMES.items() if row.quantised]


@pytest.mark.parametrize("row", SCHEMES.values(), ids=SCHEMES)
def test_a_row_names_rows_and_formats_that_there_are(row: Scheme) -> None:
    assert row.native in ("", *NATIVE_FORMATS)
    assert row.beside is None or SCHEMES[row.beside].disk is not None
    assert row.here.own is None
    assert row.here.native == row.native
    assert row.kept in CACHES


def test_a_name_that_is_no_scheme_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"scheme='int2' is not a way to hold weights\. Use one of fp32, bf16, "):
        scheme_of("int2")
    with pytest.raises(ConfigError, match=r"scheme='bf16' is not a way to quantise\. Use one of fp8, fp8-channel, int8, "):
        written_scheme("bf16")
    assert written_scheme("int4").group == 64
    assert [row.element for row in published_schemes("awq")] == ["int8", "int4"]
    assert published_schemes(["awq"]) == ()


def test_at_most_six_files_name_a_quantised_scheme() -> None:
    """Docstrings and the claims of other papers apart. A new scheme is a row, and what makes its codes."""
    name = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, QUANTISED))})(?![\w-])")
    found = set()
    for file in SOURCE.rglob("*.py"):
        if "claims" in file.parts:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in prose)
        if any(isinstance(text, str) and name.search(text) for text in texts):
            found.add(str(file.relative_to(SOURCE)))
    assert len(found) <= 6, sorted(found)
