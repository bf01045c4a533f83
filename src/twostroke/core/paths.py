"""Where Twostroke keeps what outlives a command: machine profiles, the ledger, prepared data, packed weights."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$TWOSTROKE_HOME``, or ``~/.twostroke``. Not created here: writers create what they need."""
    return Path(os.environ.get("TWOSTROKE_HOME") or Path.home() / ".twostroke")


def ledger_path() -> Path:
    return home() / "ledger.sqlite"


def profiles_dir() -> Path:
    return home() / "profiles"


def data_cache_dir() -> Path:
    return home() / "data"


def packed_dir() -> Path:
    return home() / "packed"
