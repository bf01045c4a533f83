"""What a stranger's JSON or TOML may hold; ``tests/fuzz`` measures what hostile files take."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.core.documents import read_object, read_toml
from twostroke.core.errors import CorruptFileError


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff{}", "is not valid JSON"),
        (b"[" * 100_000, "it nests too deep"),
        (b"[1]", "must hold a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' occurs twice"),
        (b'{"a": ' + b"9" * 301 + b"}", "a whole number of 301 digits"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\uDC00": 1}', "half of a surrogate pair"),
        pytest.param(b'{"a": [' + b"[]," * 300_000 + b"[]]}", "bytes of memory", id="empty lists"),
        pytest.param(b'{"a": "' + b"a" * 2**22 + b'"}', "such a file is at most 4194304", id="a long text"),
    ],
)
def test_json_that_breaks_a_rule_is_a_sentence_with_the_files_name(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"x\.json") as caught:
        read_object(tmp_path / "x.json")
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    length = 1000000000000000019884624838656  # int(1e30)
    (tmp_path / "x.json").write_text(f'{{"a": [0.0, Infinity], "model_max_length": {length}, "b": "\\ud83d\\ude00"}}')
    document = read_object(tmp_path / "x.json")
    assert document == {"a": [0.0, float("inf")], "model_max_length": length, "b": "😀"}


def test_a_file_that_is_missing_or_a_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"x\.json is missing"):
        read_object(tmp_path / "x.json")
    with pytest.raises(CorruptFileError, match="cannot be read: Is a directory"):
        read_object(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a = ", "is not valid TOML"),
        (b"a = \xff", "is not valid TOML"),
        (b"a = " + b"[" * 100_000, "it nests too deep"),
        (b"a = " + b"9" * 5000, "is not valid TOML"),
        (b"a" + b" . 'b'" * 40 + b" = 1", "has more than 32 parts"),
        pytest.param(b"#" * (2**18 + 1), "such a file is at most 262144", id="a long comment"),
    ],
)
def test_toml_that_breaks_a_rule_is_a_sentence_with_the_files_name(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"x\.toml") as caught:
        read_toml(tmp_path / "x.toml")
    assert sentence in str(caught.value)
