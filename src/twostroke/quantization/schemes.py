"""The quantised formats there are, which tensors of a model each touches, and how a directory says which it holds.

Directories are in compressed-tensors' layout, so that vLLM and transformers open them as they are: int8 is its
"int-quantized" format with dynamic activations a token (W8A8), int4 its "pack-quantized" one (W4A16), and int4 with some
matrices in int8 its "mixed-precision" one, where each group of matrices names its format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ConfigError
from twostroke.core.families import read_config
from twostroke.core.families.reader import Reader

if TYPE_CHECKING:
    from twostroke.model.families.layout import Entry

GROUPS = (32, 64, 128)
"""Inputs that may share a scale in int4: ``kernels.int4.GROUPS``, which cannot be imported here without torch."""

METHOD = "compressed-tensors"
"""``quantization_config.quant_method`` in a directory that we write or read."""

_BLOCK_MATRIX = re.compile(r"blocks\.\d+\.(attn\.(qkv|out)|mlp\.(gate_up|up|down))\.weight")


@dataclass(frozen=True)
class Scheme:
    """``int8``: symmetric int8 with one fp32 scale an output channel, weight ≈ code·scale, scale = max|channel|/127; each row
    of activations is rounded to 8 bits as well where products are of integers. ``int4``: 4 bits with a scale and a zero point
    for every ``group`` inputs, weight ≈ (code − zero)·scale. The embedding, the head, norms and biases stay bf16: they are a
    small part of most models, and the head's errors reach the logits directly.

    ``int8_modules``: the linear layers, by their names on disk, that an int4 directory holds as ``int8`` does."""

    name: str
    weight_bits: int
    group: int | None = None
    int8_modules: tuple[str, ...] = ()

    def of(self, entry: Entry) -> Scheme | None:
        """How the tensor of ``entry`` is held: in this scheme, in int8, or (None) plain. Raises ConfigError where the parts of
        one matrix are held differently."""
        if _BLOCK_MATRIX.fullmatch(entry.canonical) is None:
            return None
        kept = {module_name(part.name) in self.int8_modules for part in entry.parts}
        if len(kept) > 1:
            names = ", ".join(part.name for part in entry.parts)
            raise ConfigError(f"{names} are read as one matrix, so int8 must hold all of them or none.")
        return INT8 if kept == {True} else self

    def with_int8(self, entries: Iterable[Entry]) -> Scheme:
        """This scheme with the matrices of ``entries`` in int8."""
        return replace(self, int8_modules=tuple(sorted(module_name(part.name) for entry in entries for part in entry.parts)))

    @property
    def format(self) -> str:
        """compressed-tensors' name of the layout."""
        if self.int8_modules:
            return "mixed-precision"
        return "int-quantized" if self.group is None else "pack-quantized"

    def config(self) -> dict[str, Any]:
        """What goes into ``config.json`` as ``quantization_config``."""
        groups = {"group_0": self._config_group(["Linear"])}
        if self.int8_modules:
            groups["group_0"]["format"] = "pack-quantized"
            groups["group_1"] = INT8._config_group(list(self.int8_modules)) | {"format": INT8.format}
        return {
            "quant_method": METHOD,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }

    def _config_group(self, targets: list[str]) -> dict[str, Any]:
        weights: dict[str, Any] = {"num_bits": self.weight_bits, "type": "int", "dynamic": False}
        activations = None
        if self.group is None:
            weights |= {"symmetric": True, "strategy": "channel"}
            activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        else:
            weights |= {"symmetric": False, "strategy": "group", "group_size": self.group}
        return {"targets": targets, "weights": weights, "input_activations": activations, "output_activations": None}


INT8 = Scheme("int8", 8)


SCHEMES: dict[str, Scheme] = {"int8": INT8, "int4": Scheme("int4", 4, 64)} | {
    f"int4-g{group}": Scheme("int4", 4, group) for group in GROUPS
}


def scheme_of(name: str) -> Scheme:
    """The scheme called ``name``; ConfigError for another."""
    if name not in SCHEMES:
        raise ConfigError(f"scheme={name!r} is not a way to quantise. Use one of {', '.join(SCHEMES)}.")
    return SCHEMES[name]


def scheme_of_config(quantised: dict[str, Any], where: object) -> Scheme:
    """The scheme of a directory's ``quantization_config``. Raises ConfigError naming what about it is not supported."""
    if quantised.get("quant_method") != METHOD:
        raise ConfigError(f"{where} is quantised by {quantised.get('quant_method')!r}, which is not supported.")
    groups = quantised.get("config_groups")
    in_int8 = _int8_targets(groups) if quantised.get("format") == "mixed-precision" else ()
    for plain in SCHEMES.values():
        scheme = replace(plain, int8_modules=in_int8) if plain.group is not None else plain
        expected = scheme.config()
        same_groups = isinstance(groups, dict) and set(groups) == set(expected["config_groups"])
        if quantised.get("format") == expected["format"] and same_groups and _agree(expected["config_groups"], groups):
            return scheme
    raise ConfigError(
        f"{where} is quantised in compressed-tensors' {quantised.get('format')!r} format with settings that are not supported; "
        "supported are int8 weights by channel with int8 activations by token, or asymmetric 4-bit weights in groups of "
        f"{', '.join(map(str, GROUPS))}, of all linear layers but the head, or the second with some layers in the first."
    )


def _int8_targets(groups: Any) -> tuple[str, ...]:
    """The layers that the second of two groups names; nothing where that is not how the groups are."""
    second = groups.get("group_1") if isinstance(groups, dict) else None
    targets = second.get("targets") if isinstance(second, dict) else None
    return tuple(targets) if isinstance(targets, list) and all(isinstance(t, str) for t in targets) else ()


def stored_scheme(directory: Path | str) -> Scheme | None:
    """How the directory's matrices are held; None where they are plain. Raises ConfigError for a scheme that is not known."""
    quantised = Reader(read_config(directory)).object("quantization_config")
    return scheme_of_config(quantised, directory) if quantised else None


def _agree(expected: Any, found: Any) -> bool:
    """Whether ``found`` says all that ``expected`` does. It may say more (an observer, an order of columns)."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(_agree(value, found.get(key)) for key, value in expected.items())
    return bool(expected == found)


def module_name(weight: str) -> str:
    """The linear layer of a stored weight: ``….q_proj.weight`` → ``….q_proj``."""
    return weight.removesuffix(".weight")


def scale_name(weight: str) -> str:
    """Name of a stored weight's scales: ``….q_proj.weight`` → ``….q_proj.weight_scale``."""
    return f"{weight}_scale"


def zero_name(weight: str) -> str:
    return f"{weight}_zero_point"


def packed_name(weight: str) -> str:
    return f"{weight}_packed"


def shape_name(weight: str) -> str:
    return f"{weight}_shape"
