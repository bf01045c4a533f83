"""Writes adapters in PEFT's layout, and reads them merged into their base.

An adapter directory holds ``adapter_config.json`` and ``adapter_model.safetensors``, which the ``peft`` package reads. Ours
also hold the base's ``config.json`` and tokenizer files, so that every command can use the directory as a model, and
``twostroke_adapter.json`` with the fingerprint of the base and whether the adapters were trained on it in NF4.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from twostroke.core.documents import is_integer, is_number, read_object
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.families import layout
from twostroke.core.families.reader import Reader
from twostroke.core.families.weights import Entry
from twostroke.core.recipe import check_nf4_block
from twostroke.core.spec import ModelSpec
from twostroke.model.adapters import PEFT_PREFIX, AdapterSettings, Target, all_targets, choose_targets, nf4_round_trip
from twostroke.model.families import read_entry, write_entry
from twostroke.model.published.storage import FLOATS
from twostroke.model.safetensors_file import INDEX_NAME, SINGLE_NAME, read_header
from twostroke.model.save import COMPANION_FILES, require_writable, written_aside

CONFIG_NAME, WEIGHTS_NAME, OWN_NAME = "adapter_config.json", "adapter_model.safetensors", "twostroke_adapter.json"
_SAMPLE_BYTES = 2**20

Get = Callable[[str], Tensor]
OpenBase = Callable[[Path], tuple[ModelSpec, Get]]

_MUST_BE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
}
"""Settings of PEFT that change what an adapter computes and are not implemented here. An error names them."""


def is_adapter_directory(directory: Path | str) -> bool:
    """True if ``directory`` holds adapters without a model of its own."""
    directory = Path(directory)
    whole = (directory / SINGLE_NAME).is_file() or (directory / INDEX_NAME).is_file()
    return (directory / CONFIG_NAME).is_file() and not whole


@dataclass(frozen=True)
class AdapterConfig:
    """The content of ``adapter_config.json`` and of our own file beside it. ``base`` is the path of the base model."""

    base: str
    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    nf4: tuple[int, bool] | None = None  # block, double quantisation
    fingerprint: str | None = None

    def scale(self, target: Target) -> float:
        """alpha / rank, or alpha / √rank for rsLoRA (Kalajdzievski 2023, arXiv:2312.03732), with the target's own numbers if
        given."""
        rank = _of_pattern(self.rank_pattern, target, self.rank)
        alpha = _of_pattern(self.alpha_pattern, target, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _of_pattern(pattern: Mapping[str, float] | None, target: Target, default: float) -> float:
    # PEFT reads the keys as regular expressions. Untrusted ones are not run here, so only plain names are supported.
    return next((value for name, value in (pattern or {}).items() if target.matches(name)), default)


def read_adapter_config(directory: Path | str) -> AdapterConfig:
    """The configuration in ``directory``. Raises CorruptFileError, and ConfigError naming a setting that is not supported."""
    file = Path(directory) / CONFIG_NAME
    document = read_object(file)
    for key, allowed in _MUST_BE.items():
        value = document.get(key)
        if value not in allowed and value not in ({}, ""):
            raise ConfigError(
                f"{file}: {key}={value!r:.100} is not supported; only plain LoRA adapters are. Merge the adapter where it was "
                "made."
            )
    initial = document.get("init_lora_weights")
    if isinstance(initial, str) and initial not in ("gaussian", "orthogonal", "true"):
        raise ConfigError(
            f"{file}: init_lora_weights={initial!r:.100} may have changed the base's weights. Convert it to plain LoRA in PEFT "
            "(path_initial_model_for_weight_conversion), or merge the adapter where it was made."
        )
    rank, alpha, base = document.get("r"), document.get("lora_alpha"), document.get("base_model_name_or_path")
    if not is_integer(rank) or rank < 1 or not is_number(alpha) or not alpha > 0:
        raise CorruptFileError(f"{file}: r={rank!r:.100} must be at least 1 and lora_alpha={alpha!r:.100} above 0.")
    if not isinstance(base, str) or not base or "\0" in base:
        raise CorruptFileError(f"{file}: base_model_name_or_path={base!r:.100} must name the base model.")
    for name in ("rank_pattern", "alpha_pattern"):
        for key, value in Reader(document).object(name).items():
            if any(c in key for c in "^$*+?[](){}|\\") or not is_number(value) or not value > 0:
                raise ConfigError(
                    f"{file}: {name} has {key!r:.100}: {value!r:.100}; plain module names with numbers above 0 are read."
                )
    own_file = Path(directory) / OWN_NAME
    own = read_object(own_file) if own_file.is_file() else {}
    nf4 = own.get("nf4")
    if nf4 is not None and (not isinstance(nf4, dict) or not isinstance(nf4.get("double_quantization"), bool)):
        raise CorruptFileError(f"{own_file}: nf4={nf4!r:.100} must have a block and double_quantization.")
    format = (check_nf4_block(f"{own_file}: block", nf4.get("block")), nf4["double_quantization"]) if nf4 is not None else None
    return AdapterConfig(
        base, rank, float(alpha), bool(document.get("use_rslora")), document.get("rank_pattern"), document.get("alpha_pattern"),
        format, own.get("base_fingerprint"),
    )  # fmt: skip


def base_directory(directory: Path | str, config: AdapterConfig | None = None) -> Path:
    """The directory of the base of the adapters in ``directory``. Raises InputError if it does not exist."""
    directory = Path(directory)
    config = config or read_adapter_config(directory)
    for candidate in (Path(config.base).expanduser(), directory / config.base):
        with contextlib.suppress(OSError):  # a name that is too long for any file
            if (candidate / "config.json").is_file():
                return candidate
    raise InputError(
        f"{directory} holds adapters of {config.base:.200}, which is not a model directory on this machine. Put the base "
        "there, or "
        f"write its path into {CONFIG_NAME} as base_model_name_or_path."
    )


def fingerprint(directory: Path | str) -> str:
    """sha256 over names, sizes, and the first and last MiB of a model's weight files. Any training or change of a header
    changes it, and hashing whole files would take a second a GB at each start."""
    digest = hashlib.sha256()
    for file in sorted(Path(directory).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def save_adapters(
    weights: Mapping[str, Tensor], spec: ModelSpec, settings: AdapterSettings, base: Path, directory: Path, tokenizer: Path
) -> Path:
    """Write adapters in fp32 under PEFT's names, as a directory that ``peft`` and all commands here open. It replaces
    ``directory``. Raises InputError if that holds files that Twostroke did not write.

    ``tokenizer`` is the directory of a model, whose tokenizer files are copied, or a ``tokenizer.json``.
    """
    chosen = choose_targets(spec, settings.targets)
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": _peft_targets(spec, settings.targets, chosen),
        "fan_in_fan_out": any(target.transposed for target in chosen),
        "bias": "none",
        "inference_mode": True,
    }
    nf4 = {"block": settings.nf4_block, "double_quantization": settings.double_quantization} if settings.nf4 else None
    own = {"format": 1, "base_fingerprint": fingerprint(base), "nf4": nf4}
    require_writable(directory, replace=True)
    with written_aside(directory) as aside:
        for name, content in ((CONFIG_NAME, document), (OWN_NAME, own)):
            (aside / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        save_file({name: t.float().cpu().contiguous() for name, t in weights.items()}, aside / WEIGHTS_NAME, {"format": "pt"})
        config = read_object(base / "config.json")
        config.pop("quantization_config", None)  # merged matrices are plain numbers, whatever the base's are
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        source = tokenizer if tokenizer.is_dir() else tokenizer.parent
        for name in COMPANION_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
        if not tokenizer.is_dir():
            shutil.copyfile(tokenizer, aside / "tokenizer.json")
    return directory


def _peft_targets(spec: ModelSpec, wanted: tuple[str, ...], chosen: list[Target]) -> list[str]:
    """``wanted`` for PEFT. Some of its releases leave GPT-2's Conv1D out of "all-linear", so names are written instead."""
    if all(target.matches(name) for name in wanted for target in chosen) and len(chosen) == len(list(all_targets(spec))):
        return sorted({target.name for target in chosen})
    return sorted(wanted)


