"""Pages of the KV cache that requests hold, as the scheduler takes them and gives them back.

A request takes pages for its whole prompt when it is admitted, and one more each time its last one is full. Where every layer
has a window, pages that no later query sees are given back as pages fill. Answers to one prompt share its whole pages. Held
against the engine's own counts in tests/planner/test_kv_pages.py.
"""

from __future__ import annotations

from twostroke.core.named import largest, letter, smallest, whole
from twostroke.core.policy import PAGE_TOKENS
from twostroke.core.spec import ModelSpec
from twostroke.planner.serving.shape import ServingShape


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
