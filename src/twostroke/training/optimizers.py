"""Optimizers of a run's master weights: AdamW, Adam, SGD, LAMB, or Muon for the blocks' matrices with AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twostroke.core.errors import CorruptFileError
from twostroke.core.matrices import Matrix, layer_kinds
from twostroke.core.optimizers import OPTIMIZERS
from twostroke.core.policy import NEWTON_SCHULZ_STEPS
from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainSettings, with_default_rates
from twostroke.training.ema import WeightAverage
from twostroke.training.lamb import Lamb
from twostroke.training.loss_scale import DynamicLossScale
from twostroke.training.muon import muon_class
from twostroke.training.offloaded_state import OffloadedUpdates, StateInTurn
from twostroke.training.owned_matrices import OwnedMatrices
from twostroke.training.precision import MasterWeights
from twostroke.training.ranked_masters import DividedMasters, SummedMasters
from twostroke.training.scratch import ScratchFile
from twostroke.training.stochastic_rounding import Noise, RoundedUpdates

MUON_MOMENTUM = 0.95
SEPARATOR = "::"
AVERAGE, LOSS_SCALE, ROUNDING = "ema", "scaler", "rounding"
"""Owners of state that is not a single weight's: ``ema::embed.weight``, ``scaler::scale``, ``rounding::updates``."""


@dataclass(frozen=True)
class Part:
    """The rows of a master weight that the optimizer updates as one matrix: q, k or v of a packed projection, all rows of
    others."""

    key: str  # the master's name, with the part if it has parts: "blocks.0.attn.qkv.weight[q]"
    tensor: Tensor  # shares the master's memory; its .grad shares the gradient's


