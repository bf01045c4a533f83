"""Where things are kept, also for a user that the system does not know."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError
from twostroke.core.paths import home, ledger_path


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `docker run --user 12345` starts a process."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "TWOSTROKE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=f"user {os.getuid()} has no home directory.* Set TWOSTROKE_HOME"):
        ledger_path()
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    assert home() == tmp_path
