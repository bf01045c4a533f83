from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.data.near_duplicates import (
    NEIGHBOURS,
    SHINGLE_BYTES,
    MinHash,
    SignatureFile,
    near_duplicates,
    similarity,
)
from twostroke.data.shingles import shingle_hashes

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in ("nd", "rt", "ll", "mp", "sk", "ch", "pra", "lo")]


def text_of(rng: random.Random, n_words: int) -> list[str]:
    return rng.choices(WORDS, k=n_words)


def edited(rng: random.Random, words: list[str], n_edits: int) -> list[str]:
    words = list(words)
    for _ in range(n_edits):
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    return words


def signature(text: str) -> np.ndarray:
    minhash = MinHash()
    minhash.add(text)
    return minhash.signature()


def shingles(text: str) -> set[bytes]:
    raw = (" ".join(text.casefold().split()) + " ").encode()
    return {raw[i : i + SHINGLE_BYTES] for i in range(max(1, len(raw) - SHINGLE_BYTES + 1))}


def jaccard(a: str, b: str) -> float:
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


@settings(max_examples=80, deadline=None)
@given(raw=st.binary(min_size=1, max_size=80), length=st.integers(1, 40))
def test_hashes_are_those_of_each_stretch_alone(raw: bytes, length: int) -> None:
    array = np.frombuffer(raw, dtype=np.uint8)
    hashes = shingle_hashes(array, length)
    length = min(length, len(raw))
    stretches = [raw[i : i + length] for i in range(len(raw) - length + 1)]
    alone = [int(shingle_hashes(np.frombuffer(s, dtype=np.uint8), length)[0]) for s in stretches]
    assert hashes.tolist() == alone
    assert len(set(hashes.tolist())) == len(set(stretches)), "different stretches, different hashes"


def slow_hash(raw: bytes) -> int:
    """The polynomial byte by byte, and the mixing, in Python's own numbers."""
    value = 0
    for byte in raw:
        value = (value * 0x9E3779B97F4A7C15 + byte + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return value ^ (value >> 31)


@pytest.mark.parametrize("length", [1, 2, 3, 12, 23, 24, 31])
def test_hashes_are_the_polynomial_they_claim_to_be(length: int) -> None:
    raw = random.Random(length).randbytes(60)
    expected = [slow_hash(raw[i : i + length]) for i in range(60 - length + 1)]
    assert shingle_hashes(np.frombuffer(raw, dtype=np.uint8), length).tolist() == expected


@pytest.mark.parametrize("n_words", [6, 20, 100, 1000])
def test_similarity_estimates_jaccard_without_bias(n_words: int) -> None:
    rng, errors = random.Random(n_words), []
    for trial in range(80):
        a = text_of(rng, n_words)
        b = edited(rng, a, 1 + trial * n_words // 400)
        errors.append(float(similarity(signature(" ".join(a)), signature(" ".join(b)))) - jaccard(" ".join(a), " ".join(b)))
    # One estimate errs by at most √(0.25 / 128) = 0.044; the mean of 80 by 0.005; and short texts fill few of the bins.
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.065


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 400), max_size=5))
def test_a_signature_does_not_depend_on_where_the_text_is_cut(seed: int, cuts: list[int]) -> None:
    words = text_of(random.Random(seed), 500)
    whole, pieces = MinHash(), MinHash()
    whole.add(" ".join(words))
    for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 500], strict=True):
        pieces.add(" ".join(words[a:b]))
    assert np.array_equal(whole.signature(), pieces.signature())


def test_case_and_white_space_make_no_difference() -> None:
    text = " ".join(text_of(random.Random(1), 50))
    assert np.array_equal(signature(text), signature(text.upper().replace(" ", " \n\t ")))


@pytest.mark.parametrize("text", ["", " \n", "a", "猫", "short", "x" * 23, "x" * 24, "x" * 500])
def test_short_and_monotonous_texts_have_signatures_that_find_their_like(text: str) -> None:
    rows = np.stack([signature(text), signature("another one altogether"), signature(text)])
    dropped, leaders = near_duplicates(rows, np.arange(3), 0.8)
    assert (dropped.tolist(), leaders.tolist()) == ([2], [0])


