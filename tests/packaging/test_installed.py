"""`pip install` of a source distribution into an empty environment gives a working `twostroke`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from checkout import ROOT, clean_checkout

BUILD = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_source_distribution_alone_installs_a_working_command(tmp_path: Path, assets: Path) -> None:
    checkout, python = clean_checkout(tmp_path / "checkout"), tmp_path / "venv" / "bin" / "python"
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TWOSTROKE"))}
    environment = plain | {"TWOSTROKE_HOME": str(tmp_path / "home")}

    def run(*words: str | Path, cwd: Path = tmp_path) -> str:
        done = subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    run(sys.executable, "-c", BUILD, tmp_path, cwd=checkout)
    (archive,) = tmp_path.glob("twostroke-*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"LICENSE", "README.md", "setup.py", "src/twostroke/recipes/quick.toml"} <= names
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "requirements.lock", archive)
    twostroke = python.with_name("twostroke")
    assert run(twostroke, "--version").startswith("twostroke ")
    facts = json.loads(run(twostroke, "doctor", "--json"))["facts"]
    assert facts["kernel_target"] or not facts["compiler"], "there is a compiler, and the native library was not built"
    run(twostroke, "import", assets / "weights" / "stories260K" / "stories260K.bin", "stories")
    plan = json.loads(run(twostroke, "plan", "serve", "stories", "--hardware", "epyc-9654", "--json"))
    assert plan
    told = run(twostroke, "generate", "stories", "--prompt", "Once upon a time", "--max-tokens", "32", "--temperature", "0")
    assert "there was a little girl named Lily" in told
    recipe = next((tmp_path / "venv").glob("lib/*/site-packages/twostroke/recipes/quick.toml"))
    run(twostroke, "plan", "train", recipe, "--hardware", "epyc-9654")
