from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from twostroke.cli.main import main
from twostroke.core.spec import ModelSpec
from twostroke.data.shards import open_prepared


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(0)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(50):
        lines = [" ".join(rng.choices(["cat", "dog", "tree", "runs", "home"], k=9)) for _ in range(20)]
        (corpus / f"{i}.txt").write_text("\n".join(lines))
    (corpus / "latin.txt").write_bytes("Führer".encode("latin-1"))
    return corpus


def test_prepare_reports_what_it_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "data", "prepare", str(folder), "--vocab-size", "280", "--json")
    document = json.loads(out)
    assert code == 0
    assert "preparing data ..." in err
    prepared = open_prepared(document["directory"], verify=True)
    assert document["n_train_tokens"] == prepared.n_train_tokens
    assert document["report"]["invalid_utf8_bytes"] == 1
    code, out, err = run(capsys, "data", "prepare", str(folder), "--vocab-size", "280", "--verify")
    assert code == 0
    assert "1 bytes in 1 documents were not UTF-8" in out
    assert "51 documents" in out
    assert "reused" in err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("nowhere",), "source nowhere does not exist"),
        (("{folder}", "--vocab-size", "12"), "--vocab-size 12 must be at least 257"),
        (("{folder}", "--held-out-fraction", "1"), "--held-out-fraction 1 must be above 0 and below 1"),
        (("{folder}", "--tokenizer", "nowhere.json"), "tokenizer nowhere.json does not exist"),
        (("{folder}", "--held-out", "nowhere"), "source nowhere does not exist"),
        (("{folder}", "--out", "{folder}"), "is not prepared data"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_2(
    folder: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run(capsys, "data", "prepare", *(a.format(folder=folder) for a in args), "--json")
    assert code == 2
    assert sentence in json.loads(out)["error"]
    assert "Traceback" not in err


def test_a_corrupt_shard_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("data", "prepare", str(folder), "--vocab-size", "280", "--out", str(tmp_path / "out"))
    assert run(capsys, *command)[0] == 0
    shard = tmp_path / "out" / "train-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[5] ^= 1
    shard.write_bytes(raw)
    code, _, err = run(capsys, *command, "--verify")
    assert code == 2
    assert f"{shard} was altered" in err
    shard.write_bytes(raw[:-2])
    code, _, err = run(capsys, *command)
    assert code == 2
    assert f"{shard} is {len(raw) - 2} bytes, the manifest says {len(raw)}" in err


def test_tokenizer_train_writes_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_file = tmp_path / "t.json"
    code, out, _ = run(capsys, "tokenizer", "train", str(folder), "--vocab-size", "5000", "--out", str(out_file))
    assert code == 0
    assert out_file.is_file()
    assert "5000 were asked for" in out
    code, out, _ = run(capsys, "tokenizer", "train", str(folder), "--vocab-size", "270", "--out", str(out_file), "--json")
    assert json.loads(out)["vocab_size"] == 270
    code, _, err = run(capsys, "tokenizer", "train", str(folder), "--out", str(tmp_path / "no" / "t.json"))
    assert code == 2
    assert "must be a file in a folder that exists" in err


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    from twostroke.core.recipe import DataRecipe
    from twostroke.data.prepare import prepare
    from twostroke.model.decoder import Decoder
    from twostroke.model.save import save_model

    prepared = prepare(DataRecipe(sources=(str(folder),), vocab_size=280), out=tmp_path / "prepared")
    spec = ModelSpec("llama", prepared.vocab_size, 1, 32, 4, 2, 8, 64, 32, tied_embeddings=True, eos_token_ids=(0,))
    save_model(Decoder(spec), spec, tmp_path / "model", "fp32", prepared.tokenizer_path)
    return tmp_path / "model"


def test_eval_scores_prepared_data_and_files(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = str(tmp_path / "prepared")
    code, out, _ = run(capsys, "eval", str(model), "--prepared", prepared, "--json")
    document = json.loads(out)
    assert code == 0
    assert 1 < document["bits_per_byte"] < 9
    assert document["xz_bits_per_byte"] > 0
    code, out, _ = run(capsys, "eval", str(model), "--data", str(folder / "1.txt"), "--context", "16", "--stride", "8")
    assert code == 0
    assert "bits per byte" in out
    assert "context 16, stride 8, fp32" in out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "is not part of a training run"),
        (("--prepared", "{tmp}"), "is not prepared data"),
        (("--data", "nowhere.txt"), "source nowhere.txt does not exist"),
        (
            ("--prepared", "{tmp}/prepared", "--context", "1000"),
            "--context 1000 must be between 1 and the model's max_positions=32",
        ),
        (("--prepared", "{tmp}/prepared", "--stride", "0"), "--stride 0 must be between 1 and --context 32"),
        (("--prepared", "{tmp}/prepared", "--dtype", "int3"), "--dtype int3"),
    ],
)
def test_eval_refuses_with_a_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(capsys, "eval", str(model), *(a.format(tmp=tmp_path) for a in args))
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err


def test_compare_passes_and_fails_by_the_ratio_asked_for(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("compare", str(model), str(model), "--prepared", str(tmp_path / "prepared"))
    code, out, _ = run(capsys, *common, "--max-perplexity-ratio", "1.001", "--json")
    assert code == 0
    assert json.loads(out)["passed"] is True
    code, out, _ = run(capsys, *common, "--max-perplexity-ratio", "0.9")
    assert code == 1
    assert "FAIL" in out
    code, _, err = run(capsys, "compare", str(model), str(tmp_path / "nowhere"), "--prepared", str(tmp_path / "prepared"))
    assert code == 2
    assert "nowhere does not exist. Give a model directory" in err
