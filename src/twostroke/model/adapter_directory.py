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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from twostroke.core.documents import is_integer, is_number, read_object
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.families import layout, weight_names
from twostroke.core.families.reader import Reader
from twostroke.core.families.weights import Entry, Part
from twostroke.core.matrices import ALL_LINEAR
from twostroke.core.recipe import check_nf4_block
from twostroke.core.spec import ModelSpec
from twostroke.model.adapters import (
    AdapterSettings,
    Target,
    all_targets,
    by_expert,
    choose_targets,
    nf4_round_trip,
    parts_of,
    peft_module,
)
from twostroke.model.families import read_entry, write_entry
from twostroke.model.published import awq
from twostroke.model.published.storage import FLOATS
from twostroke.model.safetensors_file import INDEX_NAME, SINGLE_NAME, read_header
from twostroke.model.save import COMPANION_FILES, require_writable, written_aside

CONFIG_NAME, WEIGHTS_NAME, OWN_NAME = "adapter_config.json", "adapter_model.safetensors", "twostroke_adapter.json"
_SAMPLE_BYTES = 2**20

SCALED_INPUTS = "twostroke_scaled_inputs"
"""Key of ``config.json`` of a copy whose matrices read scaled inputs: adapters of the original compute something else there."""

Get = Callable[[str], Tensor]
OpenBase = Callable[[Path], tuple[ModelSpec, Get]]

