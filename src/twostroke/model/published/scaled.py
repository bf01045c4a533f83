"""Weights in one byte each, int8 or E4M3, beside their scales: what several methods store alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from twostroke.model.published.storage import FLOATS, Storage, Stored, StoredMatrix, n_groups

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.kernels.codes import Codes

_TAGS = {"int8": "I8", "fp8": "F8_E4M3"}
_IN_WORDS = {"tensor": "one scale", "channel": "one scale an output"}


@dataclass(frozen=True)
class Scaled(Storage):
    """``weight`` (n, k) and a scale for the tensor, an output, ``block`` outputs × inputs, or a group of inputs (a block of one
    output), under the suffix ``scale``. ``zero_points``: codes are less those."""

    together: ClassVar[bool] = True

    element: Literal["int8", "fp8"]
    by: Literal["tensor", "channel", "block"] = "channel"
    block: tuple[int, int] = (1, 1)
    zero_points: bool = False
    scale: str = ".weight_scale"

    @property
    def label(self) -> str:
        rows, columns = self.block
        blocks = f"groups of {columns}" if rows == 1 else f"blocks of {rows} × {columns}"
        name = "E4M3" if self.element == "fp8" else self.element
        return f"{name}, {_IN_WORDS.get(self.by, blocks)}{' with zero points' if self.zero_points else ''}"

    @property
    def timed_as(self) -> str:
        return f"{self.element}{' in blocks' if self.by == 'block' else ''}"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        shapes: tuple[tuple[int, ...], ...]
        if self.by == "tensor":
            shapes = ((1,), (), (1, 1))
        elif self.by == "channel":
            shapes = ((n, 1), (n,))
        else:
            shapes = ((math.ceil(n / self.block[0]), n_groups(self.block[1], k)),)
        found = (
            Stored(".weight", ((n, k),), (_TAGS[self.element],), oriented=True),
            Stored(self.scale, shapes, FLOATS, shared=self.by == "tensor"),
        )
        zeros = Stored(".weight_zero_point", shapes, ("I8",), shared=self.by == "tensor")
        return (*found, zeros) if self.zero_points else found

    def scheme(self, k: int) -> str | None:
        if self.by == "block" or self.zero_points:
            return None
        return "int8" if self.element == "int8" else "fp8-channel"

    def read(self, matrix: StoredMatrix) -> Codes | Tensor:
        from twostroke.kernels.codes import Codes

        codes = matrix.oriented(".weight")
        if self.scheme(matrix.k) is not None:
            scales = matrix.scales(self.scale, positive=True).flatten()
            return Codes(codes.contiguous(), scales.expand(matrix.n).contiguous())
        values = codes.float()
        if self.zero_points:
            values -= self._spread(matrix[".weight_zero_point"].float(), matrix)
        return values.mul_(self._spread(matrix.scales(self.scale), matrix))

    def _spread(self, numbers: Tensor, matrix: StoredMatrix) -> Tensor:
        """A number for each weight."""
        if self.by != "block":
            return numbers.reshape(-1, 1)
        (rows, columns), k = self.block, matrix.k
        wide = numbers.repeat_interleave(k if columns == -1 else columns, dim=1)[:, :k]
        tall = wide.unflatten(0, (matrix.copies, -1)).repeat_interleave(rows, dim=1)
        return tall[:, : matrix.rows].flatten(0, 1)
