"""Errors of the command line speak of the options as they were typed, in one sentence, with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from twostroke.cli import main as cli
from twostroke.cli.engine_options import OPTIONS
from twostroke.cli.typed import as_typed, command_of, typed_words
from twostroke.core.errors import ConfigError

GROUP = typer.main.get_command(cli.app)
CROSSOVER = ["plan", "crossover", "M", "--hardware", "h100", "--requests-per-day", "10", "--tokens", "1e9"]


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one sentence with which those words are refused."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(args))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err.removeprefix("error: ").rstrip("\n")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory that is a model's as far as anything here reads it."""
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


WRONG = {"--dtype": "int4-g7", "--head-dtype": "x", "--kv-dtype": "fp8", "--max-model-len": "0", "--kv-cache-gib": "0"}
WRONG |= {"--lora-memory-gib": "0", "--speculate": "often", "--kv-dir": "/dev/null", "--kv-dir-gib": "0"}
WRONG |= {"--early-exit": "at:2", "--pin-threads": "yes", "--huge-pages": "2"}
WRONG |= {"--token-budget": "0", "--max-running": "0", "--max-step-ratio": "1"}
WRONG["--threads"] = "99999"  # OpenMP crashed where no limit was checked


def test_every_engine_option_is_named_as_it_was_typed(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert WRONG.keys() == {setting.option for setting in OPTIONS.values() if not setting.switch}
    for verb in (["generate"], ["serve"], ["bench", "serve"], ["bench", "offline"]):
        for option, value in WRONG.items():
            assert refused(capsys, *verb, model, option, value).startswith(f"{option} {value} "), verb


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf"])
def test_memory_that_is_no_amount_is_refused(capsys: pytest.CaptureFixture[str], model: str, value: str) -> None:
    assert refused(capsys, "generate", model, "--kv-cache-gib", value) == f"--kv-cache-gib {value} must be above 0 and finite."


@pytest.mark.parametrize(
    ("words", "beginning"),
    [
        (["generate", "M", "--max-tokens", "-1"], "--max-tokens -1 must"),
        (["generate", "M", "--max-tokens=0"], "--max-tokens 0 must"),
        (["generate", "M", "-n", "0"], "-n 0 must"),
        (["generate", "M", "--temperature", "nan"], "--temperature nan must"),
        (["generate", "M", "--top-p", "0"], "--top-p 0 keeps no token. Use a value above 0, or --temperature 0 for"),
        (["generate", "M", "--threads", "2.5"], "--threads 2.5 must be a whole number. `"),
        (["generate", "M", "--max-tokens", "1e30"], "--max-tokens 1e30 must be a whole number. `twostroke generate --help`"),
        (["generate", "M", "--top-p", "half"], "--top-p half must be a number."),
        (["generate", "M", "--prompts", "a"], "No such option: --prompts"),
        (["generate"], "Missing argument 'model'"),
        (["generate", ""], "model is empty."),
        (["plan", "serve", ""], "MODEL|RECIPE is empty."),
        (["bench", "serve", "M", "--requests", "0"], "--requests 0 must"),
        (["bench", "serve", "M", "--rate", "0"], "--rate 0 must"),
        (["bench", "serve", "M", "--rate", "1", "--users", "1"], "give exactly one of --rate (open loop), users (closed loop)"),
        (["bench", "serve", "M", "--prompt-tokens", "0"], "--prompt-tokens 0 must"),
        (["bench", "serve", "M", "--temperature", "-1"], "--temperature -1 must"),
        (["bench", "serve", "M", "--output", "M"], "--output "),
        (["bench", "offline", "M", "--batch", "0"], "--batch 0 must"),
        (["bench", "offline", "M", "--batch", "1000"], "--batch 1000 must"),
        (["plan", "serve", "M", "--hardware", "h100", "--prefix-hits", "1"], "--prefix-hits 1 must"),
        (["plan", "serve", "M", "--hardware", "h100", "--output", "-1"], "--output -1 must"),
        (["serve", "M", "--host", "no.such.host.invalid", "--without-key"], "--host no.such.host.invalid is not an address"),
        (["serve", "M", "--served-name", ""], "--served-name is empty."),
        (["data", "prepare", "M", "--near-threshold", "3"], "--near-threshold 3 must be from 0.5 to 1."),
        (["plan", "train", "M", "--hardware", "h100", "--data-parallel", "0"], "--data-parallel 0 must"),
        (["compare", "M", "M", "--max-perplexity-ratio", "nan"], "--max-perplexity-ratio nan must be above 0"),
        (["compare", "M", "M", "--min-accuracy-difference", "2"], "--min-accuracy-difference 2 must"),
        (["generate", "M", "--beams", "1000"], "--beams 1000 must"),
        (["plan", "serve", "M", "--hardware", "h100", "--lora", "0,8"], "--lora '0,8': count=0 must"),
        (["plan", "serve", "M", "--hardware", "h100", "--batch", "20000"], "--batch 20000 are more users than"),
        (["plan", "train", "M", "--hardware", "h100", "--ep", "2"], "--ep 2 must divide data·tensor=1. Use 1."),
        (["plan", "compare", "M", "--hardware", "h100", "--train-layout", "fsdp=0"], "--train-layout=fsdp=0: "),
        ([*CROSSOVER, "--growth", "nan"], "--growth nan must be above -100 and at most 100 percent a month."),
        ([*CROSSOVER, "--data-usd", "-1"], "--data-usd -1 must"),
        ([*CROSSOVER, "--cleaning-usd", "nan"], "--cleaning-usd nan must"),
        ([*CROSSOVER, "--api-cached-share", "2"], "--api-cached-share 2 must"),
        ([*CROSSOVER, "--training-usd", "-1", "--usd-per-request", "1"], "--training-usd -1 must"),
        (["generate", "M", "--kv-dir-gib", "5"], "--kv-dir-gib 5 bounds the file in --kv-dir. Name that directory"),
        (["serve", "M", "--capture-gib", "1"], "--capture-gib bounds what --capture keeps."),
        (["serve", "M", "--response-cache-gib", "2"], "--response-cache-gib bounds what --response-cache keeps."),
        (["data", "prepare", "M", "--chat-template", "x"], "--chat-template x renders conversations, and the layout is"),
        (["generate", "M", "--early-exit", "at:2"], "--early-exit at:2 is not known. Use one of auto, off, at:THRESHOLD from"),
        (["generate", "M", "--max-step-ratio", "1"], "--max-step-ratio 1 is not known. Use one of auto, off, RATIO above 1."),
        (["plan", "train", "M", "--hardware", "h100", "--train-tokens", "-5"], "--train-tokens -5 must be at least 1."),
        (["serve", "M", "--api-key-file", "/"], "API key file / is not a file."),
        (["ledger", "list", "--limit", "0"], "--limit 0 must be at least 1."),
    ],
)  # fmt: skip
def test_what_was_typed_is_named(capsys: pytest.CaptureFixture[str], model: str, words: list[str], beginning: str) -> None:
    assert refused(capsys, *[model if word == "M" else word for word in words]).startswith(beginning)


@pytest.mark.parametrize(("verb", "flag"), [("generate", "--prompt"), ("score", "--text")])
def test_a_text_that_stands_alone_is_told_its_option(
    capsys: pytest.CaptureFixture[str], model: str, verb: str, flag: str
) -> None:
    for words in (["once upon"], ["once", "upon"]):
        said = refused(capsys, verb, model, *words, "--dtype", "int8")
        assert f" A text is given as {flag} 'once upon'. `twostroke {verb} --help`" in said


def test_words_that_cannot_be_read_are_a_json_document_too(capsys: pytest.CaptureFixture[str], model: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", model, "--threads", "0", "--json"])
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"].startswith("--threads 0 ")


def test_only_what_is_wrong_is_as_it_was_typed() -> None:
    words = ["eval", "M", "--engine", "decoder", "--kv-dtype", "int8"]
    said = "kv_dtype='int8' is an option of the inference engine alone. Use engine='inference'."
    assert as_typed(said, GROUP, words) == "--kv-dtype int8 is an option of the inference engine alone. Use --engine inference."


def test_a_recipes_keys_keep_their_names_and_paths_stay_whole() -> None:
    words = ["plan", "train", "recipe.toml", "--hardware", "h100"]
    for said in ("sequence_length=0 must be at least 1.", "train.batch_size=0 is wrong.", "'/a/batch_size' is missing."):
        assert as_typed(said, GROUP, words) == said
    assert as_typed("'/a/batch_size' is missing.", GROUP, ["plan", "train", "M"]) == "'/a/batch_size' is missing."


def test_options_and_arguments_are_told_apart() -> None:
    command, rest = command_of(GROUP, ["bench", "serve", "M", "--users=3", "--stop-at-eos", "--seed", "-1"])
    assert [(word.flag, word.value) for word in typed_words(command, rest)] == [(None, "M"), ("--users", "3"), ("--seed", "-1")]


def test_an_error_of_a_verb_is_said_in_typed_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise ConfigError("usd_per_hour=0.0 is too little. Raise usd_per_hour.")

    monkeypatch.setattr("twostroke.planner.hardware.tables.load_hardware", load)
    words = ("plan", "search", "M", "--usd-per-hour", "1e-9")
    assert refused(capsys, *words) == "--usd-per-hour 1e-9 is too little. Raise --usd-per-hour."
