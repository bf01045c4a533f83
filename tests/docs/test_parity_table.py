"""The table of agreement with transformers has every family, every case, and nothing beyond its bounds."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from hf_models import CASES, SAVED_AS, TOLERANCE
from parity import RUNNERS, TABLE, TIE, measured
from twostroke.core.families import FAMILIES
from twostroke.kernels.native_library import library, why_absent

COMMITTED = json.loads(TABLE.read_text())
WAYS = ("alone", "mixed", "chunked", "prefix_hit")


def test_every_case_of_every_family_was_measured() -> None:
    cases = Counter(SAVED_AS.get(case, config["model_type"]) for case, config in CASES.items())
    assert {name: row["cases"] for name, row in COMMITTED["families"].items()} == {name: cases[name] for name in FAMILIES}
    assert (COMMITTED["bound"], COMMITTED["tie"]) == (TOLERANCE, TIE)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_measured_is_within_the_bounds(name: str) -> None:
    row = COMMITTED["families"][name]
    assert all(0 < row["errors"][of] <= TOLERANCE for of in ("decoder", *RUNNERS))
    assert all(0 < row["tokens"][way][1] == row["tokens"][way][0] for way in WAYS)


@pytest.mark.skipif(library() is None, reason=why_absent())
@pytest.mark.parametrize("case", ["qwen3", "gemma3", "gpt2-untied", "kimi_k2"])
def test_it_is_measured_anew_within_the_bounds(case: str) -> None:
    row = measured(case)
    assert all(row["errors"][of] <= TOLERANCE for of in ("decoder", *RUNNERS))
    assert all(equal == n for equal, n in row["tokens"].values())
