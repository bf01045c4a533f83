"""One optimizer step: forward, backward and update over an accumulation window. If a number is not finite, nothing changes."""

from __future__ import annotations

import contextlib
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
from twostroke.training.early_exit import EarlyExit
from twostroke.training.experts import ExpertBalance
from twostroke.training.loss import IGNORE_INDEX, ChunkFunction, chunk_loss, chunked_cross_entropy, shared_cross_entropy
from twostroke.training.memory import saved_activations_bytes
from twostroke.training.offloaded_activations import OffloadedActivations
from twostroke.training.optimizers import Optimizers
from twostroke.training.parallelize import compile_blocks, undo_compile, why_not_compile
from twostroke.training.precision import MasterWeights

Log = Callable[[str], None]
Accept = Callable[[float, float], str | None]
"""Called with a step's loss and gradient norm, both finite, before any weight changes. A returned sentence refuses the step."""


@dataclass(frozen=True)
class StepResult:
    """``loss`` is in nats per token with a target, of the last layer where earlier ones have a loss too. ``grad_norm`` is
    before clipping; ``block_grad_norms`` has it by part of the model ("embed", "blocks.0", …, "final_norm", "head").
    ``skipped`` is the reason if nothing was changed, else None. ``expert_load`` is the largest load of an expert over the mean
    load, in the worst layer."""

    loss: float
    grad_norm: float
    n_valid: int
    skipped: str | None = None
    block_grad_norms: dict[str, float] = field(default_factory=dict)
    expert_load: float | None = None


