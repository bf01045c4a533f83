from __future__ import annotations

import errno
import gzip
import json
import os
import sys
import sysconfig
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import DataError
from twostroke.data import records, source_files
from twostroke.data.sources import DocumentSource, SourceFile, decode, find_documents, split_text


def joined(source: DocumentSource) -> dict[str, str]:
    """Whole documents by key."""
    documents: dict[str, str] = {}
    for piece in source:
        documents[piece.path] = documents.get(piece.path, "") + piece.text
    return documents


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_every_format_is_read_from_a_folder_in_sorted_order(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "text\n")
    write(tmp_path / "a" / "c.py", "x = 1\n")
    write(tmp_path / "d.md", "# title\n")
    write(tmp_path / "e.jsonl", '{"text": "one"}\n\n{"text": "two"}\n')
    write(tmp_path / "f.jsonl.gz", gzip.compress(b'{"text": "three"}\n'))
    write(tmp_path / "g.csv", b"a,b")
    write(tmp_path / ".git" / "h.txt", "hidden")
    source = find_documents([str(tmp_path)])
    assert joined(source) == {
        "b.txt": "text\n",
        "d.md": "# title\n",
        "e.jsonl#1": "one",
        "e.jsonl#3": "two",
        "f.jsonl.gz#1": "three",
        "a/c.py": "x = 1\n",
    }
    assert source.report.n_files == 5
    assert source.report.n_other_files == 1
    assert source.report.n_bytes == 5 + 6 + 8 + 3 + 3 + 5


def test_a_glob_names_files_relative_to_its_fixed_part(tmp_path: Path) -> None:
    write(tmp_path / "x" / "a.txt", "a")
    write(tmp_path / "y" / "b.txt", "b")
    write(tmp_path / "y" / "b.md", "c")
    assert joined(find_documents([str(tmp_path / "**" / "*.txt")])) == {"x/a.txt": "a", "y/b.txt": "b"}


def test_a_file_reached_twice_is_one_document_and_no_duplicate(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a")
    source = find_documents([str(tmp_path), str(file)])
    assert joined(source) == {"a.txt": "a"}
    assert source.report.n_duplicates == 0


def test_the_standard_library_comes_without_tests_and_installed_packages() -> None:
    files = source_files.stdlib_files()
    keys = {f.key for f in files}
    assert {"json/decoder.py", "typing.py"} <= keys
    assert not [k for k in keys if {"test", "tests", "idle_test", "site-packages"} & set(k.split("/")[:-1])]
    assert not [k for k in keys if k.rsplit("/", 1)[-1].startswith("test_")]
    assert sum(f.n_bytes for f in files) > 5_000_000
    text = (Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py").read_text(encoding="utf-8")
    assert joined(DocumentSource(tuple(f for f in files if f.key == "json/decoder.py"), "text")) == {"json/decoder.py": text}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"text": ', "a.jsonl line 2 is not valid JSON"),
        ("a.jsonl", '["text"]\n', "a.jsonl line 1 holds list; it must be an object"),
        ("a.jsonl", '{"content": "x"}\n', "a.jsonl line 1 has no text under 'text'. Keys there: 'content'"),
        ("a.jsonl", '{"text": 3}\n', "has no text under 'text'"),
        ("a.jsonl", "[" * 100_000, "is not valid JSON"),
        ("a.jsonl.gz", "no gzip", "a.jsonl.gz is not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 1000, mtime=0)[:-20], "a.jsonl.gz is not a whole gzip file"),
        ("a.csv", "a,b", "a.csv is not one of the formats .txt"),
    ],
)
def test_bad_input_is_a_sentence_that_names_the_file(tmp_path: Path, name: str, content: str | bytes, sentence: str) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        list(find_documents([str(file)]))
    assert sentence in str(error.value)


def test_missing_sources_and_empty_folders_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.txt does not exist"):
        find_documents([str(tmp_path / "nowhere.txt")])
    with pytest.raises(DataError, match=r"holds no regular file of the formats"):
        find_documents([str(tmp_path)])
    with pytest.raises(DataError, match=r"glob .*holds no regular file"):
        find_documents([str(tmp_path / "*.txt")])
    with pytest.raises(DataError, match=r"no sources were named"):
        find_documents([])


def test_an_unreadable_file_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "secret.txt", "a")
    if os.geteuid() == 0:  # whom no permission stops: the refusal is acted

        def refuse(path: str, mode: str) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

        monkeypatch.setattr(records, "open", refuse, raising=False)
    file.chmod(0)
    with pytest.raises(DataError, match=r"secret.txt cannot be read: Permission denied"):
        list(find_documents([str(tmp_path)]))


def test_a_file_that_vanishes_before_it_is_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = write(tmp_path / "gone.txt", "a")
    source = find_documents([str(file)])
    file.unlink()
    with pytest.raises(DataError, match=r"gone.txt cannot be read: No such file"):
        list(source)
    with pytest.raises(DataError, match=r"gone.txt changed while it was being read"):
        source.check_unchanged()


def test_pipes_and_dangling_links_in_a_folder_are_no_text(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere.txt")
    os.mkfifo(tmp_path / "c.txt")
    assert joined(find_documents([str(tmp_path)])) == {"a.txt": "a"}


def test_duplicates_are_dropped_across_formats_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "same")
    write(tmp_path / "b.txt", "same")
    write(tmp_path / "c.jsonl", '{"text": "same"}\n{"text": "other"}\n{"text": "other"}\n')
    source = find_documents([str(tmp_path)])
    assert joined(source) == {"a.txt": "same", "c.jsonl#2": "other"}
    assert source.report.n_duplicates == 3
    assert joined(source) == {"a.txt": "same", "c.jsonl#2": "other"}, "a second pass starts afresh"


