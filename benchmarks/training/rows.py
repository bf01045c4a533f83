"""What is measured: groups of engines that take turns on the same model and the same batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A Llama with as many key as query heads, head dimension 64, tied embeddings."""

    n_layers: int
    n_heads: int
    feed_forward: int
    vocab_size: int
    batch_size: int
    sequence_length: int = 512

    @property
    def width(self) -> int:
        return 64 * self.n_heads


SIZES = {
    "12M": Size(6, 6, 1024, 4096, 16),
    "12M-small-batch": Size(6, 6, 1024, 4096, 4),
    "12M-V32k": Size(6, 6, 1024, 32000, 16),  # 22.8M parameters
    "50M": Size(10, 8, 1408, 32000, 8),
    "125M": Size(12, 12, 2560, 32000, 4),
    "125M-wide-batch": Size(12, 12, 2560, 32000, 32, 1024),
    "1.2B": Size(22, 32, 5632, 32000, 8, 2048),
}


@dataclass(frozen=True)
class Engine:
    """One competitor. ``venv`` names the virtual environment it needs; None: that of this package."""

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    venv: str | None = None


ENGINES = {
    "twostroke": Engine("engine_twostroke"),
    "twostroke pure bf16": Engine("engine_twostroke", {"dtype": "pure_bf16"}),
    "twostroke, other seed": Engine("engine_twostroke", {"seed": 1}),
    "transformers": Engine("engine_transformers"),
    "transformers compiled": Engine("engine_transformers", {"compile": True}),
    "transformers pure bf16 compiled": Engine("engine_transformers", {"compile": True, "dtype": "bf16"}),
    "litgpt": Engine("engine_litgpt", venv="litgpt"),
    "litgpt compiled": Engine("engine_litgpt", {"compile": True}, venv="litgpt"),
    "twostroke LoRA": Engine("engine_twostroke", {"method": "lora"}),
    "twostroke QLoRA": Engine("engine_twostroke", {"method": "qlora"}),
    "peft LoRA": Engine("engine_transformers", {"method": "lora"}),
    "peft QLoRA": Engine("engine_transformers", {"method": "qlora"}, venv="bitsandbytes"),
}

ON_GPU = ("twostroke", "transformers", "transformers compiled")
TURNED = ("twostroke", "transformers", "transformers compiled", "litgpt compiled")


@dataclass(frozen=True)
class Group:
    """Engines that run side by side: each takes ``burst`` steps in turn, ``rounds`` times, after its warm-up."""

    size: str
    engines: tuple[str, ...]
    layout: str = "fixed"  # or "packed": documents of varying length
    burst: int = 1
    rounds: int = 7
    warm_up: int = 3
    kind: str = "speed"  # or "loss": every step's loss is compared
    device: str = "cpu"  # or "cuda": a row of machines with a GPU


GROUPS = {
    "12M-fixed": Group("12M", TURNED),
    "12M-packed": Group("12M", TURNED, "packed", warm_up=6),
    "12M-pure-bf16": Group("12M", ("twostroke", "twostroke pure bf16", "transformers pure bf16 compiled")),
    "memory-V32k": Group("12M-V32k", TURNED, rounds=5),
    "50M-fixed": Group("50M", TURNED, rounds=5),
    "50M-packed": Group("50M", TURNED, "packed", rounds=5, warm_up=6),
    "125M-fixed": Group("125M", TURNED, rounds=5),
    "125M-packed": Group("125M", TURNED, "packed", rounds=5, warm_up=6),
    "lora": Group("50M", ("twostroke LoRA", "peft LoRA", "twostroke QLoRA", "peft QLoRA"), rounds=5),
    "loss": Group(
        "12M-small-batch",
        ("twostroke", "twostroke, other seed", "transformers", "litgpt"),
        burst=10,
        rounds=5,
        warm_up=0,
        kind="loss",
    ),
}

GPU_GROUPS = {
    "gpu-12M-fixed": Group("12M", ON_GPU, burst=10, device="cuda"),
    "gpu-125M-fixed": Group("125M-wide-batch", ON_GPU, burst=5, device="cuda"),
    "gpu-125M-packed": Group("125M-wide-batch", ON_GPU, "packed", burst=5, warm_up=6, device="cuda"),
    "gpu-1.2B-fixed": Group("1.2B", ON_GPU, burst=2, device="cuda"),
    "gpu-1.2B-packed": Group("1.2B", ON_GPU, "packed", burst=2, warm_up=6, device="cuda"),
    "gpu-lora": Group("1.2B", ("twostroke LoRA", "peft LoRA", "twostroke QLoRA"), burst=2, device="cuda"),
}
GROUPS |= GPU_GROUPS

COMMANDS = ("startup", "resume")
"""Rows that time the package's own command; ``startup`` takes a size: ``startup-12M``."""

STARTUP_SIZES = ("12M", "50M", "125M")

EVERY = (*(name for name in GROUPS if name not in GPU_GROUPS), *(f"startup-{size}" for size in STARTUP_SIZES), "resume")
QUICK = ("12M-fixed", "12M-packed", "memory-V32k", "50M-fixed", "lora", "loss", "startup-12M")
"""Every kind of row once, in about twelve minutes on two cores."""
