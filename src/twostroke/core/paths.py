"""Where Twostroke keeps what outlives a command (profiles, ledger, data, packed and imported weights, their digests), and where
a model is."""

from __future__ import annotations

import os
from pathlib import Path

from twostroke.core.errors import ConfigError, DataError


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


def digests_dir() -> Path:
    return home() / "digests"


def imported_dir() -> Path:
    return home() / "imported"


def model_directory(path: Path | str) -> Path:
    """``path``, or the ``model`` in it if it is the output of a training run. Raises DataError."""
    path = Path(path)
    for candidate in (path, path / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    problem = "is not a model directory: it holds no config.json" if path.exists() else "does not exist"
    problem = "is a file, not a model directory" if path.is_file() else problem
    raise DataError(f"model {path} {problem}. Give a model directory; `twostroke import` makes one from a name or a file.")
