"""A stored matrix: which tensors hold it, and what they stand for. Methods differ in nothing else."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.schemes import GROUPS

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.kernels.codes import Codes

FLOATS = ("F32", "BF16", "F16")
"""safetensors' tags of plain numbers."""

MAX_GROUP = 2**20
"""Inputs that may share a scale: more than any matrix has."""


class Stored(NamedTuple):
    """One tensor of a stored matrix, named by what follows the layer's name. ``shapes`` are those that may be; ``tags`` are
    safetensors' types. ``oriented``: it lies as the family stores plain weights, transposed where those are. ``shared``: it is
    one for all matrices that are stored together."""

    suffix: str
    shapes: tuple[tuple[int, ...], ...]
    tags: tuple[str, ...]
    optional: bool = False
    oriented: bool = False
    shared: bool = False


class Storage(ABC):
    """A way to store a matrix of ``n`` outputs and ``k`` inputs."""

    together: ClassVar[bool] = False
    """Whether the matrices of all experts may be stored as one."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What it is, in words."""

    @property
    @abstractmethod
    def timed_as(self) -> str:
        """What calibration calls the decoding of it. Sizes of groups, which change its time little, are not in it."""

    @abstractmethod
    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        """Every tensor of a matrix; those of several that are stored together have one more dimension in front."""

    @abstractmethod
    def scheme(self, k: int) -> str | None:
        """Our scheme that holds its codes as they are; None: it is turned into plain numbers."""

    @abstractmethod
    def read(self, matrix: StoredMatrix) -> Codes | Tensor:
        """The codes of ``scheme``, or (n, k) numbers in fp32. Raises CorruptFileError for tensors that stand for no matrix."""


StorageOf = Callable[[str], Storage | None]
"""How a linear layer, by its name on disk, is stored; None: as plain numbers. Raises ConfigError."""


class Tensors(Protocol):
    """Tensors by name, of files in ``directory``."""

    directory: Path

    def get(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class StoredMatrix:
    """The tensors of the matrix ``module`` of ``n`` outputs and ``k`` inputs, by suffix. ``names`` are those that the
    checkpoint has. ``copies``: the outputs of so many matrices, which tensors hold apart along their first dimension."""

    files: Tensors
    module: str
    n: int
    k: int
    names: dict[str, str]
    transposed: bool = False
    copies: int = 1

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.names

    def __getitem__(self, suffix: str) -> Tensor:
        tensor = self.files.get(self.names[suffix])
        return tensor if self.copies == 1 or tensor.dim() < 2 else tensor.flatten(0, 1)

    def oriented(self, suffix: str) -> Tensor:
        """A tensor that lies as plain weights do, as (outputs, inputs)."""
        tensor = self.files.get(self.names[suffix])
        tensor = tensor.mT if self.transposed else tensor
        return tensor if self.copies == 1 else tensor.flatten(0, 1)

    def scales(self, suffix: str, positive: bool = False) -> Tensor:
        """Scales in fp32. Raises CorruptFileError where one is not finite, or with ``positive`` not above 0."""
        scales = self[suffix].float()
        if not bool(scales.isfinite().all()) or (positive and not bool((scales > 0).all())):
            raise self.error(f"scales {suffix.lstrip('._')!r} must be {'positive and ' if positive else ''}finite")
        return scales

    def groups(self, suffix: str, n_groups: int) -> Tensor:
        """The group of each input. Raises CorruptFileError for one that there is not."""
        groups = self[suffix].long()
        if not bool(((groups >= 0) & (groups < n_groups)).all()):
            raise self.error(f"{suffix.lstrip('._')!r} must be groups from 0 to {n_groups - 1}")
        return groups

    @property
    def rows(self) -> int:
        """Outputs of one matrix."""
        return self.n // self.copies

    def error(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self.files.directory}: {what} in {self.module!r}.")


def checked_group(group: int) -> int:
    """``group`` inputs that share a scale, −1 for all of them. Raises ConfigError for another number."""
    if group != -1 and not 0 < group <= MAX_GROUP:
        raise ConfigError(f"config.json: quantization_config group_size={group} must be -1 or from 1 to {MAX_GROUP}.")
    return group


def n_groups(group: int, k: int) -> int:
    """Groups of ``k`` inputs; −1 is one of all."""
    return 1 if group == -1 else math.ceil(k / group)


def integer_scheme(bits: int, group: int, k: int, symmetric: bool) -> str | None:
    """Our scheme of codes with a scale for ``group`` inputs: groups of ours, or larger ones that ours divide evenly. None where
    there is none: 8 bits are held by channel and without zero points."""
    if bits == 4:
        ours = _our_group(group)
        return None if ours is None else f"int4-g{ours}"
    return "int8" if symmetric and n_groups(group, k) == 1 else None


def _our_group(group: int) -> int | None:
    """The largest of our groups that ``group`` inputs divide into; None if they divide into no group of ours."""
    return max((ours for ours in GROUPS if group == -1 or group % ours == 0), default=None)


def four_bit_codes(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Codes:
    """Codes (n, k) 0…15 with scales and zero points (n, groups) as ``integer_scheme`` names them, the numbers unchanged.

    A scale below 0, as AutoRound writes some, changes its sign with code → 15 − code; one of 0 stands for numbers of 0.
    """
    import torch

    from twostroke.kernels.codes import Codes
    from twostroke.kernels.int4 import LARGEST_CODE

    k, ours = codes.shape[1], _our_group(group)
    assert ours is not None
    span = k if group == -1 else group
    if bool((scales <= 0).any()):
        flipped, gone = (by.repeat_interleave(span, dim=1)[:, :k] for by in (scales < 0, scales == 0))
        codes = torch.where(flipped, LARGEST_CODE - codes, codes)
        zeros = torch.where(scales < 0, LARGEST_CODE - zeros, zeros)
        codes = torch.where(gone, zeros.repeat_interleave(span, dim=1)[:, :k], codes)
        scales = torch.where(scales == 0, 1.0, scales.abs())
    if span != ours:
        count = math.ceil(k / ours)
        scales, zeros = (by.repeat_interleave(math.ceil(span / ours), dim=1)[:, :count] for by in (scales, zeros))
    return Codes(codes, scales.contiguous(), zeros.to(torch.uint8).contiguous())


def integer_values(codes: Tensor, scales: Tensor, zeros: Tensor, group_of_input: Tensor) -> Tensor:
    """(code − zero)·scale of each input's group, fp32, with the inputs where they are."""
    return (codes.float() - zeros.float()[:, group_of_input]).mul_(scales[:, group_of_input])


def eight_bit_codes(codes: Tensor, scales: Tensor) -> Codes:
    """Codes 0…255 around 128 with one scale an output, as int8 holds them."""
    import torch

    from twostroke.kernels.codes import Codes

    return Codes((codes ^ 128).view(torch.int8), scales.flatten())
