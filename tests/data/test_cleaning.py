"""What ``prepare`` leaves out, and that held-out text is never in the training part."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import make_chat_tokenizer

from twostroke.core.errors import DataError
from twostroke.core.recipe import DataRecipe
from twostroke.data import selection as selecting
from twostroke.data.conversations import BEGINS
from twostroke.data.prepare import prepare
from twostroke.data.shards import PreparedData
from twostroke.data.tokenizer import load_tokenizer

LINE = "cat sat mat looked dog while rain fell over hills green grass river stone under light morning bird sang low"
WORDS = LINE.split(" ")


def prose(rng: random.Random, n_words: int = 120) -> list[str]:
    return rng.choices(WORDS, k=n_words)


def documents(prepared: PreparedData, split: str) -> list[str]:
    stream = prepared.train_tokens() if split == "train" else prepared.heldout_tokens()
    ids, tokenizer = np.asarray(stream[:]), load_tokenizer(prepared.tokenizer_path)
    parts = np.split(ids, np.flatnonzero(ids == prepared.eos_id) + 1)[:-1]
    return [tokenizer.decode(p[:-1].tolist(), skip_special_tokens=False) for p in parts]


def recipe(*sources: Path, **changes: Any) -> DataRecipe:
    return DataRecipe(**{"sources": tuple(map(str, sources)), "vocab_size": 300, "held_out_fraction": 0.3} | changes)


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """30 originals, each with a copy that differs by one word, and an exact copy of every third."""
    rng, texts = random.Random(3), {}
    for i in range(30):
        words = prose(rng)
        texts[f"{i:02} original.txt"] = " ".join(words)
        words[60] = "different"
        texts[f"{i:02} revised.txt"] = " ".join(words)
        if i % 3 == 0:
            texts[f"{i:02} same again.txt"] = texts[f"{i:02} original.txt"]
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder, texts


def test_near_duplicates_leave_and_are_counted_with_examples(corpus: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, texts = corpus
    prepared = prepare(recipe(folder, dedup="near"), tmp_path / "cache")
    kept = documents(prepared, "train") + documents(prepared, "heldout")
    assert sorted(kept) == sorted(text for name, text in texts.items() if "original" in name)
    left_out = prepared.report["left_out"]
    assert left_out["duplicate"]["n_documents"] == prepared.report["n_duplicates"] == 10
    assert left_out["near_duplicate"] == {
        "n_documents": 30,
        "n_bytes": sum(len(text) for name, text in texts.items() if "revised" in name),
        "examples": ["00 revised.txt", "01 revised.txt", "02 revised.txt"],
    }
    assert prepared.report["n_documents"] == 30
    assert not list(prepared.directory.glob("signatures*")), "what the search needed is gone"
    assert prepare(recipe(folder, dedup="near"), tmp_path / "again").files == prepared.files


@pytest.mark.parametrize("dedup", ["exact", "near", "none"])
def test_no_training_text_equals_held_out_text(corpus: tuple[Path, dict[str, str]], tmp_path: Path, dedup: str) -> None:
    folder, texts = corpus
    prepared = prepare(recipe(folder, dedup=dedup), tmp_path / "cache")
    train, held = documents(prepared, "train"), documents(prepared, "heldout")
    assert train
    assert held
    assert not set(train) & set(held)
    n_left_out = sum(counts["n_documents"] for counts in prepared.report["left_out"].values())
    assert len(train) + len(held) + n_left_out == len(texts)
    if dedup == "near":
        stems = [{" ".join(t.split()[:50]) for t in part} for part in (train, held)]
        assert not stems[0] & stems[1], "nor nearly"
    if dedup == "none":
        assert set(prepared.report["left_out"]) == {"copy_of_held_out"}
        assert len(train) > len(set(train)), "copies within the training part stay"


def test_named_held_out_text_takes_its_near_copies_out_of_training(corpus: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, texts = corpus
    test = tmp_path / "test.jsonl"
    named = [text for name, text in texts.items() if "original" in name][:5]
    test.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*named, "x"]))
    prepared = prepare(recipe(folder, dedup="near", held_out=(str(test),), min_chars=50), tmp_path / "cache")
    assert documents(prepared, "heldout") == [*named, "x"], "filters leave alone what was named"
    assert len(documents(prepared, "train")) == 25


def test_one_file_is_divided_by_pieces_that_are_not_near_to_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "PIECE_BYTES", 1000)
    rng = random.Random(1)
    blocks = [" ".join(prose(rng, 180))[:999] + "\n" for _ in range(30)]
    repeated = [block.replace("cat", "dog", 1) for block in blocks[::2]]
    (tmp_path / "one.txt").write_text("".join(blocks + repeated))
    source = recipe(tmp_path / "one.txt", dedup="near")
    monkeypatch.setattr("twostroke.data.sources.PIECE_BYTES", 1000)
    monkeypatch.setattr("twostroke.data.prepare.find_documents", _by_thousand)
    prepared = prepare(source, tmp_path / "cache")
    assert prepared.report["split_by"] == "piece"
    assert prepared.report["pieces_left_out"]["near_duplicate"]["n_documents"] == 15
    assert prepared.report["pieces_left_out"]["near_duplicate"]["examples"][0] == "one.txt piece 31"
    assert prepared.n_heldout_bytes + prepared.report["n_train_bytes"] == sum(map(len, blocks))


def _by_thousand(sources: Any, text_key: str) -> Any:
    from twostroke.data.sources import find_documents

    return find_documents(sources, text_key, piece_bytes=1000)


def test_filters_count_what_they_leave_out(corpus: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder = corpus[0]
    (folder / "menu.txt").write_text("home\nabout\nhome\nabout\n" * 40)
    (folder / "short.txt").write_text("too short")
    (folder / "symbols.txt").write_text("{{[[ == ]]}} :: <> || " * 30)
    settings: dict[str, Any] = {"min_chars": 100, "max_repeated_lines": 0.3, "max_symbols": 0.4}
    prepared = prepare(recipe(folder, dedup="none", **settings), tmp_path / "cache")
    left_out = prepared.report["left_out"]
    assert {reason: left_out[reason]["examples"] for reason in ("too_short", "repeated_lines", "symbols")} == {
        "too_short": ["short.txt"],
        "repeated_lines": ["menu.txt"],
        "symbols": ["symbols.txt"],
    }
    for name in ("menu.txt", "short.txt", "symbols.txt"):
        text = (folder / name).read_text()
        assert text not in documents(prepared, "train") + documents(prepared, "heldout")


def test_filters_that_leave_nothing_say_so(corpus: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing is left to train on: every document is left out \(70 too short"):
        prepare(recipe(corpus[0], min_chars=10**6), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_training_part_says_where_each_source_lies(corpus: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": " ".join(prose(random.Random(i)))}) + "\n" for i in range(100, 140)))
    prepared = prepare(recipe(corpus[0], other), tmp_path / "cache")
    (first, begin, n), (second, next_begin, n_next) = prepared.source_ranges()
    assert (first, second, begin, next_begin) == (str(corpus[0]), str(other), 0, n)
    assert n + n_next == prepared.n_train_tokens
    tokens = prepared.train_tokens()
    assert tokens[n - 1 : n] == prepared.eos_id
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    whole = tuple(json.loads(line)["text"] for line in other.read_text().splitlines())
    assert tokenizer.decode(tokens[n : n + 2000].tolist()).startswith(whole)


def test_mixture_weights_need_no_new_preparation(corpus: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    one = prepare(recipe(corpus[0]), tmp_path / "cache")
    assert prepare(recipe(corpus[0], weights=(2.0,), workers=3), tmp_path / "cache").directory == one.directory


def conversation(question: str, answer: str) -> dict[str, str]:
    return {"instruction": question, "output": answer}


@pytest.mark.parametrize("dedup", ["exact", "near", "none"])
def test_conversations_are_cleaned_too(tmp_path: Path, dedup: str) -> None:
    rng, tokenizer = random.Random(4), make_chat_tokenizer(tmp_path / "chat")
    originals = [conversation(" ".join(prose(rng, 30)), " ".join(prose(rng, 90))) for _ in range(20)]
    revised = [conversation(o["instruction"], o["output"].replace("cat", "dog", 1) + " again") for o in originals]
    records = originals + revised + originals[:6] + [conversation("why?", "so"), conversation("nothing?", " ")]
    (tmp_path / "a.json").write_text(json.dumps(records))
    settings: dict[str, Any] = {"layout": "alpaca", "tokenizer": str(tokenizer), "dedup": dedup, "min_chars": 20}
    report = prepare(recipe(tmp_path / "a.json", **settings), tmp_path / "cache").report
    n_kept = report["n_train_conversations"] + report["n_heldout_conversations"]
    assert (report["n_conversations"], report["n_without_answer"]) == (48, 1)
    assert report["left_out"]["too_short"] == {"n_documents": 1, "n_bytes": 8, "examples": ["a.json#47"]}
    if dedup == "near":
        assert n_kept == 20
        assert report["left_out"]["near_duplicate"]["n_documents"] == 20
    elif dedup == "exact":
        assert (n_kept, report["n_duplicates"]) == (40, 6)
    else:
        n_copies = report["left_out"].get("copy_of_held_out", {}).get("n_documents", 0)
        assert (n_kept + n_copies, report["n_duplicates"]) == (46, 0)


def test_sources_of_conversations_lie_one_behind_the_other(tmp_path: Path) -> None:
    rng, tokenizer = random.Random(4), make_chat_tokenizer(tmp_path / "chat")
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps([conversation(" ".join(prose(rng, 9)), f"from {name}") for _ in range(15)]))
    settings = {"layout": "alpaca", "tokenizer": str(tokenizer)}
    prepared = prepare(recipe(tmp_path / "a.json", tmp_path / "b.json", **settings), tmp_path / "cache")
    (_, begin, n), (_, next_begin, n_next) = prepared.source_ranges()
    assert (begin, next_begin, n + n_next) == (0, n, prepared.n_train_tokens)
    assert prepared.train_marks()[n : n + 1][0] & BEGINS
    text = load_tokenizer(prepared.tokenizer_path).decode(prepared.train_tokens()[:n].tolist())
    assert "from a.json" in text
    assert "from b.json" not in text
