from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from twostroke.core.errors import ConfigError, CorruptFileError, DataError, TwostrokeError
from twostroke.core.recipe import DataRecipe
from twostroke.data import selection, shards
from twostroke.data.prepare import prepare
from twostroke.data.shards import PreparedData, open_prepared
from twostroke.data.sources import find_documents
from twostroke.data.tokenizer import load_tokenizer

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "looked",
    "at",
    "its",
    "dog",
    "while",
    "rain",
    "fell",
    "over",
    "hills",
    "of",
    "green",
    "grass",
]


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=12)) + ".\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(0)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(60):
        (corpus / f"{i}.txt").write_text("".join(sentence(rng) for _ in range(rng.randint(1, 40))))
    return corpus


def recipe(folder: Path, **changes: Any) -> DataRecipe:
    return DataRecipe(**{"sources": (str(folder),), "vocab_size": 300} | changes)


def decoded_documents(prepared: PreparedData, split: str) -> list[str]:
    stream = prepared.train_tokens() if split == "train" else prepared.heldout_tokens()
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    ids = stream[:]
    assert len(ids) == 0 or ids[-1] == prepared.eos_id
    parts = np.split(ids, np.flatnonzero(ids == prepared.eos_id) + 1)[:-1]
    return [tokenizer.decode(p[:-1].tolist(), skip_special_tokens=False) for p in parts]


def test_every_document_is_in_exactly_one_part_and_round_trips(folder: Path, tmp_path: Path) -> None:
    prepared = prepare(recipe(folder), tmp_path / "cache")
    train, held_out = decoded_documents(prepared, "train"), decoded_documents(prepared, "heldout")
    assert sorted(train + held_out) == sorted(p.read_text() for p in folder.iterdir())
    assert 1 <= len(held_out) < 20
    assert prepared.heldout_path.read_text() == "".join(held_out)
    assert list(prepared.heldout_documents()) == held_out
    assert prepared.n_heldout_bytes == prepared.heldout_path.stat().st_size
    assert prepared.n_train_tokens == len(prepared.train_tokens())
    assert prepared.n_heldout_tokens == len(prepared.heldout_tokens())
    assert prepared.n_heldout_documents == len(held_out)
    assert prepared.report["n_documents"] == 60
    assert prepared.report["split_by"] == "document"
    assert (prepared.vocab_size, prepared.eos_id, prepared.dtype) == (300, 0, "<u2")
    prepared.verify()


def test_the_split_depends_on_relative_paths_alone(folder: Path, tmp_path: Path) -> None:
    first = prepare(recipe(folder), tmp_path / "cache")
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    second = prepare(recipe(moved), tmp_path / "cache")
    assert second.directory != first.directory
    assert list(second.heldout_documents()) == list(first.heldout_documents())