def brute_force(texts: list[str], threshold: float) -> list[int]:
    """The greedy rule over true similarities, one pair after another."""
    sets = [shingles(t) for t in texts]
    kept: list[int] = []
    dropped = []
    for i, one in enumerate(sets):
        near = any(len(one & sets[k]) / len(one | sets[k]) >= threshold for k in kept)
        (dropped if near else kept).append(i)
    return dropped


def test_what_is_dropped_is_what_all_pairs_would_drop() -> None:
    """Families of texts with one original and copies far above or far below the threshold, shuffled."""
    rng, texts = random.Random(5), []
    for _ in range(25):
        original = text_of(rng, 200)
        texts += [original, *(edited(rng, original, n) for n in (1, 3, 60, 90))]
    rng.shuffle(texts)
    joined = [" ".join(words) for words in texts]
    # Copies with 1 or 3 of 200 words changed have J > 0.88 with the original, with 60 or more J < 0.25: none near 0.7 ± 3σ,
    # but two copies with 60 edits each; they are further still.
    dropped, leaders = near_duplicates(np.stack([signature(t) for t in joined]), np.arange(len(joined)), 0.7)
    assert dropped.tolist() == brute_force(joined, 0.7)
    assert len(dropped) == 50
    assert all(jaccard(joined[a], joined[b]) >= 0.6 for a, b in zip(dropped, leaders, strict=True))
    assert not set(leaders.tolist()) & set(dropped.tolist()), "a document leaves for one that stays"


def test_a_bucket_of_thousands_takes_no_quadratic_time_and_keeps_one() -> None:
    rng = random.Random(2)
    base = text_of(rng, 300)
    rows = np.stack([signature(" ".join(edited(rng, base, 1))) for _ in range(40)])
    many = np.repeat(rows, 50, axis=0)  # 2,000 documents, all near to one another
    dropped, leaders = near_duplicates(many, np.arange(len(many)), 0.8)
    assert dropped.tolist() == list(range(1, len(many)))
    assert set(leaders.tolist()) == {0}
    assert len(many) > 10 * NEIGHBOURS


def test_only_the_rows_asked_about_are_looked_at() -> None:
    row = signature(" ".join(text_of(random.Random(1), 50)))
    dropped, leaders = near_duplicates(np.stack([row, row, row, row]), np.array([1, 3]), 0.8)
    assert (dropped.tolist(), leaders.tolist()) == ([3], [1])
    assert near_duplicates(np.stack([row, row]), np.array([], dtype=np.int64), 0.8)[0].tolist() == []


def test_signatures_on_disk_are_those_that_were_added_and_the_file_goes(tmp_path: Path) -> None:
    file = SignatureFile(tmp_path / "signatures")
    rows = [signature(" ".join(text_of(random.Random(i), 30))) for i in range(5)]
    for row in rows:
        file.add(row)
    assert np.array_equal(file.close(), np.stack(rows))
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_real_books_are_no_duplicates_and_an_edited_one_is(assets: Path) -> None:
    folder = assets / "corpora" / "books"
    books = [path.read_text(encoding="utf-8")[:200_000] for path in sorted(folder.iterdir())]
    japanese = (assets / "corpora" / "text" / "wagahaiwa_nekodearu_ja.txt").read_text(encoding="utf-8")[:60_000]
    lines = japanese.split("。")
    books += [japanese, "。".join([*lines[: len(lines) // 2], "吾輩は犬である", *lines[len(lines) // 2 :]])]
    emma = books[sorted(p.name for p in folder.iterdir()).index("Emma_158.txt")]
    books.append(emma.replace("Harriet", "HARRY").replace("\n", "\r\n"))
    dropped, leaders = near_duplicates(np.stack([signature(b) for b in books]), np.arange(len(books)), 0.8)
    assert dropped.tolist() == [len(books) - 2, len(books) - 1]
    assert leaders.tolist() == [len(books) - 3, books.index(emma)]
