"""AWQ as AutoAWQ writes it, in the order of its GEMM kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.reader import Reader
from twostroke.model.published.patterns import listed, named
from twostroke.model.published.storage import (
    FLOATS,
    Storage,
    StorageOf,
    Stored,
    StoredMatrix,
    checked_group,
    four_bit_codes,
    integer_scheme,
    integer_values,
    n_groups,
)

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.kernels.codes import Codes

PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word, counted from its lowest four bits, each of eight outputs lies."""


@dataclass(frozen=True)
class Awq(Storage):
    """``qweight`` (k, n/8) and ``qzeros`` (groups, n/8) pack eight outputs in a 32-bit word, the even ones first; ``scales``
    are (groups, n)."""

    group: int = 128

    @property
    def label(self) -> str:
        by = "one scale an output" if self.group == -1 else f"groups of {self.group}"
        return f"4 bits, {by} with zero points"

    @property
    def timed_as(self) -> str:
        return "AWQ"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        count = n_groups(self.group, k)
        return (
            Stored(".qweight", ((k, -(-n // 8)),), ("I32",)),
            Stored(".qzeros", ((count, -(-n // 8)),), ("I32",)),
            Stored(".scales", ((count, n),), FLOATS),
        )

    def scheme(self, k: int) -> str | None:
        return integer_scheme(4, self.group, k, symmetric=False)

    def read(self, matrix: StoredMatrix) -> Codes | Tensor:
        import torch

        from twostroke.kernels.words import unpack_words

        n, k = matrix.n, matrix.k

        def outputs(words: Tensor) -> Tensor:
            codes = unpack_words(words, 8 * words.shape[1]).view(len(words), -1, 8)
            return codes[:, :, list(PLACE_OF_OUTPUT)].flatten(1)[:, :n].t().contiguous()

        codes, zeros, scales = outputs(matrix[".qweight"]), outputs(matrix[".qzeros"]), matrix.scales(".scales").t()
        if self.scheme(k) is None:
            return integer_values(codes, scales, zeros, torch.arange(k) // self.group)
        return four_bit_codes(codes, scales, zeros, self.group)


def storage_of(quantised: dict[str, Any]) -> StorageOf:
    """``quantization_config`` with ``quant_method`` "awq"."""
    read, version = Reader(quantised), str(quantised.get("version") or "gemm").lower()
    bits = read.first_integer("bits", "w_bit", default=4)
    if bits != 4:
        raise ConfigError(f"quantization_config of method 'awq' with bits={bits} is not supported. Supported: 4.")
    if version != "gemm":
        raise ConfigError(f"quantization_config of method 'awq' with version={version!r:.100} is not supported. Use gemm.")
    storage = Awq(checked_group(read.first_integer("group_size", "q_group_size", default=128)))
    left_out = named((*listed(quantised, "modules_to_not_convert"), "lm_head"))
    return lambda module: None if left_out(module) else storage


METHOD = "awq"
EXAMPLES = (Awq(128), Awq(64), Awq(32), Awq(-1), Awq(16))
