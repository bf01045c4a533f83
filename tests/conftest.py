"""Shared fixtures: real assets where they are at hand, a private Twostroke home, two threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from assets_folder import ASSETS
from twostroke.core.openmp import limit_spinning

os.environ.setdefault("OMP_NUM_THREADS", "2")
limit_spinning(os.environ)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TWOSTROKE_AS_CALIBRATED"] = "1"  # plans do not depend on what else runs meanwhile
# Children start as an installed command does, from bytecode: compiling its modules anew is 0.13 s of a plan's 0.4.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def assets() -> Path:
    """Folder of real corpora and weights, or a skip that names what is missing."""
    if not ASSETS.is_dir():
        pytest.skip(f"the shared assets are not at {ASSETS}; set TWOSTROKE_ASSETS to their folder")
    return ASSETS


@pytest.fixture(autouse=True)
def twostroke_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has its own ledger, profiles and caches."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("TWOSTROKE_HOME", str(home))
    return home
