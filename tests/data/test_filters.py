from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import ConfigError
from twostroke.core.recipe import DataRecipe
from twostroke.data.filters import NGRAM_BYTES, REASONS, TextMeasure


def measure(*pieces: str) -> TextMeasure:
    found = TextMeasure()
    for piece in pieces:
        found.add(piece)
    return found


def slow(text: str) -> dict[str, float]:
    """One character, line and stretch at a time."""
    words: list[int] = []
    n_symbols, inside = 0, False
    for c in text:
        is_word = unicodedata.category(c)[0] in "LMN"
        if is_word and not inside:
            words.append(0)
        if is_word:
            words[-1] += 1
        inside = is_word
        control = unicodedata.category(c) == "Cc" or unicodedata.category(c)[0] == "Z"
        n_symbols += not is_word and not control
    lines = [line.strip() for line in text.split("\n")]
    repeated = sum(len(line) for i, line in enumerate(lines) if line in lines[:i])
    raw = text.encode()
    stretches = [raw[i : i + NGRAM_BYTES] for i in range(len(raw) - NGRAM_BYTES + 1)]
    most = max((stretches.count(s) for s in stretches), default=0)
    return {
        "n_chars": len(text),
        "repeated_lines": repeated / max(1, sum(map(len, lines))),
        "top_ngram": min(len(raw), most * NGRAM_BYTES) / len(raw) if most > 1 else 0.0,
        "symbols": n_symbols / max(1, n_symbols + sum(words)),
        "mean_word": sum(words) / max(1, len(words)),
    }


@settings(max_examples=80, deadline=None)
@given(
    text=st.text(
        st.one_of(st.sampled_from("ab  \n.!1é猫ิ़"), st.characters(codec="utf-8", exclude_categories=["Cf", "Co", "Cn"])),
        max_size=90,
    )
)
def test_measures_are_those_of_one_character_at_a_time(text: str) -> None:
    found = measure(text)
    for name, value in slow(text).items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-12), name


def test_pieces_are_measured_together() -> None:
    one, two = "a line\n" * 3, "words, words!\n"
    found = measure(one, two)
    assert found.n_chars == len(one + two)
    assert found.symbols == pytest.approx(slow(one + two)["symbols"])
    assert found.mean_word == pytest.approx(slow(one + two)["mean_word"])


@pytest.mark.parametrize(
    ("text", "settings", "reason"),
    [
        ("short", {"min_chars": 6}, "too_short"),
        ("a little longer", {"max_chars": 10}, "too_long"),
        ("menu\nhome\n" * 20, {"max_repeated_lines": 0.3}, "repeated_lines"),
        ("buy now! buy now! " * 20, {"max_top_ngram": 0.2}, "repeated_ngram"),
        ("{}[]<>;;// x = 1", {"max_symbols": 0.5}, "symbols"),
        ("a b c d e f g", {"min_mean_word": 2}, "short_words"),
        ("a" * 50 + " " + "b" * 70, {"max_mean_word": 12}, "long_words"),
        ("A usual sentence of words, which no filter minds.", {"min_chars": 10, "max_symbols": 0.2, "min_mean_word": 2}, None),
    ],
)
def test_each_filter_leaves_out_what_it_is_for(text: str, settings: dict[str, Any], reason: str | None) -> None:
    assert measure(text).rejection(DataRecipe(**settings)) == reason
    assert measure(text).rejection(DataRecipe()) is None, "none is on by itself"
    assert reason is None or reason in REASONS


def test_usual_limits_keep_prose_of_any_writing(assets: Path) -> None:
    """Limits in use for web text (Gopher, arXiv:2112.11446, table A1, where it has them) do not reject a novel."""
    recipe = DataRecipe(max_repeated_lines=0.3, max_top_ngram=0.2, max_symbols=0.25, min_mean_word=3)
    files = [*sorted((assets / "corpora" / "books").iterdir()), assets / "corpora" / "text" / "wagahaiwa_nekodearu_ja.txt"]
    for file in files:
        text = file.read_text(encoding="utf-8")[:200_000]
        assert measure(text[:100_000], text[100_000:]).rejection(recipe) is None, file.name


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"min_chars": -1}, "data.min_chars=-1 must be at least 0"),
        ({"max_mean_word": float("inf")}, "data.max_mean_word=inf must be at least 0 and finite"),
        ({"min_mean_word": float("nan")}, "data.min_mean_word=nan must be"),
        ({"min_chars": 10, "max_chars": 5}, "data.max_chars=5 is less than data.min_chars=10"),
        ({"max_symbols": 1.5}, "data.max_symbols=1.5 is a share and must be from 0 to 1"),
        ({"max_top_ngram": float("nan")}, "data.max_top_ngram=nan is a share"),
        ({"near_threshold": 0.1}, "data.near_threshold=0.1 must be from 0.5 to 1"),
        ({"dedup": "fuzzy"}, "data.dedup='fuzzy' is not known"),
        ({"workers": -1}, "data.workers=-1 must be from 0 to 64"),
        ({"weights": (1.0, 2.0)}, "data.weights has 2 entries and data.sources 1. Give one weight a source."),
        ({"sources": ("a", "b"), "weights": (1.0,)}, "data.weights has 1 entries and data.sources 2"),
        ({"weights": (0.0,)}, "gives stdlib the weight 0.0, which must be above 0"),
        ({"weights": (-0.5,)}, "gives stdlib the weight -0.5"),
        ({"weights": (float("nan"),)}, "gives stdlib the weight nan"),
        ({"weights": (float("inf"),)}, "gives stdlib the weight inf"),
    ],
)
def test_impossible_settings_are_sentences(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        DataRecipe(**settings)
    assert sentence in str(error.value)
