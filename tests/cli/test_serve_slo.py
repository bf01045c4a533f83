"""``twostroke serve`` for an SLO: it is set as ``plan serve`` says, and what cannot be is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import machines
from real_model import make_model
from twostroke.cli.main import main
from twostroke.core.engine_settings import EngineSettings, engine_settings
from twostroke.core.errors import EngineError
from twostroke.core.profile import read_fingerprint, save_profile

LOAD = ("--prompt", "60", "--output", "12")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def calibrated(twostroke_home: Path) -> None:
    save_profile(replace(machines.profile(), fingerprint=read_fingerprint()))


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    return int(stopped.value.code or 0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[EngineSettings]:
    """The settings of engines that would have been started."""
    found: list[EngineSettings] = []

    def launch(command: list[str]) -> None:
        found.append(engine_settings(command[command.index("--settings") + 1]))
        raise EngineError("this test starts none.")

    monkeypatch.setattr("twostroke.server.launch.launch_engine", launch)
    return found


@pytest.mark.usefixtures("calibrated")
def test_it_is_set_as_the_plan_says(model: Path, started: list[EngineSettings], capsys: pytest.CaptureFixture[str]) -> None:
    slo = ("--slo-ttft-ms", "50", "--slo-tpot-ms", "5", *LOAD)
    assert run("plan", "serve", str(model), "--json", *slo) == 0
    planned = json.loads(capsys.readouterr().out)["choice"]
    assert run("serve", str(model), "--port", "0", *slo) == 1
    said = capsys.readouterr().err
    (settings,) = started
    assert (settings.token_budget, settings.max_running) == tuple(planned["chosen"][n] for n in ("token_budget", "max_running"))
    assert settings.dtype == "auto"
    assert f"--max-running {settings.max_running}" in said
    assert f"up to {planned['expected']['rate_per_s']:.3g} requests/s within that" in said
    assert "quantize MODEL --survey" in said


@pytest.mark.usefixtures("calibrated")
def test_what_is_given_by_hand_stays_be_it_the_default(model: Path, started: list[EngineSettings]) -> None:
    by_hand = ("--max-running", "128", "--token-budget", "200", "--kv-dtype", "bf16", "--kv-cache-gib", "0.25")
    assert run("serve", str(model), "--port", "0", "--mode", "latency", *by_hand, *LOAD) == 1
    (settings,) = started
    given = EngineSettings(max_running=128, token_budget=200, kv_dtype="bf16", kv_cache_bytes=2**28)
    assert settings == replace(given, in_server=True)


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--slo-ttft-ms", "0.0001"), "nothing keeps to a TTFT of 0.1"),
        (("--slo-ttft-ms", "-1"), "--slo-ttft-ms=-1 must be above 0"),
        (("--slo-tpot-ms", "nan"), "--slo-tpot-ms=nan"),
        (("--mode", "fast"), "--mode='fast' is not known. Use one of latency, throughput."),
        (("--mode", "latency", "--prompt", "600"), "the context holds 512"),
        (("--mode", "latency", "--prompt", "-1"), "must not be negative"),
        (("--mode", "latency", "--spread", "1"), "--spread 1 must be"),
        (("--prompt", "60"), "Give --slo-ttft-ms"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    model: Path,
    started: list[EngineSettings],
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    words: str,
) -> None:
    assert run("serve", str(model), "--port", "0", *options) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not started


@pytest.mark.usefixtures("twostroke_home")
def test_without_a_profile_a_sentence_says_what_to_do(
    model: Path, started: list[EngineSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", str(model), "--port", "0", "--mode", "throughput") == 2
    assert "twostroke calibrate" in capsys.readouterr().err
    assert run("plan", "serve", str(model), "--hardware", "h100", "--mode", "latency") == 2
    assert "twostroke calibrate" in capsys.readouterr().err
    assert not started
