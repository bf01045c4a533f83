"""``twostroke card``: numbers of runs, each with its run; what was never measured is left out; nothing is half written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from real_model import make_model
from twostroke.cli.main import main
from twostroke.ledger.store import Ledger


def command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([*map(str, args)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(caught.value.code or 0), out, err


def card(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    code, out, err = command(capsys, "card", *args, "--json")
    assert code == 0, err
    found = json.loads(out)
    found["facts"] = {fact["what"]: fact for facts in found["sections"].values() for fact in facts}
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home-of-cards")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Path:
    """The output of a training run of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    text = "".join(f"def f{i}(self, name={i * i}):\n    return {i} ** self\n" for i in range(400))
    (folder / "text.txt").write_text(text)
    recipe = f"""
    output = "{folder / "run"}"
    [model]
    n_layers = 1
    d_model = 32
    n_heads = 2
    d_ff = 48
    [data]
    sources = ["{folder / "text.txt"}"]
    vocab_size = 300
    [train]
    steps = 6
    batch_size = 2
    sequence_length = 32
    compile = false
    """
    (folder / "recipe.toml").write_text(recipe)
    before = os.environ.get("TWOSTROKE_HOME")
    os.environ["TWOSTROKE_HOME"] = str(home)
    try:
        with pytest.raises(SystemExit) as caught:
            main(["train", str(folder / "recipe.toml")])
        assert not caught.value.code
        assert not caught.value.code
    finally:
        os.environ.pop("TWOSTROKE_HOME") if before is None else os.environ.update(TWOSTROKE_HOME=before)
    return folder / "run"


@pytest.fixture
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("TWOSTROKE_HOME", str(home))
    return Ledger()


def test_a_trained_model_shows_what_its_run_measured(
    trained: Path, at_home: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    found, summary = card(capsys, trained), json.loads((trained / "summary.json").read_text())
    facts, run = found["facts"], summary["run_id"]
    assert facts["parameters"]["value"] == f"{summary['n_parameters']:,}"
    loss = facts["last loss, nats a token"]
    assert (loss["value"], loss["source"]) == (f"{summary['final_loss']:.4f}", run)
    bits = facts["held-out text, bits per byte"]
    assert (bits["value"], bits["source"]) == (f"{summary['measurement']['heldout_bits_per_byte']:.4f}", run)
    assert facts["text"]["value"] == "text.txt"  # not the folders of the one who trained it
    assert str(trained.parent) not in json.dumps(found)
    assert any("bench offline" in line for line in found["missing"])
    if "energy_kwh" not in summary["measurement"]:
        assert any("energy" in line for line in found["missing"])


def test_speed_comes_from_runs_of_these_weights_alone(
    trained: Path, at_home: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(capsys, "bench", "offline", trained, "--batch", "1", "--prompt-tokens", "8", "--output-tokens", "4")
    assert code == 0, err
    own = at_home.runs("bench")[0]
    other = at_home.freeze("bench", "model offline", {"directory": "/elsewhere/model"}, {})
    at_home.measure(other, {"decode_tok_per_s": 1e9})
    found = card(capsys, trained)
    rows = [fact for fact in found["facts"].values() if "decoding" in fact["value"]]
    assert [fact["source"] for fact in rows] == [own.run_id]
    assert not any("bench offline" in line for line in found["missing"])
    weights = trained / "model" / "model.safetensors"
    later = weights.stat().st_mtime + 1000
    os.utime(weights, (later, later))  # other weights than those that were measured
    assert not any("decoding" in fact["value"] for fact in card(capsys, trained)["facts"].values())
    os.utime(weights, (later - 1000, later - 1000))


def test_a_quantised_copy_says_what_it_lost_and_where_it_comes_from(
    trained: Path, at_home: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(capsys, "quantize", trained, tmp_path / "q4", "--scheme", "int4-g32", "--max-kl", "100")
    assert code == 0, err
    run = at_home.runs("quantize")[0]
    found = card(capsys, tmp_path / "q4")
    loss = found["facts"]["KL to its source, nats a token"]
    assert (loss["value"], loss["source"]) == (f"{run.measurement['kl_nats']:.4f}", run.run_id)
    assert "quantized" in found["front"]["tags"]
    assert "base_model" not in found["front"]  # nobody else can look up a folder of this machine
    command(capsys, "quantize", trained, tmp_path / "q8")
    assert any("twostroke compare" in line for line in card(capsys, tmp_path / "q8")["missing"])


def test_a_model_of_nowhere_has_a_card_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "m")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    code, text, err = command(capsys, "card", model)
    assert code == 0, err
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: apache-2.0\n")
    assert "twostroke train RECIPE" in text
    assert "## Training" not in text
    assert f"# {model.name}" in text


def test_what_strangers_wrote_beside_a_model_breaks_no_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    model = make_model(tmp_path / "run" / "model")
    (tmp_path / "run" / "recipe.json").write_text(json.dumps({"method": "a\n# b", "data": {"sources": ["x" * 9999, 3]}}))
    summary = {"run_id": "a | b\n---\n", "measurement": [], "steps": {}, "weights_sha256": 3, "final_loss": True}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"_name_or_path": "y" * 9999}))
    code, text, err = command(capsys, "card", tmp_path / "run")
    assert code == 0, err
    assert "# b" not in text.splitlines()
    assert "a \\| b ---" in text
    assert text.count("\n---\n") == 1  # the front is not left early


def test_wrong_uses_are_sentences_and_leave_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = make_model(tmp_path / "m"), tmp_path / "README.md"
    out.write_text("mine")
    for args, sentence in (
        ((tmp_path / "nowhere",), "does not exist"),
        ((model, "-o", out), "is there already"),
        ((model, "-o", tmp_path), "is a folder"),
        ((model, "-o", tmp_path / "no" / "README.md"), "does not exist"),
    ):
        code, _, err = command(capsys, "card", *args)
        assert (code, sentence in err) == (2, True), err
    assert out.read_text() == "mine"
    code, said, _ = command(capsys, "card", model, "-o", out, "--replace")
    assert code == 0
    assert "facts" in said
    assert out.read_text().startswith("---\n")
