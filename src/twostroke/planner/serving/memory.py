"""Bytes that serving holds on one device: weights, and pages of the KV cache as the scheduler takes them and gives them back.

A request takes pages for its whole prompt when it is admitted, and one more each time its last one is full. Where every layer
has a window, pages that no later query sees are given back as pages fill. Answers to one prompt share its whole pages. Held
against the engine's own counts in tests/planner/test_kv_pages.py.
"""

from __future__ import annotations

from twostroke.core.named import largest, letter, named, smallest, whole
from twostroke.core.policy import PAGE_TOKENS
from twostroke.core.spec import ModelSpec
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.step_time import device_bytes
from twostroke.planner.work.weights import kv_bytes_per_token, matrices_bytes, weights_bytes


def whole_pages(shape: ServingShape) -> int:
    """⌈(prompt + output)/page⌉: what a request fills in all, given back or not."""
    return -(-(shape.prompt_tokens + shape.output_tokens) // letter("page", PAGE_TOKENS))


def decoding_pages(spec: ModelSpec, shape: ServingShape) -> int:
    """Most pages that a request holds while it decodes: all of them, or ⌈(W − 1)/page⌉ + 1 within a window of W keys: those
    that the next query sees, and the one that is being filled."""
    window = spec.window_of_every_layer
    filled = whole_pages(shape)
    return filled if window is None else smallest(filled, -(-(window - 1) // letter("page", PAGE_TOKENS)) + 1)


def request_pages(spec: ModelSpec, shape: ServingShape) -> int:
    """Most pages that a request holds at any time: its prompt's at admission, or what it decodes with."""
    if spec.window_of_every_layer is None:
        return whole_pages(shape)
    return largest(-(-shape.prompt_tokens // letter("page", PAGE_TOKENS)), decoding_pages(spec, shape))


def shared_pages(spec: ModelSpec, shape: ServingShape) -> int:
    """Of ``decoding_pages`` those that all answers to a prompt share: its whole pages but the one that holds its last token,
    which every answer computes again. None under a window, which moves on."""
    if shape.answers == 1 or spec.window_of_every_layer is not None:
        return 0
    return (shape.prompt_tokens - 1) // letter("page", PAGE_TOKENS)


def batch_pages(spec: ModelSpec, shape: ServingShape, batch: int) -> int:
    """Pages of ``batch`` answers that decode, while one more prompt is admitted in the place of one of them."""
    shared, held = shared_pages(spec, shape), decoding_pages(spec, shape)
    prompts = -(-batch // shape.answers)
    return prompts * shared + batch * (held - shared) + request_pages(spec, shape) - held


def touched_pages(spec: ModelSpec, shape: ServingShape) -> int:
    """Pages that ``shape.batch`` requests write in all. A page that was given back is reused when no blank one is left."""
    shared = shared_pages(spec, shape)
    return shape.prompts * shared + shape.batch * (whole_pages(shape) - shared)


def largest_batch(spec: ModelSpec, shape: ServingShape, pages: float) -> int:
    """Most answers that ``pages`` hold at once (whole prompts with all their answers); 0 where not one."""
    first = request_pages(spec, shape) - decoding_pages(spec, shape)
    each = batch_pages(spec, shape, shape.answers) - first
    return max(0, whole((pages - first) / each)) * shape.answers


def request_kv_bytes(spec: ModelSpec, shape: ServingShape) -> float:
    """Most KV cache that one request holds at a time: whole pages · page · bytes per token (``request_pages``)."""
    held = request_pages(spec, shape) * page_bytes(spec, shape)
    source = "a request's last page is counted whole"
    if spec.window_of_every_layer is not None:
        source += "; what is behind the window is given back"
    return named("kv_request_bytes", held, "bytes", source)


def page_bytes(spec: ModelSpec, shape: ServingShape) -> float:
    """One page over all layers and devices."""
    return letter("page", PAGE_TOKENS) * kv_bytes_per_token(spec, shape.cache_dtype)


def weights_on_device(spec: ModelSpec, shape: ServingShape) -> float:
    """Bytes of weights on one device: the blocks' matrices as ``Placement`` divides them, the rest (embedding, head, norms)
    by tensor; all of it where there is one device. Stages hold equally many layers, the first the embedding, the last the head:
    the fuller one is counted."""
    whole, at = weights_bytes(spec, shape.scheme), shape.placement
    if at.devices == 1:
        return named("weights_bytes", whole, "bytes", f"all of them on one device, in {shape.scheme}")
    rest = whole - matrices_bytes(spec, shape.scheme)
    stages = smallest(at.pipeline, spec.n_layers)
    layers = -(-spec.n_layers // stages) / spec.n_layers
    ends = rest / at.tensor / (1 if stages == 1 or spec.tied_embeddings else 2)
    held = layers * device_bytes(spec, shape.scheme, at) + ends
    source = "one device: matrices cut by tensor parallel, whole experts spread, layers by stage; embedding or head at an end"
    return named("weights_bytes", held, "bytes", source)


def kv_bytes_on_device(spec: ModelSpec, shape: ServingShape, kv_bytes: float) -> float:
    """Of ``kv_bytes`` of cached tokens what one device keeps: key heads divided by tensor (no further than there are heads,
    and not at all under latent attention), layers by pipeline, requests by attention groups."""
    at = shape.placement
    heads = 1 if spec.mla is not None else smallest(at.tensor, spec.n_kv_heads)
    return kv_bytes / (heads * smallest(at.pipeline, spec.n_layers) * at.attention_groups)
