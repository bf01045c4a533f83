"""`twostroke demo`: its calibration."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import machines
from twostroke.cli import demo_verb
from twostroke.cli.doctor import facts as reading
from twostroke.cli.main import main
from twostroke.core.described import plain
from twostroke.core.errors import TwostrokeError
from twostroke.core.profile import MachineProfile, read_fingerprint, save_profile
from twostroke.core.rates import NativeRates
from twostroke.kernels.native_library import why_absent


def profile_of_this_machine(days_old: float) -> MachineProfile:
    return replace(
        machines.profile(),
        fingerprint=read_fingerprint(),
        measured_at=(datetime.now(UTC) - timedelta(days=days_old)).isoformat(),
        torch_version=torch.__version__,
        native=None if why_absent() else NativeRates(machines.W0, (), ()),
    )


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that the demo ran; calibrating gives a profile of one core."""
    ran: list[tuple[str, ...]] = []

    def verb(*args: str) -> dict[str, Any]:
        ran.append(args)
        return plain(machines.profile(fingerprint=replace(machines.profile().fingerprint, cpu_model="Measured Now")))

    monkeypatch.setattr(demo_verb, "verb", verb)
    monkeypatch.setattr(reading, "SAMPLE_S", 0.0)
    return ran


def demo(folder: Path) -> demo_verb.Demo:
    return demo_verb.Demo(folder, demo_verb.OWN_RECIPE, 60.0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budget-s", "1e30"], "--budget-s 1e30 must be at most 1,000,000,000,000,000."),
        (["--budget-s", "-1"], "--budget-s -1 must be above 0."),
        (["--recipe", "misspelt.toml"], "train.stpes is not known. Did you mean 'steps'?"),
    ],
)
def test_what_is_wrong_is_told_before_calibration(
    tmp_path: Path, calibrations: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], sentence: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("misspelt.toml").write_text('[model]\nsize = "auto"\n[train]\nstpes = 3\n')
    with pytest.raises(SystemExit) as ended:
        main(["demo", *words])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert calibrations == []
    assert not (tmp_path / "runs").exists()


def test_a_profile_that_holds_is_used_again(tmp_path: Path, calibrations: list[tuple[str, ...]]) -> None:
    stored = profile_of_this_machine(days_old=3)
    save_profile(stored)
    result, line = demo_verb._calibrate(demo(tmp_path))
    assert calibrations == []
    assert result == plain(stored)
    assert stored.measured_at in line
    assert stored.fingerprint.cpu_model in line


@pytest.mark.parametrize(("child", "expected"), [(2, 2), (130, 130), (-2, 130), (1, 1)])
def test_a_stage_that_fails_ends_the_demo_with_its_code(
    monkeypatch: pytest.MonkeyPatch, child: int, expected: int, capfd: pytest.CaptureFixture[str]
) -> None:
    end = f"os.kill(os.getpid(), {-child})" if child < 0 else f"sys.exit({child})"
    script = (
        f'import os, signal, sys; signal.signal(2, signal.SIG_DFL); print(\'{{"error": "it said so."}}\', flush=True); {end}'
    )
    popen = demo_verb.subprocess.Popen
    monkeypatch.setattr(demo_verb.subprocess, "Popen", lambda _, **how: popen([sys.executable, "-c", script], **how))
    with pytest.raises(TwostrokeError, match="it said so") as caught:
        demo_verb.verb("calibrate")
    assert (caught.value.exit_code, caught.value.is_told) == (expected, True)


@pytest.mark.parametrize("days_old", [None, 200.0])
def test_without_one_or_with_an_old_one_the_machine_is_measured(
    tmp_path: Path, calibrations: list[tuple[str, ...]], days_old: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if days_old is not None:
        save_profile(profile_of_this_machine(days_old))
    _, line = demo_verb._calibrate(demo(tmp_path))
    assert calibrations == [("calibrate",)]
    assert line.startswith("Measured Now")
    assert ("never calibrated" if days_old is None else "200 days old") in capsys.readouterr().err
