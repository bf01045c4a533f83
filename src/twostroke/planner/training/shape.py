"""How a run trains: the questions that a training plan answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from twostroke.core import engines
from twostroke.core.checks import check_whole
from twostroke.core.described import LeftOut
from twostroke.core.errors import ConfigError
from twostroke.core.matrices import ALL_LINEAR
from twostroke.core.named import letter, named
from twostroke.core.optimizers import CHOICES, OPTIMIZERS
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.policy import computed_type, rows_at_once
from twostroke.planner.training.datasheet_rates import LOW_PRECISIONS
from twostroke.planner.training.layout import replicas_of
from twostroke.planner.training.memory import PRECISIONS

if TYPE_CHECKING:
    from twostroke.core.recipe import TrainRecipe
    from twostroke.planner.hardware.device import Hardware

METHODS = tuple(method for method in engines.METHODS if method != "pretrain")
"""Fresh weights or another model's, "full" trains all of them."""

CHECKPOINTING = ("none", "selective", "selective_op", "full")
"""What backward computes again, from nothing to everything: *selective* elementwise work, *selective_op*, as torchtitan's
selective checkpointing "op", every second product beside it. Our engines do all but that (``engines.RECOMPUTATIONS``)."""

GRADIENT_BITS = (0, 1, 4, 8, 16)
"""1-bit Adam (arXiv 2102.02888), ZeRO++ and SDP4Bit (arXiv 2306.10209, 2410.15526), fp8 and bf16 reductions."""

LOGITS = ("chunked", "listed", "whole")
OFFLOADS = ("none", "cpu", "disk")


