"""`twostroke plan crossover`: the two bills as text and JSON; options that exclude each other and impossible values exit 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli.main import main

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
CLAIM = ("--training-usd", "5e6", "--usd-per-request", "0.001", "--requests-per-day", "1e9")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "crossover", *args])
    found = capsys.readouterr()
    return int(stopped.value.code or 0), found.out, found.err


def test_two_given_prices_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *CLAIM)
    assert code == 0
    assert "crossover: day 5:" in out
    code, out, _ = run(capsys, *CLAIM, "--json")
    found = json.loads(out)["prediction"]
    assert found["crossover_day"] == pytest.approx(5.0)
    assert found["saved_usd"]["serving"] == pytest.approx(36.525e6)


def test_a_planned_model_shows_both_bills_prices_and_sources(capsys: pytest.CaptureFixture[str], model: str) -> None:
    args = (model, "--hardware", "h100", "--tokens", "1e9", "--tokens-per-day", "1e8", "--api", "gpt-5-nano")
    code, out, err = run(capsys, *args)
    assert code == 0, err
    for word in ("final run", "people", "crossover: day", "10% saved", "gpt-5-nano", "break-even", "Nebius", "in (prefill)"):
        assert word in out
    code, out, _ = run(capsys, *args, "--json")
    found = json.loads(out)
    assert found["demand"]["tokens_per_day"] == pytest.approx(1e8)
    assert found["training"]["items_usd"]["final run"] == pytest.approx(found["training_cost"]["usd"])
    assert found["token_prices"]["output_usd_per_mtok"] > found["token_prices"]["input_usd_per_mtok"] > 0
    assert found["api"]["price"]["vendor"] == "openai"
    assert found["energy"]["training_kwh"] == pytest.approx(found["training_cost"]["energy_kwh"])
    code, out, _ = run(capsys, *args, "--explain", "--json")
    terms = {term["symbol"]: term for term in json.loads(out)["terms"]}
    assert terms["day"]["value"] == pytest.approx(json.loads(out)["prediction"]["crossover_day"])


def test_terms_and_hidden_costs_reach_the_bill(capsys: pytest.CaptureFixture[str], model: str) -> None:
    def bill(*more: str) -> dict[str, float]:
        args = (model, "--hardware", "h100", "--tokens", "1e9", "--requests-per-day", "1e5", *more, "--json")
        code, out, err = run(capsys, *args)
        assert code == 0, err
        found = json.loads(out)
        return {**found["training"]["items_usd"], "serving": found["prediction"]["serving_usd"]}

    rented = bill()
    spot = bill("--spot")
    bought = bill("--bought", "--years", "5")
    assert spot["final run"] < rented["final run"]
    assert spot["serving"] < rented["serving"]
    assert bought["final run"] != rented["final run"]
    assert bill("--always-on")["serving"] >= rented["serving"]
    hidden = bill("--people-months", "2", "--repeated-runs", "3", "--data-usd", "7")
    assert hidden["people"] == 30_000
    assert hidden["repeated runs"] == pytest.approx(3 * hidden["final run"])
    assert hidden["data acquisition"] == 7


def test_a_run_that_does_not_fit_its_device_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    large.write_text(json.dumps(LLAMA | sizes))
    args = (str(large), "--hardware", "h100", "--requests-per-day", "1", "--usd-per-request", "1", "--tokens", "1e9")
    code, out, err = run(capsys, *args)
    assert code == 0, err
    assert "its price is of its work alone" in out
    code, out, _ = run(capsys, *args, "--devices", "8", "--batch-size", "1", "--json")
    assert json.loads(out)["notes"] == []


def test_more_devices_train_for_as_much_money_or_more(capsys: pytest.CaptureFixture[str], model: str) -> None:
    costs = []
    for n in ("1", "8"):
        args = (model, "--hardware", "h100", "--tokens", "1e9", "--requests-per-day", "1", "--devices", n, "--json")
        code, out, err = run(capsys, *args)
        assert code == 0, err
        costs.append(json.loads(out)["training_cost"]["usd"])
    assert costs[0] <= costs[1] < 3 * costs[0]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--training-usd", "1", "--usd-per-request", "1"), "--requests-per-day or --tokens-per-day"),
        ((*CLAIM, "--tokens-per-day", "1"), "--requests-per-day or --tokens-per-day"),
        (("--requests-per-day", "1"), "a model or recipe is needed"),
        ((*CLAIM, "--spot", "--bought"), "--spot and --bought exclude each other"),
        ((*CLAIM, "--years", "3"), "--years=3 depreciates bought devices"),
        ((*CLAIM, "--always-on"), "--always-on needs a replica's speed"),
        ((*CLAIM, "--growth", "1000"), "--growth 1000 must be above -100"),
        ((*CLAIM, "--months", "-1"), "--months -1"),
        ((*CLAIM, "--people-months", "-1"), "--people-months -1"),
        ((*CLAIM, "--api", "gpt-5-mni"), "Did you mean 'gpt-5-mini'"),
        (("--training-usd", "-5", "--usd-per-request", "1", "--requests-per-day", "1"), "--training-usd -5"),
        (("--training-usd", "5", "--usd-per-request", "1", "--requests-per-day", "-3"), "--requests-per-day -3"),
        (("MODEL", "--requests-per-day", "1", "--tokens", "1e9", "--hardware", "h10"), "Did you mean 'h100'"),
        (
            ("MODEL", "--requests-per-day", "1", "--tokens", "1e9", "--hardware", "h100", "--utilisation", "1.5"),
            "--utilisation 1.5",
        ),
        (("MODEL", "--requests-per-day", "1", "--tokens", "-1", "--hardware", "h100"), "--tokens=-1"),
        (("MODEL", "--requests-per-day", "1", "--hardware", "h100"), "the training run has no length"),
        (("MODEL", "--requests-per-day", "1", "--tokens", "1e9", "--hardware", "h100", "--devices", "0"), "--devices 0"),
    ],
)
def test_bad_input_gets_a_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], model: str, args: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(capsys, *(model if a == "MODEL" else a for a in args))
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
