"""Weights in E2M1, two to a byte, beside scales for groups of inputs: NVFP4 and MXFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from twostroke.model.published.storage import Storage, Stored, StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0…7 (OCP Microscaling 1.0, table 5); codes 8…15 are the same below 0."""

E8M0_BIAS, E8M0_NAN = 127, 255
MX_GROUP, NV_GROUP = 32, 16


def e2m1_values(packed: Tensor) -> Tensor:
    """(…, bytes) → (…, 2·bytes) numbers in fp32; a byte's low half is the first."""
    import torch

    from twostroke.kernels.words import unpack_bytes

    return torch.tensor((*E2M1, *(-value for value in E2M1)))[unpack_bytes(packed).int()]


def e8m0_values(exponents: Tensor) -> Tensor:
    """2^(code − 127); NaN for 255."""
    import torch

    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - E8M0_BIAS)
    return scales.masked_fill_(exponents == E8M0_NAN, torch.nan)


def mxfp4_values(blocks: Tensor, exponents: Tensor) -> Tensor:
    """(…, groups, 16) bytes and (…, groups) exponents → (…, 32·groups) numbers in fp32, as gpt-oss stores its experts."""
    return (e2m1_values(blocks) * e8m0_values(exponents)[..., None]).flatten(-2)


@dataclass(frozen=True)
class Mxfp4(Storage):
    """Blocks of 32 inputs with an exponent of 8 bits. ``blocks``: as gpt-oss, ``…_blocks`` (n, k/32, 16) and ``…_scales``
    (n, k/32); else as compressed-tensors, ``weight_packed`` (n, k/2) and ``weight_scale`` (n, k/32)."""

    together: ClassVar[bool] = True

    blocks: bool = True

    @property
    def label(self) -> str:
        return f"E2M1, groups of {MX_GROUP} with an exponent of 8 bits"

    @property
    def timed_as(self) -> str:
        return "MXFP4"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        count = -(-k // MX_GROUP)
        names, shape = self._names, (n, count, MX_GROUP // 2) if self.blocks else (n, count * MX_GROUP // 2)
        return (Stored(names[0], (shape,), ("U8",)), Stored(names[1], ((n, count),), ("U8",)))

    @property
    def _names(self) -> tuple[str, str]:
        return ("_blocks", "_scales") if self.blocks else (".weight_packed", ".weight_scale")

    def scheme(self, k: int) -> str | None:
        return None

    def read(self, matrix: StoredMatrix) -> Tensor:
        packed, exponents = (matrix[name] for name in self._names)
        if bool((exponents == E8M0_NAN).any()):
            raise matrix.error(f"scales {self._names[1].lstrip('._')!r} must be finite")
        return mxfp4_values(packed.view(matrix.n, -1, MX_GROUP // 2), exponents)[:, : matrix.k]


@dataclass(frozen=True)
class Nvfp4(Storage):
    """``weight_packed`` (n, k/2), ``weight_scale`` (n, k/16) in E4M3 for groups of 16 inputs, and ``weight_global_scale``, by
    which those were multiplied."""

    @property
    def label(self) -> str:
        return f"E2M1, groups of {NV_GROUP} with a scale in E4M3, and one of the tensor"

    @property
    def timed_as(self) -> str:
        return "NVFP4"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        count = -(-k // NV_GROUP)
        return (
            Stored(".weight_packed", ((n, count * NV_GROUP // 2),), ("U8",)),
            Stored(".weight_scale", ((n, count),), ("F8_E4M3",)),
            Stored(".weight_global_scale", ((1,), ()), ("F32",)),
        )

    def scheme(self, k: int) -> str | None:
        return None

    def read(self, matrix: StoredMatrix) -> Tensor:
        scales = matrix.scales(".weight_scale") / matrix.scales(".weight_global_scale", positive=True)
        values = e2m1_values(matrix[".weight_packed"]).unflatten(1, (-1, NV_GROUP))
        return values.mul_(scales[..., None]).flatten(1)[:, : matrix.k]
