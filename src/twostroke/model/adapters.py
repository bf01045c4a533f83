"""Low-rank adapters (LoRA) beside a decoder's frozen matrices, which may be in NF4 (QLoRA).

Adapters have the names of the family's own modules (``q_proj``), although query, key and value are one matrix here. An adapter
of ``q_proj`` adds only to the query's rows of the packed product. Experts have one adapter each beside a matrix, under the name
of the parameter that holds all of them in transformers 5 (``experts.gate_up_proj``): gate and up share their A.
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
from twostroke.core.families import layout, weight_names
from twostroke.core.families.weights import Entry
from twostroke.core.matrices import ALL_LINEAR
from twostroke.core.policy import NF4_BLOCK
from twostroke.core.spec import ModelSpec
from twostroke.kernels.dropout import dropout
from twostroke.kernels.grouped import grouped_linear
from twostroke.kernels.nf4 import Nf4Matrix, dequantize_nf4, grouped_nf4_linear, nf4_linear, quantize_nf4, stacked
from twostroke.model.attention import compute_dtype
from twostroke.model.families import stored_order

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Target:
    """One matrix that can have an adapter: ``rows`` rows of the canonical ``module``'s weight, from row ``begin``.

    Of ``copies`` experts it is one matrix of each, and ``stored`` the parameter of transformers 5 that holds them, in which
    gate and up may be ``interleaved``. ``parameter`` is what PEFT names in ``target_parameters``, None where it names a module.
    """

    module: str  # blocks.0.attn.qkv
    stored: str  # model.layers.0.self_attn.q_proj
    begin: int
    rows: int
    columns: int
    transposed: bool = False  # on disk, as GPT-2's Conv1D
    by_group: tuple[int, int] | None = None  # on disk, as ``core.families.weights.Entry`` says
    parameter: str | None = None
    copies: int = 1
    interleaved: bool = False

    @property
    def name(self) -> str:
        """The last part of the stored name: ``q_proj``."""
        return self.stored.rpartition(".")[2]

    def matches(self, target: str) -> bool:
        """Whether ``target`` is the whole stored name, or its end after a dot, as PEFT matches names."""
        if target == ALL_LINEAR:
            return self.copies == 1
        return self.stored == target or self.stored.endswith(f".{target}")


def all_targets(spec: ModelSpec) -> Iterator[Target]:
    """Every matrix inside the blocks of a model of ``spec``, in the order of its layout.

    PEFT 0.21 takes ``gate_proj`` and its like for experts wherever a family has experts. Modules beside them are therefore
    named as parameters too, which gives the same tensors.
    """
    names = weight_names(spec.family)
    for entry in layout(spec):
        if entry.matrix is None:
            continue
        if entry.matrix.copies > 1:
            ((name, rows),) = names.parts(entry.matrix)
            stored = f"{names.layer}.{entry.canonical.split('.')[1]}.{name}"
            yield Target(
                _module(entry), stored, 0, rows, entry.shape[1], parameter=stored, copies=entry.matrix.copies,
                interleaved=entry.interleaved,
            )  # fmt: skip
        else:
            yield from parts_of(entry, spec.moe is not None and entry.matrix.component == "mlp")


def parts_of(entry: Entry, as_parameters: bool = False) -> Iterator[Target]:
    """Each stored part of a matrix by itself; of experts every one's, as transformers 4 had them."""
    begin = 0
    for part in entry.parts:
        stored = part.name.removesuffix(".weight")
        parameter = part.name if as_parameters else None
        yield Target(_module(entry), stored, begin, part.rows, entry.shape[1], entry.transposed, entry.by_group, parameter)
        begin += part.rows


def _module(entry: Entry) -> str:
    return entry.canonical.removesuffix(".weight")


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

    def __init__(self, target: Target, rank: int, scale: float, dropout: float, device: torch.device) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(target.copies * rank, target.columns, device=device))
        self.b = nn.Parameter(torch.zeros(target.copies * target.rows, rank, device=device))
        self.copies, self.scale, self.dropout = target.copies, scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(dropout(x, self.dropout, self.training), self.a), self.b) * self.scale


class LowRankExperts(LowRank):
    """As ``LowRank``, an adapter an expert: an expert's rows of A, and of B, after another's."""

    def forward(self, x: Tensor, ends: Tensor, expert: Tensor) -> Tensor:  # type: ignore[override]
        dtype = compute_dtype(x.device, self.a.dtype)
        a, b = (factor.unflatten(0, (self.copies, -1)).to(dtype) for factor in (self.a, self.b))
        x = dropout(x.to(dtype), self.dropout, self.training)
        return grouped_linear(grouped_linear(x, a, ends), b, ends) * self.scale


class Nf4Linear(nn.Module):
    """A frozen matrix in NF4 with its bias."""

    codes: Tensor
    scales: Tensor
    scale_scales: Tensor | None
    scale_offset: Tensor | None

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, block: int, double: bool) -> None:
        super().__init__()
        matrix = quantize_nf4(weight, block, double)
        self._shape, self._block = matrix.shape, matrix.block
        self._hold(matrix)
        self.register_parameter("bias", bias)

    def _hold(self, matrix: Nf4Matrix) -> None:
        for name in ("codes", "scales", "scale_scales", "scale_offset"):
            self.register_buffer(name, getattr(matrix, name))

    @property
    def matrix(self) -> Nf4Matrix:
        return Nf4Matrix(self._shape, self._block, self.codes, self.scales, self.scale_scales, self.scale_offset)

    def replace(self, matrix: Nf4Matrix) -> None:
        """Hold ``matrix``, a piece of the one before."""
        self._shape = matrix.shape
        self._hold(matrix)

    def forward(self, x: Tensor) -> Tensor:
        product = nf4_linear(x, self.matrix)
        bias = self._parameters["bias"]
        return product if bias is None else product + bias


