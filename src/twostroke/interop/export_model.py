"""Exports a model directory for other programs: it merges adapters into their base and converts weights to another dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import ConfigError, InputError
from twostroke.core.families import layout, read_config
from twostroke.interop.import_model import CheckedState
from twostroke.interop.peft import lazy_state, tokenizer_directory
from twostroke.model.adapter_directory import base_directory, is_adapter_directory, read_adapter_config
from twostroke.model.load import open_weights
from twostroke.model.save import save_model

_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote. ``base`` is the model that adapters were merged into; None for a whole model."""

    source: str
    directory: str
    family: str
    n_parameters: int
    n_bytes: int
    dtype: str
    base: str | None
    notes: tuple[str, ...]


def export_model(
    source: Path | str,
    directory: Path | str,
    merge: bool = False,
    dtype: str = "auto",
    replace: bool = False,
    progress: Callable[[float, str], None] | None = None,
) -> ExportReport:
    """Write the model in ``source``, or in its ``model`` folder, to ``directory``. With ``merge``, adapters are merged.

    ``dtype`` "auto" is that of the model, or of the adapters' base. Tensors are written one at a time, and the directory
    appears when it is complete. Raises InputError if ``source`` holds adapters without ``merge``, or none with it, ConfigError
    for a dtype that is not one to save in, and the errors of ``model.load.open_weights``.
    """
    if dtype not in ("auto", "fp32", "bf16", "fp16"):
        raise ConfigError(f"dtype={dtype!r} is not a format to save in. Use auto, fp32, bf16 or fp16.")
    found = _find(Path(source))
    adapters = is_adapter_directory(found)
    if adapters and not merge:
        raise InputError(
            f"{found} already holds adapters in PEFT's layout, which other programs can use as they are. Give --merge to write "
            "one model with them."
        )
    if merge and not adapters:
        raise InputError(f"{found} holds no adapters, so there is nothing to merge. Leave --merge out.")
    notes: list[str] = []
    base: Path | None = None
    if adapters:
        config = read_adapter_config(found)
        base = base_directory(found, config)
        if config.nf4 is not None:
            notes.append("the adapters were trained on the base in NF4, so they are merged into the base as NF4 rounds it.")
    spec, get = open_weights(found)
    if dtype == "auto":
        stored = read_config(base or found)
        dtype = _NAMES.get(str(stored.get("dtype") or stored.get("torch_dtype")), "fp32")
        dtype = dtype if dtype in ("fp32", "bf16", "fp16") else "fp32"
    if adapters and dtype != "fp32":
        notes.append(f"merged weights are rounded to {dtype}; --dtype fp32 keeps them.")
    state = lazy_state(spec, get)
    save_model(
        CheckedState(state, progress), spec, directory, dtype, tokenizer_path=tokenizer_directory(found, base), replace=replace,
    )  # fmt: skip
    n_parameters = sum(math.prod(entry.shape) for entry in layout(spec))
    n_bytes = sum(file.stat().st_size for file in Path(directory).iterdir())
    return ExportReport(
        str(found), str(directory), spec.family, n_parameters, n_bytes, dtype, None if base is None else str(base), tuple(notes)
    )


def _find(source: Path) -> Path:
    for candidate in (source, source / "model"):
        if (candidate / "config.json").is_file() or is_adapter_directory(candidate):
            return candidate
    raise InputError(
        f"{source} is neither a model or adapter directory nor the output of a training run. Give the folder with config.json."
    )
