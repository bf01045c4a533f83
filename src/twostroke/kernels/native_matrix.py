"""Weight matrices packed for the native library, callable like every other ``Matrix``."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.schemes import NATIVE_FORMATS
from twostroke.kernels.codes import CODE_TYPES
from twostroke.kernels.group_scales import eight_bit_groups
from twostroke.kernels.int4 import quantize_groups
from twostroke.kernels.native_library import library, mirror

if TYPE_CHECKING:
    from jaxtyping import Float, Int8, UInt8

FORMATS = {name: number for number, name in enumerate(NATIVE_FORMATS)}
"""Our names, with the library's numbers."""

PANEL_OUTPUTS = 16
"""``ts::layout::kPanelOutputs``: outputs that a packed matrix holds together."""

BLOCK_WEIGHTS = 2**20
"""Weights that are quantised at a time."""


@mirror("Matrix")
class CMatrix(ctypes.Structure):
    """``ts::Matrix``."""

    _fields_ = [
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


@mirror("Rows")
class CRows(ctypes.Structure):
    """``ts::Rows``."""

    _fields_ = [("m", ctypes.c_int64)] + [(name, ctypes.c_void_p) for name in ("f32", "bf16", "codes", "scales", "sums")]


def _loaded() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise ConfigError("the native library was not built, so there are no native matrices. Use runner='torch'.")
    return loaded


class NativeMatrix:
    """``weight`` (N, K) packed once in ``format``; one copy serves one row and thousands.

    ``weight`` may be codes already: int8 with their ``scale`` (N), for the two int8 formats, or uint8 0…15 with ``scale`` and
    ``zero`` (N, groups), for int4; int8 with ``scale`` (N, groups), for int8_groups; and what ``kernels.group_scales`` says of
    int4_blocks. The call is the library's product on fp32 rows, which is what the torch interpreter of a
    native plan runs. Raises ConfigError for codes of another format.
    """

    def __init__(
        self,
        weight: Float[Tensor, "N K"] | Int8[Tensor, "N K"] | UInt8[Tensor, "N K"],
        format: str,
        bias: Float[Tensor, " N"] | None = None,
        scale: Tensor | None = None,
        zero: UInt8[Tensor, "N groups"] | None = None,
        group: int = 64,
    ) -> None:
        held = NATIVE_FORMATS[format]
        if held.grouped and group not in held.groups:
            raise ConfigError(f"group={group} must be one of {', '.join(map(str, held.groups))}.")
        given = not weight.is_floating_point()
        if given and (weight.dtype is not CODE_TYPES.get(held.element) or scale is None):
            raise ConfigError(
                f"a matrix of {weight.dtype} codes cannot be packed as {format}. Start from the unquantised model."
            )
        n, k = weight.shape
        self._allocate(format, group if held.grouped else 0, n, k, bias)
        plain = weight
        if not given and format == "int8_groups":
            plain, scale = _in_row_blocks(partial(eight_bit_groups, group=group), weight)
        elif not given and held.grouped:
            # A search for the best range takes six times as long.
            plain, scale, zero = _in_row_blocks(partial(quantize_groups, group=group, searched=False), weight)
        elif not given and held.coded:
            plain, scale = native_columns(weight)
        elif not given:
            plain = weight.to(getattr(torch, TORCH_NAMES[held.element]))
        plain = plain.contiguous()
        scale = None if scale is None else scale.float().contiguous()
        zero = None if zero is None else zero.contiguous()
        pointers = [None if t is None else t.data_ptr() for t in (plain, scale, zero)]
        _loaded().ts_pack(FORMATS[format], self.group, self.n_rows, self.n_columns, *pointers, self.address)

    @classmethod
    def empty(cls, format: str, group: int, n: int, k: int, bias: Float[Tensor, " N"] | None = None) -> NativeMatrix:
        """A matrix whose ``packed_bytes`` at ``address`` the caller fills, from where another of the same kind was kept."""
        made = cls.__new__(cls)
        made._allocate(format, group, n, k, bias)
        _loaded().ts_place(*made._shape[:4], made.address)
        return made

    @classmethod
    def at(
        cls, address: int, owner: object, format: str, group: int, n: int, k: int, bias: Float[Tensor, " N"] | None = None
    ) -> NativeMatrix:
        """A matrix whose bytes are at ``address``, a multiple of 64, for as long as ``owner`` lives. Nobody writes to them."""
        made = cls.__new__(cls)
        made._describe(format, group, n, k, bias)
        made._take(address, owner)
        return made

    def move(self, address: int, owner: object) -> None:
        """Take the same bytes at ``address``, as in ``at``, and free those that it had. The library has no view of them yet."""
        if isinstance(self._owner, weakref.finalize):
            self._owner()
        self._take(address, owner)

    def _take(self, address: int, owner: object) -> None:
        self.address, self._owner = address, owner

    def _describe(self, format: str, group: int, n: int, k: int, bias: Float[Tensor, " N"] | None) -> None:
        self.format, self.group, self.n_rows, self.n_columns = format, group, n, k
        self.bias = None if bias is None else bias.float().contiguous()
        self.packed_bytes: int = _loaded().ts_packed_bytes(FORMATS[format], group, n, k)
        self.n_bytes = self.held_bytes = self.packed_bytes + (0 if self.bias is None else self.bias.nbytes)

    def _allocate(self, format: str, group: int, n: int, k: int, bias: Float[Tensor, " N"] | None) -> None:
        loaded = _loaded()
        self._describe(format, group, n, k, bias)
        address: int = loaded.ts_allocate(self.packed_bytes)
        if not address:
            raise CapacityError(f"a matrix of {self.packed_bytes} bytes does not fit in memory.")
        self._take(address, weakref.finalize(self, loaded.ts_release, address))

    @property
    def c(self) -> CMatrix:
        """The library's view of it, valid while this object lives."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return CMatrix(FORMATS[self.format], self.group, self.n_rows, self.n_columns, self.address, bias)

    def __call__(self, x: Float[Tensor, "M K"], residual: Float[Tensor, "M N"] | None = None) -> Float[Tensor, "M N"]:
        m, rows = len(x), self._prepared(x)
        y = torch.empty((m, self.n_rows)) if residual is None else residual.float().clone(memory_format=torch.contiguous_format)
        pointers = [tensor.data_ptr() for tensor in rows]
        _loaded().ts_product(*self._shape, m, *pointers, y.data_ptr(), self.n_rows, residual is not None)
        return y.to(x.dtype)

    def outputs(self, x: Float[Tensor, "M K"], first: int, last: int) -> Float[Tensor, "M outputs"]:
        """Outputs [first, last) of ``self(x)``; ``first`` is a multiple of ``PANEL_OUTPUTS``."""
        m, rows = len(x), self._prepared(x)
        y = torch.empty((m, last - first))
        pointers, place = [tensor.data_ptr() for tensor in rows], y.data_ptr() - 4 * first  # of output 0
        _loaded().ts_product_range(*self._shape, m, *pointers, first, last, place, last - first, False)
        return y.to(x.dtype)

    @property
    def _shape(self) -> tuple[int | None, ...]:
        bias = None if self.bias is None else self.bias.data_ptr()
        return FORMATS[self.format], self.group, self.n_rows, self.n_columns, self.address, bias

    def _prepared(self, x: Float[Tensor, "M K"]) -> tuple[Tensor, ...]:
        """``ts::Rows`` of ``x``."""
        loaded, m, k = _loaded(), len(x), self.n_columns
        rows, width = x.float().contiguous(), loaded.ts_padded(k)
        bf16 = torch.empty((m, width), dtype=torch.int16)
        codes = torch.empty((m, width), dtype=torch.int8)
        scales = torch.empty(m)
        sums = torch.empty((m, loaded.ts_sums_per_row(k)), dtype=torch.int32)
        made = (bf16, codes, scales, sums)
        loaded.ts_prepare_rows(FORMATS[self.format], rows.data_ptr(), m, k, *(tensor.data_ptr() for tensor in made))
        return rows, *made


def native_columns(weight: Float[Tensor, "N K"]) -> tuple[Int8[Tensor, "N K"], Float[Tensor, " N"]]:
    """``kernels.matrix.quantize_columns`` by the library, to the bit: one pass that makes no fp32 copies."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    weight, (n, k) = weight.contiguous(), weight.shape
    codes, scale = torch.empty((n, k), dtype=torch.int8), torch.empty(n)
    is_bf16 = weight.dtype == torch.bfloat16
    _loaded().ts_quantize_columns(is_bf16, weight.data_ptr(), n, k, codes.data_ptr(), scale.data_ptr())
    return codes, scale


def _in_row_blocks(quantize: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> tuple[Tensor, ...]:
    """What ``quantize`` makes of ``weight``, a few rows at a time: its fp32 copies of a whole output head would take more
    memory than the packed model leaves."""
    whole: tuple[Tensor, ...] = ()
    n_rows = max(1, BLOCK_WEIGHTS // weight.shape[1])
    for start in range(0, len(weight), n_rows):
        parts = quantize(weight[start : start + n_rows])
        whole = whole or tuple(part.new_empty((len(weight), *part.shape[1:])) for part in parts)
        for all_rows, part in zip(whole, parts, strict=True):
            all_rows[start : start + n_rows] = part
    return whole


class NativeExperts:
    """The matrices of ``copies`` experts as one tall ``matrix``, an expert's outputs after another's. Each begins with a
    panel."""

    def __init__(self, matrix: NativeMatrix, copies: int) -> None:
        self.matrix, self.copies = matrix, copies
        self.n_bytes, self.held_bytes = matrix.n_bytes, matrix.held_bytes

    def of(self, expert: int) -> Callable[[Tensor], Tensor]:
        width = self.matrix.n_rows // self.copies
        return lambda x: self.matrix.outputs(x, expert * width, (expert + 1) * width)


class NativePair:
    """Gate and up as two matrices of the same input, so that threads can share out both alike; called, they are one."""

    def __init__(self, gate: NativeMatrix, up: NativeMatrix) -> None:
        self.gate, self.up = gate, up
        self.n_rows, self.n_columns = gate.n_rows + up.n_rows, gate.n_columns
        self.n_bytes, self.held_bytes = gate.n_bytes + up.n_bytes, gate.held_bytes + up.held_bytes

    def __call__(self, x: Float[Tensor, "M K"], residual: Float[Tensor, "M N"] | None = None) -> Float[Tensor, "M N"]:
        y = torch.cat((self.gate(x), self.up(x)), dim=1)
        return y if residual is None else y.add_(residual)
