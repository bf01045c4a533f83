"""A small model for commands, and their own processes from this source tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_model import make_model

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def children_run_from_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
