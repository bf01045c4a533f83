"""What our ranks hold of gradients beside their sums: what a backward pass leaves, and the buffers in which ranks exchange it.

Buffers live at moments at which activations have gone or go, so they add to the peak what they take beyond these. Bytes for one
element of a gradient, which is sent in w bytes, and n ranks (tests/training/test_exchange_buffers.py counts them):

- Replicas add what a pass leaves to their sums bucket by bucket, and in the last pass exchange each beside the next one
  (``training.replicas``). A bucket's message and what comes, w and w, stand beside the piece of the sum, 4/n, and the whole,
  4, of the bucket before; later what came and its pieces in fp32, then the piece of the sum and the whole. Copies of shards,
  and replicas that share out matrices or exchange factors, do so after the last pass. Where accelerators add up, without
  ``exact``, it is the message alone, 4.
- Ranks of shards reduce the gradients of a unit, a layer or what is outside of all layers, as soon as backward has left them
  (FSDP2, ``training.parallelize.OrderedReduceScatter``): a message in fp32, 4, which FSDP2 keeps until the next unit's, and a
  rank's rows of the sum, 4/n. On CPUs and with ``exact`` what has come is held, w, and in 16 bits its pieces in fp32, 4. On
  CPUs the next unit computes meanwhile, and message, what is sent of it and what comes stay until its gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.core.dtypes import bytes_of
from twostroke.core.named import largest, letter
from twostroke.core.policy import BUCKET_BYTES
from twostroke.planner.training.memory import FP32
from twostroke.planner.training.shape import TrainingShape


def largest_buckets(sizes: Iterable[float]) -> tuple[float, float]:
    """Elements of the largest bucket of gradients in fp32, of ``sizes`` elements in their order, and of the one before it."""
    buckets = [0.0, 0.0]
    for size in sizes:
        buckets[-1] += float(size)
        if FP32 * buckets[-1] >= BUCKET_BYTES:
            buckets.append(0.0)
    own = max(range(1, len(buckets)), key=buckets.__getitem__)
    return letter("bucket", buckets[own]), letter("bucket_before", buckets[own - 1])


def exchanged_bytes(shape: TrainingShape, bucket: float, before: float, ranks: float, on_accelerator: bool) -> float:
    """Bytes of the buffers of a ``bucket`` that ``ranks`` ranks exchange, and of the one ``before`` it that is under way."""
    if on_accelerator and not shape.exact:
        return FP32 * bucket
    sent = letter("sent", bytes_of(shape.compute_dtype)) if shape.exact and shape.gradient_sums == 1 else FP32
    widened, whole_and_sum = 0.0 if sent == FP32 else FP32, FP32 + FP32 / ranks
    return largest(2 * sent * bucket + whole_and_sum * before, (sent + widened) * bucket, whole_and_sum * bucket)


def reducing_bytes(shape: TrainingShape, ranks: float, on_accelerator: bool) -> float:
    """Bytes of an element while the gradients of a unit are reduced to the rows of ``ranks`` ranks."""
    message_and_sum = FP32 + FP32 / ranks
    if not shape.exact:
        return message_and_sum + (0.0 if on_accelerator else FP32)
    sent = letter("sent", bytes_of(shape.compute_dtype))
    return message_and_sum + sent + (0.0 if sent == FP32 else FP32)


def under_way_bytes(shape: TrainingShape, on_accelerator: bool) -> tuple[float, float]:
    """Bytes of an element that stay of a unit's reduction while the next unit computes, and beside the next unit's message."""
    if on_accelerator:
        return FP32, 0.0
    sent = letter("sent", bytes_of(shape.compute_dtype)) if shape.exact else FP32
    stay = FP32 + sent + (0.0 if sent == FP32 else sent)
    return stay, stay


def beside_sums_of_replicas(left: float, activations: float, of_a_layer: float, differentiated: float, buffers: float) -> float:
    """Bytes that the peak has beyond ``activations`` and what the layer takes that is ``differentiated``, where a pass has
    ``left`` gradients at its end, and ``buffers`` come after it."""
    counted = activations + differentiated
    return largest(largest(of_a_layer + differentiated + left, buffers) - counted, 0.0)


def beside_sums_of_shards(
    gradient: float, left_of_blocks: float, layer: float, outside: float, ranks: float, reducing: float,
    under_way: tuple[float, float], activations: float, of_a_layer: float, differentiated: float,
) -> float:  # fmt: skip
    """The same of shards. Moments of a pass: its first layer, whose whole ``gradient`` bytes an element are not reduced yet;
    its second one, beside what is ``under_way`` of the first; the second's message, before the first is reduced; its last
    layer, when ``left_of_blocks`` is there, and the gradient of what is ``outside`` the blocks waits for the end; reducing
    that."""
    beside_backward, beside_message = under_way
    kept = (gradient + beside_backward) * layer
    message = FP32 + FP32 / ranks
    first = activations + differentiated + gradient * layer
    second = activations - of_a_layer + differentiated + kept + FP32 / ranks * layer
    reduced = activations - of_a_layer + largest(reducing, message + beside_message) * layer
    last = of_a_layer + differentiated + left_of_blocks + kept + gradient * outside
    end = left_of_blocks + largest(reducing * outside, message * outside + beside_message * layer)
    return largest(first, second, reduced, last, end) - (activations + differentiated)
