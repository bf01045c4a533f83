"""Master weights of a run by the recipe's ``[parallel]``: whole on each rank, or what it holds of them, gradients added in one
order.

All kinds take the gradients of each micro-batch away and add them up in a tree (``training.tree_sums``), then over replicas.
The norm of a gradient is that of its rows' norms, which no layout cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twostroke.model.decoder import Decoder
from twostroke.training.compression import FACTOR, RESIDUAL, CompressedSums, compressed_sums
from twostroke.training.exchanges import UnderWay, gathered
from twostroke.training.holding import HeldPart, Holding
from twostroke.training.parallelize import divide, drop_gathered, shard_decoder
from twostroke.training.precision import MasterWeights
from twostroke.training.ranks import AXES, Part, Ranks
from twostroke.training.stages import EMBEDDING, chunk_with, own_chunks
from twostroke.training.tied_head import TiedHead
from twostroke.training.tree_sums import TreeSum
from twostroke.training.whole import Whole

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
"""What the names begin with by which ranks ask each other for parts."""

AVERAGE = "ema"
"""What the names of the running average begin with."""


class SummedMasters(MasterWeights):
    """The whole model's masters on each rank. Gradients are summed over micro-batches and replicas in one order."""

    _chunks: Sequence[tuple[list[str], TreeSum]] = ()

    def __init__(self, decoder: nn.Module, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        self.ranks = ranks
        self.compressed: CompressedSums | None = compressed_sums(ranks)
        super().__init__(decoder, dtype, stored)
        self._sum_up([list(self.weights)])

    def _sum_up(self, chunks: list[list[str]]) -> None:
        """Add up gradients of ``chunks`` of the weights apart: ``accumulate`` is called after a backward pass through one."""
        self._chunks = [(names, TreeSum(in_order=self.ranks.layout.exact)) for names in chunks]

    @torch.no_grad()
    def zero_gradients(self) -> None:
        for _, sums in self._chunks:
            sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def accumulate(self, chunk: int = 0) -> None:
        names, sums = self._chunks[chunk]
        if not names:
            return
        taken = [self._taken(self._parameters[name]) for name in names]
        if sums.count == 0 and self.stored == torch.float32:
            # A tree's sum ends where its first leaf was, so it takes no memory beside that of the gradients.
            first = [self.gradients[name] for name in names]
            torch._foreach_copy_(first, taken)
            taken = first
        sums.add(taken)

    def _taken(self, parameter: Tensor) -> Tensor:
        """The gradient of ``parameter``, which has none from here on."""
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient

    def expect_last_pass(self) -> None:
        """The pass that follows is the last one of the window."""

    def _wire(self, n_micro_batches: int) -> torch.dtype:
        """The type that holds a sum of so many gradients: one is in the type it was computed in, sums are in fp32."""
        return self._leaf_dtype if n_micro_batches == 1 else torch.float32

    @torch.no_grad()
    def finish_window(self) -> Tensor:
        wire = self._wire(max(sums.count for _, sums in self._chunks))
        trained = [(names, sums.total()) for names, sums in self._chunks if names]
        by_name = {name: total for names, totals in trained for name, total in zip(names, totals, strict=True)}
        totals = {name: by_name[name] for name in self.gradients}
        self._over_ranks(totals, wire)
        self._keep(totals)
        return self._norms()

    def _keep(self, totals: Mapping[str, Tensor]) -> None:
        """Let ``totals`` be the gradients."""
        for name, total in totals.items():
            if total is not self.gradients[name]:
                self.gradients[name].copy_(total)

    def _over_ranks(self, totals: dict[str, Tensor], wire: torch.dtype) -> None:
        """Add up what ranks computed apart of the gradients ``totals``."""
        if self.compressed is None:
            self.ranks.sum_along(("replica", "context"), list(totals.values()), wire)
        else:
            self.compressed.sum(totals)

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
        """√Σ‖row‖² of each gradient."""
        squares = [row_norms(gradient).double().square().sum() for gradient in self.gradients.values()]
        return torch.stack(squares).sqrt().float()


class DividedMasters(SummedMasters):
    """Masters that the ranks of a replica hold together: those of its stage on each, and of some of these a piece
    (``holdings``).

    A gradient is whole after it was added up along all axes whose ranks hold the same and compute different parts of it. The
    order is one, so copies never part.
    """

    is_sharded = True
    owned: frozenset[str] = frozenset()
    """Those whose optimizer state is of the whole matrix (``training.owned_matrices``)."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        trained = [name for name, parameter in decoder.named_parameters() if parameter.requires_grad]
        held = divide(decoder, ranks)
        self.holdings = {name: held[name] for name in trained}
        self._others: dict[str, HeldPart] = {}
        self._device = next(decoder.parameters()).device
        self._hold(decoder, dtype, stored, ranks)
        chunk_of = {name: chunk_with(name, decoder, ranks) for name in self.weights}
        self._sum_up([[name for name in self.weights if chunk_of[name] == chunk] for chunk in own_chunks(ranks)])
        axes = {axis for holding in self.holdings.values() for axis in holding.axes}
        self.axes = tuple(axis for axis in AXES if axis in axes)
        self.tied = TiedHead.of(decoder, self.holdings, dtype, ranks)

    def _hold(self, decoder: Decoder, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        """Make masters of what is left in ``decoder``."""
        super().__init__(decoder, dtype, stored, ranks)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: holding.shape for name, holding in self.holdings.items()}

    # -- sums ---------------------------------------------------------------------------------------------------------------

    def _over_ranks(self, totals: dict[str, Tensor], wire: torch.dtype) -> None:
        # In the order of all stages' masters, because ranks make a group together.
        by_axes: dict[tuple[str, ...], list[Tensor]] = {self._apart(name): [] for name in self.holdings}
        for name, total in totals.items():
            by_axes[self._apart(name)].append(total)
        for axes, same in by_axes.items():
            self.ranks.sum_along(axes, same, wire)
        left_whole = [total for name, total in totals.items() if "tensor" not in self.holdings[name].axes]
        self.ranks.sum_along(("tensor",), left_whole)

    def _apart(self, name: str) -> tuple[str, ...]:
        """The axes whose ranks hold the same of master ``name`` and compute its gradient of different rows."""
        return tuple(axis for axis in ("replica", "expert", "context") if axis not in self.holdings[name].axes)

    def finish_window(self) -> Tensor:
        if self.tied is not None:
            self.tied.wait()
        return super().finish_window()

    def _norms(self) -> Tensor:
        """√Σ‖row‖² of each gradient of the whole model, of the rows of all ranks in their order."""
        squares = self._squares_of_pieces()
        own = torch.stack(list(squares.values()))
        for axis in ("expert", "tensor"):
            if self.ranks.size(axis) > 1:
                counted = [axis in self.holdings[name].cut_axes or self.ranks.at(axis) == 0 for name in squares]
                own = own * torch.tensor(counted, dtype=own.dtype, device=own.device)
                own = gathered(own, self.ranks.group(axis)).sum(dim=0)
        norms = dict(zip(squares, own.sqrt().float(), strict=True))
        if self.ranks.size("pipeline") == 1:
            return torch.stack([norms[name] for name in self.holdings])
        # Of one stage, and zeros of the others, whose sum is exact.
        whole = torch.stack([norms.get(name, own.new_zeros((), dtype=torch.float32)) for name in self.holdings])
        dist.all_reduce(whole, group=self.ranks.group("pipeline"))
        return whole

    def _squares_of_pieces(self) -> dict[str, Tensor]:
        """Σ‖row‖² of the gradient of each piece, of which ranks share out the rows."""
        found, by_rows = {}, dict[tuple[str, ...], list[str]]()
        for name in self.gradients:
            by_rows.setdefault(self.holdings[name].rows, []).append(name)
        for rows, names in by_rows.items():
            n = self.ranks.size(*rows)
            norms = [row_norms(self.gradients[name]) for name in names]
            ends = self.ranks.places_along(rows)
            heights = [sum(self._shape_at(name, places)[0] for places in ends) for name in names]
            each = [-(-height // n) for height in heights]
            flat = torch.cat([nn.functional.pad(own, (0, most - len(own))) for own, most in zip(norms, each, strict=True)])
            all_rows = gathered(flat, self.ranks.group(*rows)) if rows else flat[None]
            for name, height, own in zip(names, heights, all_rows.split(each, dim=1), strict=True):
                found[name] = own.reshape(-1)[:height].double().square().sum()
        return {name: found[name] for name in self.gradients}

    # -- pieces -------------------------------------------------------------------------------------------------------------

    def is_piece(self, name: str) -> bool:
        """Whether ranks hold pieces of master ``name``; if not, those that have it have all of it."""
        return self.holdings[name].is_divided

    def counts(self, name: str) -> bool:
        same = set(AXES) - {"replica", "pipeline", *self.holdings[name].axes}
        return not any(self.ranks.at(axis) for axis in same)

    def _here(self, name: str) -> dict[str, int]:
        return {axis: self.ranks.at(axis) for axis in self.holdings[name].axes}

    def _shape_at(self, name: str, places: Mapping[str, int]) -> tuple[int, ...]:
        return self.holdings[name].shape_of(self.ranks, self._here(name) | dict(places))

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of ``whole``, master ``name`` or its state."""
        return self.holdings[name].local(whole, self.ranks, self._here(name))

    def part(self, name: str, local: Tensor | None, dtype: torch.dtype) -> Tensor | Part:
        """The whole of which ``local`` is what this rank has, of master ``name`` or of its state."""
        holding = self.holdings[name]
        if local is not None and not holding.axes and not holding.place:
            return local
        return HeldPart(local, holding, dtype, self._device)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(self.piece(name, weights[name]))
        self.update_working_copy()

    def share_working_copy(self) -> None:
        if self.tied is not None:
            self.tied.renew(self.parameters.get(EMBEDDING))

    def whole(self, extra: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return Whole(self.ranks, self._parts(self.weights, self.stored) | dict(extra), WEIGHTS)

    def whole_average(self, averages: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        as_in_state = f"{OPTIMIZER}ema::"
        return Whole(self.ranks, self._parts(averages, torch.float32) | dict(extra), as_in_state)

    def _parts(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor | Part]:
        """Of each master the whole of which ``tensors`` has what this rank holds."""
        return {name: self.part(name, tensors.get(name), dtype) for name in self.holdings}

    # -- the optimizer's state ------------------------------------------------------------------------------------------------

    def saw_state(self, state: Mapping[str, Any]) -> None:
        """Learn what state the other stages have. All ranks call it together."""
        if self.ranks.size("pipeline") == 1:
            return
        parts = self._state_parts(state)
        own = {key: part.described() for key, part in parts.items() if isinstance(part, HeldPart)}
        by_rank = self.ranks.gathered(own)
        self._others = {}
        for stage in range(self.ranks.size("pipeline")):
            self._others |= by_rank[self.ranks.rank_at({"pipeline": stage})]

    def whole_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        own = self._state_parts(state)
        others = {key: part.on(self._device) for key, part in self._others.items() if key not in own}
        return Whole(self.ranks, own | others, OPTIMIZER)

    def _state_parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The whole of each of ``state``: a part, or what all ranks have."""
        return {key: self._state_part(key, value) if isinstance(value, Tensor) else value for key, value in state.items()}

    def _state_part(self, key: str, value: Tensor) -> Tensor | Part:
        name = self._weight_of(key)
        if name is None:
            return value
        if value.dim() and key.partition("::")[0] in (name, AVERAGE):
            return self.part(name, value, value.dtype)
        place = self.holdings[name].place  # a number, or a matrix of a packed master, which all ranks of its stage have
        return HeldPart(value, Holding(tuple(value.shape), place=place), value.dtype, value.device) if place else value

    def own_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for key, value in super().own_state(state).items():
            name = self._weight_of(key)
            if name is None:
                found[key] = value
            elif name in self.weights:
                owner = key.partition("::")[0]
                is_piece = owner == AVERAGE or (owner == name not in self.owned and value.dim() > 0)
                found[key] = self.piece(name, value) if is_piece else value
        return found

    def _weight_of(self, key: str) -> str | None:
        """The master that state ``key`` is of: ``<weight>::exp_avg``, ``<weight>[q]::momentum_buffer`` or ``ema::<weight>``.
        None if it is of the whole run."""
        owner, _, name = key.partition("::")
        return next((weight for weight in (owner.partition("[")[0], name) if weight in self.holdings), None)


class ShardedMasters(DividedMasters):
    """Rows of each master on each rank of a replica (ZeRO-2 and 3 by torch's FSDP2).

    The decoder's parameters are the masters' rows in fp32. FSDP2 rounds them to the type of the computation when it gathers
    them, and hands each rank its rows of the gradients' sum.
    """

    def _hold(self, decoder: Decoder, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        self.ranks = ranks
        self.compressed: CompressedSums | None = None  # each pass is, by the reduce-scatter
        self.dtype, self.stored = dtype, torch.float32
        self._decoder, self._under_way = decoder, UnderWay()
        shard_decoder(decoder, ranks, dtype, self._under_way)
        parameters = dict(decoder.named_parameters())
        self._parameters = {name: parameters[name] for name, holding in self.holdings.items() if holding.is_at(ranks)}
        with torch.no_grad():
            self.weights = {name: _local(parameter) for name, parameter in self._parameters.items()}
        frozen = [_local(parameter) for name, parameter in parameters.items() if name not in self._parameters]
        self.frozen_bytes = sum(t.numel() * t.element_size() for t in (*frozen, *decoder.buffers()))
        self.has_working_copy = False
        self.gradients = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self.weights

    @property
    def _leaf_dtype(self) -> torch.dtype:
        return torch.float32

    def zero_gradients(self) -> None:
        self._under_way.finish()
        super().zero_gradients()

    def accumulate(self, chunk: int = 0) -> None:
        self._under_way.finish()
        super().accumulate(chunk)

    def _taken(self, parameter: Any) -> Tensor:
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(_local(parameter)) if gradient is None else _local(gradient)

    def drop_gathered(self) -> None:
        drop_gathered(self._decoder)

    def update_working_copy(self) -> None:
        self.drop_gathered()
        self.share_working_copy()


def row_norms(gradient: Tensor) -> Tensor:
    """‖row‖ of each row of ``gradient``, of a vector each value's."""
    if gradient.dim() < 2:
        return gradient.float().abs()
    norms: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float32)
    return norms


def _local(tensor: Any) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
