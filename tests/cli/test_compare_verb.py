"""`twostroke compare`: two models beside each other, what passes and what fails, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from real_model import make_model
from twostroke.cli import side_measurements
from twostroke.cli.main import main
from twostroke.core.recipe import DataRecipe
from twostroke.data.prepare import prepare
from twostroke.ledger.store import Ledger
from twostroke.quantization.convert import quantize_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, its int8 copy, and one of other weights."""
    folder = tmp_path_factory.mktemp("models")
    a = make_model(folder / "a")
    quantize_model(a, folder / "int8", "int8")
    return a, folder / "int8", make_model(folder / "other", seed=1)


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Options that name a text and a task."""
    (tmp_path / "a.txt").write_text("".join(f"def f{i}(self, name={i * i}):\n    return {i} ** self\n" for i in range(250)))
    records = [{"q": f"def f{i}", "choices": ["(self)", f" {i} = name"], "gold": i % 2} for i in range(20)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "own.toml").write_text('kind = "choice"\nfile = "q.jsonl"\nprompt = "{q}"\ndelimiter = ""\n')
    return ["--data", str(tmp_path / "a.txt"), "--task", str(tmp_path / "own.toml")]


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["compare", *map(str, args)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(caught.value.code or 0), out, err


def test_quality_speed_cost_and_size_stand_beside_each_other(
    models: tuple[Path, Path, Path], texts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_measurements, "TURNS", 2)
    a, int8, _ = models
    options = ["--hardware", "h100", "--max-perplexity-ratio", "1.5", "--max-size-ratio", "1", "--max-slowdown", "1e6"]
    code, out, err = run(
        capsys, a, int8, *texts, *options, "--max-cost-ratio", "2", "--min-accuracy-difference", "-1", "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["passed"] is True
    assert [c["name"] for c in document["checks"]] == [
        "perplexity ratio", "own acc, B − A", "own acc_norm, B − A",
        "prefill time, batch 1, B ÷ A", "decode time, batch 1, B ÷ A",
        "prefill time, batch 8, B ÷ A", "decode time, batch 8, B ÷ A", "bytes on disk, B ÷ A", "predicted cost a token, B ÷ A",
    ]  # fmt: skip
    assert (document["a"]["engine"], document["b"]["engine"]) == ("inference", "inference")
    assert document["b"]["dtype"] == "int8"
    low, high = document["interval_bits_per_byte"]
    assert low < document["difference_bits_per_byte"] < high
    assert document["perplexity_ratio_interval"][0] < document["perplexity_ratio"] < document["perplexity_ratio_interval"][1]
    assert document["cost"]["ratio"] == pytest.approx(
        document["cost"]["b"]["usd_per_mtok"] / document["cost"]["a"]["usd_per_mtok"], rel=1e-9
    )
    (task,) = document["tasks"]
    assert task["n_examples"] == 20
    assert task["metrics"]["acc"]["b"] - task["metrics"]["acc"]["a"] == pytest.approx(task["metrics"]["acc"]["value"])
    entries = [Ledger().get(str(run_id)) for run_id in document["run_ids"]]
    decoders = json.loads(run(capsys, a, a, *texts[2:], "--limit", "2", "--json")[1])
    assert decoders["a"]["engine"] == "decoder"
    assert decoders["speed"][0]["b"]["decode_tok_per_s"] > 0
    for name, entry in zip("ab", entries, strict=True):
        assert entry.status == "finished"
        assert entry.measurement["bits_per_byte"] == document[name]["bits_per_byte"]
        assert entry.measurement["decode_tok_per_s"] == document["speed"][0][name]["decode_tok_per_s"] > 0


def test_what_falls_short_is_named_and_the_command_fails(
    models: tuple[Path, Path, Path], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    a, _, other = models
    options = ("--no-speed", "--max-perplexity-ratio", "0.5", "--max-size-ratio", "1.1")
    code, out, _ = run(capsys, a, other, *texts, *options)
    assert code == 1
    assert "FAIL  perplexity ratio" in out
    assert "pass  bytes on disk" in out


def test_strict_asks_the_whole_interval(
    models: tuple[Path, Path, Path], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is as good as itself; over 20 questions the interval cannot say so within a point, over the text it can."""
    a = models[0]
    options = (a, a, *texts, "--no-speed", "--min-accuracy-difference", "-0.01", "--max-perplexity-ratio", "1.0001")
    assert run(capsys, *options)[0] == 0
    code, out, _ = run(capsys, *options, "--strict")
    assert code == 1
    assert "FAIL  own acc" in out
    assert "pass  perplexity ratio" in out