def test_nothing_changed_is_reused_and_any_change_is_not(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = prepare(recipe(folder), cache)
    stamp = (first.directory / "manifest.json").stat().st_mtime_ns
    notes: list[str] = []
    again = prepare(recipe(folder), cache, lambda done, note: notes.append(note))
    assert (again.directory, notes) == (first.directory, ["reused"])
    assert (again.directory / "manifest.json").stat().st_mtime_ns == stamp
    keys = {first.key}
    keys.add(prepare(recipe(folder, vocab_size=301), cache).key)
    keys.add(prepare(recipe(folder, held_out_fraction=0.3), cache).key)
    (folder / "0.txt").write_text("changed\n")
    keys.add(prepare(recipe(folder), cache).key)
    assert len(keys) == 4
    assert len(list(cache.iterdir())) == 4, "nothing else is left in the cache"


def test_a_file_in_the_place_of_the_data_is_told(folder: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(DataError, match="taken is a file, and data are prepared into a directory"):
        prepare(recipe(folder), out=taken)
    assert taken.read_text() == "mine"


@pytest.mark.parametrize("name", ["train-00000.bin", "heldout-00000.bin", "heldout.txt", "heldout-ends.bin", "tokenizer.json"])
def test_damaged_files_are_named(folder: Path, tmp_path: Path, name: str) -> None:
    prepared = prepare(recipe(folder), tmp_path / "cache")
    file = prepared.directory / name
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 1
    file.write_bytes(flipped)
    open_prepared(prepared.directory)  # of the right size: only a verifying open reads it
    with pytest.raises(CorruptFileError, match=rf"{name} was altered"):
        open_prepared(prepared.directory, verify=True)
    file.write_bytes(content[:-1])
    with pytest.raises(CorruptFileError, match=rf"{name} is {len(content) - 1} bytes, the manifest says {len(content)}"):
        prepare(recipe(folder), tmp_path / "cache")
    file.unlink()
    with pytest.raises(CorruptFileError, match=rf"{name} is missing"):
        open_prepared(prepared.directory)


def test_a_manifest_cannot_be_altered_unseen(folder: Path, tmp_path: Path) -> None:
    prepared = prepare(recipe(folder), tmp_path / "cache")
    file = prepared.directory / "manifest.json"
    content = file.read_bytes()
    rng = random.Random(1)
    n_equal = 0
    for _ in range(200):
        mutated = bytearray(content)
        at = rng.randrange(len(mutated))
        mutated[at] ^= 1 << rng.randrange(8)
        file.write_bytes(mutated[: rng.choice([len(mutated), rng.randrange(len(mutated))])])
        try:
            opened = open_prepared(prepared.directory)
        except CorruptFileError as error:
            assert "manifest.json" in str(error)  # noqa: PT017 - one of two allowed outcomes
        else:
            n_equal += 1
            assert opened == prepared, "white space may change, nothing that is read"
    assert n_equal < 60
    file.unlink()
    with pytest.raises(DataError, match=r"is not prepared data: it has no manifest.json"):
        open_prepared(prepared.directory)


def test_one_file_is_divided_by_pieces(tmp_path: Path) -> None:
    rng = random.Random(0)
    file = tmp_path / "one.txt"
    text = "".join(sentence(rng) for _ in range(40_000))
    file.write_text(text)
    assert len(text) > 1_500_000
    prepared = prepare(recipe(file), tmp_path / "cache")
    assert prepared.report["split_by"] == "piece"
    assert 0.02 < prepared.report["held_out_share"] < 0.5
    train, held_out = decoded_documents(prepared, "train"), decoded_documents(prepared, "heldout")
    assert sum(map(len, train + held_out)) == len(text)
    for run in train + held_out:
        assert run in text, "a run of neighbouring pieces is one document"
        assert run.endswith("\n")
    starts = sorted((text.index(run), run) for run in train + held_out)
    assert "".join(run for _, run in starts) == text


@pytest.mark.parametrize("n_bytes", [200, 5_000, 100_000])
def test_a_small_file_still_holds_something_out(tmp_path: Path, n_bytes: int) -> None:
    file = tmp_path / "one.md"
    rng = random.Random(n_bytes)
    text = "".join(sentence(rng) for _ in range(n_bytes // 20))[:n_bytes]
    file.write_text(text)
    prepared = prepare(recipe(file, vocab_size=260), tmp_path / "cache")
    assert prepared.n_heldout_bytes > 0
    assert prepared.n_train_tokens > 0
    assert prepared.n_heldout_bytes + prepared.report["n_train_bytes"] == n_bytes


def test_a_text_too_small_to_divide_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("word")
    with pytest.raises(DataError, match=r"4 bytes of text cannot be divided into a training and a held-out part"):
        prepare(recipe(file), tmp_path / "cache")
    file.write_text("  \n")
    with pytest.raises(DataError, match=r"the sources hold no text: 1 of 1 files or records are empty"):
        prepare(recipe(file), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_large_corpus_holds_out_a_megabyte(tmp_path: Path) -> None:
    """Of bucket counts alone: fraction 1% of 12 MB would be 120 kB, so the threshold goes up to the first that reaches 1 MB."""
    histogram = np.zeros(2**16, dtype=np.int64)
    places = np.random.default_rng(0).integers(0, 2**16, 600)
    np.add.at(histogram, places, 20_000)
    threshold = selection._threshold(histogram, 0.01)
    assert threshold is not None
    assert selection.MIN_HELD_OUT_BYTES <= histogram[:threshold].sum() <= 1_040_000
    assert histogram[: threshold - 1].sum() < selection.MIN_HELD_OUT_BYTES
    assert selection._threshold(histogram, 0.25) == 2**14
    one = np.zeros(2**16, dtype=np.int64)
    one[123] = 10**8
    assert selection._threshold(one, 0.1) is None, "a corpus in one bucket cannot be divided"


def test_named_held_out_sources_leave_the_training_part(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(folder / "7.txt", other / "copied.txt")
    (other / "own.txt").write_text("a sentence of its own\n")
    prepared = prepare(recipe(folder, held_out=(str(other),)), tmp_path / "cache")
    assert list(prepared.heldout_documents()) == [(folder / "7.txt").read_text(), "a sentence of its own\n"]
    train = decoded_documents(prepared, "train")
    assert len(train) == 59
    assert (folder / "7.txt").read_text() not in train
    assert prepared.report["n_duplicates"] == 1
    assert prepared.report["split_by"] == "explicit"
    with pytest.raises(DataError, match=r"nothing is left to train on"):
        prepare(recipe(folder, held_out=(str(folder),)), tmp_path / "cache")


def test_the_tokenizer_never_sees_held_out_text(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("zyzzyva " * 500)
    prepared = prepare(recipe(folder, held_out=(str(other),), vocab_size=1000), tmp_path / "cache")
    assert not [t for t in load_tokenizer(prepared.tokenizer_path).get_vocab() if "zy" in t]


def test_an_existing_tokenizer_is_used_and_kept(folder: Path, tmp_path: Path, assets: Path) -> None:
    file = assets / "tokenizers" / "olmo" / "allenai_gpt-neox-olmo-dolma-v1_5.json"
    prepared = prepare(recipe(folder, tokenizer=str(file)), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(file))
    assert prepared.tokenizer_path.read_bytes() == file.read_bytes()
    assert prepared.eos_id == tokenizer.token_to_id("<|endoftext|>")
    assert prepared.vocab_size == 1 + max(tokenizer.get_vocab().values())
    document = (folder / "1.txt").read_text()
    assert document in decoded_documents(prepared, "train") + decoded_documents(prepared, "heldout")
    assert prepared.train_tokens()[:].max() < prepared.vocab_size


def test_a_vocabulary_beyond_16_bits_takes_wider_shards(folder: Path, tmp_path: Path) -> None:
    first = prepare(recipe(folder), tmp_path / "cache")
    table = json.loads(first.tokenizer_path.read_text())
    table["model"]["vocab"]["far away"] = 2**17
    wide = tmp_path / "wide.json"
    wide.write_text(json.dumps(table))
    second = prepare(recipe(folder, tokenizer=str(wide)), tmp_path / "cache")
    assert (second.dtype, second.vocab_size) == ("<u4", 2**17 + 1)
    assert np.array_equal(second.train_tokens()[:], first.train_tokens()[:])


def test_end_of_text_inside_a_document_ends_nothing(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        file.write_text(f"a <|endoftext|> inside of {file.name}\n")
    prepared = prepare(recipe(folder), tmp_path / "cache")
    assert len(decoded_documents(prepared, "train")) + len(decoded_documents(prepared, "heldout")) == 60


def test_tokens_span_shards(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(recipe(folder), tmp_path / "one")
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    cut = prepare(recipe(folder), tmp_path / "many")
    assert len([n for n in cut.files if n.startswith("train-")]) > 5
    assert np.array_equal(cut.train_tokens()[:], whole.train_tokens()[:])
    assert np.array_equal(cut.heldout_tokens()[:], whole.heldout_tokens()[:])


def test_a_chosen_directory_is_made_reused_and_never_overwritten(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prepare(recipe(folder), out=out).directory == out
    assert prepare(recipe(folder), out=out).key == open_prepared(out).key
    with pytest.raises(DataError, match=r"holds data prepared from other input or settings"):
        prepare(recipe(folder, vocab_size=280), out=out)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match=r"is not prepared data"):
        prepare(recipe(folder), out=mine)
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]


def test_impossible_settings_are_sentences(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=100 must be at least 257"):
        prepare(recipe(folder, vocab_size=100), tmp_path)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"held_out_fraction="):
            prepare(recipe(folder, held_out_fraction=fraction), tmp_path)


def test_input_that_changes_meanwhile_is_refused(folder: Path, tmp_path: Path) -> None:
    def change(done: float, note: str) -> None:
        if note == "tokenising":
            (folder / "3.txt").write_text("changed\n")

    with pytest.raises(DataError, match=r"3.txt changed while it was being read"):
        prepare(recipe(folder), tmp_path / "cache", change)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_at_any_write_leaves_nothing_behind(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the n-th of all flushes to disk, for every n there is: after each, the cache is empty and a retry succeeds."""
    cache = tmp_path / "cache"
    real = os.fsync
    for fail_at in range(100):
        calls = 0

        def failing(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if calls == fail_at + 1:  # noqa: B023 - used within its turn of the loop
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", failing)
        try:
            prepare(recipe(folder), cache)
        except TwostrokeError as error:
            assert "No space left on device" in str(error)  # noqa: PT017 - one of two allowed outcomes
            # Only the flush of the parent directory comes after the rename; by then the data is whole.
            assert all((left / "manifest.json").is_file() for left in cache.iterdir())
            for left in cache.iterdir():
                open_prepared(left, verify=True)
                shutil.rmtree(left)
        else:
            break
    assert fail_at >= 7  # four shard files, two tokenizer flushes, manifest, directory
    monkeypatch.setattr(os, "fsync", real)
    prepare(recipe(folder), cache).verify()


def test_a_kill_leaves_nothing_that_is_mistaken_for_prepared_data(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from twostroke.core.recipe import DataRecipe\n"
        "from twostroke.data import shards\nfrom twostroke.data import prepare as p\n"
        "shards._move_into_place = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "p.prepare(DataRecipe(sources=(sys.argv[1],), vocab_size=300), Path(sys.argv[2]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", code, str(folder), str(cache)], env=environment)
    assert killed.returncode == -signal.SIGKILL
    left = list(cache.iterdir())
    assert [p.suffix for p in left] == [".partial"]
    prepared = prepare(recipe(folder), cache)
    prepared.verify()
    assert left[0].exists(), "a young one may belong to a process at work"
    os.utime(left[0], (0, 0))
    prepare(recipe(folder, vocab_size=301), cache)
    assert not left[0].exists()


def test_two_processes_that_prepare_the_same_agree(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    real = shards._move_into_place

    def late(partial: Path, directory: Path) -> None:
        monkeypatch.setattr(shards, "_move_into_place", real)
        prepare(recipe(folder), cache)  # the other one is first
        real(partial, directory)

    monkeypatch.setattr(shards, "_move_into_place", late)
    prepare(recipe(folder), cache).verify()
    assert len(list(cache.iterdir())) == 1


def test_progress_never_goes_back(folder: Path, tmp_path: Path) -> None:
    seen: list[float] = []
    prepare(recipe(folder), tmp_path, lambda done, note: seen.append(done))
    assert seen == sorted(seen)
    assert (seen[0] > 0, seen[-1]) == (True, 1.0)


def test_preparation_holds_constant_memory(tmp_path: Path) -> None:
    """Python's own memory while 8 MB are prepared with a given tokenizer; what ``tokenizers`` holds is one batch of 1 MB."""
    rng = random.Random(0)
    block = "".join(sentence(rng) for _ in range(1000))
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_text(block)
    with open(large, "w", encoding="utf-8") as stream:
        for i in range(8_000_000 // len(block)):
            stream.write(f"{i} {block}")
    tokenizer = prepare(recipe(small), tmp_path / "cache").tokenizer_path
    tracemalloc.start()
    try:
        prepared = prepare(recipe(large, tokenizer=str(tokenizer)), tmp_path / "cache")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert prepared.report["n_bytes"] > 7_500_000
    # A batch of text, its ids as a list and as an array, two histograms of half a megabyte.
    assert peak_bytes < 20_000_000


def test_the_standard_library_is_prepared_by_the_demo_settings() -> None:
    prepared = prepare(DataRecipe(vocab_size=1024))
    assert prepared.n_heldout_bytes >= selection.MIN_HELD_OUT_BYTES
    assert prepared.report["split_by"] == "document"
    assert prepared.report["n_duplicates"] + prepared.report["n_empty"] > 0
    held_out, total = prepared.n_heldout_bytes, prepared.report["n_bytes"]
    assert held_out + prepared.report["n_train_bytes"] == total
    assert total == sum(d.n_bytes for d in find_documents(["stdlib"]))


def test_jsonl_books_and_japanese_prepare(assets: Path, tmp_path: Path) -> None:
    folder = assets / "corpora" / "text"
    sources = (str(folder / "c4_demo.jsonl"), str(folder / "wagahaiwa_nekodearu_ja.txt"))
    prepared = prepare(DataRecipe(sources=sources, vocab_size=600), tmp_path)
    documents = decoded_documents(prepared, "train") + decoded_documents(prepared, "heldout")
    assert len(documents) == prepared.report["n_documents"]
    assert (folder / "wagahaiwa_nekodearu_ja.txt").read_bytes().decode() in documents
    assert sum(len(d.encode()) for d in documents) == prepared.report["n_bytes"]
