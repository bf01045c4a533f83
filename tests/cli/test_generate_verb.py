"""``twostroke generate`` and ``twostroke quantize``, as a person types them."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import machines
from real_model import greedy_reference, make_model
from twostroke.cli.main import main
from twostroke.core.profile import read_fingerprint, save_profile
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.llm import LLM
from twostroke.ledger.scoring import numbers_of
from twostroke.ledger.store import Ledger
from twostroke.scheduling.sampling_params import SamplingParams

PROMPT = "def add_argument(self"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def this_machine_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "300")  # the verb sets it where nobody has; tests leave the environment as it was
    save_profile(replace(machines.profile(), fingerprint=read_fingerprint()))


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    captured = capsys.readouterr()
    assert not caught.value.code, captured.err
    return captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def greedy_text(model: Path, prompt: str, n: int) -> str:
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(prompt).ids
    text: str = tokenizer.decode(ids + greedy_reference(model, ids, n)[0])
    return text


GREEDY = ("--temperature", "0", "--max-tokens", "12", "--dtype", "fp32", "--ignore-eos", "--threads", "1")


def test_text_goes_to_stdout_and_the_speed_of_each_phase_to_stderr(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    out, err = run(capsys, "generate", str(model), "--prompt", PROMPT, *GREEDY)
    assert PROMPT + out.removesuffix("\n") == greedy_text(model, PROMPT, 12)
    start, prefill, decode, *_ = err.splitlines()
    assert start.startswith("start")
    for line, words in ((prefill, "prefill  "), (decode, "decode   11 tokens")):
        assert line.startswith(words)
        assert "GB/s read" in line
        assert "FLOP/s" in line
        assert "% of what this machine reads at" in line


def test_several_prompts_are_answered_in_order(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    out, _ = run(capsys, "generate", str(model), "--prompt", PROMPT, "--prompt", "import ", *GREEDY)
    expected = f"[1] {greedy_text(model, PROMPT, 12)}\n[2] {greedy_text(model, 'import ', 12)}\n"
    assert out == expected


def test_a_prompt_may_come_from_stdin(capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    out, _ = run(capsys, "generate", str(model), *GREEDY)
    assert PROMPT + out.removesuffix("\n") == greedy_text(model, PROMPT, 12)


def test_json_is_one_document_and_the_run_is_in_the_ledger(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    out, _ = run(capsys, "generate", str(model), "--prompt", PROMPT, *GREEDY, "--json")
    document: dict[str, Any] = json.loads(out)
    (output,) = document["outputs"]
    assert PROMPT + output["text"] == greedy_text(model, PROMPT, 12)
    assert (output["finish_reason"], len(output["token_ids"])) == ("length", 12)
    record = Ledger().get(document["run_id"])
    assert (record.kind, record.subject, record.status) == ("generate", "tiny", "finished")
    assert numbers_of(record.prediction) == document["prediction"]
    assert all(frozen["low"] <= frozen["value"] <= frozen["high"] for frozen in record.prediction.values())
    assert record.inputs["shape"]["prompt_tokens"] == output["prompt_tokens"]
    for name in ("ttft_s", "tpot_s", "e2e_s", "decode_tok_per_s", "prefill_tok_per_s", "weights_bytes", "startup_s"):
        assert document["prediction"][name] > 0
        assert math.isfinite(record.measurement[name])
        assert record.measurement[name] > 0
    assert record.measurement["weights_bytes"] == document["prediction"]["weights_bytes"]


def test_beams_are_searched_and_the_best_printed(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    options = ("--prompt", PROMPT, "--max-tokens", "9", "--dtype", "fp32", "--threads", "1", "--beams", "4")
    out, err = run(capsys, "generate", str(model), *options, "-n", "2", "--length-penalty", "0.5", "--json")
    params = SamplingParams(temperature=0.0, max_tokens=9, use_beam_search=True, n=2, best_of=4, length_penalty=0.5)
    (expected,) = LLM(model, dtype="fp32", n_threads=1).generate(PROMPT, params)
    document = json.loads(out)
    assert [o["token_ids"] for o in document["outputs"]] == [o.token_ids for o in expected.outputs]
    assert [o["cumulative_logprob"] for o in document["outputs"]] == pytest.approx(
        [o.cumulative_logprob for o in expected.outputs], abs=1e-4
    )
    assert "beams are predicted as so many answers" in err
    record = Ledger().get(document["run_id"])
    assert record.inputs["beams"] == 4
    assert not {"ttft_s", "output_tok_per_s"} & record.measurement.keys()
    out, _ = run(capsys, "generate", str(model), *options)
    (best,) = LLM(model, dtype="fp32", n_threads=1).generate(PROMPT, dataclasses.replace(params, n=1, length_penalty=1.0))
    assert out == best.outputs[0].text + "\n"
    drawing = refused(capsys, "generate", str(model), *options, "--temperature", "0.5")
    assert "--temperature 0.5 draws tokens, and a beam search does not" in drawing
    assert "--beams 4 must be at least -n 5" in refused(capsys, "generate", str(model), *options, "-n", "5")
    assert "--length-penalty needs --beams" in refused(capsys, "generate", str(model), "--prompt", "x", "--length-penalty", "2")


def test_answers_have_the_form_that_a_file_or_an_expression_gives(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": ["red", "blue"], "x-guidance": {"whitespace_flexible": False}}))
    options = ("generate", str(model), "--prompt", PROMPT, "--max-tokens", "40", "--threads", "1", "--seed", "1")
    out, _ = run(capsys, *options, "--json-schema", str(file), "--json")
    (answer,) = json.loads(out)["outputs"]
    assert json.loads(answer["text"]) in ("red", "blue")
    out, _ = run(capsys, *options, "--regex", "[xy]{5}")
    assert set(out.strip()) <= {"x", "y"}
    assert "both give the answer's form" in refused(capsys, *options, "--regex", "a", "--json-schema", str(file))
    assert "is missing" in refused(capsys, *options, "--json-schema", str(tmp_path / "other.json"))
    assert "regular expression cannot be used" in refused(capsys, *options, "--regex", "a(")


def test_a_run_that_fails_is_recorded_as_failed(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert "--max-model-len 4" in refused(capsys, "generate", str(model), "--prompt", PROMPT, "--max-model-len", "4")
    assert [run.status for run in Ledger().runs("generate")] == ["failed"]


def test_generating_needs_no_calibration(capsys: pytest.CaptureFixture[str], model: Path, twostroke_home: Path) -> None:
    for file in (twostroke_home / "profiles").iterdir():
        file.unlink()
    out, err = run(capsys, "generate", str(model), "--prompt", PROMPT, *GREEDY)
    assert PROMPT + out.removesuffix("\n") == greedy_text(model, PROMPT, 12)
    assert "twostroke calibrate" in err.splitlines()[0]
    assert "of the measured" not in err


def test_what_generate_predicts_it_measures_or_gives_a_reason(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    document = json.loads(run(capsys, "generate", str(model), "--prompt", PROMPT, *GREEDY, "--json")[0])
    found = Ledger().get(document["run_id"]).measurement
    assert set(document["prediction"]) == {n for n in document["prediction"] if n in found} | set(found["not_measured"])
    assert set(found["not_measured"]) == {"energy_per_mtok_kwh", "model_bytes", "warm_startup_s"} - set(found)
    assert found["cost_per_mtok_usd"] > 0


def test_eight_answers_are_predicted_as_one_prompt_and_eight_rows(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    def predicted(*options: str) -> tuple[dict[str, Any], dict[str, Any]]:
        document = json.loads(run(capsys, "generate", str(model), *options, *GREEDY, "--json")[0])
        return document["prediction"], Ledger().get(document["run_id"]).inputs["shape"]

    (one, _), (eight, shape) = predicted("--prompt", PROMPT), predicted("--prompt", PROMPT, "-n", "8")
    prompts, _ = predicted(*("--prompt", PROMPT) * 8)
    assert (shape["batch"], shape["answers"]) == (8, 8)
    assert eight["ttft_s"] == one["ttft_s"] < prompts["ttft_s"]
    assert eight["tpot_s"] == prompts["tpot_s"] >= one["tpot_s"]
    # the seven others begin a step after the first, which computes the prompt
    assert eight["e2e_s"] == pytest.approx(one["ttft_s"] + 12 * eight["tpot_s"], rel=0.1)


def on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch, *engines_of_the_cpu: Any) -> None:
    """A GPU that torch sees and that was calibrated a thousand times as fast, and of the CPU what is named."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    cpu = replace(machines.profile(), fingerprint=read_fingerprint())
    save_profile(replace(cpu, engines=engines_of_the_cpu))
    fast = tuple(replace(p, bytes_per_s=1e3 * p.bytes_per_s) for p in cpu.read_bandwidth)
    save_profile(replace(cpu, device="cuda", engines=("train",), read_bandwidth=fast))


