"""What training keeps in the host's memory or in a scratch file: the bytes that move, and their seconds that nothing hides."""

from __future__ import annotations

from twostroke.core.named import largest, letter, smallest
from twostroke.core.optimizers import OPTIMIZERS
from twostroke.core.policy import OFFLOAD_BLOCK
from twostroke.planner.hardware.device import ASSUMED_LINK_EFFICIENCY, Hardware
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
``OffloadActivations``, max_fwd_stash_size). When the loss is computed, none: offloading took from torchtune's own peak of
Llama-3.2-3B (23.1 to 21.8 GiB) what all 28 layers keep."""


def kept_on_device(activations: float, n_layers: float) -> float:
    """Of ``activations`` bytes, those that stay when layers hand theirs to the host."""
    return activations * smallest(1.0, LAYERS_ON_DEVICE / n_layers)


BLOCKS_IN_MEMORY = 2
"""Blocks of the state of an optimizer on disk: one is updated while the other is written and read (``offloaded_state``)."""


def state_in_memory_bytes(
    n_parameters: float, n_matrix: float, largest_matrix: float, largest_table: float, optimizer: str, state: float
) -> float:
    """Bytes of an optimizer on disk that are in memory: two blocks of ``OFFLOAD_BLOCK`` parameters, or of a whole matrix where
    an update takes whole matrices, as LAMB does of embeddings too."""
    row, block = OPTIMIZERS[optimizer], letter("block_parameters", float(OFFLOAD_BLOCK))

    def blocks(n_updated: float, each: float, n_moments: int) -> float:
        return smallest(BLOCKS_IN_MEMORY * smallest(each, n_updated), n_updated) * n_moments * state

    if not row.by_matrix:
        return blocks(n_parameters, block, row.moments)
    each = largest(block, largest_matrix)
    if row.matrix_moments == row.moments:
        return blocks(n_parameters, largest(each, largest_table), row.moments)
    return blocks(n_matrix, each, row.matrix_moments) + blocks(n_parameters - n_matrix, block, row.moments)


def scratch_s(n_bytes: float, hidden_s: float, in_cache: bool, hardware: Hardware) -> float:
    """Seconds that writing ``n_bytes`` to a scratch file and reading them adds: copies to the system's memory and back, and two
    sums over them; the disk where it takes longer to write them than ``hidden_s`` of other work, and to read them where the
    system's memory does not hold them until then (``in_cache``)."""
    reading = letter("reading", hardware.disk_cached_read_bytes_per_s or hardware.disk_write_bytes_per_s)
    disk_s = n_bytes / letter("writing", hardware.disk_write_bytes_per_s)
    copied_s = 2 * n_bytes / reading + 2 * n_bytes / hardware.bandwidth(n_bytes)
    return copied_s + largest(0.0, disk_s - hidden_s) + (0.0 if in_cache else disk_s)


def activations_s(n_bytes: float, forward_s: float, backward_s: float) -> tuple[float, float]:
    """(seconds, exposed seconds) of sending ``n_bytes`` out behind a forward and back behind its backward pass."""
    once_s = n_bytes / letter("slot", SLOT_BYTES_PER_S)
    return 2 * once_s, largest(0.0, once_s - forward_s) + largest(0.0, once_s - backward_s)


def update_s(shape: TrainingShape, n_parameters: float) -> float:
    """Seconds of an update in the host's memory: gradients out, the update there, new weights in; nothing hides it."""
    precision = PRECISIONS[shape.dtype]
    crossing = n_parameters * (precision.gradient + precision.working) / letter("slot", SLOT_BYTES_PER_S)
    return crossing + n_parameters * HOST_UPDATE_BYTES / letter("host", HOST_BYTES_PER_S)
