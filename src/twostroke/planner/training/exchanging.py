"""What our ranks hold of gradients beside their sums: what a backward pass leaves, and the buffers in which ranks exchange it.

Buffers live at moments at which activations have gone or go, so they add to the peak what they take beyond these. Bytes for one
element of a gradient, which is sent in w bytes, and n ranks (tests/training/test_exchange_buffers.py counts them):

- Replicas, and copies of shards, exchange sums after the last pass, a bucket after the other (``training.ranks``). With
  ``exact`` a rank's piece of the sum, 4/n, the same for each rank, 4, and the whole that comes, 4. Otherwise the message alone,
  4, in which torch adds.
- Ranks of shards reduce the gradients of a unit, a layer or what is outside of all layers, as soon as backward has left them
  (FSDP2, ``training.parallelize.OrderedReduceScatter``): a message in fp32, 4, which FSDP2 keeps until the next unit's, and a
  rank's rows of the sum, 4/n. On CPUs and with ``exact`` what has come is held, w, and in 16 bits its pieces in fp32, 4.
"""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.core.dtypes import bytes_of
from twostroke.core.named import largest, letter
from twostroke.core.policy import BUCKET_BYTES
from twostroke.planner.training.memory import FP32
from twostroke.planner.training.shape import TrainingShape


def bucket_elements(sizes: Iterable[float]) -> float:
    """Elements of the largest bucket of gradients in fp32, of ``sizes`` elements in their order."""
    most = filled = 0.0
    for size in sizes:
        filled += float(size)
        most = max(most, filled)
        if FP32 * filled >= BUCKET_BYTES:
            filled = 0.0
    return letter("bucket", most)


def after_the_last_pass(shape: TrainingShape, bucket: float, ranks: float) -> float:
    """Bytes of the buffers of a ``bucket`` that ``ranks`` ranks exchange."""
    return ((2 * FP32 + FP32 / ranks) if shape.exact else FP32) * bucket


def reducing_bytes(shape: TrainingShape, ranks: float, on_accelerator: bool) -> float:
    """Bytes of an element while the gradients of a unit are reduced to the rows of ``ranks`` ranks."""
    message_and_sum = FP32 + FP32 / ranks
    if not shape.exact:
        return message_and_sum + (0.0 if on_accelerator else FP32)
    sent = letter("sent", bytes_of(shape.compute_dtype))
    return message_and_sum + sent + (0.0 if sent == FP32 else FP32)


def beside_sums_of_replicas(left: float, activations: float, of_a_layer: float, differentiated: float, buffers: float) -> float:
    """Bytes that the peak has beyond ``activations`` and what the layer takes that is ``differentiated``, where a pass has
    ``left`` gradients at its end, and ``buffers`` come after it."""
    counted = activations + differentiated
    return largest(largest(of_a_layer + differentiated + left, buffers) - counted, 0.0)


def beside_sums_of_shards(
    gradient: float, left_of_blocks: float, layer: float, outside: float, ranks: float, reducing: float,
    activations: float, of_a_layer: float, differentiated: float,
) -> float:  # fmt: skip
    """The same of shards. Moments of a pass: its first layer, whose whole ``gradient`` bytes an element are not reduced yet;
    its second one, beside the message of the first; reducing the first; its last layer, when ``left_of_blocks`` is there, and
    the gradient of what is ``outside`` the blocks waits for the end; reducing that."""
    kept = (gradient + FP32) * layer
    first = activations + differentiated + gradient * layer
    second = activations - of_a_layer + differentiated + kept + FP32 / ranks * layer
    reduced = activations - of_a_layer + reducing * layer
    last = of_a_layer + differentiated + left_of_blocks + kept + gradient * outside
    end = left_of_blocks + reducing * outside
    return largest(first, second, reduced, last, end) - (activations + differentiated)