def matrix_parts(name: str, n_rows: int, spec: ModelSpec) -> dict[str, int]:
    """Rows of each matrix that master ``name`` of ``n_rows`` packs, in order; empty for a single matrix.

    Muon orthogonalises a matrix. Orthogonalising stacked q, k and v gives another and worse update than orthogonalising each
    (Jordan 2024, "Muon: An optimizer for hidden layers in neural networks").
    """
    matrices = {m.module: m for kind, _ in layer_kinds(spec) for m in kind.matrices}
    module, _, adapter = name.partition(".adapters.")
    matrix = matrices.get(module.removesuffix(".weight").split(".", 2)[-1])
    if matrix is None:
        return {}
    if adapter:  # every expert's factor
        return {} if matrix.copies == 1 else {str(expert): n_rows // matrix.copies for expert in range(matrix.copies)}
    return dict(_parts(matrix)) if name.endswith(".weight") else {}


def _parts(matrix: Matrix) -> tuple[tuple[str, int], ...]:
    """(name, rows) of the matrices that one tensor holds, of experts with their number; nothing for a single one."""
    if matrix.copies == 1:
        return matrix.packed
    return tuple((f"{expert}.{name}", rows) for expert in range(matrix.copies) for name, rows in matrix.parts)


def is_block_matrix(name: str, tensor: Tensor) -> bool:
    """True for matrices inside blocks, which Muon updates. Embedding and head are tables of rows and not maps between
    spaces."""
    return name.startswith("blocks.") and tensor.dim() == 2


def decays(name: str, tensor: Tensor, settings: TrainSettings) -> bool:
    """Whether weight decay applies to a weight. It applies to matrices and, if the recipe says so, to norms, biases and
    embeddings. Smaller embeddings raise the gradients through the norm that follows (OLMo 2, arXiv:2501.00656, section 3.4)."""
    if tensor.dim() != 2:
        return settings.decay_norms
    return settings.decay_embeddings or name not in ("embed.weight", "position_embed.weight")


def _view(tensor: Tensor, gradient: Tensor) -> Tensor:
    """A new leaf tensor that shares the memory of ``tensor`` and has ``gradient`` as its gradient."""
    leaf = tensor.detach()
    leaf.grad = gradient
    return leaf


FUSED_MULTIPLE = 16
"""fp32 values of a cache line and of the widest vector. Fused kernels round what is left over after the last whole vector in
another way, and rows of such a length leave nothing over wherever they are cut."""


def _optimizer(settings: TrainSettings, params: Any, fused: bool = True) -> torch.optim.Optimizer:
    """The recipe's optimizer, but for the matrices that Muon updates. Fused AdamW takes 104 ms for a step of 25M parameters on
    two cores, foreach 598, and the plain loop 830."""
    how = {"fused": True} if fused else {"foreach": True}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(params, lr=settings.learning_rate, momentum=settings.momentum, nesterov=settings.nesterov, **how)
    betas = settings.beta1, settings.beta2
    if settings.optimizer == "lamb":
        return Lamb(params, settings.learning_rate, betas, settings.eps)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(
        params,
        lr=settings.learning_rate,
        betas=betas,
        eps=settings.eps,
        weight_decay=0.0,
        **how,
    )


def _muon(settings: TrainSettings, params: list[Tensor]) -> torch.optim.Optimizer:
    return muon_class(params[0].device.type)(
        params,
        lr=settings.muon_learning_rate,
        weight_decay=settings.weight_decay,
        momentum=MUON_MOMENTUM,
        nesterov=True,
        ns_steps=NEWTON_SCHULZ_STEPS,
        adjust_lr_fn="original",
    )


WHOLE_STATE: dict[str, dict[str, torch.device | None]] = {
    "muon": {"momentum_buffer": None},
    "lamb": {"step": torch.device("cpu"), "exp_avg": None, "exp_avg_sq": None},
}
"""What an optimizer of whole matrices keeps of each, as ``OwnedMatrices`` has it."""


def _of_whole(settings: TrainSettings, name: str, leaves: list[Tensor]) -> torch.optim.Optimizer:
    """That of the matrices of master ``name``, which is updated whole."""
    if settings.optimizer == "muon":
        return _muon(settings, leaves)
    decay = settings.weight_decay if decays(name, leaves[0], settings) else 0.0
    return _optimizer(settings, [{"params": leaves, "weight_decay": decay}])


def _takes_whole_tensors(optimizer: Any) -> bool:
    """Whether an update depends on a matrix as a whole, so that it cannot be made a piece at a time."""
    return isinstance(optimizer, torch.optim.Muon | Lamb)


class Optimizers:
    """The optimizers of one run, with its loss scale and running average. ``step`` reads the masters' gradients and changes the
    masters in place.

    Weight decay is decoupled in AdamW and Muon, w ← w − η·λ·w, and a part of the direction in LAMB; in Adam and SGD it is added
    to the gradient, g + λ·w (L2). With ``scratch`` the state of parameters lies in that file between steps.
    Each is held against its formulas in float64 in ``tests/training/test_update_formulas.py``.
    """

    def __init__(
        self, masters: MasterWeights, spec: ModelSpec, settings: TrainSettings, scratch: ScratchFile | None = None
    ) -> None:
        settings = with_default_rates(settings, "pretrain")
        self.parts: list[Part] = []
        muon: list[Tensor] = []
        owned: dict[str, list[tuple[str, int]]] = {}
        exact = isinstance(masters, SummedMasters) and masters.ranks.layout.exact
        groups: dict[tuple[bool, bool], list[Tensor]] = {}  # by whether weights decay, and whether their kernel is fused
        for name, weight in masters.weights.items():
            gradient = masters.gradients[name]
            is_matrix = OPTIMIZERS[settings.optimizer].by_matrix and is_block_matrix(name, weight)
            rows = matrix_parts(name, masters.shapes[name][0], spec) if is_matrix else {}
            is_whole = is_matrix or (settings.optimizer == "lamb" and weight.dim() > 1)
            if is_whole and isinstance(masters, DividedMasters) and masters.is_piece(name):
                parts = [(f"{name}[{part}]", n) for part, n in rows.items()]
                owned[name] = parts or [(name, masters.shapes[name][0])]
                continue
            weights, gradients = (t.split(list(rows.values())) if rows else (t,) for t in (weight, gradient))
            keyed = zip([f"{name}[{part}]" for part in rows] or [name], weights, gradients, strict=True)
            new = [Part(key, _view(w, g)) for key, w, g in keyed]
            self.parts += new
            fused = not exact or (weight.dim() > 1 and weight[:1].numel() % FUSED_MULTIPLE == 0)
            group = groups.setdefault((decays(name, weight, settings), fused), [])
            group = muon if settings.optimizer == "muon" and is_matrix else group
            group += [part.tensor for part in new]
        self._optimizers: list[Any] = []
        for fused in (True, False):
            alike = [
                {"params": groups[decayed, fused], "weight_decay": settings.weight_decay if decayed else 0.0}
                for decayed in (True, False)
                if groups.get((decayed, fused))
            ]
            if alike:
                self._optimizers.append(_optimizer(settings, alike, fused))
        if muon:
            self._optimizers.append(_muon(settings, muon))
        self._owned: OwnedMatrices | None = None
        if owned:
            assert isinstance(masters, DividedMasters)
            self._owned = OwnedMatrices(masters, owned, partial(_of_whole, settings), WHOLE_STATE[settings.optimizer])
            self._optimizers.append(self._owned)
        self._base_rates = [[group["lr"] for group in o.param_groups] for o in self._optimizers]
        self._rounded: list[RoundedUpdates] = []
        self._updates = 0
        keys: dict[int, str] = {}
        if masters.stored == torch.bfloat16:
            device = self.parts[0].tensor.device
            noise = Noise(device)
            keys.update({id(part.tensor): part.key for part in self.parts})
            for optimizer in self._optimizers:
                matrix = torch.zeros(1, 1, device=device)
                make = _muon if isinstance(optimizer, torch.optim.Muon) else _optimizer
                worker = make(settings, [matrix])
                whole = _takes_whole_tensors(optimizer)
                self._rounded.append(RoundedUpdates(optimizer, worker, whole, noise, keys))
        self._scratch, self._offloaded = scratch, list[OffloadedUpdates]()
        if scratch is not None:
            row = OPTIMIZERS[settings.optimizer]
            for optimizer, updates in zip(self._optimizers, self._rounded or self._optimizers, strict=True):
                n_moments = row.matrix_moments if isinstance(optimizer, torch.optim.Muon) else row.moments
                whole = _takes_whole_tensors(optimizer)
                self._offloaded.append(OffloadedUpdates(optimizer, updates.step, whole, n_moments, scratch))
                keys |= {id(leaf): keys[id(t)] for t, leaf in self._offloaded[-1].first_leaves() if id(t) in keys}
        self.loss_scale = DynamicLossScale() if masters.dtype == torch.float16 else None
        self.average = WeightAverage(masters.weights, settings.ema_decay) if settings.ema_decay else None
        self._masters, self._has_begun = masters, False
        masters.saw_state(self.state())

    @torch.no_grad()
    def step(self, learning_rate_factor: float) -> None:
        """One update, every base learning rate multiplied by ``learning_rate_factor``."""
        for optimizer, rates in zip(self._optimizers, self._base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate_factor
        if self._rounded:
            self._updates += 1
            for rounded in self._rounded:
                rounded.begin(self._updates)
        for updates in self._offloaded or self._rounded or self._optimizers:
            updates.step()
        if self.average is not None:
            self.average.update()
        if not self._has_begun:
            self._has_begun = True
            self._masters.saw_state(self.state())

    def _state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        if self._offloaded:
            return next(updates.state_of(tensor) for updates in self._offloaded if tensor in updates)
        found: dict[str, Any] = next((o.state[tensor] for o in self._of_torch if tensor in o.state), {})
        return {name: value for name, value in found.items() if value is not None}

    @property
    def _of_torch(self) -> list[torch.optim.Optimizer]:
        return [o for o in self._optimizers if o is not self._owned]

    def _own_state(self) -> dict[str, Tensor]:
        """State of the parameters, by ``<part>::<name>``; empty before the first step."""
        return {
            f"{part.key}{SEPARATOR}{name}": value for part in self.parts for name, value in self._state_of(part.tensor).items()
        }

    def state(self) -> dict[str, Any]:
        """All state by ``<owner>::<name>``, such as ``embed.weight::exp_avg`` and ``ema::embed.weight``. Where ranks hold rows
        of the masters, it is of these rows, and of whole matrices a ``training.holding.HeldPart``."""
        shared: dict[str, Mapping[str, Tensor]] = {}
        if self.average is not None:
            shared[AVERAGE] = self.average.state()
        if self.loss_scale is not None:
            shared[LOSS_SCALE] = self.loss_scale.state()
        if self._rounded:
            shared[ROUNDING] = {"updates": torch.tensor(self._updates, dtype=torch.int64)}
        named = {f"{owner}{SEPARATOR}{name}": value for owner, values in shared.items() for name, value in values.items()}
        own: dict[str, Any] = self._own_state()
        whole = {} if self._owned is None else self._owned.state(self._has_begun)
        found = own | whole | named
        return found if self._scratch is None else StateInTurn(found, self._scratch)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned. Raises CorruptFileError if it is of other parameters or another optimizer."""
        by_owner: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            owner, _, name = key.partition(SEPARATOR)
            by_owner.setdefault(owner, {})[name] = value
        shared = {owner: by_owner.pop(owner, None) for owner in (AVERAGE, LOSS_SCALE, ROUNDING)}
        keys = [part.key for part in self.parts] + ([] if self._owned is None else self._owned.keys)
        keeps_state = keys if self._keeps_state else []
        unknown = sorted(set(by_owner) - set(keys))
        missing = [key for key in keeps_state if key not in by_owner] if by_owner else []
        wanted = {AVERAGE: self.average, LOSS_SCALE: self.loss_scale, ROUNDING: self._rounded or None}
        unknown += [owner for owner in shared if shared[owner] is not None and wanted[owner] is None]
        missing += [owner for owner in shared if shared[owner] is None and wanted[owner] is not None]
        if unknown or missing:
            named = unknown[0] if unknown else missing[0]
            raise CorruptFileError(
                f"the optimizer state {'holds' if unknown else 'lacks'} {named!r}, so a run of another recipe saved it. Resume "
                "with "
                "that recipe."
            )
        if self.average is not None:
            self.average.load_state(shared[AVERAGE] or {})
        if self.loss_scale is not None:
            self.loss_scale.load_state(shared[LOSS_SCALE] or {})
        if self._rounded:
            self._updates = int((shared[ROUNDING] or {})["updates"])
        if self._owned is not None:
            self._owned.load_state(by_owner)
        given = {part.tensor: by_owner[part.key] for part in self.parts if part.key in by_owner}
        for updates in self._offloaded:
            updates.load_state({tensor: state for tensor, state in given.items() if tensor in updates})
        for optimizer in self._of_torch if not self._offloaded else ():
            optimizer.state.clear()
            for tensor in [t for group in optimizer.param_groups for t in group["params"] if t in given]:
                # Copied, because the given tensors may be mapped from a file that is deleted later.
                optimizer.state[tensor] = {name: value.to(tensor.device, copy=True) for name, value in given[tensor].items()}
        self._has_begun = bool(by_owner)
        self._masters.saw_state(self.state())

    @property
    def _keeps_state(self) -> bool:
        return any(group.get("momentum", 1.0) != 0 for optimizer in self._of_torch for group in optimizer.param_groups)

    @property
    def state_bytes(self) -> int:
        """Bytes in memory of the parameters' state and of the running average."""
        average = self.average.bytes if self.average is not None else 0
        whole = self._owned.state_bytes if self._owned is not None else 0
        if self._offloaded:
            return average + sum(updates.buffer_bytes for updates in self._offloaded)
        return average + whole + sum(t.numel() * t.element_size() for t in self._own_state().values())
