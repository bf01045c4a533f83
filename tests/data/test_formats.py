"""Parquet, Hugging Face data sets and compressed files, good and bad."""

from __future__ import annotations

import builtins
import gzip
import json
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from chat_models import make_chat_tokenizer
from pyarrow import parquet

from twostroke.core.errors import DataError
from twostroke.core.recipe import DataRecipe
from twostroke.data.hub_datasets import parse_name
from twostroke.data.prepare import prepare
from twostroke.data.shards import PreparedData
from twostroke.data.sources import find_documents

datasets = pytest.importorskip("datasets")

TEXTS = [f"document {i} of the table, about the number {i * i}.\n" for i in range(700)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")


def texts(*sources: str, **options: Any) -> dict[str, str]:
    documents: dict[str, str] = {}
    for piece in find_documents(sources, **options):
        documents[piece.path] = documents.get(piece.path, "") + piece.text
    return documents


def write_table(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(dict(columns)), path, **options)
    return path


def test_parquet_is_read_by_column_over_row_groups(tmp_path: Path) -> None:
    columns = {"id": list(range(700)), "content": TEXTS, "meta": [{"a": i} for i in range(700)]}
    file = write_table(tmp_path / "a.parquet", columns, row_group_size=100, compression="zstd")
    assert texts(str(file), text_key="content") == {f"a.parquet#{i + 1}": text for i, text in enumerate(TEXTS)}


@pytest.mark.parametrize(
    "kind",
    [pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())],
    ids=str,
)
def test_every_kind_of_text_column_is_read_and_null_is_empty(tmp_path: Path, kind: pyarrow.DataType) -> None:
    values = pyarrow.array(["one", None, "猫 three", " "], pyarrow.string())
    try:
        file = write_table(tmp_path / "a.parquet", {"text": values.cast(kind)})
    except pyarrow.lib.ArrowNotImplementedError:
        pytest.skip(f"this pyarrow does not write {kind}")
    source = find_documents([str(file)])
    assert [d.text for d in source] == ["one", "猫 three"]
    assert source.report.n_empty == 2