_MUST_BE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
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
    """The content of ``adapter_config.json`` and of our own file beside it. ``base`` is the path of the base model,
    ``parameters`` what PEFT adapts as parameters: of experts one that holds all of them."""

    base: str
    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    nf4: tuple[int, bool] | None = None  # block, double quantisation
    fingerprint: str | None = None
    parameters: tuple[str, ...] = ()

    def scale(self, target: Target) -> float:
        """alpha / rank, or alpha / √rank for rsLoRA (Kalajdzievski 2023, arXiv:2312.03732), with the target's own numbers if
        given."""
        rank = _of_pattern(self.rank_pattern, target, self.rank)
        alpha = _of_pattern(self.alpha_pattern, target, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


_ANY_BEFORE = ".*\\."
"""What PEFT writes before a name of its own in patterns."""


def _of_pattern(pattern: Mapping[str, float] | None, target: Target, default: float) -> float:
    # PEFT reads the keys as regular expressions. Untrusted ones are not run here, so only plain names are supported.
    return next((value for name, value in (pattern or {}).items() if target.matches(name.removeprefix(_ANY_BEFORE))), default)


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
            plain = key.removeprefix(_ANY_BEFORE)
            if any(c in plain for c in "^$*+?[](){}|\\") or not is_number(value) or not value > 0:
                raise ConfigError(
                    f"{file}: {name} has {key!r:.100}: {value!r:.100}; plain module names with numbers above 0 are read."
                )
    parameters = document.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise CorruptFileError(f"{file}: target_parameters={parameters!r:.100} must be a list of names.")
    own_file = Path(directory) / OWN_NAME
    own = read_object(own_file) if own_file.is_file() else {}
    nf4 = own.get("nf4")
    if nf4 is not None and (not isinstance(nf4, dict) or not isinstance(nf4.get("double_quantization"), bool)):
        raise CorruptFileError(f"{own_file}: nf4={nf4!r:.100} must have a block and double_quantization.")
    format = (check_nf4_block(f"{own_file}: block", nf4.get("block")), nf4["double_quantization"]) if nf4 is not None else None
    return AdapterConfig(
        base, rank, float(alpha), bool(document.get("use_rslora")), document.get("rank_pattern"), document.get("alpha_pattern"),
        format, own.get("base_fingerprint"), tuple(parameters),
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


def scales_inputs(directory: Path | str) -> bool:
    """Whether the matrices in ``directory`` read other inputs than those of the model that it was rounded from, as AWQ's do."""
    document = read_object(Path(directory) / "config.json")
    quantised = document.get("quantization_config")
    published = isinstance(quantised, dict) and quantised.get("quant_method") == awq.METHOD
    return published or bool(document.get(SCALED_INPUTS))


def save_adapters(
    weights: Mapping[str, Tensor], spec: ModelSpec, settings: AdapterSettings, base: Path, directory: Path, tokenizer: Path
) -> Path:
    """Write adapters in fp32 under PEFT's names, as a directory that ``peft`` and all commands here open. It replaces
    ``directory``. Raises InputError if that holds files that Twostroke did not write.

    ``tokenizer`` is the directory of a model, whose tokenizer files are copied, or a ``tokenizer.json``.
    """
    chosen = choose_targets(spec, settings.targets)
    parameters = _peft_parameters(spec, chosen)
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        # PEFT opens no adapters of parameters with dropout, which only training would need.
        "lora_dropout": 0.0 if parameters else settings.dropout,
        "target_modules": _peft_modules(spec, settings.targets, chosen),
        **({"target_parameters": parameters} if parameters else {}),
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


def _peft_modules(spec: ModelSpec, wanted: tuple[str, ...], chosen: list[Target]) -> list[str]:
    """``wanted`` for PEFT. Some of its releases leave GPT-2's Conv1D out of "all-linear", so names are written instead."""
    every, own = ([target for target in targets if target.parameter is None] for targets in (all_targets(spec), chosen))
    if ALL_LINEAR in wanted or (len(own) == len(every) and all(target.matches(name) for name in wanted for target in own)):
        return sorted({target.name for target in own})
    return sorted(name for name in wanted if any(target.matches(name) for target in own))


def _peft_parameters(spec: ModelSpec, chosen: list[Target]) -> list[str]:
    """The parameters of ``chosen`` for PEFT: without their layer where all layers have them chosen."""
    every, own = ([t.parameter for t in targets if t.parameter is not None] for targets in (all_targets(spec), chosen))
    before = f"{weight_names(spec.family).layer}."
    below = {name: name.removeprefix(before).partition(".")[2] for name in every}
    whole = {below[name] for name in every} - {below[name] for name in set(every) - set(own)}
    return sorted({below[name] if below[name] in whole else name for name in own})


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
        """By the stored tensor that it is added to, or of experts by the canonical module."""
        self._names: dict[Target, tuple[str, str]] = {}
        self._of_experts: tuple[Target, Tensor, Tensor] | None = None  # the last that was read
        expected: set[str] = set()
        for target, module in _possible(spec, config):
            a, b = names = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
            if a not in infos and b not in infos:
                continue
            rank = int(_of_pattern(config.rank_pattern, target, config.rank)) * target.copies
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
            self.widest = max(self.widest, rank // target.copies)
            self.targets[f"{target.stored}.weight" if target.copies == 1 else target.module] = target
            self._names[target] = names
        unexpected = sorted(set(infos) - expected)
        if unexpected or not expected:
            named = f"tensor {unexpected[0]!r}, which fits no matrix" if unexpected else "no adapter for any matrix"
            raise CorruptFileError(f"{file} holds {named} of the base's blocks. It belongs to another base.")
        try:
            self._file = safetensors.safe_open(str(file), framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise CorruptFileError(f"{file} cannot be read as safetensors: {error}.") from None

    def pair(self, target: Target) -> tuple[Tensor, Tensor]:
        """A (rank, columns) and scale · B (rows, rank) of ``target`` in fp32, rows in the order of the disk."""
        a, b = self._factors(target)
        return a, self.config.scale(target) * b

    def delta(self, target: Target) -> Tensor:
        """scale · B · A in fp32, which merging adds to the target's rows."""
        a, b = self._factors(target)
        product: Tensor = self.config.scale(target) * (b @ a)
        return product

    def delta_of_experts(self, target: Target, begin: int, rows: int) -> Tensor:
        """``rows`` rows from ``begin`` on, all of one expert, of the experts' deltas one after another."""
        expert, first = divmod(begin, target.rows)
        a, b = self._experts(target)
        product: Tensor = self.config.scale(target) * (b[expert, first : first + rows] @ a[expert])
        return product

    def _experts(self, target: Target) -> tuple[Tensor, Tensor]:
        """A (copies, rank, inputs) and B (copies, outputs, rank)."""
        if self._of_experts is None or self._of_experts[0] != target:
            a, b = self._factors(target)
            self._of_experts = target, a.unflatten(0, (target.copies, -1)), by_expert(target, b).contiguous()
        return self._of_experts[1:]

    def _factors(self, target: Target) -> tuple[Tensor, Tensor]:
        a, b = (self._file.get_tensor(name).float() for name in self._names[target])
        return a, b


def _possible(spec: ModelSpec, config: AdapterConfig) -> Iterator[tuple[Target, str]]:
    """Every matrix that an adapter may be of, and the module of its tensors: of experts together, if the configuration names
    their parameters, else of each by itself."""
    every = list(all_targets(spec))
    chosen = [target for target in every if target.copies > 1 and any(target.matches(name) for name in config.parameters)]
    yield from ((target, peft_module(target, chosen)) for target in every if target.copies == 1 or target in chosen)
    for entry in layout(spec):
        if entry.matrix is not None and entry.matrix.copies > 1 and entry.copies == 1 and not chosen:
            yield from ((target, peft_module(target, ())) for target in parts_of(entry))


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
    matrices = [entry for entry in layout(spec) if entry.matrix is not None]
    places = {part.name: (entry, begin) for entry in matrices for part, begin in _with_begin(entry)}
    last: dict[str, Tensor] = {}  # the parts of the last packed matrix, because NF4 rounds a packed matrix as a whole

    def base_weight(name: str) -> Tensor:
        if config.nf4 is None or name not in places:
            return get(name)
        if name not in last:
            last.clear()
            last.update(_rounded(places[name][0], get, config.nf4))
        return last[name]

    @torch.no_grad()
    def merged(name: str) -> Tensor:
        weight = base_weight(name)
        target = adapters.targets.get(name)
        if target is not None:
            delta = adapters.delta(target)
            return weight.float() + (delta.T if target.transposed else delta)
        entry, begin = places.get(name, (None, 0))
        target = adapters.targets.get(entry.canonical.removesuffix(".weight")) if entry is not None else None
        if entry is None or target is None:
            return weight
        if entry.copies == 1:
            return weight.float() + adapters.delta_of_experts(target, begin, len(weight))
        one = target.rows  # a stored tensor has a share of every expert's rows
        deltas = torch.cat([adapters.delta_of_experts(target, expert * one, one) for expert in range(target.copies)])
        return weight.float() + dict(write_entry(entry, deltas))[name]

    return spec, merged


def _with_begin(entry: Entry) -> Iterator[tuple[Part, int]]:
    begin = 0
    for part in entry.parts:
        yield part, begin
        begin += part.rows


def _rounded(entry: Entry, get: Get, nf4: tuple[int, bool]) -> dict[str, Tensor]:
    assert entry.matrix is not None
    return dict(write_entry(entry, nf4_round_trip(read_entry(entry, get), *nf4, entry.matrix.copies)))
