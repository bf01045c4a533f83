"""Low-rank adapters (LoRA) beside a decoder's frozen matrices, which may be in NF4 (QLoRA).

Adapters have the names of the family's own modules (``q_proj``), although query, key and value are one matrix here. An adapter
of ``q_proj`` adds only to the query's rows of the packed product.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.errors import ConfigError, did_you_mean
from twostroke.core.families import layout
from twostroke.core.matrices import ALL_LINEAR
from twostroke.core.policy import NF4_BLOCK
from twostroke.core.spec import ModelSpec
from twostroke.kernels.dropout import dropout
from twostroke.kernels.nf4 import Nf4Matrix, dequantize_nf4, nf4_linear, quantize_nf4
from twostroke.model.families import stored_order

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Target:
    """One matrix on disk that can have an adapter: ``rows`` rows of the canonical ``module``'s weight, from row ``begin``."""

    module: str  # blocks.0.attn.qkv
    stored: str  # model.layers.0.self_attn.q_proj
    begin: int
    rows: int
    columns: int
    transposed: bool  # on disk, as GPT-2's Conv1D
    by_group: tuple[int, int] | None = None  # on disk, as ``core.families.weights.Entry`` says

    @property
    def name(self) -> str:
        """The last part of the stored name: ``q_proj``."""
        return self.stored.rpartition(".")[2]

    def matches(self, target: str) -> bool:
        """Whether ``target`` is the whole stored name, or its end after a dot, as PEFT matches names."""
        return target == ALL_LINEAR or self.stored == target or self.stored.endswith(f".{target}")


def all_targets(spec: ModelSpec) -> Iterator[Target]:
    """Every matrix inside the blocks of a model of ``spec``, experts left out, in the order of its layout."""
    for entry in layout(spec):
        if entry.matrix is None or entry.matrix.copies > 1:
            continue
        begin = 0
        for part in entry.parts:
            module, stored = (name.removesuffix(".weight") for name in (entry.canonical, part.name))
            yield Target(module, stored, begin, part.rows, entry.shape[1], entry.transposed, entry.by_group)
            begin += part.rows


def choose_targets(spec: ModelSpec, targets: Sequence[str]) -> list[Target]:
    """The matrices that ``targets`` name. Raises ConfigError for an unknown name, with the most similar one."""
    every = list(all_targets(spec))
    for target in targets:
        if not any(found.matches(target) for found in every):
            names = {found.name for found in every} | {ALL_LINEAR}
            raise ConfigError(f"lora.targets: a {spec.family} model has no matrix {target!r}. {did_you_mean(target, names)}")
    return [found for found in every if any(found.matches(target) for target in targets)]


class LowRank(nn.Module):
    """``scale`` · B·A·dropout(x) with A of ``rank`` rows and B of ``rows`` rows. B is 0 at first, so training begins with the
    base.

    Hu et al. 2021 (arXiv:2106.09685), section 4.1.
    """

    def __init__(self, columns: int, rows: int, rank: int, scale: float, dropout: float, device: torch.device) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(rank, columns, device=device))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=device))
        self.scale, self.dropout = scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(dropout(x, self.dropout, self.training), self.a), self.b) * self.scale


class Nf4Linear(nn.Module):
    """A frozen matrix in NF4 with its bias."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, block: int, double: bool) -> None:
        super().__init__()
        matrix = quantize_nf4(weight, block, double)
        self._shape, self._block = matrix.shape, matrix.block
        for name, tensor in matrix.tensors.items():
            self.register_buffer(name, tensor)
        self._double = double
        self.register_parameter("bias", bias)

    @property
    def matrix(self) -> Nf4Matrix:
        second = (self.get_buffer("scale_scales"), self.get_buffer("scale_offset")) if self._double else (None, None)
        return Nf4Matrix(self._shape, self._block, self.get_buffer("codes"), self.get_buffer("scales"), *second)

    def forward(self, x: Tensor) -> Tensor:
        product = nf4_linear(x, self.matrix)
        bias = self._parameters["bias"]
        return product if bias is None else product + bias


class AdaptedLinear(nn.Module):
    """A frozen ``base`` product of packed rows, with adapters for some of its parts.

    One product for the A of all parts was tried. It reads x once and gains nothing (3 × 384, rank 16, bf16, CPU time of a step:
    168 ms apart and 165 together, compiled 105 and 108), and each part could no longer have a dropout mask of its own.
    """

    def __init__(self, base: nn.Module, rows: Sequence[int], names: Sequence[str | None], adapters: dict[str, LowRank]) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict(adapters)
        self._rows, self._names = tuple(rows), tuple(names)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        pieces = [
            piece if name is None else piece + self.adapters[name](x)
            for piece, name in zip(y.split(self._rows, dim=-1), self._names, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of a decoder's adapters, from ``core.recipe.LoraRecipe``. ``nf4`` says whether the blocks' matrices are in
    NF4."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    nf4: bool = False
    nf4_block: int = NF4_BLOCK
    double_quantization: bool = True

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@torch.no_grad()
def attach_adapters(decoder: nn.Module, spec: ModelSpec, settings: AdapterSettings, seed: int) -> None:
    """Freeze ``decoder`` and put new fp32 adapters beside the matrices that ``settings.targets`` name, in place.

    A is uniform within ±1/√columns, as in PEFT, from a generator seeded by (seed, name), and B is 0. Raises ConfigError for an
    unknown target.
    """
    if settings.nf4 and spec.moe is not None:
        raise ConfigError('method="qlora" would leave experts in 16 bits. Use method="lora".')
    chosen = {target.stored for target in choose_targets(spec, settings.targets)}
    decoder.requires_grad_(False)
    by_module: dict[str, list[Target]] = {}
    for target in all_targets(spec):
        by_module.setdefault(target.module, []).append(target)
    for module, parts in by_module.items():
        base = decoder.get_submodule(module)
        device = next(iter((*base.parameters(), *base.buffers()))).device
        adapters = {part.name: _fresh(part, settings, seed, device) for part in parts if part.stored in chosen}
        if adapters:
            names = [part.name if part.stored in chosen else None for part in parts]
            decoder.set_submodule(module, AdaptedLinear(base, [part.rows for part in parts], names, adapters))


def _fresh(target: Target, settings: AdapterSettings, seed: int, device: torch.device) -> LowRank:
    adapter = LowRank(target.columns, target.rows, settings.rank, settings.scale, settings.dropout, device)
    digest = hashlib.sha256(f"{seed}:{target.stored}.lora_A".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = 1 / math.sqrt(target.columns)
    adapter.a.copy_(torch.empty(adapter.a.shape).uniform_(-bound, bound, generator=generator))
    return adapter


def peft_names(spec: ModelSpec) -> dict[str, str]:
    """PEFT's name of each possible adapter matrix, by the decoder's parameter name."""
    names = {}
    for target in all_targets(spec):
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            names[f"{target.module}.adapters.{target.name}.{ours}"] = f"{PEFT_PREFIX}{target.stored}.{theirs}.weight"
    return names


def peft_weights(spec: ModelSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters by PEFT's names, their rows in the order of the stored matrices."""
    names, groups = peft_names(spec), {f"{t.module}.adapters.{t.name}.b": t.by_group for t in all_targets(spec)}
    return {names[name]: stored_order(groups.get(name), weight) for name, weight in weights.items()}


def nf4_round_trip(weight: Tensor, block: int, double: bool) -> Tensor:
    """``weight`` rounded to NF4, in fp32."""
    return dequantize_nf4(quantize_nf4(weight, block, double))
