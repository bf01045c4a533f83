"""Optimizers over fp32 masters: fused AdamW for everything, or Muon for the blocks' matrices with AdamW for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.core.errors import CorruptFileError
from twostroke.core.recipe import TrainSettings
from twostroke.core.spec import ModelSpec
from twostroke.training.precision import MasterWeights

MUON_MOMENTUM = 0.95
SEPARATOR = "::"


@dataclass(frozen=True)
class Part:
    """Some rows of a master weight, as the optimizer sees them: the whole of most, q, k and v of a packed projection."""

    key: str  # the master's name, and for a part of it which: "blocks.0.attn.qkv.weight[q]"
    tensor: Tensor  # shares the master's memory; its .grad shares the gradient's


def matrix_parts(name: str, spec: ModelSpec) -> dict[str, int]:
    """Rows of each matrix that master ``name`` packs, in order; empty where it is one matrix.

    Muon orthogonalises a matrix: orthogonalising q, k and v stacked is another update than each alone, and a worse one
    (Jordan 2024, "Muon: An optimizer for hidden layers in neural networks").
    """
    if name.endswith(".attn.qkv.weight"):
        q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        return {"q": q_rows, "k": kv_rows, "v": kv_rows}
    if name.endswith(".mlp.gate_up.weight"):
        return {"gate": spec.d_ff, "up": spec.d_ff}
    return {}


def is_block_matrix(name: str, tensor: Tensor) -> bool:
    """True for the matrices inside blocks: what Muon is for. Embedding and head are tables of rows, not maps between spaces."""
    return name.startswith("blocks.") and tensor.dim() == 2


def _decays(name: str, tensor: Tensor) -> bool:
    """Weight decay applies to matrices: not to norms and biases, and not to embeddings, whose shrinking raises the gradients
    behind the norm that follows (OLMo 2, arXiv:2501.00656, section 3.4)."""
    return tensor.dim() == 2 and name not in ("embed.weight", "position_embed.weight")


def _view(tensor: Tensor, gradient: Tensor) -> Tensor:
    """A leaf of its own over the memory of ``tensor``, with ``gradient`` as its gradient."""
    leaf = tensor.detach()
    leaf.grad = gradient
    return leaf


class Optimizers:
    """The optimizers of one run. ``step`` reads the masters' fp32 gradients and changes the masters in place."""

    def __init__(self, masters: MasterWeights, spec: ModelSpec, settings: TrainSettings) -> None:
        self.parts: list[Part] = []
        muon: list[Tensor] = []
        adam: dict[bool, list[Tensor]] = {True: [], False: []}  # by whether weight decay applies
        for name, weight in masters.weights.items():
            gradient = masters.gradients[name]
            if settings.optimizer == "muon" and is_block_matrix(name, weight):
                rows = matrix_parts(name, spec)
                weights, gradients = (t.split(list(rows.values())) if rows else (t,) for t in (weight, gradient))
                keys = [f"{name}[{part}]" for part in rows] or [name]
                for key, w, g in zip(keys, weights, gradients, strict=True):
                    self.parts.append(Part(key, _view(w, g)))
                    muon.append(self.parts[-1].tensor)
            else:
                self.parts.append(Part(name, _view(weight, gradient)))
                adam[_decays(name, weight)].append(self.parts[-1].tensor)
        self._optimizers: list[torch.optim.Optimizer] = []
        groups = [
            {"params": tensors, "weight_decay": settings.weight_decay if decays else 0.0}
            for decays, tensors in adam.items()
            if tensors
        ]
        if groups:
            betas = (settings.beta1, settings.beta2)
            # Fused: 104 ms a step of 25M parameters on two cores, where foreach takes 598 and the plain loop 830.
            self._optimizers.append(
                torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.eps, fused=True)
            )
        if muon:
            self._optimizers.append(
                torch.optim.Muon(
                    muon,
                    lr=settings.muon_learning_rate,
                    weight_decay=settings.weight_decay,
                    momentum=MUON_MOMENTUM,
                    nesterov=True,
                    adjust_lr_fn="original",
                )
            )
        self._base_rates = [[group["lr"] for group in o.param_groups] for o in self._optimizers]

    @torch.no_grad()
    def step(self, learning_rate_factor: float) -> None:
        """One update, every base learning rate multiplied by ``learning_rate_factor``."""
        for optimizer, rates in zip(self._optimizers, self._base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate_factor
            optimizer.step()

    def _state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        return next((o.state[tensor] for o in self._optimizers if tensor in o.state), {})

    def state(self) -> dict[str, Tensor]:
        """All state by ``<part>::<name>``, as in ``embed.weight::exp_avg``; empty before the first step."""
        return {
            f"{part.key}{SEPARATOR}{name}": value for part in self.parts for name, value in self._state_of(part.tensor).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state`` returned. Raises CorruptFileError where it is of other parameters or another optimizer."""
        by_part: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            owner, _, name = key.rpartition(SEPARATOR)
            by_part.setdefault(owner, {})[name] = value
        unknown = set(by_part) - {part.key for part in self.parts}
        missing = [part.key for part in self.parts if part.key not in by_part] if state else []
        if unknown or missing:
            named = sorted(unknown)[0] if unknown else missing[0]
            raise CorruptFileError(
                f"the optimizer state {'holds' if unknown else 'lacks'} {named!r}: it was not saved by a run of this recipe."
            )
        for optimizer in self._optimizers:
            optimizer.state.clear()  # of a run that goes back to before its first step
        optimizer_of = {id(t): o for o in self._optimizers for group in o.param_groups for t in group["params"]}
        for part in self.parts:
            if part.key in by_part:
                # A copy: what is given may be mapped from a file that will go away.
                optimizer_of[id(part.tensor)].state[part.tensor] = {
                    name: value.to(part.tensor.device, copy=True) for name, value in by_part[part.key].items()
                }

    @property
    def state_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.state().values())
