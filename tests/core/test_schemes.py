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
    assert row.beside is None or row.disk is None or SCHEMES[row.beside].disk is not None
    assert row.here.own is None
    assert row.here.native == row.native
    assert row.kept in CACHES
    assert {row.head, *(of for _, of, _ in row.mix)} <= {None, *SCHEMES}
    assert all(0 < share <= 1 for _, _, share in row.mix)


def test_a_name_that_is_no_scheme_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"scheme='int2' is not a way to hold weights\. Use one of fp32, bf16, "):
        scheme_of("int2")
    with pytest.raises(ConfigError, match=r"scheme='bf16' is not a way to quantise\. Use one of fp8, fp8-channel, int8, "):
        written_scheme("bf16")
    assert written_scheme("int4").group == 64
    assert [row.element for row in published_schemes("awq")] == ["int8", "int4"]
    assert published_schemes(["awq"]) == ()


def test_names_are_found_as_people_type_them() -> None:
    assert scheme_of("q4_k_m") is SCHEMES["Q4_K_M"]
    assert scheme_of("F16") is SCHEMES["fp16"]
    assert scheme_of("BF16") is SCHEMES["bf16"]


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q4_0", 4.5),
        ("Q4_1", 5.0),
        ("Q5_0", 5.5),
        ("Q5_1", 6.0),
        ("Q8_0", 8.5),
        ("Q4_K_M", 4.5),
        ("Q5_K_M", 5.5),
        ("Q6_K", 6.5625),
    ],
)
def test_a_block_of_ggufs_takes_the_bits_that_ggml_gives_it(name: str, bits: float) -> None:
    assert 8 * SCHEMES[name].matrix_bytes(64, 1024) / (64 * 1024) == bits


def test_at_most_fourteen_files_name_a_quantised_scheme() -> None:
    """Docstrings, the claims of other papers and other tools' formats apart. A new scheme is a row, and what makes its codes
    or tells it from a checkpoint's config. Five files of training name types of products that are called as schemes are, fp8
    and nvfp4, and two ways to send gradients, int8 and int4."""
    name = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, QUANTISED))})(?![\w-])")
    found = set()
    for file in SOURCE.rglob("*.py"):
        if {"claims", "published", "interop"} & {*file.parts}:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in prose)
        if any(isinstance(text, str) and name.search(text) for text in texts):
            found.add(str(file.relative_to(SOURCE)))
    assert len(found) <= 14, sorted(found)
