"""compressed-tensors, as llm-compressor and ``twostroke quantize`` write it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from twostroke.core.errors import ConfigError
from twostroke.core.families.quantised import OURS
from twostroke.core.families.reader import Reader
from twostroke.model.published.fp4 import MX_GROUP, NV_GROUP, Mxfp4, Nvfp4
from twostroke.model.published.fp8 import block_sizes
from twostroke.model.published.patterns import Budget, Pattern, listed, pattern
from twostroke.model.published.scaled import Scaled
from twostroke.model.published.storage import (
    FLOATS,
    Storage,
    StorageOf,
    Stored,
    StoredMatrix,
    checked_group,
    eight_bit_codes,
    four_bit_codes,
    integer_scheme,
    integer_values,
    n_groups,
)

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.kernels.codes import Codes

MIXED_FORMAT = "mixed-precision"
"""Each group of layers names its own format."""

PACKED, SCALE, ZERO, SHAPE, GROUP_OF_INPUT = (f".weight_{name}" for name in ("packed", "scale", "zero_point", "shape", "g_idx"))
"""Suffixes of the tensors of a matrix, below the layer."""

_BROKEN_GROUPS = -1
"""What ``weight_g_idx`` holds in every place where inputs keep their order."""


@dataclass(frozen=True)
class PackedIntegers(Storage):
    """``weight_packed`` (n, k·bits/32) packs codes along the inputs in 32-bit words, offset by half their range;
    ``weight_scale`` is (n, groups), ``weight_zero_point`` packed along the outputs. ``scattered``: ``weight_g_idx`` puts inputs
    in groups."""

    together: ClassVar[bool] = True

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    scattered: bool = False

    @property
    def label(self) -> str:
        by = "one scale an output" if self.group == -1 else f"groups of {self.group}"
        order = ", inputs grouped by importance" if self.scattered else ""
        return f"{self.bits} bits packed, {by}{'' if self.symmetric else ' with zero points'}{order}"

    @property
    def timed_as(self) -> str:
        return f"packed {self.bits} bits"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        per_word, count = 32 // self.bits, n_groups(self.group, k)
        zeros = () if self.symmetric else (Stored(ZERO, ((-(-n // per_word), count),), ("I32",)),)
        return (
            Stored(PACKED, ((n, -(-k // per_word)),), ("I32",)),
            Stored(SCALE, ((n, count),), FLOATS),
            *zeros,
            Stored(SHAPE, ((2,),), ("I64", "I32"), optional=True, shared=True),
            Stored(GROUP_OF_INPUT, ((k,),), ("I32", "I64"), optional=not self.scattered, shared=True),
        )

    def scheme(self, k: int) -> str | None:
        if self.scattered and n_groups(self.group, k) > 1:
            return None
        return integer_scheme(self.bits, self.group, k, self.symmetric)

    def read(self, matrix: StoredMatrix) -> Codes | Tensor:
        import torch

        from twostroke.kernels.words import unpack_words

        n, k, count = matrix.n, matrix.k, n_groups(self.group, matrix.k)
        if SHAPE in matrix and matrix[SHAPE].tolist() != [matrix.rows, k]:
            raise matrix.error(f"'weight_shape' must be {matrix.rows} × {k}")
        codes, scales = unpack_words(matrix[PACKED], k, self.bits), matrix.scales(SCALE)
        if self.symmetric:
            zeros = torch.full((n, count), 1 << (self.bits - 1), dtype=torch.uint8)
        else:
            words = matrix[ZERO]
            zeros = unpack_words(words.t(), len(words) * (32 // self.bits), self.bits).t()
            zeros = zeros.unflatten(0, (matrix.copies, -1))[:, : matrix.rows].flatten(0, 1)
        in_order = torch.arange(k) // (k if count == 1 else self.group)
        given = GROUP_OF_INPUT in matrix and not bool((matrix[GROUP_OF_INPUT] == _BROKEN_GROUPS).all())
        group_of_input = matrix.groups(GROUP_OF_INPUT, count) if given else in_order
        if self.scheme(k) is None:
            return integer_values(codes, scales, zeros, group_of_input)
        if not torch.equal(group_of_input, in_order):
            raise matrix.error("'weight_g_idx' must put inputs in groups in their order, because actorder is not 'group',")
        if self.bits == 4:
            return four_bit_codes(codes, scales, zeros, self.group)
        return eight_bit_codes(codes, matrix.scales(SCALE, positive=True))


def storage_of(quantised: dict[str, Any]) -> StorageOf:
    """``quantization_config`` with ``quant_method`` "compressed-tensors"."""
    status = quantised.get("quantization_status")
    if status not in (None, "compressed"):
        raise ConfigError(f"quantization_config with quantization_status={status!r:.100} is not supported. Use compressed.")
    for key in ("transform_config", "sparsity_config"):
        if Reader(quantised).object(key).get("format") != "dense" and Reader(quantised).object(key):
            raise ConfigError(f"quantization_config with {key} is not supported. Use weights without it.")
    groups, budget = [], Budget()
    for name, group in Reader(quantised).object("config_groups").items():
        if not isinstance(group, dict):
            raise ConfigError(f"config.json: quantization_config config_groups {name!r:.100} must be an object.")
        if Reader(group).object("weights"):
            own = group.get("format") or quantised.get("format")
            groups.append((_matching(listed(group, "targets"), budget), _storage(Reader(group).object("weights"), own)))
    if not groups:
        raise ConfigError("config.json: quantization_config config_groups must have weights in one group at least.")
    left_out = _matching(listed(quantised, "ignore"), budget)

    def of(module: str) -> Storage | None:
        if left_out(module):
            return None
        # A layer's own name goes before its class, as compressed-tensors decides.
        fitting = [(names, storage) for names, storage in groups if names(module)]
        if not fitting:
            fitting = [(names, storage) for names, storage in groups if names("Linear")]
        return fitting[0][1] if fitting else None

    return of


def _matching(names: Iterable[str], budget: Budget) -> Pattern:
    """Whether a name is among ``names`` or begins as one of those that are patterns ("re:")."""
    exact = frozenset(name for name in names if not name.startswith("re:"))
    patterns = tuple(pattern(name.removeprefix("re:"), budget) for name in names if name.startswith("re:"))
    return lambda name: name in exact or any(fits(name) for fits in patterns)


def _storage(weights: dict[str, Any], format: Any) -> Storage:
    """How the matrices of one group are stored. Raises ConfigError naming what about it is not supported."""
    read = Reader(weights)
    bits, numbers, symmetric = read.integer("num_bits", 8), weights.get("type") or "int", read.flag("symmetric", True)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    group = checked_group(read.integer("group_size", -1)) if strategy in ("group", "tensor_group") else -1
    scattered = weights.get("actorder") in ("group", True)
    found: Storage | None = None
    if format == "pack-quantized" and numbers == "int" and bits in (4, 8) and strategy in ("channel", "group"):
        found = PackedIntegers(bits, group, symmetric, scattered)
    elif format in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8:
        zeros = numbers == "int" and not symmetric
        element: Any = {"int": "int8", "float": "fp8"}.get(str(numbers))
        by: Any = strategy
        if element and strategy in ("tensor", "channel"):
            found = Scaled(element, by, zero_points=zeros)
        elif element and strategy == "group" and not scattered:
            found = Scaled(element, "block", (1, group), zeros)
        elif element and strategy == "block":
            found = Scaled(element, "block", block_sizes(weights.get("block_structure"), "block_structure"), zeros)
    elif format == "nvfp4-pack-quantized" and (numbers, bits, group) == ("float", 4, NV_GROUP):
        found = Nvfp4()
    elif format == "mxfp4-pack-quantized" and (numbers, bits, group) == ("float", 4, MX_GROUP):
        found = Mxfp4(blocks=False)
    if found is None:
        share = f"{strategy!r:.50}" if group == -1 else f"{strategy!r:.50} of {group}"
        raise ConfigError(
            f"quantization_config in compressed-tensors' format {format!r:.100} with {bits}-bit {numbers!r:.50} weights by "
            f"{share} is not supported. docs/published.md lists what is."
        )
    return found


METHOD = OURS
EXAMPLES = (
    PackedIntegers(4, 128), PackedIntegers(4, 128, False), PackedIntegers(4, -1), PackedIntegers(4, 128, True, True),
    PackedIntegers(8, -1), PackedIntegers(8, 128), Scaled("int8", "channel"), Scaled("int8", "tensor"),
    Scaled("int8", "channel", zero_points=True), Scaled("int8", "block", (1, 128)), Scaled("fp8", "channel"),
    Scaled("fp8", "tensor"), Scaled("fp8", "block", (128, 128)), Nvfp4(), Mxfp4(blocks=False),
)  # fmt: skip
