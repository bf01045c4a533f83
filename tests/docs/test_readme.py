"""The README's session is run as it stands, in order, in a folder of its own.

`make test` measures this machine on small shapes instead of ``calibrate``'s minutes, stores that as `calibrate` stores its
profile, and trains by a copy of the recipe with fewer steps and less text, since most of its time went to scoring a megabyte;
every other command is the README's. `make soak` runs all of them as they stand.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROUGH_CALIBRATION = """
from twostroke.calibration.measure import SMALL, calibrate_engines
from twostroke.core.profile import save_profile
for profile in calibrate_engines(extent=SMALL, device="cpu"):
    print(save_profile(profile))
"""
"""In a child, as the command runs: what calibrating leaves in a process is not what a session meets."""

QUICKER = {"steps": "30", "sources": f'["{sysconfig.get_path("stdlib")}/asyncio"]'}
"""Settings of the copied recipe."""


def commands() -> list[str]:
    """Lines behind "$ " in the README's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def run_session(folder: Path, instead: dict[str, list[str]], changed: dict[str, str]) -> list[str]:
    """Run every command in ``folder``, or what stands for it in ``instead``; the commands that were run as they stand.
    ``changed`` are settings of the recipe."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    recipe = folder / "recipes" / "quick.toml"
    for name, value in changed.items():
        text, n = re.subn(rf"(?m)^{name} = .+$", f"{name} = {value}", recipe.read_text())
        assert n == 1
        recipe.write_text(text)
    environment = os.environ | {"TWOSTROKE_HOME": str(folder / "home")}
    verbatim = []
    for command in commands():
        program, *arguments = shlex.split(command)
        assert program == "twostroke", command
        words = instead.get(command)
        if words is None:
            words = ["-m", "twostroke", *arguments]
            verbatim.append(command)
        result = subprocess.run(
            [sys.executable, *words],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        assert result.stdout.strip(), f"{command} printed nothing"
    return verbatim


@pytest.mark.timeout(900)
def test_every_command_of_the_session_succeeds(tmp_path: Path) -> None:
    run = run_session(tmp_path, {"twostroke calibrate": ["-c", ROUGH_CALIBRATION]}, QUICKER)
    assert len(run) >= 5
    assert set(commands()) - set(run) == {"twostroke calibrate"}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_session_succeeds_as_it_stands(tmp_path: Path) -> None:
    assert run_session(tmp_path, {}, {}) == commands()


def test_the_picture_is_small_and_a_screens_width() -> None:
    picture = (ROOT / "docs" / "report.png").read_bytes()
    assert len(picture) <= 300_000
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(picture[16:20], "big") == 1280
