"""Exports a model for other programs: merges adapters into their base and writes one of the formats of ``export_targets``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.aside import file_beside
from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import InputError
from twostroke.core.families import layout, read_config, read_spec
from twostroke.core.spec import ModelSpec
from twostroke.interop.export_targets import TARGETS, ExportSource, target_of
from twostroke.interop.held import held_by
from twostroke.interop.import_model import CheckedState
from twostroke.interop.moved import Held, Made, cast, new_memory, words_of
from twostroke.interop.peft import lazy_state, tokenizer_directory
from twostroke.interop.stages import Stages
from twostroke.model.adapter_directory import base_directory, is_adapter_directory, read_adapter_config
from twostroke.model.load import open_weights
from twostroke.model.save import bytes_of_tokenizer, bytes_to_save, fill_directory, require_writable, written_aside

_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote. ``base`` is the model that adapters were merged into; None for a whole model."""

    source: str
    directory: str
    target: str
    family: str
    n_parameters: int
    n_bytes: int
    precision: str
    base: str | None
    notes: tuple[str, ...]


def export_model(
    source: Path | str,
    directory: Path | str,
    merge: bool = False,
    precision: str = "auto",
    replace: bool = False,
    progress: Callable[[float, str], None] | None = None,
    to: str = "hf",
    measure: Callable[[Path], Mapping[str, Tensor] | None] | None = None,
) -> ExportReport:
    """Write the model in ``source``, or in its ``model`` folder, to ``directory`` in the format ``to``; with ``merge``, with
    its adapters merged.

    ``precision`` "auto" is that of the model, or of the adapters' base, if the format has it, else the format's first. The
    result appears when it is complete. ``measure(directory)`` gives ``ExportSource.importance`` where the precision is one that
    a text can guide. Raises InputError if ``source`` holds adapters without ``merge``, or none with it, if ``directory`` may
    not be replaced or a package is missing, ConfigError for an unknown format or precision, and the errors of
    ``model.load.open_weights``.
    """
    row, out = target_of(to), Path(directory)
    write = row.load_writer()
    row.precision(precision, "")  # before anything is read
    found = _find(Path(source))
    adapters = is_adapter_directory(found)
    if adapters and not merge:
        raise InputError(
            f"{found} already holds adapters in PEFT's layout, which other programs can use as they are. Give --merge to write "
            "one model with them."
        )
    if merge and not adapters:
        raise InputError(f"{found} holds no adapters, so there is nothing to merge. Leave --merge out.")
    if row.suffix:
        _require_writable_file(out, row.suffix, replace)
    else:
        require_writable(out, replace, [name for any_row in TARGETS.values() for name in any_row.files])
    notes: list[str] = []
    base: Path | None = None
    if adapters:
        config = read_adapter_config(found)
        base = base_directory(found, config)
        if config.nf4 is not None:
            notes.append("the adapters were trained on the base in NF4, so they are merged into the base as NF4 rounds it.")
    spec, get = open_weights(found)
    chosen = row.precision(precision, _stored_dtype(base or found))
    if adapters and chosen != "fp32":
        remedy = "; --precision fp32 keeps them." if "fp32" in row.precisions else "."
        notes.append(f"merged weights are rounded to {chosen}{remedy}")
    stages = Stages(row.stages, progress)
    state = CheckedState(lazy_state(spec, get), stages.read)
    importance = measure(found) if measure is not None and chosen in row.weighed else None
    model = ExportSource(found, spec, state, tokenizer_directory(found, base), importance, stages.stage)
    if row.suffix:
        out = Path(os.path.abspath(out))
        with file_beside(out) as aside:
            notes += write(model, aside, chosen)
        n_bytes = out.stat().st_size
    else:
        with written_aside(out) as aside:
            notes += write(model, aside, chosen)
        n_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    n_parameters = sum(math.prod(entry.shape) for entry in layout(spec))
    where = None if base is None else str(base)
    return ExportReport(str(found), str(out), to, spec.family, n_parameters, n_bytes, chosen, where, tuple(notes))


@dataclass(frozen=True)
class Expected:
    """An export before it begins: the model, what its source holds, what the writer will write, and whether a text says which
    inputs matter."""

    spec: ModelSpec
    held: Held
    made: Made
    weighed: bool


def expect_export(source: Path, to: str, precision: str, has_text: Callable[[Path], bool] = lambda found: False) -> Expected:
    """What ``export_model`` will do with ``source``. ``has_text(directory)``: whether it gets an importance, where the
    precision takes one. No weight is read. Raises those of its errors that need none."""
    row, found = target_of(to), _find(source)
    row.precision(precision, "")
    base = base_directory(found) if is_adapter_directory(found) else None
    chosen = row.precision(precision, _stored_dtype(base or found))
    spec, held = read_spec(base or found), held_by(found)
    weighed = base is None and chosen in row.weighed and has_text(found)
    state = {entry.canonical: torch.empty(entry.shape, device="meta") for entry in layout(spec)}
    model = ExportSource(found, spec, state, tokenizer_directory(found, base), {} if weighed else None)
    return Expected(spec, held, row.load_expects()(model, held, chosen), weighed)


def _stored_dtype(directory: Path) -> str:
    stored = read_config(directory)
    return _NAMES.get(str(stored.get("dtype") or stored.get("torch_dtype")), "fp32")


def write_hugging_face(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` with a model directory of transformers' layout. Memory: one shard. Raises the errors of ``save_model``."""
    fill_directory(source.state, source.spec, out, precision, source.tokenizer)
    return ()


def expect_hugging_face(source: ExportSource, held: Held, precision: str) -> Made:
    """What ``write_hugging_face`` will write."""
    changed, words = cast(held, precision), words_of(source.tokenizer, source.spec)
    n_bytes = bytes_to_save(source.spec, precision, bytes_of_tokenizer(source.tokenizer))
    return Made(n_bytes, words, 0, new_memory(changed), max(changed, default=0.0))


def _require_writable_file(out: Path, suffix: str, replace: bool) -> None:
    if out.is_dir():
        raise InputError(f"{out} is a directory, and this format is one file. Name a file that ends in {suffix}.")
    if out.suffix != suffix:
        raise InputError(f"{out} must end in {suffix}. Name a file such as {out.with_suffix(suffix)}.")
    if out.exists() and not replace:
        raise InputError(f"{out} exists. Name a new file, or replace it with --replace.")


def _find(source: Path) -> Path:
    for candidate in (source, source / "model"):
        if (candidate / "config.json").is_file() or is_adapter_directory(candidate):
            return candidate
    raise InputError(
        f"{source} is neither a model or adapter directory nor the output of a training run. Give the folder with config.json."
    )
