"""`twostroke plan search`: both phases as text and JSON; contradicting limits and impossible values exit 2 with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli.main import main

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TWO = ("--hardware", "h100", "--hardware", "l40s")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "search", *args])
    found = capsys.readouterr()
    return int(stopped.value.code or 0), found.out, found.err


def test_each_phase_is_searched_apart(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out, err = run(capsys, model, *TWO)
    assert code == 0, err
    assert out.index("TRAINING") < out.index("SERVING")
    for word in ("h100-sxm", "l40s", "behind", "lost by", "candidates", "interconnect", "idle link", "assumed"):
        assert word in out
    assert max(len(line) for line in out.split("\n") if model not in line) <= 120
    code, out, _ = run(capsys, model, *TWO, "--phase", "serve", "--no-simulation")
    assert code == 0
    assert "TRAINING" not in out


def test_json_has_every_device_with_counts_and_reasons(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out, _ = run(capsys, model, *TWO, "--phase", "train", "--days", "60", "--json")
    assert code == 0
    found = json.loads(out)["searches"]["train"]
    assert found["limits"]["days"] == 60
    assert found["out_of_memory"] + found["timed"] == found["enumerated"]
    assert {d["device"] for d in found["devices"]} == {"h100-sxm", "l40s"}
    for device in found["devices"]:
        lost = sum(device["rejected"].values()) + sum(device["outranked"].values())
        assert device["enumerated"] == lost + (device["device"] == found["winner"]["device"])
    assert found["winner"]["prediction"]["train_time_s"] <= 60 * 86400


def test_spot_is_cheaper_than_on_demand(capsys: pytest.CaptureFixture[str], model: str) -> None:
    costs = []
    for terms in ("on-demand", "spot"):
        _, out, _ = run(capsys, model, "--hardware", "h100", "--phase", "serve", "--terms", terms, "--no-simulation", "--json")
        costs.append(json.loads(out)["searches"]["serve"]["winner"]["prediction"]["cost_per_mtok_usd"])
    assert costs[1] < costs[0]


def test_a_phase_that_finds_nothing_says_so_beside_the_other(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out, _ = run(capsys, model, *TWO, "--days", "2", "--top", "1")
    assert code == 0
    assert "run takes too long" in " ".join(out.partition("SERVING")[0].split())
    assert "$/Mtok" in out
    code, out, _ = run(capsys, model, *TWO, "--days", "2", "--no-simulation", "--json")
    assert code == 0
    found = json.loads(out)["searches"]
    assert found["train"]["winner"] is None
    assert found["train"]["nearest_miss"]["misses"][0]["limit"] == "days"
    assert found["serve"]["winner"] is not None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--phase", "both ways"), ("--phase", "train, serve or both")),
        (("--objective", "fame"), ("--objective", "cost, time, throughput, energy")),
        (("--terms", "stolen"), ("--terms", "on-demand, spot, bought")),
        (("--phase", "train", "--slo-tpot-ms", "20"), ("--slo-tpot-ms=20", "serving", "--phase=both")),
        (("--phase", "serve", "--days", "3"), ("--days=3", "training", "Drop it")),
        (("--slo-ttft-ms", "-1"), ("--slo-ttft-ms=-1", "above 0")),
        (("--days", "0"), ("--days=0", "above 0")),
        (("--usd-per-hour", "nan"), ("--usd-per-hour=nan", "above 0")),
        (("--requests-per-s", "-2"), ("--requests-per-s -2", "from 0 to")),
        (("--max-devices", "0"), ("--max-devices 0", "from 1 to")),
        (("--top", "0"), ("--top=0",)),
        (("--tokens", "-5"), ("--tokens -5",)),
        (("--hardware", "h1000"), ("h1000", "Did you mean")),
        (("--dtype", "fp3"), ("fp3", "Use one of")),
        (("--scheme", "fp3"), ("fp3", "Use one of")),
        (("--scheme", "int8", "--phase", "train"), ("--scheme=int8", "serving")),
        (("--sequence-length", "9000"), ("9000", "8192")),
        (("--phase", "serve", "--slo-tpot-ms", "0.01"), ("none of", "nearest", "--slo-tpot-ms", "would do")),
        (("--phase", "train", "--budget-usd", "1"), ("none of", "--budget-usd")),
    ],
)
def test_bad_input_is_a_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], model: str, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    hardware = () if "--hardware" in args else TWO
    code, out, err = run(capsys, model, *hardware, *args)
    assert code == 2
    assert out == ""
    for word in words:
        assert word in err
    assert "Traceback" not in err