class Adapters:
    """The adapter tensors of ``directory``. Every name, shape and type is checked against the targets of ``spec`` before a
    tensor is read: ``n_elements`` is what their matrices hold, ``widest`` the largest rank.

    Raises InputError without a file of weights, and CorruptFileError for one that breaks its format or belongs to another base.
    """

    def __init__(self, directory: Path, spec: ModelSpec, config: AdapterConfig) -> None:
        self.config, self.n_elements, self.widest = config, 0, 0
        file = directory / WEIGHTS_NAME
        if not file.is_file():
            pickled = (
                " adapter_model.bin is a pickle, which is never opened." if (directory / "adapter_model.bin").is_file() else ""
            )
            raise InputError(f"{directory} has no {WEIGHTS_NAME}.{pickled} Save the adapter as safetensors.")
        infos = read_header(file)
        self.targets: dict[str, Target] = {}
        expected: set[str] = set()
        for target in all_targets(spec):
            a, b = (self._name(target, which) for which in "AB")
            if a not in infos and b not in infos:
                continue
            rank = int(_of_pattern(config.rank_pattern, target, config.rank))
            for name, shape in ((a, (rank, target.columns)), (b, (target.rows, rank))):
                if name not in infos or infos[name].shape != shape:
                    found = f"has shape {list(infos[name].shape)}" if name in infos else "is missing"
                    raise CorruptFileError(f"{file}: tensor {name!r} {found}; this base needs {list(shape)}.")
                if infos[name].dtype not in FLOATS:
                    raise CorruptFileError(
                        f"{file}: tensor {name!r} is {infos[name].dtype}; weights must be {', '.join(FLOATS)}."
                    )
                expected.add(name)
                self.n_elements += math.prod(shape)
            self.widest = max(self.widest, rank)
            self.targets[target.stored] = target
        unexpected = sorted(set(infos) - expected)
        if unexpected or not expected:
            named = f"tensor {unexpected[0]!r}, which fits no matrix" if unexpected else "no adapter for any matrix"
            raise CorruptFileError(f"{file} holds {named} of the base's blocks. It belongs to another base.")
        try:
            self._file = safetensors.safe_open(str(file), framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise CorruptFileError(f"{file} cannot be read as safetensors: {error}.") from None

    @staticmethod
    def _name(target: Target, which: str) -> str:
        return f"{PEFT_PREFIX}{target.stored}.lora_{which}.weight"

    def pair(self, target: Target) -> tuple[Tensor, Tensor]:
        """A (rank, columns) and scale · B (rows, rank) of ``target`` in fp32, rows in the order of the disk."""
        a, b = self._pair(target)
        return a, self.config.scale(target) * b

    def delta(self, target: Target) -> Tensor:
        """scale · B · A in fp32, which merging adds to the target's rows."""
        a, b = self._pair(target)
        product: Tensor = self.config.scale(target) * (b @ a)
        return product

    def _pair(self, target: Target) -> tuple[Tensor, Tensor]:
        a, b = (self._file.get_tensor(self._name(target, which)).float() for which in "AB")
        return a, b


def open_merged(directory: Path, open_base: OpenBase) -> tuple[ModelSpec, Get]:
    """The base's spec, and a reader of its stored tensors with the adapters of ``directory`` merged in, one at a time.

    Merged matrices are fp32, the others as the base stores them. Adapters that were trained on NF4 are merged into the base
    rounded to NF4, because they were trained to correct its rounding; merged into the exact weights they compute something else
    (peft#2321). Raises the errors of ``open_base``, InputError if base or adapters are missing, and CorruptFileError if they do
    not match.
    """
    config = read_adapter_config(directory)
    base = base_directory(directory, config)
    if config.fingerprint is not None and fingerprint(base) != config.fingerprint:
        raise CorruptFileError(
            f"the weights of {base} have changed since the adapters in {directory} were trained. Restore the earlier weights."
        )
    spec, get = open_base(base)
    adapters = Adapters(Path(directory), spec, config)
    entries = {part.name: entry for entry in layout(spec) for part in entry.parts}
    in_blocks = {target.stored for target in all_targets(spec)}
    last: dict[str, Tensor] = {}  # the parts of the last packed matrix, because NF4 rounds a packed matrix as a whole

    def base_weight(name: str) -> Tensor:
        if config.nf4 is None or name.removesuffix(".weight") not in in_blocks:
            return get(name)
        if name not in last:
            last.clear()
            last.update(_rounded(entries[name], get, config.nf4))
        return last[name]

    @torch.no_grad()
    def merged(name: str) -> Tensor:
        weight = base_weight(name)
        target = adapters.targets.get(name.removesuffix(".weight"))
        if target is None or not name.endswith(".weight"):
            return weight
        delta = adapters.delta(target)
        return weight.float() + (delta.T if target.transposed else delta)

    return spec, merged


def _rounded(entry: Entry, get: Get, nf4: tuple[int, bool]) -> dict[str, Tensor]:
    return dict(write_entry(entry, nf4_round_trip(read_entry(entry, get), *nf4)))
