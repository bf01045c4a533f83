"""The README's session is run as it stands, in order, in a folder of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def commands() -> list[str]:
    """Lines behind "$ " in the README's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.timeout(600)
def test_every_command_of_the_session_succeeds(tmp_path: Path) -> None:
    assert len(commands()) >= 5
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    environment = os.environ | {"TWOSTROKE_HOME": str(tmp_path / "home")}
    for command in commands():
        program, *arguments = shlex.split(command)
        assert program == "twostroke", command
        result = subprocess.run(
            [sys.executable, "-m", "twostroke.cli.main", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        assert result.stdout.strip(), f"{command} printed nothing"


def test_the_picture_is_small_and_a_screens_width() -> None:
    picture = (ROOT / "docs" / "report.png").read_bytes()
    assert len(picture) <= 300_000
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(picture[16:20], "big") == 1280