def test_beside_a_gpu_the_prediction_is_of_the_cpu_which_computes(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = json.loads(run(capsys, "generate", str(model), "--prompt", PROMPT, *GREEDY, "--json")[0])
    on_a_gpu_machine(monkeypatch, "serve")
    beside = json.loads(run(capsys, "generate", str(model), "--prompt", PROMPT, *GREEDY, "--json")[0])
    assert beside["prediction"] == alone["prediction"]
    frozen = Ledger().get(beside["run_id"])
    assert "GPU" not in frozen.inputs["device"]
    assert read_fingerprint().cpu_model in frozen.inputs["device"]


def test_a_gpu_that_alone_was_calibrated_gives_no_prediction_of_what_the_cpu_computes(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu_machine(monkeypatch)
    out, err = run(capsys, "generate", str(model), "--prompt", PROMPT, *GREEDY, "--json")
    assert "no prediction: this machine's profile has no measurement of serving on cpu, only of training on cuda" in err
    assert "Run `twostroke calibrate`" in err
    document = json.loads(out)
    assert document["prediction"] == {}
    assert Ledger().get(document["run_id"]).prediction == {}


def test_the_same_seed_gives_the_same_text(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    args = ("generate", str(model), "--prompt", PROMPT, "--max-tokens", "10", "--seed", "7", "--temperature", "1.5")
    assert run(capsys, *args)[0] == run(capsys, *args)[0]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--temperature", "-1"], "--temperature -1"),
        (["--max-tokens", "0"], "--max-tokens 0"),
        (["--top-p", "0"], "--top-p 0"),
        (["--dtype", "int5"], "--dtype int5"),
        (["--stop", ""], "stop"),
        (["--max-model-len", "100000"], "max_positions=512"),
        (["--kv-cache-gib", "0.0000001"], "--kv-cache-gib 0.0000001 is less than one page"),
    ],
)
def test_bad_options_are_one_sentence(capsys: pytest.CaptureFixture[str], model: Path, args: list[str], sentence: str) -> None:
    assert sentence in refused(capsys, "generate", str(model), "--prompt", "x", *args)


def test_missing_prompts_and_models_are_one_sentence(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "does not exist" in refused(capsys, "generate", str(tmp_path / "nowhere"), "--prompt", "x")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "empty" in refused(capsys, "generate", str(model))
    monkeypatch.setattr("sys.stdin", None)
    assert "--prompt" in refused(capsys, "generate", str(model))
    assert "no tokens" in refused(capsys, "generate", str(model), "--prompt", "")


def test_several_answers_come_one_after_another(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    args = (
        "generate",
        str(model),
        "--prompt",
        PROMPT,
        "--max-tokens",
        "6",
        "--seed",
        "3",
        "--temperature",
        "1.5",
        "--ignore-eos",
    )
    out, _ = run(capsys, *args, "-n", "3", "--json")
    answers = json.loads(out)["outputs"]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 3
    shown, _ = run(capsys, *args, "-n", "3")
    assert [f"[1.{i + 1}] {PROMPT}{answer['text']}" in shown for i, answer in enumerate(answers)] == [True] * 3
    penalised, _ = run(capsys, *args, "--repetition-penalty", "50", "--json")
    assert len(set(json.loads(penalised)["outputs"][0]["token_ids"])) == 6


def test_quantize_writes_a_model_that_generates(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    out, _ = run(capsys, "quantize", str(model), str(tmp_path / "int8"), "--json")
    report = json.loads(out)
    assert report["n_matrices"] == 8
    assert report["bytes"] < report["source_bytes"]
    out, _ = run(capsys, "generate", str(tmp_path / "int8"), "--prompt", PROMPT, "--max-tokens", "4", "--json")
    assert json.loads(out)["dtype"] == "int8"
    out, _ = run(capsys, "quantize", str(model), str(tmp_path / "int8"), "--replace")
    assert "8 matrices in int8" in out


def test_quantize_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    assert "not empty" in refused(capsys, "quantize", str(model), str(tmp_path / "full"))
    assert "--scheme int3" in refused(capsys, "quantize", str(model), str(tmp_path / "out"), "--scheme", "int3")
    assert "does not exist" in refused(capsys, "quantize", str(tmp_path / "nowhere"), str(tmp_path / "out"))
