"""Gradients that replicas send each other in fewer bits (``core.compressions``), and what rounding leaves for the next step.

Each rank of n sends a code of each n-th of its sum to the rank that adds it up in fp32, which sends a code of the sum to all:
an all-reduce of codes, 2·(n−1)/n of their bytes. What the first code left out is the rank's residual; what the second left out
is that of the rank that made it, whose own part went into the sum unrounded. So over any steps

    Σ sums that came out = Σ gradients of all ranks − Σ residuals of all ranks

(tests/training/test_compression.py). A step that is refused leaves the residuals as they were.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from twostroke.core.compressions import BLOCK, Compression, factored_elements
from twostroke.core.errors import CorruptFileError
from twostroke.training.exchanges import Exchange, Sending, gather_into, wait_for
from twostroke.training.ranks import Ranks, named_buckets
from twostroke.training.tree_sums import tree_sum
from twostroke.training.whole import ReplicasPart

RESIDUAL, FACTOR = "residual::", "factor::"
"""What the names of a checkpoint's tensors begin with: residuals of all replicas (n, …), and PowerSGD's last right factors."""


# -- codes ----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def hadamard(device: torch.device) -> Tensor:
    """The symmetric orthonormal Hadamard matrix of ``BLOCK`` rows (Sylvester's), its own inverse."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(BLOCK)


def encoded(rows: Tensor, way: Compression) -> Tensor:
    """The message of each row of ``rows`` (n, elements) in fp32, as bytes (n, bytes). Elements are a multiple of
    ``way.multiple``. What is not finite stays so in its block."""
    if not way.is_code:
        return rows.to(torch.bfloat16 if way.name == "bf16" else torch.float16).view(torch.uint8)
    blocks = rows.reshape(-1, BLOCK)
    if way.rotated:
        blocks = blocks @ hadamard(rows.device)
    most = 2 ** (way.bits - 1) - 1
    scales = (blocks.abs().amax(1, keepdim=True) / most).to(torch.bfloat16)
    divisors = torch.where(scales == 0, 1.0, scales.float())
    codes = (blocks / divisors).nan_to_num_(0.0).round_().clamp_(-most, most).to(torch.int8)
    if way.bits == 4:
        low, high = codes.view(-1, BLOCK // 2, 2).unbind(2)
        codes = (low & 0xF) | (high << 4)
    n = len(rows)
    return torch.cat([codes.view(torch.uint8).reshape(n, -1), scales.view(torch.uint8).reshape(n, -1)], 1)


def decoded(messages: Tensor, way: Compression) -> Tensor:
    """The rows in fp32 whose messages ``encoded`` made."""
    if not way.is_code:
        return messages.view(torch.bfloat16 if way.name == "bf16" else torch.float16).float()
    n = len(messages)
    n_blocks = messages.shape[1] // (BLOCK * way.bits // 8 + 2)
    codes, scales = messages.split([n_blocks * BLOCK * way.bits // 8, 2 * n_blocks], 1)
    numbers = codes.contiguous().view(torch.int8)
    if way.bits == 4:
        numbers = torch.stack([(numbers << 4) >> 4, numbers >> 4], 2)
    blocks = numbers.reshape(-1, BLOCK).float() * scales.contiguous().view(torch.bfloat16).reshape(-1, 1).float()
    if way.rotated:
        blocks = blocks @ hadamard(messages.device)
    return blocks.view(n, -1)


# -- sums over replicas ---------------------------------------------------------------------------------------------------


class CompressedSums(ABC):
    """Sums over replicas of tensors by name, in the bits of one row. ``sum`` computes new residuals, ``accept`` keeps
    them."""

    def __init__(self, ranks: Ranks, way: Compression) -> None:
        self._ranks, self._way, self._feeds_back = ranks, way, ranks.layout.feeds_back
        self._residuals: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    @abstractmethod
    def sum(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace ``tensors`` (fp32) by what their sums over replicas come to."""

    def accept(self) -> None:
        """Keep what the last ``sum`` left out, because its step was taken."""
        self._residuals |= self._next
        self._next = {}

    def _with_residuals(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t + self._residuals[name] if name in self._residuals else t for name, t in tensors.items()}

    def state(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor | ReplicasPart]:
        """What a checkpoint holds of it; nothing before the first step."""
        return {
            f"{RESIDUAL}{name}": ReplicasPart(self._residuals[name], (self._ranks.layout.data, *shapes[name]))
            for name in names
            if name in self._residuals
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave. Another number of replicas shares out the sum of the residuals evenly."""
        n = self._ranks.layout.data
        self._next, self._residuals = {}, {}
        for key, stacked in state.items():
            name = key.removeprefix(RESIDUAL)
            own = stacked[self._ranks.replica] if len(stacked) == n else stacked.sum(0) / n
            self._residuals[name] = own.to(self._device, copy=True)

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def bytes(self) -> int:
        """Of residuals; as many again exist during a step."""
        return sum(t.numel() * t.element_size() for t in self._residuals.values())


class CodedSums(CompressedSums):
    """fp16, bf16, int8 and int4."""

    @torch.no_grad()
    def sum(self, tensors: Mapping[str, Tensor]) -> None:
        for bucket in named_buckets(tensors):
            wait_for(self.summing(bucket))

    def summing(self, bucket: Mapping[str, Tensor]) -> Exchange:
        """Replaces the tensors of ``bucket`` (fp32) by what their sums over replicas come to."""
        ranks, n = self._ranks, self._ranks.layout.data
        flat = torch.cat([tensor.reshape(-1) for tensor in self._with_residuals(bucket).values()])
        n_elements = flat.numel()
        own = -(-n_elements // (n * self._way.multiple)) * self._way.multiple
        pieces = torch.nn.functional.pad(flat, (0, own * n - n_elements)).view(n, own)
        del flat
        messages = received = encoded(pieces, self._way)
        if n > 1:
            sending = Sending(messages, ranks.group("replica"), "data")
            yield sending.work
            received = torch.stack(sending.pieces())
        parts = decoded(received, self._way)
        parts[ranks.replica] = pieces[ranks.replica]  # which this rank does not send
        mine = tree_sum(list(parts))
        answer = encoded(mine[None], self._way)
        answers = answer.new_empty(n, answer.shape[1])
        if n > 1:
            yield gather_into(answers, answer, ranks.group("replica"), "data")
        else:
            answers.copy_(answer)
        summed = decoded(answers, self._way)
        if self._feeds_back:
            left = pieces - decoded(messages, self._way)
            left[ranks.replica] = mine - summed[ranks.replica]
            self._keep(bucket, left.view(-1)[:n_elements])
        lengths = [tensor.numel() for tensor in bucket.values()]
        for tensor, part in zip(bucket.values(), summed.view(-1)[:n_elements].split(lengths), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _keep(self, bucket: Mapping[str, Tensor], left: Tensor) -> None:
        parts = left.split([tensor.numel() for tensor in bucket.values()])
        for (name, tensor), part in zip(bucket.items(), parts, strict=True):
            self._next[name] = part.view_as(tensor).clone()


class LowRankSums(CompressedSums):
    """PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithm 1): of a matrix M, one step of power iteration from the right
    factor of the step before, P = orthonormal(Σ M·Q), Q = Σ Mᵀ·P, comes out as P·Qᵀ. Vectors are summed in fp32."""

    def __init__(self, ranks: Ranks, way: Compression, rank: int) -> None:
        super().__init__(ranks, way)
        self._rank = rank
        self._factors: dict[str, Tensor] = {}
        self._next_factors: dict[str, Tensor] = {}

    @torch.no_grad()
    def sum(self, tensors: Mapping[str, Tensor]) -> None:
        self._next, self._next_factors = {}, {}
        factored = [name for name, t in tensors.items() if factored_elements(tuple(t.shape), self._rank)]
        given = self._with_residuals({name: tensors[name] for name in factored})
        matrices = {name: t.flatten(1) for name, t in given.items()}
        lefts = [matrix @ self._right(name, matrix) for name, matrix in matrices.items()]
        self._ranks.sum_along(("replica",), [*lefts, *(t for name, t in tensors.items() if name not in matrices)])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        for (name, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            if self._feeds_back:
                self._next[name] = (matrix - left @ right.T).view_as(tensors[name])
        self._ranks.sum_along(("replica",), rights)
        for name, left, right in zip(factored, lefts, rights, strict=True):
            tensors[name].copy_((left @ right.T).view_as(tensors[name]))
            self._next_factors[name] = right

    def _right(self, name: str, matrix: Tensor) -> Tensor:
        """The right factor to begin with: the last one, and random numbers by the matrix's size before."""
        found = self._factors.get(name)
        if found is None:
            generator = torch.Generator().manual_seed(matrix.numel())
            found = torch.randn(matrix.shape[1], self._rank, generator=generator).to(matrix.device)
        return found

    def accept(self) -> None:
        super().accept()
        self._factors |= self._next_factors
        self._next_factors = {}

    def state(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor | ReplicasPart]:
        factors = {f"{FACTOR}{name}": factor for name, factor in self._factors.items() if name in names}
        return super().state(names, shapes) | factors

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        factors = {k: t for k, t in state.items() if k.startswith(FACTOR)}
        super().load_state({k: t for k, t in state.items() if k not in factors})
        self._next_factors = {}
        self._factors = {k.removeprefix(FACTOR): t.to(self._device, copy=True) for k, t in factors.items()}
        if any(factor.shape[-1] != self._rank for factor in self._factors.values()):
            raise CorruptFileError(
                f"the checkpoint's PowerSGD factors are not of rank {self._rank}. Resume with the run's own recipe."
            )


def compressed_sums(ranks: Ranks) -> CompressedSums | None:
    """The sums over replicas that ``parallel.compress`` asks for; None where gradients are sent as they are."""
    way = ranks.layout.compression
    if way.name == "none":
        return None
    return LowRankSums(ranks, way, ranks.layout.compress_rank) if way.low_rank else CodedSums(ranks, way)
