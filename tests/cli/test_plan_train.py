"""`twostroke plan train` over devices: text and JSON with traffic, bubble and failures; bad layouts exit 2 with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli.main import main

LLAMA = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
RECIPE = """
[model]
n_layers = 2
d_model = 64
n_heads = 2
d_ff = 128
[data]
vocab_size = 512
[train]
steps = 10
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "train", *args])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_a_job_of_many_devices_shows_traffic_bubble_failures_and_days(capsys: pytest.CaptureFixture[str], model: str) -> None:
    layout = ("--data-parallel", "4", "--zero", "1", "--tensor", "2", "--pipeline", "3", "--interleave", "2")
    code, text, _ = run(capsys, model, "--hardware", "h100", *layout, "--grad-accumulation", "6", "--tokens", "1000000000")
    assert code == 0
    for words in (
        "24 × NVIDIA",
        "data 4, tensor 2, pipeline 3, ZeRO-1, interleaved 2",
        "reduce-scatter of gradients",
        "bubble",
    ):
        assert words in " ".join(text.split())  # lines break where the model's path is long
    for words in ("failures  one in", "with failures", "masters", "waiting for traffic"):
        assert words in " ".join(text.split()) or words in text


def test_json_carries_everything(capsys: pytest.CaptureFixture[str], model: str) -> None:
    options = ("--method", "lora", "--lora-rank", "8", "--lora-targets", "q_proj,v_proj", "--checkpointing", "full")
    layout = ("--data-parallel", "8", "--zero", "3", "--mtbf-hours", "100", "--dtype", "fp16", "--optimizer", "adamw8bit")
    code, out, _ = run(capsys, model, "--hardware", "h100", *options, *layout, "--tokens", "1000000000", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["layout"]["n_devices"] == 8
    assert found["shape"]["lora_targets"] == ["q_proj", "v_proj"]
    assert found["trained_parameters"] == 6 * 2 * 8 * (256 + 256)
    assert found["tokens_per_step"] == 16 * 512 * 8
    assert found["shape"]["steps"] == -(-1_000_000_000 // found["tokens_per_step"])
    assert {"sent_bytes", "bursts", "burst_bytes", "exposed_s", "overlap"} <= set(found["communication"][0])
    assert found["resilience"]["mtbf_s"] == 100 * 3600 / 8
    assert found["resilience"]["mtbf_kind"] == "given"
    assert found["cost"]["n_devices"] == 8
    assert found["hfu"] > found["prediction"]["mfu"]


def test_a_plan_that_does_not_fit_says_so_and_what_would(capsys: pytest.CaptureFixture[str], assets: Path) -> None:
    config = str(assets / "configs/hf/Meta-Llama-3-8B.json")
    code, text, _ = run(capsys, config, "--hardware", "h100", "--sequence-length", "8192")
    assert code == 2
    assert text.startswith("DOES NOT FIT: it takes ")
    assert text.split("\n")[1].startswith("The smallest change that makes it fit: --")
    code, text, _ = run(capsys, config, "--hardware", "h100", "--sequence-length", "8192", "--json")
    found = json.loads(text)
    assert (code, found["fits"]) == (2, False)
    assert found["notes"][-1].startswith("The smallest change")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--steps", "1" + 23 * "0"), "must be at most 1,000,000,000,000,000"),
        (("--tokens", "1e300"), "--tokens=1e+300 must be from 1 to 1e+15"),
        (("--dp", "100000000"), "must be at most 1,048,576"),
        (("--fsdp", "8", "--dp", "2"), "stands for --data-parallel 8 --zero 3"),
        (("--tensor", "3"), "--tensor 3 must divide n_heads=4. Use 1, 2 or 4"),
        (("--pipeline", "9"), "--pipeline 9 makes more chunks than n_layers=6"),
        (("--gradient-bits", "3"), "--gradient-bits 3"),
        (("--context", "0"), "--context 0"),
        (("--cp", "7"), "--cp 7 cuts sequences into 14 pieces, which --sequence-length 512 is no multiple of"),
        (("--lora-rank", "8"), "--lora-rank is of adapters, and --method full trains none"),
        (("--lora-targets", "q_proj"), "--lora-targets is of adapters"),
        (("--zero", "3"), "--data-parallel 1"),
        (("--zero", "7", "--data-parallel", "2"), "--zero 7"),
        (("--data-parallel", "-4"), "--data-parallel -4"),
        (("--expert", "2", "--data-parallel", "2"), "dense"),
        (("--devices-per-node", "-1"), "--devices-per-node=-1"),
        (("--mtbf-hours", "-1"), "--mtbf-hours=-1"),
        (("--tokens", "5", "--steps", "5"), "give one of them"),
        (("--tokens", "-5"), "--tokens=-5"),
        (("--method", "dora"), "--method dora"),
        (("--method", "lora", "--lora-rank", "0"), "--lora-rank 0"),
        (("--method", "lora", "--lora-targets", "q_prj"), "q_proj"),
        (("--method", "lora", "--lora-targets", ","), "--lora-targets is empty"),
        (("--checkpointing", "some"), "--checkpointing some"),
        (("--dtype", "int8"), "--dtype int8"),
        (("--optimizer", "lion"), "--optimizer lion"),
        (("--logits", "half"), "--logits half"),
    ],
)
def test_bad_options_get_one_sentence(
    capsys: pytest.CaptureFixture[str], model: str, options: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run(capsys, model, "--hardware", "h100", *options)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


def test_options_that_a_recipe_would_overrule_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    assert run(capsys, str(path), "--hardware", "l4", "--data-parallel", "2")[0] == 0
    code, _, err = run(capsys, str(path), "--hardware", "l4", "--batch-size", "3")
    assert code == 2
    assert "--set train.batch_size" in err


def test_fsdp_is_data_parallel_with_zero_3_and_short_names_are_the_long_ones(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    long = ("--data-parallel", "8", "--zero", "3", "--tensor", "2")
    plans = [run(capsys, model, "--hardware", "h100", *way, "--json") for way in (long, ("--fsdp", "8", "--tp", "2"))]
    assert plans[0] == plans[1]
    assert json.loads(plans[0][1])["layout"]["n_devices"] == 16
