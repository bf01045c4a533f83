"""Models and devices that the claims are computed for: published shapes and datasheets, written down once."""

from __future__ import annotations

from functools import lru_cache

from twostroke.core.matrices import layer_kinds
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.memory import PRECISIONS, ActivationPolicy, gradient_bytes_per_parameter, kept_by_layer
from twostroke.planner.work.params import count_parameters

LLAMA_3B = ModelSpec("llama", 128256, 28, 3072, 24, 8, 128, 8192, 131072, tied_embeddings=True)
LLAMA_8B = ModelSpec("llama", 128256, 32, 4096, 32, 8, 128, 14336, 131072)
LLAMA_70B = ModelSpec("llama", 128256, 80, 8192, 64, 8, 128, 28672, 131072)
LLAMA_405B = ModelSpec("llama", 128256, 126, 16384, 128, 8, 128, 53248, 131072)
"""Llama 3.2 3B, 3.1 8B, 70B and 405B: their published config.json (arXiv 2407.21783, table 3)."""

LLAMA_2_7B = ModelSpec("llama", 32000, 32, 4096, 32, 32, 128, 11008, 4096)
"""Llama 2 7B (arXiv 2307.09288): 184,320 A100-hours on 2·10¹² tokens, table 2."""

GB = 1e9
DEVICE = "h100-sxm"
"""Where nothing else is said."""


@lru_cache(maxsize=64)
def device(name: str) -> Hardware:
    """A datasheet's device, read once."""
    return load_hardware(name)


def n_parameters(spec: ModelSpec) -> int:
    return count_parameters(spec).total


def state_bytes_per_parameter(dtype: str) -> float:
    """Weights, gradient and AdamW's state of one parameter on one of several devices: 16 bytes in mixed precision (weights 2,
    gradient 2, fp32 master 4, two fp32 moments 8: ZeRO, arXiv 1910.02054, section 3.1), 8 where everything is bf16."""
    gradient = gradient_bytes_per_parameter(dtype, alone=False, n_micro_batches=1)
    return PRECISIONS[dtype].working + gradient + checkpoint_bytes_per_parameter(dtype)


def checkpoint_bytes_per_parameter(dtype: str) -> float:
    """What a checkpoint adds to the weights in the working type: masters and AdamW's two moments."""
    return PRECISIONS[dtype].master + 2 * PRECISIONS[dtype].state


def block_activations_bytes(spec: ModelSpec, sequence_length: int, checkpointing: str = "none") -> float:
    """Bytes of a token in all blocks in bf16, compiled, with flash attention, under a checkpointing policy."""
    policy = ActivationPolicy(sequence_length=sequence_length, checkpointing=checkpointing)
    return sum(count * kept_by_layer(spec, kind, policy) for kind, count in layer_kinds(spec))