class WindowAbandoned(Exception):
    """A stop was requested between two micro-batches of a window. No weight has changed, and the gradients are dropped."""


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
    """The step of one run. A call with the micro-batches of a window updates the masters and the decoder's working copy."""

    def __init__(
        self,
        decoder: Decoder,
        masters: MasterWeights,
        optimizers: Optimizers,
        clip_norm: float,
        compile: bool,
        log: Log,
        activation_checkpointing: str = "none",
        experts: ExpertBalance | None = None,
        early_exit: EarlyExit | None = None,
        chunk: ChunkFunction = chunk_loss,
        offloaded: OffloadedActivations | None = None,
    ) -> None:
        self.experts, self.early_exit, self.offloaded = experts, early_exit, offloaded
        self.decoder, self.masters, self.optimizers, self.clip_norm = decoder, masters, optimizers, clip_norm
        self.device = next(decoder.parameters()).device
        self._log = log
        self._chunk = self._uncompiled = chunk
        self._unproven = False  # compiled but not run yet: torch.compile reports most of its errors in the first call
        checkpoint_activations(decoder, activation_checkpointing)  # before compiling, so that the graph contains it
        if compile:
            missing = why_not_compile(self.device)
            if missing is None:
                self._chunk = compile_blocks(decoder, chunk)
                self._unproven = True
            else:
                log(f"training is not compiled and takes about twice as long: {missing}.")

    @property
    def is_compiled(self) -> bool:
        return self._chunk is not self._uncompiled

    def __call__(
        self,
        batches: Sequence[Batch],
        learning_rate_factor: float,
        clock: StepClock,
        accept: Accept = _accept_all,
        abandon: Callable[[], bool] = _never,
    ) -> StepResult:
        """One update from ``batches``, the micro-batches of one accumulation window.

        The gradient is that of Σ loss / Σ valid tokens over the whole window, for any split into micro-batches. If the loss or
        the gradient's norm is not finite, or if ``accept`` refuses them, masters, working copy and optimizer state do not
        change. If fp16 gradients overflow, the window is computed again at half the loss scale. ``abandon`` is called between
        micro-batches; if it returns True, WindowAbandoned is raised.
        """
        # A mean of the micro-batches' means would give a token more weight in a batch with few valid tokens.
        n_valid = self._n_valid(batches)
        scaler = self.optimizers.loss_scale
        loss, norms = self._window(batches, n_valid, clock, abandon)
        # If the loss itself is not finite, a smaller scale cannot help.
        while scaler is not None and math.isfinite(loss) and not torch.isfinite(norms).all() and scaler.halve():
            self._log(f"fp16 gradients overflowed. The step is computed again at a loss scale of {scaler.scale:,.0f}.")
            loss, norms = self._window(batches, n_valid, clock, abandon)
        norm = torch.linalg.vector_norm(norms).item()
        by_part = norms_by_part(list(self.masters.shapes), norms.tolist())
        refused: str | None
        if not math.isfinite(loss) or not math.isfinite(norm):
            refused = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        else:
            refused = accept(loss, norm)
        if refused is not None:
            clock.lap("optimizer")
            return StepResult(loss, norm, n_valid, refused, by_part)
        # Clipping and the inverse loss scale are one factor, so that gradients are read and written once.
        own_norm = self.masters.norm_to_clip(norm)
        factor = min(1.0, self.clip_norm / own_norm) if own_norm > 0 else 1.0
        if scaler is not None:
            factor /= scaler.scale
            scaler.count_good_step()
        if factor != 1.0:
            torch._foreach_mul_(list(self.masters.gradients.values()), factor)
        self.optimizers.step(learning_rate_factor)
        self.masters.took_step()
        load = None if self.experts is None else self.experts.update()
        clock.lap("optimizer")
        return StepResult(loss, norm, n_valid, block_grad_norms=by_part, expert_load=load)

    def _n_valid(self, batches: Sequence[Batch]) -> int:
        """Tokens with a target in the whole window."""
        return sum(batch.n_valid for batch in batches)

    def _window(
        self, batches: Sequence[Batch], n_valid: int, clock: StepClock, abandon: Callable[[], bool]
    ) -> tuple[float, Tensor]:
        """(loss of the window in nats per valid token, norm of each gradient). The gradients stay in the masters, multiplied by
        the loss scale."""
        loss_scale, share = self._begin_window(), 1.0 / max(1, n_valid)
        total = torch.zeros((), dtype=torch.float32, device=self.device)  # on the device: reading it would wait for each part
        for number, batch in enumerate(batches):
            if number and abandon():  # before the first micro-batch the loop has just asked
                raise WindowAbandoned
            for part in self._parts(batch):
                total += self._forward_backward_guarded(part, share * loss_scale, clock)
                self.masters.accumulate()
            clock.lap("optimizer")
        return total.item() * share, self.masters.finish_window() / loss_scale

    def _begin_window(self) -> float:
        """Drop what the last window left. Returns the loss scale of this one."""
        self.masters.zero_gradients()
        if self.experts is not None:
            self.experts.begin_window()
        scaler = self.optimizers.loss_scale
        return 1.0 if scaler is None else scaler.scale

    def _parts(self, batch: Batch) -> list[Batch]:
        """Split a micro-batch into passes of ``policy.rows_at_once`` rows. On a CPU the activations of 2,048 tokens stay in the
        cache, and those of 8,192 go to memory. Gradients of the passes are summed in fp32, as accumulation does."""
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
        """``forward_backward``. If the first compiled call fails, it is repeated uncompiled with the same random numbers."""
        if not self._unproven:
            return self.forward_backward(batch, scale, clock)
        state = torch.get_rng_state()  # a repeated call must draw the same dropout
        try:
            loss = self.forward_backward(batch, scale, clock)
        except Exception as error:  # any error of torch.compile, the C++ compiler or Triton; a real one occurs again uncompiled
            undo_compile(self.decoder)
            self._chunk = self._uncompiled
            self._unproven = False
            torch.set_rng_state(state)
            self.masters.zero_gradients()
            loss = self.forward_backward(batch, scale, clock)
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._log(f"training is not compiled and takes about twice as long: torch.compile failed ({first_line:.200}).")
        self._unproven = False
        return loss

    def forward_backward(self, batch: Batch, scale: float, clock: StepClock) -> Tensor:
        """The summed loss of one micro-batch in nats. ``scale`` times its gradient is added to the decoder's parameters.

        Positions and documents are always passed. If every row were one document, no mask would be needed. But that is rare (3%
        of batches of 16 rows of 512 tokens of Python source), the mask costs almost nothing, and a second kind of batch would
        be compiled in the middle of the run.
        """
        if self.experts is not None:
            self.experts.set_scale(scale)
        trained, loss = self._loss(batch, clock.lap)
        (trained * scale).backward()
        clock.lap("backward")
        return loss.detach()

    def _loss(self, batch: Batch, lap: Callable[[str], None]) -> tuple[Tensor, Tensor]:
        """(what is trained, the last layer's loss): the same without early exit."""
        if self.early_exit is not None:
            self.early_exit.outputs.clear()
        batch = batch.to(self.device, non_blocking=True)
        with contextlib.nullcontext() if self.offloaded is None else self.offloaded.of_a_pass():
            hidden = self.decoder.hidden(batch.tokens, batch.positions, batch.documents).flatten(0, 1)  # (B·T, E)
        lap("forward")
        return self._loss_of(hidden, batch.targets.flatten(), lap)

    def _loss_of(self, hidden: Tensor, targets: Tensor, lap: Callable[[str], None]) -> tuple[Tensor, Tensor]:
        """``_loss`` of what the last layer made, (B·T, E)."""
        # In chunks, because the logits of all tokens are the largest tensor of a step (4 GiB for 16 × 512 at V = 128k).
        rows, head, cap = loss_chunk_rows(hidden.shape[0]), self.decoder.head_weight, self.decoder.logit_cap
        if self.early_exit is None:
            loss = chunked_cross_entropy(hidden, head, targets, rows, self._chunk, lap, cap)
            return loss, loss
        earlier = [self.decoder.read_out(output).flatten(0, 1) for output in self.early_exit.outputs]
        self.early_exit.outputs.clear()
        lap("forward")
        return shared_cross_entropy([hidden, *earlier], self.early_exit.shares, head, targets, rows, self._chunk, lap, cap)

    def activations_bytes(self, batch: Batch) -> int:
        """Bytes in memory that the forward pass of a part of ``batch`` keeps for its backward pass; of what waits on disk an
        average layer's, which backward has in memory at once. Only the random state changes."""
        batch = self._parts(batch)[0]
        own = (*self.decoder.parameters(), *self.decoder.buffers())
        with cached_bytes() as cached:
            kept = saved_activations_bytes(lambda: self._loss(batch, lambda part: None)[0], own) + cached()
        if self.offloaded is None:
            return kept
        return kept + self.offloaded.in_memory_bytes + self.offloaded.on_disk_bytes // self.decoder.spec.n_layers