def test_runs_on_conversations_are_compared_by_their_answers(
    models: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": f"def {i}?", "response": "return " + "self " * (i % 7) + str(i)} for i in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    recipe = DataRecipe((str(tmp_path / "a.json"),), (), 0.5, tokenizer=str(models[0]), layout="prompt")
    prepared = prepare(recipe, tmp_path / "cache")
    args = (models[0], models[1], "--prepared", prepared.directory, "--no-speed", "--max-perplexity-ratio", "1.1", "--json")
    code, out, err = run(capsys, *args)
    assert code == 0, err
    document = json.loads(out)
    assert document["unit"] == "nats per answer token"
    difference = document["b"]["nats_per_token"] - document["a"]["nats_per_token"]
    assert document["difference_nats_per_token"] == pytest.approx(difference, rel=1e-6)
    code, out, _ = run(capsys, *args[:-1])
    assert "nats per answer token" in out
    strange = make_model(tmp_path / "strange", vocab_size=300)
    code, _, err = run(capsys, models[0], strange, *args[2:])
    assert code == 2
    assert "was prepared with another tokenizer" in err


def test_what_training_ran_at_comes_from_the_runs(
    models: tuple[Path, Path, Path], texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    (run_directory / "model").symlink_to(models[0])
    (run_directory / "summary.json").write_text(json.dumps({"measurement": {"train_tok_per_s": 1234.5}}))
    args = (run_directory, models[2], *texts[2:], "--no-speed", "--limit", "2")
    assert json.loads(run(capsys, *args, "--json")[1])["training"] == {"a": 1234.5, "b": None}
    assert "1,234" in run(capsys, *args)[1]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--max-slowdown", "1.1", "--no-speed"), "--max-slowdown needs speed to be measured"),
        (("--min-accuracy-difference", "0"), "--min-accuracy-difference needs a --task"),
        (("--max-cost-ratio", "1"), "--max-cost-ratio needs a price"),
        (("--hardware", "abacus"), "hardware 'abacus' is not known"),
        (("--task", "nowhere.toml"), "nowhere.toml is missing"),
    ],
)
def test_thresholds_that_nothing_would_be_held_against_are_refused_before_any_work(
    models: tuple[Path, Path, Path], texts: list[str], capsys: pytest.CaptureFixture[str], args: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(capsys, models[0], models[0], *texts[:2], *args)
    assert code == 2
    assert sentence in err


def test_a_task_alone_needs_no_text(
    models: tuple[Path, Path, Path], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, models[0], models[2], *texts[2:], "--no-speed", "--limit", "4", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert "bits_per_byte" not in document["a"]
    assert document["passed"] is None
    code, _, err = run(capsys, models[0], models[2], *texts[2:], "--max-perplexity-ratio", "1", "--no-speed")
    assert (code, "--max-perplexity-ratio needs a text" in err) == (2, True)


def test_a_cache_in_int8_is_the_second_model_s_alone(
    models: tuple[Path, Path, Path], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    a = models[0]
    options = ["--no-speed", "--dtype", "fp32", "--kv-dtype", "int8", "--head-dtype", "int8", "--max-perplexity-ratio", "1.5"]
    code, out, err = run(capsys, a, a, *texts[:2], *options, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert [document[side]["formats"] for side in "ab"] == ["fp32", "fp32, head int8, cache int8"]
    assert {document[side]["engine"] for side in "ab"} == {"inference"}
    assert document["perplexity_ratio"] != 1.0
    assert document["checks"][0]["passed"] is True
