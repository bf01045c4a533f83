"""Sharded weights of which ranks send what an update changed, in few bits (SDP4Bit; Jia et al. 2024, arXiv 2410.15526).

Each rank has the fp32 masters M of its rows, and under zero = 2 all ranks of a replica hold the whole weights W that the
decoder computes with, in the type of the computation. After an update each rank sends codes of its rows of M − W, and all add
to W what these codes decode to:

    W ← W + decoded(encoded(M − W))

The difference is to what the ranks hold and not to the masters of the step before, so what rounding left out is in the next
difference: W stays as far from M as one code leaves it, however many steps are taken. The optimizer, a checkpoint's weights and
the finished model are the masters', which nothing rounds.

All ranks add the same bits, also on different processors: the numbers of a block are whole multiples of 1/16 of its scale's
last place, fewer than 2²⁴ of them, so the sums of the rotation are exact in fp32 in any order.

Checkpoints hold W beside the optimizer's state, and a resume goes on from it (tests/training/test_weight_differences.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twostroke.core.compressions import COMPRESSIONS
from twostroke.model.decoder import Decoder
from twostroke.training.compression import decoded, encoded
from twostroke.training.exchanges import gathered
from twostroke.training.parallelize import drop_gathered, gather_weights
from twostroke.training.ranked_masters import OPTIMIZER, ShardedMasters
from twostroke.training.ranks import Ranks, named_buckets
from twostroke.training.whole import Whole

HELD = "held::"
"""What the names of a checkpoint's tensors begin with that all ranks hold whole."""


class DifferenceMasters(ShardedMasters):
    """Rows of each master on each rank, beside the whole weights that all ranks hold from step to step."""

    def _hold(self, decoder: Decoder, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        super()._hold(decoder, dtype, stored, ranks)
        self._way = COMPRESSIONS[ranks.layout.compress_weights]
        parts = {name: name.rpartition(".") for name in self.weights}
        self._places = {name: (decoder.get_submodule(module), attribute) for name, (module, _, attribute) in parts.items()}
        self._differ = False
        """Whether ``held`` may be something else than the masters in the type of the computation, as FSDP2 gathers them."""

    def held(self, name: str) -> Tensor:
        """The whole weight that all ranks hold of master ``name``. FSDP2 puts it in the parameter's place when it gathers."""
        module, attribute = self._places[name]
        found: Tensor = getattr(module, attribute)
        return found.detach()

    # -- steps --------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def took_step(self) -> None:
        self._differ = True
        for bucket in named_buckets({name: self.held(name) for name in self.weights}):
            self._send_differences(list(bucket))

    def _send_differences(self, names: Sequence[str]) -> None:
        """Bring what all ranks hold of the masters ``names`` up to date, in one message of each."""
        n, parts, lengths = self.ranks.size("shard"), list[Tensor](), list[int]()
        for name in names:
            whole = self.held(name)
            own = (self.weights[name] - self.piece(name, whole)).flatten()
            # Of rows that do not divide the last ranks have fewer.
            lengths.append(-(-len(whole) // n) * math.prod(whole.shape[1:]))
            parts.append(nn.functional.pad(own, (0, lengths[-1] - own.numel())))
        own = torch.cat(parts)
        padded = nn.functional.pad(own, (0, -own.numel() % self._way.multiple))
        messages = gathered(encoded(padded[None], self._way)[0], self.ranks.group("shard"), "data")
        changes = decoded(messages, self._way)[:, : own.numel()].split(lengths, dim=1)
        for name, changed in zip(names, changes, strict=True):
            whole = self.held(name)
            whole += changed.reshape(-1)[: whole.numel()].view_as(whole)

    def drop_gathered(self) -> None:
        """Ranks go on from what they hold, so a pass without a backward pass leaves it there."""

    def update_working_copy(self) -> None:
        """Let the next pass gather the masters, which are other ones."""
        self._differ = False
        drop_gathered(self._decoder)

    # -- checkpoints --------------------------------------------------------------------------------------------------------

    def whole_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        held = {f"{HELD}{name}": self.held(name) for name in self.weights} if self._differ else {}
        return Whole(self.ranks, self._state_parts(state) | held, OPTIMIZER)

    @torch.no_grad()
    def own_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = {key.removeprefix(HELD): whole for key, whole in state.items() if key.startswith(HELD)}
        if held:
            gather_weights(self._decoder)
            for name, whole in held.items():
                self.held(name).copy_(whole)
            self._differ = True
        return super().own_state({key: value for key, value in state.items() if not key.startswith(HELD)})
