"""Measures a model while it trains: statistics of its activations, and how far an update moves its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from twostroke.data.loader import Batch
from twostroke.model.decoder import Decoder
from twostroke.training.measurement import rounded
from twostroke.training.observers import Observer
from twostroke.training.parallelize import eager
from twostroke.training.progress import Phase
from twostroke.training.stages import layers_of_stage
from twostroke.training.step import part_of

if TYPE_CHECKING:
    from twostroke.training.measurement import StepRecord
    from twostroke.training.run import RunState

T = TypeVar("T")

SAMPLED_PER_TENSOR = 2**16
"""Number of weights of each tensor that are compared before and after a step. A copy of all would be as large as the model."""

DEAD_SHARE_OF_RMS = 0.01
"""An inner channel of an MLP counts as dead if it stays below this share of the layer's RMS at every token."""


@contextmanager
def evaluating(decoder: nn.Module) -> Iterator[None]:
    """A context in which ``decoder`` runs uncompiled, without gradients and dropout. Random states are restored afterwards.

    Compiled blocks stay compiled, and the shapes of this context are not compiled.
    """
    was_training = decoder.training
    devices = sorted({p.device.index for p in decoder.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad(), eager(decoder):
        decoder.eval()
        try:
            yield
        finally:
            decoder.train(was_training)


def activation_statistics(decoder: Decoder, batch: Batch) -> dict[str, list[float]]:
    """Statistics of each block from one forward pass over ``batch``.

    ``residual_rms`` and ``residual_max`` (√mean x², max |x|) are of the residual stream after the block. ``mlp_rms``,
    ``mlp_max`` and ``mlp_zero_share`` (share of exact zeros) are of the input of the MLP's down projection. ``mlp_dead_share``
    is the share of its channels whose |x| stays below ``DEAD_SHARE_OF_RMS`` of ``mlp_rms`` at every token of the batch.

    Changes nothing (``tests/training/test_diagnostics.py`` compares weights with and without).
    """
    found: dict[str, list[Tensor]] = {}

    def note(**values: Tensor) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value.float())

    def after_block(block: nn.Module, inputs: tuple[Tensor, ...], x: Tensor) -> None:
        note(residual_rms=_rms(x), residual_max=torch.maximum(x.amax(), -x.amin()))

    def before_down(down: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)  # (B·T, F)
        rms = _rms(x)
        by_channel = torch.maximum(x.amax(0), -x.amin(0)).float()  # max |x| without a copy as large as x
        zeros = 1.0 - x.count_nonzero() / x.numel()
        dead = (by_channel < DEAD_SHARE_OF_RMS * rms).float().mean()
        note(mlp_rms=rms, mlp_max=by_channel.amax(), mlp_zero_share=zeros, mlp_dead_share=dead)

    hooks = []
    for block in decoder.blocks:
        hooks.append(block.register_forward_hook(after_block))
        hooks.append(block.get_submodule("mlp.down").register_forward_pre_hook(before_down))
    try:
        with evaluating(decoder):
            batch = batch.to(next(decoder.parameters()).device)
            decoder.hidden(batch.tokens, batch.positions, batch.documents)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: [rounded(value) for value in torch.stack(values).tolist()] for name, values in found.items()}


def _rms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float32) / math.sqrt(x.numel())


class WeightSample:
    """Up to ``SAMPLED_PER_TENSOR`` evenly spaced values of each tensor, from which ``update_ratios`` estimates how far a step
    moves it."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._values = {name: _sample(weight).clone() for name, weight in weights.items()}

    def squares(self, weights: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """(‖w_now − w_then‖², ‖w_then‖²) of each part of the model ("embed", "blocks.0", …), estimated from the samples: the
        sums of squares of a tensor are multiplied by its size over its sample's."""
        found: dict[str, tuple[float, float]] = {}
        for name, then in self._values.items():
            weight, (moved, size) = weights[name].numel() / max(1, then.numel()), found.get(part_of(name), (0.0, 0.0))
            difference = _sample(weights[name]).float() - then.float()
            moved, size = moved + weight * float(difference.square().sum()), size + weight * float(then.float().square().sum())
            found[part_of(name)] = moved, size
        return found


def update_ratios(squares: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """‖w_now − w_then‖ / ‖w_then‖ of each part of a model, of whose ``WeightSample.squares`` each of some ranks has its own. A
    part that was all zeros is left out."""
    found: dict[str, float] = {}
    for part in dict.fromkeys(part for own in squares for part in own):
        moved, size = (sum(own[part][i] for own in squares if part in own) for i in range(2))
        if size > 0:
            found[part] = rounded(math.sqrt(moved / size))
    return found


def _sample(weight: Tensor) -> Tensor:
    """Evenly spaced values of ``weight``, with a stride that visits every column."""
    flat = weight.detach().reshape(-1)
    stride = max(1, flat.numel() // SAMPLED_PER_TENSOR)
    columns = weight.shape[-1] if weight.dim() else 1
    while stride > 1 and math.gcd(stride, columns) > 1:
        stride += 1
    return flat[::stride]


class Diagnostics(Observer):
    """Logs every ``every`` steps ``activation_statistics`` of the step's last micro-batch as "activations", and
    ``update_ratios`` of the step."""

    name = "diagnostics"
    runs_model = True

    def __init__(self, every: int) -> None:
        self.every = every
        self._before: WeightSample | None = None

    def begin(self, run: RunState) -> None:
        self._look_ahead(run)

    def after_step(self, run: RunState, record: StepRecord) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if record.step % self.every == 0:
            with run.inputs.ranks.progress.doing(Phase.OBSERVING):
                if self._before is not None:
                    squares = self._before.squares(run.masters.weights)
                    values["update_ratios"] = update_ratios(_by_rank(run, squares)[: run.inputs.ranks.layout.of_a_replica])
                if run.last_batch is not None:
                    values["activations"] = self._activations(run, run.last_batch)
        self._look_ahead(run)
        return values

    def _activations(self, run: RunState, batch: Batch) -> dict[str, list[float]]:
        """Those of all layers, of which each stage has its own, over the micro-batch with the highest number."""
        by_rank, ranks = _by_rank(run, activation_statistics(run.decoder, batch)), run.inputs.ranks
        run.masters.drop_gathered()
        stages = by_rank[-ranks.layout.together :: ranks.size("context", "tensor")]
        of_stages = [layers_of_stage(stage, run.inputs.spec.n_layers, ranks) for stage in range(ranks.size("pipeline"))]
        layers = [layer for chunks in of_stages for chunk in chunks for layer in chunk]
        found: dict[str, list[float]] = {}
        for name in stages[0]:
            values = [value for stage in stages for value in stage[name]]
            found[name] = [value for _, value in sorted(zip(layers, values, strict=True))]
        return found

    def _look_ahead(self, run: RunState) -> None:
        """Sample the weights before a step that is compared."""
        held = {name: weight for name, weight in run.masters.weights.items() if run.masters.counts(name)}
        self._before = WeightSample(held) if (run.step + 1) % self.every == 0 else None

    def close(self) -> None:
        self._before = None


def _by_rank(run: RunState, found: T) -> list[T]:
    """``found`` of each rank where they hold parts of the model; of this one alone elsewhere."""
    return run.inputs.ranks.gathered(found) if run.masters.is_sharded else [found]
