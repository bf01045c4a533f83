"""One optimizer step: forward, backward and update over an accumulation window, in which nothing changes if a number is not
finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twostroke.core.policy import loss_chunk_rows, rows_at_once
from twostroke.data.loader import Batch
from twostroke.model.decoder import Decoder
from twostroke.training.activation_checkpointing import cached_bytes, checkpoint_activations
from twostroke.training.clock import StepClock
from twostroke.training.loss import IGNORE_INDEX, ChunkFunction, chunk_loss, chunked_cross_entropy
from twostroke.training.memory import saved_activations_bytes
from twostroke.training.optimizers import Optimizers
from twostroke.training.parallelize import compile_blocks, undo_compile, why_not_compile
from twostroke.training.precision import MasterWeights

Log = Callable[[str], None]
Accept = Callable[[float, float], str | None]
"""Asked with a step's loss and gradient norm, both finite, before any weight changes; a returned sentence refuses the step."""


@dataclass(frozen=True)
class StepResult:
    """``loss`` in nats per token with a target; ``grad_norm`` before clipping, and by part of the model in
    ``block_grad_norms`` ("embed", "blocks.0", …, "final_norm", "head"); ``skipped`` says why nothing was changed."""

    loss: float
    grad_norm: float
    n_valid: int
    skipped: str | None = None
    block_grad_norms: dict[str, float] = field(default_factory=dict)


class WindowAbandoned(Exception):
    """A stop was asked for between two micro-batches of a window: no weight has changed, its gradients are dropped."""


def _never() -> bool:
    return False


def _accept_all(loss: float, grad_norm: float) -> None:
    return None


