"""Matrices in the blocks of GGUF's types, as ``twostroke import`` keeps them: the file's bytes, a row of blocks an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from twostroke.core.errors import ConfigError
from twostroke.core.families.quantised import GGUF
from twostroke.core.families.reader import Reader
from twostroke.model.published.gguf_blocks import BLOCKS
from twostroke.model.published.patterns import listed
from twostroke.model.published.storage import Storage, StorageOf, Stored, StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.kernels.codes import Codes

ROWS = ".qweight"
"""Suffix of the tensor of a matrix, below the layer."""


@dataclass(frozen=True)
class GgufRows(Storage):
    """``qweight`` (n, bytes of a row) holds the blocks of each output."""

    together: ClassVar[bool] = True

    kind: str

    @property
    def label(self) -> str:
        return f"GGUF's {self.kind}"

    @property
    def timed_as(self) -> str:
        return f"rows of {self.kind}"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        block = BLOCKS[self.kind]
        return (Stored(ROWS, ((n, -(-k // block.n_values) * block.n_bytes),), ("U8",)),)

    def scheme(self, k: int) -> str | None:
        return BLOCKS[self.kind].scheme

    def read(self, matrix: StoredMatrix) -> Codes | Tensor:
        from twostroke.model.published.gguf_types import TYPES, codes_of, dequantise, halves_are_finite

        block, kind = BLOCKS[self.kind], TYPES[self.kind]
        if matrix.k % block.n_values:
            raise matrix.error(f"inputs must be whole blocks of {block.n_values}")
        raw = matrix[ROWS].contiguous().numpy().reshape(-1)
        if not halves_are_finite(kind, raw):
            raise matrix.error("scales must be finite")
        if block.scheme is None:
            return dequantise(kind, raw).view(matrix.n, matrix.k)
        return codes_of(kind, raw, matrix.n)


def storage_of(quantised: dict[str, Any]) -> StorageOf:
    """``quantization_config`` with ``quant_method`` "gguf": ``types`` names the layers of each type, all others are plain."""
    types = Reader(quantised).object("types")
    found: dict[str, Storage] = {}
    for kind in types:
        if kind not in BLOCKS:
            raise ConfigError(
                f"quantization_config of method 'gguf' with type {kind!r:.50} is not read. Read: {', '.join(BLOCKS)}."
            )
        for module in listed(types, kind):
            if module in found:
                raise ConfigError(f"quantization_config of method 'gguf' names {module!r:.100} twice.")
            found[module] = GgufRows(kind)
    return found.get


@dataclass(frozen=True)
class KeptRows:
    """Matrices that are stored as the blocks that their source holds: of each by the name of its plain weight the type, the
    shape of its bytes, and, from ``read``, these."""

    kinds: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], memoryview | Tensor]

    @property
    def config(self) -> dict[str, Any]:
        return config_of({name.removesuffix(".weight"): kind for name, kind in self.kinds.items()})


def config_of(kinds: dict[str, str]) -> dict[str, Any]:
    """The ``quantization_config`` of layers, each with its type."""
    types: dict[str, list[str]] = {}
    for module, kind in kinds.items():
        types.setdefault(kind, []).append(module)
    return {"quant_method": GGUF, "types": types}


METHOD = GGUF
EXAMPLES = tuple(map(GgufRows, BLOCKS))
