"""`twostroke eval`: tasks and text through either engine, in a table, as JSON and in the ledger; bad input exits 2."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from real_model import make_model
from twostroke.cli.eval_verb import _planned
from twostroke.cli.main import main
from twostroke.core.families import read_spec
from twostroke.ledger.store import Ledger
from twostroke.planner.hardware import tables
from twostroke.planner.hardware.tables import load_hardware
from twostroke.quantization.convert import quantize_model
from twostroke.training.ranks import Ranks

MATCH = 'kind = "match"\nfile = "q.jsonl"\nprompt = "{q}"\ntarget = "{t}"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    records = [{"q": f"def f{i}(self,", "t": "name" if i % 2 else "prefix"} for i in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "own.toml").write_text(MATCH)
    return tmp_path / "own.toml"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["eval", *args])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(caught.value.code or 0), out, err


def test_a_task_of_ones_own_scores_alike_on_both_engines(model: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = []
    for engine in ("decoder", "inference"):
        args = (str(model), "--task", str(own), "--engine", engine, "--dtype", "fp32", "--json")
        code, out, err = run(capsys, *args)
        assert code == 0, err
        documents.append(json.loads(out))
    a, b = (d["tasks"][0] for d in documents)
    assert (a["n_examples"], a["kind"], a["chance"]) == (6, "match", None)
    # fp32 in another order of summation.
    assert a["metrics"]["target_nats"]["value"] == pytest.approx(b["metrics"]["target_nats"]["value"], abs=1e-3)
    assert [d["engine"] for d in documents] == ["decoder", "inference"]
    entry = Ledger().get(documents[1]["run_id"])
    assert (entry.kind, entry.status, entry.inputs["engine"]) == ("evaluate", "finished", "inference")
    assert entry.measurement["own_target_nats"] == b["metrics"]["target_nats"]["value"]
    code, out, _ = run(capsys, str(model), "--task", str(own), "--limit", "1")
    assert code == 0
    assert "own" in out
    assert "unknown" in out, "one example has no standard error"


def test_text_and_tasks_may_be_scored_at_once_and_text_costs_the_same_through_either_engine(
    model: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("import argparse\nparser = argparse.ArgumentParser()\n" * 20)
    found = []
    for engine in ("decoder", "inference"):
        args = ("--data", str(tmp_path / "a.txt"), "--task", str(own), "--engine", engine, "--dtype", "fp32", "--json")
        code, out, err = run(capsys, str(model), *args, "--context", "100")
        assert code == 0, err
        found.append(json.loads(out))
    assert found[0]["bits_per_byte"] == pytest.approx(found[1]["bits_per_byte"], rel=1e-5)
    assert found[0]["tasks"]


def test_quantised_weights_go_through_the_engine_without_being_asked(
    model: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize_model(model, tmp_path / "int8", "int8")
    code, out, err = run(capsys, str(tmp_path / "int8"), "--task", str(own), "--json")
    assert code == 0, err
    assert (json.loads(out)["engine"], json.loads(out)["dtype"]) == ("inference", "int8")


def test_head_and_cache_in_int8_are_scored_as_the_engine_holds_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("import argparse\nparser = argparse.ArgumentParser()\n" * 20)
    found = []
    for formats in ((), ("--head-dtype", "int8"), ("--kv-dtype", "int8")):
        args = ("--data", str(tmp_path / "a.txt"), "--engine", "auto" if formats else "inference", "--dtype", "fp32")
        code, out, err = run(capsys, str(model), *args, *formats, "--context", "100", "--json")
        assert code == 0, err
        found.append(json.loads(out))
    assert [f["formats"] for f in found] == ["fp32", "fp32, head int8", "fp32, cache int8"]
    assert {f["engine"] for f in found} == {"inference"}
    assert len({f["bits_per_byte"] for f in found}) == 3  # each rounds something else
    assert found[1]["bits_per_byte"] == pytest.approx(found[0]["bits_per_byte"], rel=0.01)
    assert found[2]["bits_per_byte"] == pytest.approx(found[0]["bits_per_byte"], rel=0.01)


def test_prompts_beyond_the_context_are_counted_and_said(
    model: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"q": "def f(self, name): " * 200, "t": "x"}))
    code, out, err = run(capsys, str(model), "--task", str(own), "--json")
    assert code == 0
    assert json.loads(out)["tasks"][0]["n_cut"] == 1
    assert "1 prompts of own were longer than the context and lost their beginning" in err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--task", "nothing"), "task 'nothing' is not known"),
        (("--task", "copa"), "llmfoundry_copa.jsonl, which is not in"),
        (("--task", "copa", "--task-data", "{tmp}"), "which is not in {tmp}"),
        (("--task", "{tmp}/none.toml"), "none.toml is missing"),
        (("--task", "{tmp}/own.toml", "--engine", "vllm"), "--engine vllm is not known"),
        (("--task", "{tmp}/own.toml", "--limit", "0"), "limit"),
        (("--limit", "5"), "--limit 5 is of a task's questions, and no --task is given"),
        (("--task", "{tmp}/own.toml", "--dtype", "int4x"), "--dtype int4x"),
        (("--task", "{tmp}/own.toml", "--kv-dtype", "int3"), "--kv-dtype int3 is not known"),
        (
            ("--task", "{tmp}/own.toml", "--kv-dtype", "int8", "--engine", "decoder"),
            "--kv-dtype int8 is an option of the inference",
        ),
        (
            ("--task", "{tmp}/own.toml", "--layer-by-layer", "--engine", "inference"),
            "--layer-by-layer is an option of the decoder",
        ),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    model: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(capsys, str(model), *(a.format(tmp=tmp_path) for a in args))
    assert code == 2
    assert sentence.format(tmp=tmp_path) in err


def test_a_folder_that_is_no_model_and_an_empty_file_are_refused(
    model: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, str(tmp_path), "--task", str(own))
    assert (code, "is not a model directory" in err) == (2, True)
    (tmp_path / "q.jsonl").write_text("")
    code, _, err = run(capsys, str(model), "--task", str(own))
    assert (code, "holds no record" in err) == (2, True)
    assert Ledger().get("last").status == "failed"


def test_a_model_that_does_not_fit_is_refused_and_scored_layer_by_layer(
    model: Path, own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.evaluation.decoder_scorer.available_bytes", lambda: 1000)
    code, _, err = run(capsys, str(model), "--task", str(own))
    assert code == 2
    assert "and 1000 B of memory is free. Have one layer in memory at a time with --layer-by-layer, or use" in err
    code, out, err = run(capsys, str(model), "--task", str(own), "--layer-by-layer", "--json")
    assert code == 0, err
    assert Ledger().get(json.loads(out)["run_id"]).inputs["layer_by_layer"] is True


@pytest.mark.parametrize(("device", "n", "n_local", "times"), [("cpu", 4, 4, 1), ("cpu", 4, 2, 2), ("h100-sxm", 4, 4, 4)])
def test_ranks_that_share_a_processor_are_planned_as_fast_as_one_process(
    model: Path, device: str, n: int, n_local: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = replace(load_hardware("h100-sxm", "train"), kind="cpu" if device == "cpu" else "gpu")
    monkeypatch.setattr(tables, "load_hardware", lambda name, phase: hardware)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_local))
    scorer, text = SimpleNamespace(engine="decoder", spec=read_spec(model), dtype="fp32"), SimpleNamespace(prepared=None)
    alone, together = (_planned(model, scorer, text, 64, 48, False, ranks) for ranks in (None, Ranks(0, n)))  # type: ignore[arg-type]
    assert together.values["scored_tok_per_s"] == pytest.approx(times * alone.values["scored_tok_per_s"])
    assert together.n_devices == times