def part_of(name: str) -> str:
    """The part of the model that parameter ``name`` belongs to: its block, or its module outside the blocks."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def norms_by_part(names: Sequence[str], norms: Sequence[float]) -> dict[str, float]:
    """√Σ‖g‖² over the gradients of each part, from the norms of single gradients."""
    squares: dict[str, float] = {}
    for name, norm in zip(names, norms, strict=True):
        squares[part_of(name)] = squares.get(part_of(name), 0.0) + norm * norm
    return {part: math.sqrt(square) for part, square in squares.items()}


class TrainStep:
    """The step of one run. Called with the window's micro-batches it updates the masters and the decoder's working copy."""

    def __init__(
        self,
        decoder: Decoder,
        masters: MasterWeights,
        optimizers: Optimizers,
        clip_norm: float,
        compile: bool,
        log: Log,
        activation_checkpointing: str = "none",
    ) -> None:
        self.decoder, self.masters, self.optimizers, self.clip_norm = decoder, masters, optimizers, clip_norm
        self.device = next(decoder.parameters()).device
        self._log = log
        self._chunk: ChunkFunction = chunk_loss
        self._unproven = False  # compiled, but has not run yet
        checkpoint_activations(decoder, activation_checkpointing)
        if compile:
            missing = why_not_compile(self.device)
            if missing is None:
                self._chunk = compile_blocks(decoder)
                self._unproven = True
            else:
                log(f"training runs uncompiled, about half as fast: {missing}.")

    @property
    def is_compiled(self) -> bool:
        return self._chunk is not chunk_loss

    def __call__(
        self,
        batches: Sequence[Batch],
        learning_rate_factor: float,
        clock: StepClock,
        accept: Accept = _accept_all,
        abandon: Callable[[], bool] = _never,
    ) -> StepResult:
        """One update from ``batches``, the micro-batches of one accumulation window.

        The gradient is that of Σ loss / Σ valid tokens over the whole window, whatever the split into micro-batches: a mean of
        the micro-batches' means would weigh a token more in a batch that has few. If the loss or the gradient's norm is not
        finite, or ``accept`` refuses them, masters, working copy and optimizer state stay as they were. fp16 gradients that
        overflow at the present loss scale are no such case: the window is computed again at half of it. ``abandon`` is asked
        between micro-batches; where it says yes, WindowAbandoned is raised.
        """
        n_valid = sum(batch.n_valid for batch in batches)
        scaler = self.optimizers.loss_scale
        loss, norms = self._window(batches, n_valid, clock, abandon)
        while scaler is not None and math.isfinite(loss) and not torch.isfinite(norms).all() and scaler.halve():
            self._log(f"fp16 gradients overflowed: the step is computed again at a loss scale of {scaler.scale:,.0f}.")
            loss, norms = self._window(batches, n_valid, clock, abandon)
        norm = torch.linalg.vector_norm(norms).item()
        by_part = norms_by_part(list(self.masters.gradients), norms.tolist())
        refused: str | None
        if not math.isfinite(loss) or not math.isfinite(norm):
            refused = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        else:
            refused = accept(loss, norm)
        if refused is not None:
            clock.lap("optimizer")
            return StepResult(loss, norm, n_valid, refused, by_part)
        factor = min(1.0, self.clip_norm / norm) if norm > 0 else 1.0
        if scaler is not None:
            factor /= scaler.scale
            scaler.count_good_step()
        if factor != 1.0:
            torch._foreach_mul_(list(self.masters.gradients.values()), factor)
        self.optimizers.step(learning_rate_factor)
        self.masters.publish()
        clock.lap("optimizer")
        return StepResult(loss, norm, n_valid, block_grad_norms=by_part)

    def _window(
        self, batches: Sequence[Batch], n_valid: int, clock: StepClock, abandon: Callable[[], bool]
    ) -> tuple[float, Tensor]:
        """Loss of the window in nats per valid token, and the norm of each gradient, which are left in the masters times the
        loss scale."""
        scaler = self.optimizers.loss_scale
        loss_scale = 1.0 if scaler is None else scaler.scale
        share = 1.0 / max(1, n_valid)
        self.masters.zero_gradients()
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, batch in enumerate(batches):
            if number and abandon():
                raise WindowAbandoned
            for part in self._parts(batch):
                total += self._forward_backward_guarded(part, share * loss_scale, clock)
                self.masters.collect()
            clock.lap("optimizer")
        norms = torch.stack(torch._foreach_norm(list(self.masters.gradients.values()), 2, torch.float32))
        return total.item() * share, norms / loss_scale

    def _parts(self, batch: Batch) -> list[Batch]:
        """The micro-batch in passes of as many rows as are best computed at once; their gradients are summed in fp32."""
        fp32 = all(gradient.dtype == torch.float32 for gradient in self.masters.gradients.values())
        rows = rows_at_once(self.device.type, fp32, *batch.tokens.shape)
        if rows == len(batch.tokens):
            return [batch]
        split = (t.split(rows) for t in (batch.tokens, batch.targets, batch.positions, batch.documents))
        return [
            Batch(tokens, targets, positions, documents, n_valid=int((targets != IGNORE_INDEX).sum()))
            for tokens, targets, positions, documents in zip(*split, strict=True)
        ]

    def _forward_backward_guarded(self, batch: Batch, scale: float, clock: StepClock) -> Tensor:
        """``forward_backward``; the first compiled one, if it fails, is repeated uncompiled."""
        if not self._unproven:
            return self.forward_backward(batch, scale, clock)
        state = torch.get_rng_state()
        try:
            loss = self.forward_backward(batch, scale, clock)
        except Exception as error:  # whatever the compiler, its C++ compiler or Triton may raise: the eager run decides
            self._chunk = undo_compile(self.decoder)
            self._unproven = False
            torch.set_rng_state(state)
            self.masters.zero_gradients()
            loss = self.forward_backward(batch, scale, clock)
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._log(f"training runs uncompiled, about half as fast: torch.compile failed ({first_line:.200}).")
        self._unproven = False
        return loss

    def forward_backward(self, batch: Batch, scale: float, clock: StepClock) -> Tensor:
        """Summed loss of one micro-batch in nats; leaves ``scale`` times its gradient in the decoder's parameters.

        Positions and documents are always given. A row of one document could do without a mask, but a batch in which all
        rows are such is rare (3% of 16 rows of 512 tokens of Python source), the mask costs next to nothing, and two kinds of
        batches would be compiled twice, the second time in the middle of the run.
        """
        loss = self._loss(batch, clock.lap)
        (loss * scale).backward()
        clock.lap("backward")
        return loss.detach()

    def _loss(self, batch: Batch, lap: Callable[[str], None]) -> Tensor:
        batch = batch.to(self.device, non_blocking=True)
        hidden = self.decoder.hidden(batch.tokens, batch.positions, batch.documents).flatten(0, 1)  # (B·T, E)
        lap("forward")
        rows = loss_chunk_rows(hidden.shape[0])
        return chunked_cross_entropy(hidden, self.decoder.head_weight, batch.targets.flatten(), rows, self._chunk, lap)

    def activations_bytes(self, batch: Batch) -> int:
        """Bytes that one forward pass, of a part of ``batch``, keeps for its backward pass. Changes nothing but the random
        state."""
        batch = self._parts(batch)[0]
        own = (*self.decoder.parameters(), *self.decoder.buffers())
        with cached_bytes() as cached:
            return saved_activations_bytes(lambda: self._loss(batch, lambda part: None), own) + cached()
