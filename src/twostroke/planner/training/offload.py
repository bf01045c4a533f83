"""What training keeps in the host's memory: bytes that cross the slot, and the seconds of them that nothing hides."""

from __future__ import annotations

from twostroke.core.named import largest, letter, smallest
from twostroke.planner.hardware.device import ASSUMED_LINK_EFFICIENCY
from twostroke.planner.training.memory import PRECISIONS
from twostroke.planner.training.shape import TrainingShape

SLOT_BYTES_PER_S = 32e9 * ASSUMED_LINK_EFFICIENCY
"""One direction of PCIe 4.0 ×16, assumed of every device: what A100 and GeForce cards have; an H100's slot is twice as fast."""

HOST_BYTES_PER_S = 50e9
"""Of the host's memory, for one device's optimizer: assumed, an eighth of 12 channels of DDR5-4800."""

HOST_UPDATE_BYTES = 28
"""A parameter's fp32 master, two moments and gradient read, and all but the gradient written (ZeRO-Offload,
arXiv 2101.06840)."""

LAYERS_ON_DEVICE = 6
"""Layers whose activations are on the device while others wait: the one that is computed and five on their way (torchtune's
``OffloadActivations``, max_fwd_stash_size)."""


def kept_on_device(activations: float, n_layers: float) -> float:
    """Of ``activations`` bytes, those that stay when layers hand theirs to the host."""
    return activations * smallest(1.0, LAYERS_ON_DEVICE / n_layers)


def activations_s(n_bytes: float, forward_s: float, backward_s: float) -> tuple[float, float]:
    """(seconds, exposed seconds) of sending ``n_bytes`` out behind a forward and back behind its backward pass."""
    once_s = n_bytes / letter("slot", SLOT_BYTES_PER_S)
    return 2 * once_s, largest(0.0, once_s - forward_s) + largest(0.0, once_s - backward_s)


def update_s(shape: TrainingShape, n_parameters: float) -> float:
    """Seconds of an update in the host's memory: gradients out, the update there, new weights in; nothing hides it."""
    precision = PRECISIONS[shape.dtype]
    crossing = n_parameters * (precision.gradient + precision.working) / letter("slot", SLOT_BYTES_PER_S)
    return crossing + n_parameters * HOST_UPDATE_BYTES / letter("host", HOST_BYTES_PER_S)
