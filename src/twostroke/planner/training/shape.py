"""How a run trains: the questions that a training plan answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from twostroke.core import engines
from twostroke.core.checks import check_whole
from twostroke.core.errors import ConfigError
from twostroke.core.matrices import ALL_LINEAR
from twostroke.core.named import letter, named
from twostroke.core.optimizers import CHOICES, OPTIMIZERS
from twostroke.core.policy import rows_at_once
from twostroke.planner.training.memory import PRECISIONS

if TYPE_CHECKING:
    from twostroke.core.recipe import TrainRecipe

METHODS = tuple(method for method in engines.METHODS if method != "pretrain")
"""Fresh weights or another model's, "full" trains all of them."""

CHECKPOINTING = engines.RECOMPUTATIONS

LOGITS = ("chunked", "whole")


@dataclass(frozen=True)
class TrainingShape:
    """How a run trains. One optimizer step of one data-parallel rank reads batch_size·sequence_length·grad_accumulation tokens;
    under pipeline parallel ``grad_accumulation`` is the number of micro-batches in the pipe. Raises ConfigError for impossible
    values."""

    batch_size: Annotated[int, "sequences of one pass of a replica"] = 16
    sequence_length: Annotated[int, "tokens of a sequence"] = 512
    grad_accumulation: Annotated[int, "passes of one update"] = 1
    dtype: Annotated[str, "bf16, fp16, fp32 or pure_bf16"] = "bf16"
    optimizer: Annotated[str, CHOICES] = "adamw"
    compile: Annotated[bool, "torch.compile"] = True
    steps: Annotated[int, "updates; 0 leaves the length of the run open"] = 0
    method: Annotated[str, "full, lora (adapters beside the frozen base) or qlora (beside a base in NF4)"] = "full"
    lora_rank: Annotated[int, "rank of adapters"] = 16
    lora_targets: Annotated[tuple[str, ...], "matrices that get one"] = (ALL_LINEAR,)
    checkpointing: Annotated[str, "what backward computes again: none, selective or full"] = "none"
    logits: Annotated[str, "how the loss takes them: chunked or whole"] = "chunked"
    snapshot: Annotated[bool, "checkpoints are copied in memory and written in the background"] = False
    average: Annotated[bool, "a running average of the weights is kept in fp32"] = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "grad_accumulation", "steps", "lora_rank"):
            check_whole(name, getattr(self, name), 0 if name == "steps" else 1)
        for name, choices, kind in (
            ("dtype", tuple(PRECISIONS), "a training type"),
            ("optimizer", OPTIMIZERS, "an optimizer"),
            ("method", METHODS, "a way to train"),
            ("checkpointing", CHECKPOINTING, "a checkpointing policy"),
            ("logits", LOGITS, "a way to hold logits"),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not {kind}. Use one of {', '.join(choices)}.")
        if not self.lora_targets:
            raise ConfigError(f"lora_targets is empty. Name matrices, as q_proj, or {ALL_LINEAR}.")

    @property
    def targets(self) -> tuple[str, ...]:
        """Matrices that get an adapter; none where everything is trained."""
        return () if self.method == "full" else self.lora_targets

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward and backward: B·T."""
        tokens = self.batch_size * self.sequence_length
        return named("tokens_per_pass", tokens, "tokens", "of one replica, as asked for", "given")

    def tokens_at_once(self, device_kind: str, n_devices: int) -> int:
        """Tokens of one pass as our engine computes it, which on a CPU cuts a micro-batch (``core.policy.rows_at_once``)."""
        if n_devices > 1:
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
        """The type of forward and backward: pure bf16 computes in bf16."""
        return "bf16" if self.dtype == "pure_bf16" else self.dtype

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
            average=settings.ema_decay > 0,
            checkpointing=settings.activation_checkpointing,
        )

    @classmethod
    def from_recipe(cls, recipe: TrainRecipe, steps: int | None = None) -> TrainingShape:
        """As ``from_settings``, with the recipe's adapters where it trains any."""
        shape = cls.from_settings(recipe.train, steps)
        if not recipe.trains_adapters:
            return shape
        return replace(shape, method=recipe.method, lora_rank=recipe.lora.rank, lora_targets=recipe.lora.targets)
