"""Master weights of a run by the recipe's ``[parallel]``: whole on each rank, or rows of each, gradients added in one order.

Both kinds take the gradients of each micro-batch away and add them up in a tree (``training.tree_sums``), then over replicas.
The norm of a gradient is that of its rows' norms, which no layout cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twostroke.model.decoder import Decoder
from twostroke.training.compression import FACTOR, RESIDUAL, CompressedSums, compressed_sums
from twostroke.training.parallelize import drop_gathered, shard_decoder
from twostroke.training.precision import MasterWeights
from twostroke.training.ranks import Part, Ranks, sum_over
from twostroke.training.tree_sums import TreeSum
from twostroke.training.whole import RowsPart, Whole, rows_of

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
"""What the names begin with by which ranks ask each other for parts."""


class SummedMasters(MasterWeights):
    """The whole model's masters on each rank. Gradients are summed over micro-batches and replicas in one order."""

    def __init__(self, decoder: nn.Module, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sums = TreeSum(in_order=ranks.layout.exact)
        self.compressed: CompressedSums | None = compressed_sums(ranks)
        super().__init__(decoder, dtype, stored)

    @torch.no_grad()
    def zero_gradients(self) -> None:
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def accumulate(self) -> None:
        leaves = [self._taken(parameter) for parameter in self._parameters.values()]
        self._sums.add(leaves)

    def _taken(self, parameter: Tensor) -> Tensor:
        """The gradient of ``parameter``, which has none from here on."""
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient

    @torch.no_grad()
    def finish_window(self) -> Tensor:
        # One micro-batch's gradient is in the type it was computed in; sums are in fp32.
        wire = self._leaf_dtype if self._sums.count == 1 else torch.float32
        totals = self._sums.total()
        self._over_replicas(totals, wire)
        torch._foreach_copy_(list(self.gradients.values()), totals)
        self._complete_gradients()
        return self._norms()

    def _complete_gradients(self) -> None:
        """Add up what the ranks of a replica computed of ``gradients`` apart."""
        if self.ranks.layout.context > 1:
            sum_over("context", list(self.gradients.values()), self.ranks)

    def _over_replicas(self, totals: list[Tensor], wire: torch.dtype) -> None:
        if self.compressed is None:
            self.ranks.sum_over_replicas(totals, wire)
        else:
            self.compressed.sum(dict(zip(self.gradients, totals, strict=True)))

    @property
    def exchange_bytes(self) -> int:
        return 0 if self.compressed is None else self.compressed.bytes

    def took_step(self) -> None:
        if self.compressed is not None:
            self.compressed.accept()
        self.update_working_copy()

    def whole_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        if self.compressed is None:
            return state
        return Whole(self.ranks, dict(state) | self.compressed.state(list(self.weights), self.shapes), OPTIMIZER)

    def own_state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        sent = {key: value for key, value in state.items() if key.startswith((RESIDUAL, FACTOR))}
        if self.compressed is not None:
            self.compressed.load_state(sent)
        return {key: value for key, value in state.items() if key not in sent}

    @property
    def _leaf_dtype(self) -> torch.dtype:
        return self.dtype

    def _norms(self) -> Tensor:
        """√Σ‖row‖² of each gradient, of the rows of all shards in their order."""
        n, norms, heights = self.ranks.layout.shard, [], []
        for name, gradient in self.gradients.items():
            rows = row_norms(gradient)
            heights.append(-(-self.shapes[name][0] // n))
            norms.append(nn.functional.pad(rows, (0, heights[-1] - len(rows))))
        all_rows = self.ranks.over_shards(torch.cat(norms))
        squares = [
            rows.reshape(-1)[: self.shapes[name][0]].double().square().sum()
            for name, rows in zip(self.gradients, all_rows.split(heights, dim=1), strict=True)
        ]
        return torch.stack(squares).sqrt().float()


class DividedMasters(SummedMasters):
    """Masters that the ranks of a replica, the ``group``, hold pieces of."""

    is_sharded = True
    _shapes: Mapping[str, tuple[int, ...]]
    owned: frozenset[str] = frozenset()
    """Those whose optimizer state is of the whole matrix (``training.owned_matrices``)."""

    @property
    def group(self) -> Any:
        raise NotImplementedError

    def is_piece(self, name: str) -> bool:
        """Whether ranks hold pieces of master ``name``; if not, each holds all of it."""
        return True

    def part(self, name: str, local: Tensor) -> Tensor | Part:
        """The whole of which ``local`` is this rank's piece, of master ``name`` or of its state."""
        raise NotImplementedError

    def piece(self, name: str, whole: Tensor, rank: int | None = None) -> Tensor:
        """What ``rank`` of the group holds of ``whole``, this one by default."""
        raise NotImplementedError

    def joined(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        """The whole of the ``pieces`` of all ranks."""
        raise NotImplementedError

    def piece_shape(self, name: str, rank: int) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(self.piece(name, weights[name]))
        self.update_working_copy()

    def whole(self, extra: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return Whole(self.ranks, self._parts(self.weights) | dict(extra), WEIGHTS)

    def whole_average(self, averages: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        as_in_state = f"{OPTIMIZER}ema::"
        return Whole(self.ranks, self._parts(averages) | dict(extra), as_in_state)

    def _parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Part]:
        """Of each master the whole of which ``tensors`` has this rank's piece."""
        return {name: self.part(name, tensor) for name, tensor in tensors.items()}

    def whole_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        parts: dict[str, Tensor | Part] = {}
        for key, value in state.items():
            name = self._weight_of(key)
            is_piece = name is not None and isinstance(value, Tensor) and value.dim() > 0
            parts[key] = self.part(name, value) if is_piece and name is not None else value
        return Whole(self.ranks, parts, OPTIMIZER)

    def own_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for key, value in super().own_state(state).items():
            name = self._weight_of(key)
            found[key] = value if name is None or value.dim() == 0 else self.piece(name, value)
        return found

    def _weight_of(self, key: str) -> str | None:
        """The weight whose pieces state ``key`` has: ``<weight>::exp_avg``, or ``ema::<weight>``. None for a whole one's."""
        owner, _, name = key.partition("::")
        if owner in self._shapes:
            return None if owner in self.owned else owner
        return name if name in self._shapes else None


class ShardedMasters(DividedMasters):
    """Rows of each master on each rank of a replica (ZeRO-2 and 3 by torch's FSDP2).

    The decoder's parameters are the masters' rows in fp32. FSDP2 rounds them to the type of the computation when it gathers
    them, and hands each rank its rows of the gradients' sum.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sums = TreeSum(in_order=ranks.layout.exact)
        self.compressed: CompressedSums | None = None  # each pass is, by the reduce-scatter
        self.dtype, self.stored = dtype, torch.float32
        self._decoder = decoder
        self._shapes = trained_shapes(decoder)
        shard_decoder(decoder, ranks, dtype)
        parameters = dict(decoder.named_parameters())
        self._parameters = {name: parameters[name] for name in self._shapes}
        with torch.no_grad():
            self.weights = {name: _local(parameter) for name, parameter in self._parameters.items()}
        frozen = [_local(p) for p in parameters.values() if not p.requires_grad]
        self.frozen_bytes = sum(t.numel() * t.element_size() for t in (*frozen, *decoder.buffers()))
        self.has_working_copy = False
        self.gradients = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self.weights

    @property
    def _leaf_dtype(self) -> torch.dtype:
        return torch.float32

    def _taken(self, parameter: Any) -> Tensor:
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(_local(parameter)) if gradient is None else _local(gradient)

    def drop_gathered(self) -> None:
        drop_gathered(self._decoder)

    def update_working_copy(self) -> None:
        self.drop_gathered()

    @property
    def group(self) -> Any:
        return self.ranks.mesh.get_group("shard")

    def part(self, name: str, local: Tensor) -> Tensor | Part:
        return RowsPart(local, self._shapes[name])

    def piece(self, name: str, whole: Tensor, rank: int | None = None) -> Tensor:
        first, end = rows_of(len(whole), self.ranks.shard if rank is None else rank, self.ranks.layout.shard)
        return whole[first:end]

    def joined(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces))

    def piece_shape(self, name: str, rank: int) -> tuple[int, ...]:
        n_rows, *rest = self._shapes[name]
        first, end = rows_of(n_rows, rank, self.ranks.layout.shard)
        return (end - first, *rest)


def trained_shapes(decoder: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of ``decoder`` that are trained, by name."""
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters() if parameter.requires_grad}


def row_norms(gradient: Tensor) -> Tensor:
    """‖row‖ of each row of ``gradient``, of a vector each value's."""
    if gradient.dim() < 2:
        return gradient.float().abs()
    norms: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float32)
    return norms


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor
    return local
