"""``twostroke plan serve``: placements, SLOs, rates, and sentences for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.cli.main import main

LLAMA = "configs/hf/meta-llama--Meta-Llama-3.1-70B_config.json"
EXPERTS = "configs/hf/deepseek-ai--DeepSeek-V3_config.json"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(assets: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """``plan(config, *options)`` on an H200 → exit code, standard output, standard error."""

    def run(config: str, *options: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["plan", "serve", str(assets / config), "--hardware", "h200", *options])
        code = stopped.value.code
        return code if isinstance(code, int) else 0, *capsys.readouterr()

    return run


def test_a_plan_over_devices_with_an_slo_and_a_rate(plan: Run) -> None:
    options = ("--scheme", "fp8", "--tensor", "4", "--slo-tpot-ms", "20", "--rate", "20", "--disaggregate", "--json")
    code, out, _ = plan(LLAMA, *options)
    document = json.loads(out)
    assert code == 0
    assert document["devices"] == 4
    assert document["load"]["service"]["each"]["tpot_s"] <= 0.02
    assert document["load"]["service"]["devices"] == 4 * document["load"]["service"]["replicas"]
    assert document["load"]["pools"]["prefill_instances"] >= 1
    assert document["loaded"]["ttft_s"] > document["prediction"]["ttft_s"]
    assert len(document["latency_table"]["ttft_s"]) == len(document["latency_table"]["contexts"])


def test_text_says_replicas_waiting_and_the_table(plan: Run) -> None:
    code, out, _ = plan(LLAMA, "--scheme", "fp8", "--tensor", "4", "--rate", "20", "--speculate", "4,0.8,0.05")
    assert code == 0
    for words in ("replica", "of it waiting", "TPOT, batch 1", "tokens a check"):
        assert words in " ".join(out.split())
    assert max(len(line) for line in out.split("\n") if "/" not in line) <= 80  # a path may be longer


def test_auto_takes_the_cache_that_a_checkpoint_has_scales_for(plan: Run, assets: Path, tmp_path: Path) -> None:
    """Half the bytes of bf16, under engines that read a published checkpoint as it is and unless another type is asked for."""
    (tmp_path / "config.json").write_text((assets / LLAMA).read_text())
    algorithms = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithms}))

    def token_bytes(*options: str) -> float:
        code, out, _ = plan(str(tmp_path), "--tensor", "4", "--no-simulation", "--json", *options)
        assert code == 0
        return float(json.loads(out)["kv_bytes_per_token"])

    own, wide = token_bytes("--engine", "trtllm"), token_bytes("--engine", "trtllm", "--kv-dtype", "bf16")
    assert own == wide / 2
    assert token_bytes("--scheme", "bf16", "--tensor", "8") == wide  # another checkpoint
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithms | {"kv_cache_quant_algo": "NVFP4"}}))
    code, out, _ = plan(str(tmp_path), "--tensor", "4")
    assert code == 0
    assert "its KV cache is published in nvfp4" in " ".join(out.split())


def test_experts_over_more_devices_than_tensor(plan: Run) -> None:
    code, out, _ = plan(EXPERTS, "--scheme", "fp8", "--tensor", "1", "--expert", "16", "--batch", "64", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["devices"] == 16
    # 671 GB of fp8 weights; experts over 16, attention and embedding whole on each
    assert 0.04e12 < document["memory_bytes"]["weights"] < 0.08e12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tensor", "3"), "--tensor 3 must divide"),
        (("--tensor", "-1"), "--tensor -1"),
        (("--pipeline", "81"), "n_layers=80"),
        (("--expert", "8"), "has none"),
        (("--engine", "vlm"), "vllm"),
        (("--prefix-hits", "1.5"), "below 1"),
        (("--speculate", "4"), "γ,α,c"),
        (("--speculate", "0,0.5"), "draft_tokens"),
        (("--disaggregate",), "--rate"),
        (("--rate", "-1"), "--rate"),
        (("--slo-ttft-ms", "nan"), "--slo-ttft-ms"),
        (("--slo-ttft-ms", "1e300"), "--slo-ttft-ms=1e+300 must be"),
        (("--rate", "1e300"), "--rate=1e+300 must be above 0 and at most 1e+12"),
        (("--batch", "1" + 20 * "0"), "must be at most 1,000,000,000,000,000"),
        (("--tensor", "2", "--slo-tpot-ms", "0.1", "--rate", "1"), "no number of replicas"),
        (("--scheme", "int3"), "int3"),
        (("--kv-dtype", "int3"), "--kv-dtype int3"),
        (("--tensor", "1"), "DOES NOT FIT: bf16 weights take 131 GiB"),
        (("--tensor", "1"), "Would fit: --tp 2; or --scheme fp8."),
    ],
)
def test_what_cannot_be_planned_gets_a_sentence(plan: Run, options: tuple[str, ...], words: str) -> None:
    code, out, err = plan(LLAMA, *options)
    assert code == 2
    assert words in err
    assert "Traceback" not in out + err


def test_expert_groups_must_divide(plan: Run) -> None:
    for options in (("--expert", "7"), ("--tensor", "3", "--expert", "8"), ("--tensor", "16", "--expert", "24")):
        code, _, err = plan(EXPERTS, "--scheme", "fp8", *options)
        assert code == 2, options
        assert "must" in err