class Nf4Experts(nn.Module):
    """The frozen matrices of all experts (copies·n, k) in NF4, each rounded by itself, and their biases (copies·n)."""

    def __init__(self, weight: Tensor, copies: int, bias: nn.Parameter | None, block: int, double: bool) -> None:
        super().__init__()
        matrices = [quantize_nf4(matrix, block, double) for matrix in weight.unflatten(0, (copies, -1))]
        self.copies, self._shape, self._block = copies, matrices[0].shape, block
        held = stacked(matrices)
        for name, tensor in held.items():
            self.register_buffer(name, tensor)
        self._names = tuple(held)
        self.register_parameter("bias", bias)

    @property
    def held(self) -> dict[str, Tensor]:
        """Codes and scales of all experts by name, those of one after another's."""
        return {name: getattr(self, name) for name in self._names}

    def keep(self, first: int, end: int) -> None:
        """Hold the matrices of experts ``first`` to ``end`` alone, but their biases as they are."""
        for name, tensor in self.held.items():
            setattr(self, name, tensor[first:end].clone())
        self.copies = end - first

    def forward(self, x: Tensor, ends: Tensor, expert: Tensor) -> Tensor:
        product = grouped_nf4_linear(x, self._shape, self._block, self.held, ends)
        bias = self._parameters["bias"]
        return product if bias is None else product + bias.unflatten(0, (self.copies, -1))[expert].to(product.dtype)


class AdaptedLinear(nn.Module):
    """A frozen ``base`` product of packed rows, with adapters for some of its parts. Those of experts also take which rows are
    whose.

    One product for the A of all parts was tried. It reads x once and gains nothing (3 × 384, rank 16, bf16, CPU time of a step:
    168 ms apart and 165 together, compiled 105 and 108), and each part could no longer have a dropout mask of its own.
    """

    def __init__(self, base: nn.Module, rows: Sequence[int], names: Sequence[str | None], adapters: dict[str, LowRank]) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict(adapters)
        self.rows, self._names = tuple(rows), tuple(names)

    def forward(self, x: Tensor, *of_rows: Tensor) -> Tensor:
        y = self.base(x, *of_rows)
        pieces = [
            piece if name is None else piece + self.adapters[name](x, *of_rows)
            for piece, name in zip(y.split(self.rows, dim=-1), self._names, strict=True)
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
    kind = LowRank if target.copies == 1 else LowRankExperts
    adapter = kind(target, settings.rank, settings.scale, settings.dropout, device)
    digest = hashlib.sha256(f"{seed}:{target.stored}.lora_A".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = 1 / math.sqrt(target.columns)
    adapter.a.copy_(torch.empty(adapter.a.shape).uniform_(-bound, bound, generator=generator))
    return adapter


def _parameter_names(target: Target) -> dict[str, str]:
    """The decoder's names of an adapter's two matrices, by PEFT's."""
    return {f"lora_{which.upper()}": f"{target.module}.adapters.{target.name}.{which}" for which in "ab"}


def peft_module(target: Target, chosen: Sequence[Target]) -> str:
    """The module that PEFT keeps the adapter of ``target`` in. It wraps the module of all experts once for each of its chosen
    parameters, the first innermost, so the name counts what is around it."""
    if target.copies == 1:
        return f"{PEFT_PREFIX}{target.stored}"
    module = target.stored.rpartition(".")[0]
    within = [other.stored for other in chosen if other.copies > 1 and other.stored.rpartition(".")[0] == module]
    return PEFT_PREFIX + module + ".base_layer" * (len(within) - 1 - within.index(target.stored))


def peft_names(chosen: Sequence[Target]) -> dict[str, str]:
    """PEFT's name of each adapter matrix of ``chosen``, by the decoder's parameter name."""
    return {
        ours: f"{peft_module(target, chosen)}.{theirs}.weight"
        for target in chosen
        for theirs, ours in _parameter_names(target).items()
    }


def peft_weights(spec: ModelSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters by PEFT's names, their rows in the order of the stored matrices. Those of experts are A (copies·rank, inputs),
    an expert's after another's, and B (outputs, rank·copies), an expert's in every copies-th column."""
    chosen = [target for target in all_targets(spec) if _parameter_names(target)["lora_A"] in weights]
    names = peft_names(chosen)
    found: dict[str, Tensor] = {}
    for target in chosen:
        a, b = (weights[name] for name in _parameter_names(target).values())
        if target.copies > 1:
            b = b.unflatten(0, (target.copies, -1))
            if target.interleaved:
                b = b.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            b = b.permute(1, 2, 0).flatten(1)
        else:
            b = stored_order(target.by_group, b)
        found |= dict(zip((names[name] for name in _parameter_names(target).values()), (a, b), strict=True))
    return found


def by_expert(target: Target, b: Tensor) -> Tensor:
    """B of experts from PEFT's order as (copies, outputs, rank) in ours: the inverse of what ``peft_weights`` does."""
    b = b.unflatten(1, (-1, target.copies)).permute(2, 0, 1)
    return b.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if target.interleaved else b


def nf4_round_trip(weight: Tensor, block: int, double: bool, copies: int = 1) -> Tensor:
    """``weight``, matrices one after another, each rounded to NF4, in fp32."""
    matrices = weight.unflatten(0, (copies, -1))
    return torch.cat([dequantize_nf4(quantize_nf4(matrix, block, double)) for matrix in matrices])