def test_empty_documents_are_counted_and_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", " \n\n")
    write(tmp_path / "c.txt", b"\xef\xbb\xbf")
    write(tmp_path / "d.jsonl", '{"text": ""}\n{"text": "x"}\n')
    source = find_documents([str(tmp_path)])
    assert joined(source) == {"d.jsonl#2": "x"}
    assert (source.report.n_empty, source.report.n_documents) == (4, 1)


def slow_decode(raw: bytes) -> tuple[str, int]:
    """One error after another, as the codec reports them."""
    text, invalid = "", 0
    while raw:
        try:
            return text + raw.decode(), invalid
        except UnicodeDecodeError as error:
            text += raw[: error.start].decode() + "\ufffd"
            invalid += error.end - error.start
            raw = raw[error.end :]
    return text, invalid


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=6), st.just("\ufffd".encode()))))
def test_invalid_bytes_are_counted_exactly(parts: list[bytes]) -> None:
    raw = b"".join(parts)
    assert decode(raw) == slow_decode(raw)


def test_invalid_utf8_is_counted_and_reported_never_fatal(tmp_path: Path) -> None:
    write(tmp_path / "latin.txt", "Führer\n".encode("latin-1"))
    write(tmp_path / "good.txt", "valid \ufffd stays\n")
    write(tmp_path / "bad.jsonl", b'{"text": "a\xff\xfeb"}\n{"text": "half \\ud83d pair"}\n')
    source = find_documents([str(tmp_path)])
    documents = joined(source)
    assert documents["latin.txt"] == "F\ufffdhrer\n"
    assert documents["good.txt"] == "valid \ufffd stays\n"
    assert documents["bad.jsonl#1"] == "a\ufffd\ufffdb"
    assert documents["bad.jsonl#2"] == "half \ufffd pair"
    assert source.report.invalid_utf8_documents == 3
    assert source.report.invalid_utf8_bytes == 1 + 2 + 2
    "".join(documents.values()).encode()


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("a\n \r猫é🦙"), max_size=300), piece_bytes=st.integers(4, 64))
def test_pieces_join_to_the_document_and_respect_their_limit(
    text: str, piece_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pieces = list(split_text(text, piece_bytes))
    assert "".join(p for p, _, _ in pieces) == text
    assert all(n == len(p.encode()) <= piece_bytes for p, n, _ in pieces)
    assert [last for _, _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    file = write(tmp_path_factory.mktemp("pieces") / "a.txt", text)
    documents = list(DocumentSource((SourceFile(str(file), "a.txt", 0, 0),), "text", piece_bytes))
    if documents:
        assert [(d.text, d.n_bytes, d.is_last) for d in documents] == pieces, "a file is cut where the same text in a record is"
        assert [d.piece for d in documents] == list(range(len(documents)))
    else:
        assert not text.strip()


@pytest.mark.parametrize("kind", ["txt", "txt-one-line", "jsonl"])
def test_a_50_mb_file_is_read_in_constant_memory(tmp_path: Path, kind: str) -> None:
    size, record = 50_000_000, "word " * 2000
    path = tmp_path / ("a.jsonl" if kind == "jsonl" else "a.txt")
    with open(path, "w", encoding="utf-8") as stream:
        for i in range(size // len(record)):
            stream.write(json.dumps({"text": f"{i} {record}"}) + "\n" if kind == "jsonl" else record + "\n" * (kind == "txt"))
    tracemalloc.start()
    try:
        n_bytes = sum(d.n_bytes for d in find_documents([str(path)]))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n_bytes >= size * 0.99
    assert peak_bytes < 4_000_000  # hashing reads 256 KiB at a time; pieces, their copies and 5,000 record hashes make the rest


def test_a_line_too_long_to_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 100)
    file = write(tmp_path / "a.jsonl", '{"text": "%s"}' % ("x" * 100))
    with pytest.raises(DataError, match=r"a.jsonl line 1 is longer than 100 bytes"):
        list(find_documents([str(file)]))


def test_fingerprint_changes_with_content_and_not_without(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a")
    first = find_documents([str(tmp_path)]).fingerprint()
    assert find_documents([str(tmp_path)]).fingerprint() == first
    write(file, "bb")
    assert find_documents([str(tmp_path)]).fingerprint() != first


def test_real_corpora_parse_whole(assets: Path) -> None:
    folder = assets / "corpora"
    books = find_documents([str(folder / "books")])
    documents = joined(books)
    assert len(documents) == 16
    for key, text in documents.items():
        assert text == (folder / "books" / key).read_bytes().decode().removeprefix("\ufeff")
    assert books.report.invalid_utf8_bytes == 0
    japanese = joined(find_documents([str(folder / "text" / "wagahaiwa_nekodearu_ja.txt")]))
    assert japanese["wagahaiwa_nekodearu_ja.txt"].encode() == (folder / "text" / "wagahaiwa_nekodearu_ja.txt").read_bytes()
    records = joined(find_documents([str(folder / "text" / "*.jsonl")]))
    lines = (folder / "text" / "c4_demo.jsonl").read_text(encoding="utf-8").split("\n")
    expected = {json.loads(line)["text"] for line in lines if line}
    assert set(records.values()) == expected


def test_this_room_reads_text_without_torch() -> None:
    import subprocess

    code = "import sys, twostroke.data.prepare; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}).returncode
        == 0
    )
