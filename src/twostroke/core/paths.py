"""Where Twostroke keeps what outlives a command: machine profiles, the ledger, prepared data, packed weights."""

from __future__ import annotations

import os
from pathlib import Path

from twostroke.core.errors import ConfigError


def home() -> Path:
    """``$TWOSTROKE_HOME``, or ``~/.twostroke``. Not created here: writers create what they need. Raises ConfigError where the
    user has no home directory, as a container's may."""
    try:
        return Path(os.environ.get("TWOSTROKE_HOME") or Path.home() / ".twostroke")
    except RuntimeError:
        raise ConfigError(
            f"user {os.getuid()} has no home directory, and HOME and TWOSTROKE_HOME are not set. Set TWOSTROKE_HOME to a "
            "directory that may be written."
        ) from None


def ledger_path() -> Path:
    return home() / "ledger.sqlite"


def profiles_dir() -> Path:
    return home() / "profiles"


def data_cache_dir() -> Path:
    return home() / "data"


def packed_dir() -> Path:
    return home() / "packed"
