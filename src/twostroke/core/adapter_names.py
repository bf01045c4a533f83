"""Names of served adapters: what they may be, and ``--lora NAME=DIR`` on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twostroke.core.errors import ConfigError, InputError

MAX_NAME = 200
LORA_HELP = "Adapter in PEFT's layout, as NAME=DIR. Repeatable."


def check_adapter_name(name: str, field: str = "lora_name") -> None:
    """Raises InputError for a name that is empty, too long or not printable."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise InputError(f"{field}={name!r:.100} must have 1 to {MAX_NAME} printable characters.", field=field)


def adapters_of(options: Sequence[str]) -> dict[str, Path]:
    """Directories by name, of options NAME=DIR. Raises ConfigError for one that is not so, a name given twice or a directory
    without an adapter."""
    found: dict[str, Path] = {}
    for option in options:
        name, separator, directory = option.partition("=")
        if not separator or not directory:
            raise ConfigError(f"--lora {option!r:.200} must be NAME=DIR.")
        check_adapter_name(name, "--lora")
        if name in found:
            raise ConfigError(f"--lora names {name!r} twice. Give each adapter its own name.")
        if not (Path(directory) / "adapter_config.json").is_file():
            raise ConfigError(f"--lora {option!r:.200}: {directory} has no adapter_config.json. Name an adapter's directory.")
        found[name] = Path(directory)
    return found
