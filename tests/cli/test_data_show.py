"""``twostroke data prepare``'s table of what was left out, and ``twostroke data show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + " ".join(f"word{i}x{k}" for k in range(40)))
    for i in range(3):
        text = (folder / f"{i:02}.txt").read_text()
        (folder / f"{i:02}-again.txt").write_text(text)
        (folder / f"{i:02}-revised.txt").write_text(text + "!")
    (folder / "stub.txt").write_text("stub")
    (folder / "table.csv").write_text("a,b")
    return folder


def test_prepare_prints_what_was_left_out_and_why(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_dir = str(tmp_path / "out")
    options = ("--vocab-size", "280", "--dedup", "near", "--min-chars", "20", "--out", out_dir)
    code, out, _ = run(capsys, "data", "prepare", str(corpus), *options)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "1 files of other formats were not read" in lines
    assert any(line.startswith("found 37 documents") for line in lines)
    assert any(line.endswith("equal to an earlier one: 00.txt, 01.txt, 02.txt") for line in lines)
    assert any(line.startswith("left out 3 documents") and "nearly equal to an earlier one" in line for line in lines)
    assert any("shorter than --min-chars: stub.txt" in line for line in lines)
    assert lines[-1] == f"look at it: twostroke data show {out_dir}"
    code, out, _ = run(capsys, "data", "prepare", str(corpus), *options, "--json")
    left_out = json.loads(out)["report"]["left_out"]
    assert {reason: counts["n_documents"] for reason, counts in left_out.items()} == {
        "duplicate": 3,
        "near_duplicate": 3,
        "too_short": 1,
    }


def test_show_decodes_documents_from_their_beginnings(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_dir = str(tmp_path / "out")
    assert run(capsys, "data", "prepare", str(corpus), "--vocab-size", "280", "--out", out_dir)[0] == 0
    code, out, _ = run(capsys, "data", "show", out_dir, "--n", "4", "--tokens", "1000", "--json")
    assert code == 0
    excerpts = json.loads(out)["excerpts"]
    assert len(excerpts) == 4
    texts = {path.read_text() + "<|endoftext|>" for path in corpus.glob("*.txt")}
    for excerpt in excerpts:
        assert excerpt["is_whole"]
        assert excerpt["parts"][0]["text"] in texts
    code, out, _ = run(capsys, "data", "show", out_dir, "--held-out", "--tokens", "5")
    assert code == 0
    assert "held-out part's documents" in out
    assert "its beginning" in out


def test_conversations_are_prepared_and_shown_with_what_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    (tmp_path / "text.txt").write_text("what is the answer to a question?\n" * 9)
    assert run(capsys, "tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "270", "--out", str(tokenizer))[0] == 0
    records = [{"instruction": f"what is {i}?", "output": f"the {i}"} for i in range(20)]
    (tmp_path / "a.json").write_text(json.dumps([*records, records[0], {"instruction": "q", "output": ""}]))
    options = ("--layout", "alpaca", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"))
    code, out, _ = run(capsys, "data", "prepare", str(tmp_path / "a.json"), *options)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "found 22 conversations" in lines
    assert "left out 1 without an answer by an assistant" in lines
    assert "left out 1 conversations equal to an earlier one" in lines
    code, out, _ = run(capsys, "data", "show", str(tmp_path / "out"), "--n", "1")
    assert code == 0
    assert "Assistant:« the " in out
    assert "<|endoftext|>»" in out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("prepare", "{tmp}", "--dedup", "fuzzy"), "--dedup fuzzy is not known. Use one of 'exact', 'near', 'none'"),
        (("prepare", "{tmp}", "--layout", "chat"), "--layout chat is not known"),
        (("prepare", "{tmp}", "--layout", "alpaca"), "--layout alpaca needs a tokenizer"),
        (("prepare", "{tmp}", "--max-symbols", "2"), "--max-symbols 2 is a share and must be from 0 to 1"),
        (("prepare", "hf:a:b:c:d"), "is not a data set's name"),
        (("show", "{tmp}"), "is not prepared data"),
    ],
)
def test_bad_options_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(capsys, "data", *(a.format(tmp=tmp_path) for a in args))
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