@dataclass(frozen=True)
class TrainingShape:
    """How a run trains. One optimizer step of one data-parallel rank reads batch_size·sequence_length·grad_accumulation tokens;
    under pipeline parallel ``grad_accumulation`` is the number of micro-batches in the pipe. Raises ConfigError for impossible
    values."""

    batch_size: Annotated[int, "sequences of one pass of a replica"] = 16
    sequence_length: Annotated[int, "tokens of a sequence"] = 512
    grad_accumulation: Annotated[int, "passes of one update"] = 1
    dtype: Annotated[str, "bf16, fp16, fp32, pure_bf16, or blocks multiplied in fp8, mxfp8 or nvfp4"] = "bf16"
    optimizer: Annotated[str, CHOICES] = "adamw"
    compile: Annotated[bool, "torch.compile"] = True
    steps: Annotated[int, "updates; 0 leaves the length of the run open"] = 0
    method: Annotated[str, "full, lora (adapters beside the frozen base) or qlora (beside a base in NF4)"] = "full"
    lora_rank: Annotated[int, "rank of adapters"] = 16
    lora_targets: Annotated[tuple[str, ...], "matrices that get one"] = (ALL_LINEAR,)
    checkpointing: Annotated[str, "what backward computes again: none, selective, selective_op or full"] = "none"
    logits: Annotated[str, "how the loss takes them: chunked, listed (all in the working type, in fp32 a chunk) or whole"] = (
        "chunked"
    )
    optimizer_in_backward: Annotated[bool, "each gradient is used and freed as soon as it is there"] = False
    offload_activations: Annotated[str, "where what layers keep for backward waits: none, cpu (host memory) or disk"] = "none"
    offload_optimizer: Annotated[
        str, "none; cpu: masters and moments in host memory, updated there; disk: moments in a scratch file"
    ] = "none"
    gradient_bits: Annotated[int, "bits in which a gradient is sent to other ranks; 0: as it is held"] = 0
    compress: Annotated[str, "how gradients are sent to other replicas: none, bf16, fp16, int8, int4 or powersgd"] = "none"
    compress_rank: Annotated[int, "rank of PowerSGD's factors"] = 4
    gradient_sums: Annotated[int, "fp32 sums of gradients that our ranks hold at once; 0: as other trainers do"] = 0
    exact: Annotated[bool, "our ranks add gradients in one order, each a piece, and exchange what they send and get"] = False
    residuals: Annotated[bool, "what compression left out is kept in fp32 for the next update"] = False
    compress_weights: Annotated[
        str, "how ranks that share out masters send what an update changed of whole weights: none (the weights), int8 or int4"
    ] = "none"
    outer_every: Annotated[int, "updates that replicas make apart before they exchange them (DiLoCo); 0: none"] = 0
    outer_fragments: Annotated[int, "parts of the model that are exchanged in turn"] = 1
    outer_overlap: Annotated[int, "updates during which what is exchanged is under way"] = 0
    pace_mbit: Annotated[float, "millions of bits that a rank on a CPU sends a second at most; 0: no limit"] = 0.0
    sequence_ranks: Annotated[int, "ranks that share each sequence, where a rank is planned", LeftOut] = 1
    snapshot: Annotated[bool, "checkpoints are copied in memory and written in the background"] = False
    checkpoint_every: Annotated[int, "updates between checkpoints; 0: none before the last"] = 0
    average: Annotated[bool, "a running average of the weights is kept in fp32"] = False
    exit_losses: Annotated[int, "earlier layers that have a loss of their own in each pass"] = 0
    saved_dtype: Annotated[str, "type in which the finished model is written, where it is computed in another", LeftOut] = ""

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "grad_accumulation", "steps", "lora_rank", "exit_losses"):
            check_whole(name, getattr(self, name), 0 if name in ("steps", "exit_losses") else 1)
        for name, choices, kind in (
            ("dtype", tuple(PRECISIONS), "a training type"),
            ("optimizer", OPTIMIZERS, "an optimizer"),
            ("method", METHODS, "a way to train"),
            ("checkpointing", CHECKPOINTING, "a checkpointing policy"),
            ("logits", LOGITS, "a way to hold logits"),
            ("offload_activations", OFFLOADS, "a place for activations"),
            ("offload_optimizer", OFFLOADS, "a place for the optimizer's state"),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not {kind}. Use one of {', '.join(choices)}.")
        if self.gradient_bits not in GRADIENT_BITS:
            words = ", ".join(map(str, GRADIENT_BITS))
            raise ConfigError(
                f"gradient_bits={self.gradient_bits!r} is not a width that gradients are sent in. Use one of {words}."
            )
        if self.optimizer_in_backward and self.grad_accumulation > 1:
            raise ConfigError(
                f"optimizer_in_backward frees each gradient, and grad_accumulation={self.grad_accumulation} adds several up. "
                "Use grad_accumulation=1."
            )
        if not self.lora_targets:
            raise ConfigError(f"lora_targets is empty. Name matrices, as q_proj, or {ALL_LINEAR}.")

    @property
    def planned_only(self) -> tuple[str, ...]:
        """Options of it that our trainer does not have, in words."""
        options = {
            "the optimizer in backward": self.optimizer_in_backward,
            "activations in host memory": self.offload_activations == "cpu",
            "the optimizer in host memory": self.offload_optimizer == "cpu",
            f"gradients sent in {self.gradient_bits} bits": bool(self.gradient_bits),
        }
        return tuple(name for name, asked in options.items() if asked)

    @property
    def uses_disk(self) -> bool:
        """Whether anything lies in a scratch file while it trains."""
        return "disk" in (self.offload_activations, self.offload_optimizer)

    @property
    def targets(self) -> tuple[str, ...]:
        """Matrices that get an adapter; none where everything is trained."""
        return () if self.method == "full" else self.lora_targets

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward and backward: B·T, under context parallel a rank's share of them."""
        tokens = -(-self.batch_size * self.sequence_length // self.sequence_ranks)
        return named("tokens_per_pass", tokens, "tokens", "of one replica, as asked for", "given")

    def tokens_at_once(self, device_kind: str, n_devices: int) -> int:
        """Tokens of one pass as our engine computes it, which on a CPU cuts a micro-batch (``core.policy.rows_at_once``) unless
        its recipe has ``[parallel]``."""
        if n_devices > 1 or self.gradient_sums:
            return self.tokens_per_pass
        fp32_gradients = self.dtype != "pure_bf16"
        rows = letter("rows", rows_at_once(device_kind, fp32_gradients, self.batch_size, self.sequence_length))
        source = "of a pass as it is computed: on a CPU the rows of a micro-batch that stay near the cache"
        return named("tokens_at_once", self.sequence_length * rows, "tokens", source, "given")

    @property
    def mode(self) -> str:
        """ "compiled" or "eager", as calibrated rates are named."""
        return "compiled" if self.compile else "eager"

    @property
    def tokens_per_step(self) -> int:
        return self.tokens_per_pass * self.grad_accumulation

    @property
    def compute_dtype(self) -> str:
        """The type of forward and backward: pure bf16 computes in bf16, and what narrower types multiply is held in it."""
        return "bf16" if self.dtype in ("pure_bf16", *LOW_PRECISIONS) else self.dtype

    def on(self, hardware: Hardware) -> TrainingShape:
        """As it is computed on ``hardware``: mixed bf16 in fp32 where calibration found no fast products of bf16."""
        multiplies = hardware.kind != "cpu" or hardware.basis != "measured" or "bf16" in hardware.peak_flop_per_s
        dtype = computed_type(self.dtype, multiplies)
        if dtype == self.dtype:
            return self
        sent = "none" if self.exact else self.compress  # in one order gradients are sent as they are computed
        return replace(self, dtype=dtype, saved_dtype=self.dtype, compress=sent)

    @classmethod
    def from_settings(cls, settings: Any, steps: int | None = None) -> TrainingShape:
        """The shape that a recipe's ``TrainSettings`` describe; ``steps`` where they come from a budget."""
        return cls(
            batch_size=settings.batch_size,
            sequence_length=settings.sequence_length,
            grad_accumulation=settings.grad_accumulation,
            dtype=settings.dtype,
            optimizer=settings.optimizer,
            compile=settings.compile,
            steps=settings.steps if steps is None else steps,
            snapshot=settings.checkpoint_every > 0 and settings.checkpoint_in_background,
            checkpoint_every=settings.checkpoint_every,
            average=settings.ema_decay > 0,
            checkpointing=settings.activation_checkpointing,
            offload_activations=settings.offload_activations,
            offload_optimizer=settings.offload_optimizer,
            exit_losses=settings.exits_per_step if settings.exit_loss > 0 else 0,
        )

    @classmethod
    def from_recipe(cls, recipe: TrainRecipe, steps: int | None = None, ranks: int | None = None) -> TrainingShape:
        """As ``from_settings``, with the recipe's adapters where it trains any, and a rank's share of a step's micro-batches.
        ``ranks`` are those that run and read different ones; those that ``[parallel]`` asks for if that is None."""
        shape = cls.from_settings(recipe.train, steps)
        n = replicas_of(recipe.parallel) if ranks is None else ranks
        shape = replace(shape, grad_accumulation=max(1, shape.grad_accumulation // n))
        if (p := recipe.parallel or (ParallelRecipe() if n > 1 else None)) is not None:
            # In one order gradients of a pass are sent as backward leaves them.
            in_order = p.exact and p.shard > 1 and shape.compute_dtype != "fp32"
            shape = replace(shape, compress=shape.compute_dtype if in_order else p.compress, compress_rank=p.compress_rank)
            shape = replace(shape, residuals=p.feeds_back, outer_every=p.outer_every, compress_weights=p.compress_weights)
            shape = replace(shape, outer_fragments=p.fragments, outer_overlap=p.outer_overlap, pace_mbit=p.pace_mbit)
            shape = replace(shape, gradient_sums=sums_at_once(shape.grad_accumulation, p.exact), exact=p.exact)
        if not recipe.trains_adapters:
            return shape
        return replace(shape, method=recipe.method, lora_rank=recipe.lora.rank, lora_targets=recipe.lora.targets)


def sums_at_once(n_micro_batches: int, in_order: bool) -> int:
    """Sums of gradients that a rank holds during its last backward pass: of a tree over ``n_micro_batches`` one a level, and
    if they are not added ``in_order`` one."""
    return max(1, n_micro_batches.bit_length() - 1) if in_order else 1