def test_binary_that_is_no_utf8_is_counted(tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", {"text": pyarrow.array([b"F\xfchrer", b"ok"], pyarrow.binary())})
    source = find_documents([str(file)])
    assert [d.text for d in source] == ["F\ufffdhrer", "ok"]
    assert (source.report.invalid_utf8_bytes, source.report.invalid_utf8_documents) == (1, 1)


def test_an_empty_table_is_counted_and_an_empty_corpus_is_a_sentence(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {"text": pyarrow.array([], pyarrow.string())})
    source = find_documents([str(tmp_path)])
    assert list(source) == []
    assert (source.report.n_empty, source.report.n_documents) == (1, 0)
    with pytest.raises(DataError, match=r"the sources hold no text: 1 of 1 files or records are empty"):
        prepare(DataRecipe(sources=(str(tmp_path),)), tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "a.parquet is not a whole parquet file: Parquet file size is 0 bytes"),
        (b"PAR1" * 300, "a.parquet is not a whole parquet file"),
        ({"body": ["x"], "id": [1]}, "has no column 'text'. Columns there: 'body', 'id'. Name the right one as text_key."),
        ({"text": [1, 2]}, "a.parquet row 1 holds int in the column 'text', not text"),
        ({"text": [["a"], ["b"]]}, "a.parquet row 1 holds list in the column 'text', not text"),
    ],
)
def test_bad_tables_are_sentences(tmp_path: Path, content: bytes | dict[str, Any], sentence: str) -> None:
    file = tmp_path / "a.parquet"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        write_table(file, content)
    with pytest.raises(DataError) as error:
        list(find_documents([str(file)]))
    assert sentence in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_table_is_never_read_in_part_without_a_word(tmp_path: Path, damage: str) -> None:
    file = write_table(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=100, use_dictionary=False)
    raw = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(raw[: len(raw) // 2])
    else:
        for i in range(len(raw) // 3, len(raw) // 2):
            raw[i] ^= 0xA5
        file.write_bytes(raw)
    with pytest.raises(DataError, match=r"a.parquet is not a whole parquet file"):
        list(find_documents([str(file)]))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
def test_compressed_files_hold_what_plain_ones_do(tmp_path: Path, name: str) -> None:
    text = "".join(TEXTS)
    raw = text.encode() if ".txt" in name else "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()
    if name.endswith("gz"):
        packed = gzip.compress(raw[:1000]) + gzip.compress(raw[1000:])  # of two members, as concatenated files are
    else:
        codec = pyarrow.Codec("zstd")
        packed = b"".join(codec.compress(part, asbytes=True) for part in (raw[:1000], raw[1000:]))
    (tmp_path / name).write_bytes(packed)
    expected = {name: text} if ".txt" in name else {f"{name}#{i + 1}": t for i, t in enumerate(TEXTS)}
    assert texts(str(tmp_path / name)) == expected
    for damaged in (packed[: len(packed) - 9], packed[: len(packed) // 2], b"neither"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{name} is not a whole (gzip|zstd) file"):
            texts(str(tmp_path / name))


def test_saved_data_sets_are_found_in_folders_and_by_name(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"text": TEXTS[:300], "n": list(range(300))})
    one.save_to_disk(tmp_path / "corpus" / "saved", num_shards=3)
    (tmp_path / "corpus" / "plain.txt").write_text("plain")
    expected = {f"saved#{i + 1}": text for i, text in enumerate(TEXTS[:300])}
    assert texts(str(tmp_path / "corpus")) == {"plain.txt": "plain"} | expected
    assert texts(str(tmp_path / "corpus" / "saved")) == expected
    assert sorted(texts(f"hf:{tmp_path / 'corpus' / 'saved'}").values()) == sorted(TEXTS[:300])


def test_rows_chosen_from_a_data_set_are_the_rows_that_are_read(tmp_path: Path) -> None:
    """Indices lie beside the rows in a saved data set: the files alone would give the wrong ones."""
    datasets.Dataset.from_dict({"text": TEXTS}).shuffle(seed=1).select(range(20)).save_to_disk(tmp_path / "few")
    found = list(texts(str(tmp_path / "few")).values())
    assert len(found) == 20
    assert found == datasets.load_from_disk(str(tmp_path / "few"))["text"][:]


def test_splits_are_named_and_train_is_the_default(tmp_path: Path) -> None:
    parts = {"train": TEXTS[:9], "test": TEXTS[9:14]}
    datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in parts.items()}).save_to_disk(tmp_path / "d")
    assert list(texts(str(tmp_path / "d")).values()) == parts["train"]
    assert list(texts(f"hf:{tmp_path / 'd'}::test").values()) == parts["test"]
    with pytest.raises(DataError, match=r"has no split 'dev'; it has 'train', 'test'. Name one as hf:.*/d::split"):
        texts(f"hf:{tmp_path / 'd'}::dev")


def test_a_directory_of_data_files_is_loaded_by_the_library(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write_table(folder / "train-00000-of-00001.parquet", {"text": TEXTS[:50]})
    write_table(folder / "validation-00000-of-00001.parquet", {"text": TEXTS[50:60]})
    assert list(texts(f"hf:{folder}::validation").values()) == TEXTS[50:60]
    source = find_documents([f"hf:{folder}"])
    assert [d.text for d in source] == TEXTS[:50]
    assert [d.text for d in source] == TEXTS[:50], "a second pass"


def test_a_hub_name_is_asked_of_the_library_with_its_config_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.Dataset.from_dict({"text": TEXTS[:5]}).save_to_disk(tmp_path / "cached")
    asked = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return datasets.load_from_disk(str(tmp_path / "cached"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("hf:owner/name", "hf:owner/name:en", "hf:owner/name:en:test", "hf:owner/name::test"):
        assert list(texts(source).values()) == TEXTS[:5]
    names = [("owner/name", None), ("owner/name", "en"), ("owner/name", "en"), ("owner/name", None)]
    assert asked == [(name, {"split": split}) for name, split in zip(names, ["train", "train", "test", "test"], strict=True)]
    assert next(iter(find_documents(["hf:owner/name:en"]))).path == "hf:owner/name:en:train#1"


def test_data_sets_that_cannot_be_loaded_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("hf:", "hf::x", "hf:a:b:c:d"):
        with pytest.raises(DataError, match=r"is not a data set's name. Write hf:owner/name"):
            parse_name(bad)
    with pytest.raises(DataError, match=r"data set hf:owner/name cannot be loaded: "):  # offline, as tests are
        find_documents(["hf:owner/name"])
    one = datasets.Dataset.from_dict({"text": TEXTS})
    one.save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match=r"d has no column 'body'. Columns there: 'text'"):
        texts(str(tmp_path / "d"), text_key="body")
    (arrow,) = (tmp_path / "d").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"data set .*d cannot be (loaded|read): "):
        texts(str(tmp_path / "d"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"data set. Install the library that reads it: pip install 'twostroke\[train\]'"):
        find_documents(["hf:owner/name"])


def test_without_pyarrow_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_table(tmp_path / "a.parquet", {"text": ["x"]})
    (tmp_path / "b.txt.zst").write_bytes(pyarrow.Codec("zstd").compress(b"x", asbytes=True))
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] in ("pyarrow", "compression"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    for path in (file, tmp_path / "b.txt.zst"):
        with pytest.raises(DataError, match=r"Install the library that reads it: pip install 'twostroke\[train\]'"):
            texts(str(path))


@pytest.mark.parametrize("kind", ["parquet", "data set"])
def test_a_table_that_changes_meanwhile_is_refused_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    target = tmp_path / ("d" if kind == "data set" else "a.parquet")
    if kind == "parquet":
        write_table(target, {"text": TEXTS})
    else:
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(target)

    def change(done: float, note: str) -> None:
        if note == "tokenising":
            path = target if kind == "parquet" else next(target.glob("*.arrow"))
            path.touch()

    with pytest.raises(DataError, match=r"changed while it was being read. Run again"):
        prepare(DataRecipe(sources=(str(target),), vocab_size=300), tmp_path / "cache", change)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_large_table_is_read_in_bounded_memory(tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", {"text": [f"{i} " + "word " * 2000 for i in range(2000)]}, row_group_size=50)
    next(iter(find_documents([str(file)])))  # what a first import holds is not the table's
    before = pyarrow.total_allocated_bytes()
    peak_arrow = 0
    tracemalloc.start()
    try:
        for _ in find_documents([str(file)]):
            peak_arrow = max(peak_arrow, pyarrow.total_allocated_bytes() - before)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4_000_000  # of 20 MB: 256 rows at most as Python strings, here the 50 of a row group
    assert peak_arrow < 6_000_000  # a few row groups of 0.5 MB


def conversations(tokenizer: Path, source: Path, layout: str, cache: Path) -> PreparedData:
    recipe = DataRecipe(sources=(str(source),), tokenizer=str(tokenizer), layout=layout, held_out_fraction=0.2)  # type: ignore[arg-type]
    return prepare(recipe, cache)


def test_conversations_in_tables_are_those_of_the_same_json(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path / "chat")
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": f"it is {i}"}]}
        for i in range(30)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    table = {"id": list(range(30)), "messages": [r["messages"] for r in records]}
    write_table(tmp_path / "a.parquet", table)
    datasets.Dataset.from_dict(table).save_to_disk(tmp_path / "saved")
    tokens = []
    for name in ("a.jsonl", "a.parquet", "saved"):
        prepared = conversations(tokenizer, tmp_path / name, "messages", tmp_path / "cache")
        assert prepared.report["n_conversations"] == 30
        assert prepared.report["sources"][0]["n_tokens"] == prepared.n_train_tokens
        tokens.append(prepared.n_train_tokens + prepared.n_heldout_tokens)
    assert len(set(tokens)) == 1
    with pytest.raises(DataError, match=r'a.parquet row 1 .*It looks like data.layout="messages"'):
        conversations(tokenizer, tmp_path / "a.parquet", "alpaca", tmp_path / "cache")


def test_real_parquet_holds_the_records_of_its_data_set(assets: Path, tmp_path: Path) -> None:
    file = assets / "corpora" / "text" / "c4_minimal_train.parquet"
    expected = parquet.read_table(file)["text"].to_pylist()
    assert list(texts(str(file)).values()) == list(dict.fromkeys(expected))
    prepared = prepare(DataRecipe(sources=(str(file),), vocab_size=500), tmp_path)
    assert prepared.report["n_documents"] == len(set(expected))
    again = prepare(DataRecipe(sources=(str(file),), vocab_size=500), tmp_path / "again")
    assert again.files == prepared.files, "the same input gives the same bytes"
