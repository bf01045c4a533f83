"""Which tensors of a model a scheme touches, and how a directory says which it holds.

Directories are in compressed-tensors' layout, so that vLLM and transformers open them as they are: the scheme's own
(``core.schemes``), or "mixed-precision" with some matrices in the scheme beside it, where each group of matrices names its
format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ConfigError
from twostroke.core.families import read_config
from twostroke.core.families.reader import Reader
from twostroke.core.schemes import SCHEMES, WRITTEN, DiskLayout, Scheme

if TYPE_CHECKING:
    from twostroke.core.families.weights import Entry

METHOD = "compressed-tensors"
"""``quantization_config.quant_method`` in a directory that we write or read."""

MIXED_FORMAT = "mixed-precision"


@dataclass(frozen=True)
class Quantisation:
    """How a directory holds its model: the blocks' matrices in ``scheme``, those of ``others``, linear layers by their names on
    disk, in the scheme beside it. The embedding, the head, norms and biases stay bf16: they are a small part of most models,
    and the head's errors reach the logits directly."""

    scheme: Scheme
    others: tuple[str, ...] = ()

    @property
    def beside(self) -> Scheme | None:
        """The scheme of ``others``; None where there can be none."""
        return None if self.scheme.beside is None else SCHEMES[self.scheme.beside]

    def of(self, entry: Entry) -> Scheme | None:
        """How the tensor of ``entry`` is held; None: plain. Raises ConfigError where the parts of one matrix are held
        differently."""
        if entry.matrix is None:
            return None
        kept = {module_name(part.name) in self.others for part in entry.parts}
        if len(kept) > 1:
            names = ", ".join(part.name for part in entry.parts)
            raise ConfigError(f"{names} are read as one matrix, so {self.scheme.beside} must hold all of them or none.")
        return self.beside if kept == {True} else self.scheme

    def with_others(self, entries: Iterable[Entry]) -> Quantisation:
        """The same with the matrices of ``entries`` in the scheme beside it."""
        return Quantisation(self.scheme, tuple(sorted(module_name(part.name) for entry in entries for part in entry.parts)))

    def config(self, weights_only: bool = False) -> dict[str, Any]:
        """What goes into ``config.json`` as ``quantization_config``; ``weights_only``: without a word on activations."""
        layout = _layout(self.scheme)
        groups = {"group_0": _config_group(self.scheme, ["Linear"])}
        if weights_only:
            groups["group_0"]["input_activations"] = None
        if self.others and self.beside is not None:
            groups["group_0"]["format"] = layout.format
            groups["group_1"] = _config_group(self.beside, list(self.others)) | {"format": _layout(self.beside).format}
        return {
            "quant_method": METHOD,
            "format": MIXED_FORMAT if self.others else layout.format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


def _layout(scheme: Scheme) -> DiskLayout:
    assert scheme.disk is not None, scheme.name
    return scheme.disk


def _config_group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    layout, bits = _layout(scheme), round(8 * scheme.element_bytes)
    weights: dict[str, Any] = {"num_bits": bits, "type": layout.numbers, "dynamic": False}
    if scheme.group is None:
        weights |= {"symmetric": True, "strategy": "channel"}
    else:
        weights |= {"symmetric": False, "strategy": "group", "group_size": scheme.group}
    activations = None
    if layout.activations is not None:
        activations = {"num_bits": 8, "type": layout.activations, "symmetric": True, "strategy": "token", "dynamic": True}
    return {"targets": targets, "weights": weights, "input_activations": activations, "output_activations": None}


def quantisation_of(quantised: dict[str, Any], where: object) -> Quantisation:
    """What a directory's ``quantization_config`` says. Raises ConfigError naming what about it is not supported."""
    if quantised.get("quant_method") != METHOD:
        raise ConfigError(f"{where} is quantised by {quantised.get('quant_method')!r}, which is not supported.")
    groups = quantised.get("config_groups")
    others = _other_targets(groups) if quantised.get("format") == MIXED_FORMAT else ()
    schemes = [SCHEMES[name].here for name in WRITTEN]
    for scheme in schemes:
        found = Quantisation(scheme, others if scheme.beside is not None else ())
        # An engine that expands codes leaves activations alone, whatever a directory asks of engines that can round them.
        for expected in (found.config(), found.config(weights_only=not scheme.computes_in_codes)):
            same_groups = isinstance(groups, dict) and set(groups) == set(expected["config_groups"])
            if quantised.get("format") == expected["format"] and same_groups and _agree(expected["config_groups"], groups):
                return found
    supported = ", ".join(dict.fromkeys(_in_words(scheme) for scheme in schemes))
    raise ConfigError(
        f"{where} is quantised in compressed-tensors' {quantised.get('format')!r} format with settings that are not supported. "
        f"Supported, of all linear layers but the head: {supported}. Beside weights in groups some layers may be by channel."
    )


def _in_words(scheme: Scheme) -> str:
    layout, bits = _layout(scheme), round(8 * scheme.element_bytes)
    rounded = "" if layout.activations is None else f" with 8-bit {layout.activations} activations by token"
    by = "symmetric and by channel" if scheme.group is None else f"asymmetric and in groups of {scheme.group}"
    return f"{bits}-bit {layout.numbers} weights, {by}{rounded}"


def _other_targets(groups: Any) -> tuple[str, ...]:
    """The layers that the second of two groups names; nothing where that is not how the groups are."""
    second = groups.get("group_1") if isinstance(groups, dict) else None
    targets = second.get("targets") if isinstance(second, dict) else None
    return tuple(targets) if isinstance(targets, list) and all(isinstance(t, str) for t in targets) else ()


def stored_quantisation(directory: Path | str) -> Quantisation | None:
    """How the directory's matrices are held; None where they are plain. Raises ConfigError for a scheme that is not known."""
    quantised = Reader(read_config(directory)).object("quantization_config")
    return quantisation_of(quantised, directory) if quantised else None


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
