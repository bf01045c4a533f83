"""Activation checkpointing: ``train.activation_checkpointing`` decides what a block keeps for its backward pass.

*none* keeps everything that backward reads. *full* keeps a block's input and computes the whole block again. *selective* keeps
the results of the wide products and of flash attention, which take most of the time, and computes norms, rotary embedding,
activations and the probabilities of explicit attention again, which take most of the memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.kernels import training_attention  # noqa: F401  registers the operator named below
from twostroke.model.decoder import Block, Decoder

Compute = Callable[..., Tensor]
Recompute = Callable[..., Tensor]

_MATRIX_ARGUMENT = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}
"""The operations that ``nn.Linear`` becomes, with the number of the argument that is the matrix, (inputs, outputs)."""

_FLASH = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
} | {torch.ops.twostroke.packed_attention.default}


def _policy(inputs_kept: frozenset[int], ctx: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep the results of flash attention and of products that read the residual stream or attention's output.

    The results of a block's last product, which no backward pass reads, and of an adapter's second product, which is large and
    cheap to compute, are not kept. The width of a product's input distinguishes them.
    """
    if operation in _FLASH:
        return CheckpointPolicy.MUST_SAVE
    if operation in _MATRIX_ARGUMENT:
        matrix = arguments[_MATRIX_ARGUMENT[operation]]
        if matrix.shape[0] in inputs_kept:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _Caches:
    """The caches of uncompiled selective checkpointing. Autograd's saved-tensor hooks do not see what they hold."""

    def __init__(self) -> None:
        self.watched: list[dict[Any, Any]] | None = None

    def contexts(self, inputs_kept: frozenset[int]) -> tuple[Any, Any]:
        contexts = create_selective_checkpoint_contexts(functools.partial(_policy, inputs_kept))
        if self.watched is not None:
            self.watched.append(contexts[0].storage)
        return contexts


_CACHES = _Caches()


def _recompute(compute: Compute, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None, **how: Any) -> Tensor:
    """``checkpoint`` with each tensor as an argument of its own, so that autograd's saved-tensor hooks see that it is kept."""
    result: Tensor
    if rope is None:
        result = checkpoint(compute, x, None, mask, use_reentrant=False, **how)
    else:
        result = checkpoint(
            lambda x, cos, sin, mask: compute(x, (cos, sin), mask), x, rope[0], rope[1], mask, use_reentrant=False, **how
        )
    return result


def _selective(inputs_kept: frozenset[int]) -> Recompute:
    context_fn = functools.partial(_CACHES.contexts, inputs_kept)

    def run(compute: Compute, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        return _recompute(compute, x, rope, mask, context_fn=context_fn)

    return run


def checkpoint_activations(decoder: Decoder, policy: str) -> None:
    """Make each block of ``decoder`` keep what ``policy`` says. Call it before the blocks are compiled.

    All blocks have the same function, so that they still share one compiled graph. Gradients equal those without checkpointing:
    bit for bit if uncompiled, and up to the compiler's rounding if compiled (tests/training/test_activation_checkpointing.py).
    Dropout draws the same random numbers again.
    """
    spec: ModelSpec = decoder.spec
    kinds: dict[str, Recompute | None] = {
        "none": None,
        "selective": _selective(frozenset((spec.d_model, spec.n_heads * spec.head_dim))),
        "full": _recompute,
    }
    # It warns about in-place operations in recomputed functions, and a block has none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if policy not in kinds:
        raise ConfigError(f"train.activation_checkpointing={policy!r} is not known. Use one of {', '.join(map(repr, kinds))}.")
    for block in decoder.blocks:
        assert isinstance(block, Block)
        block.recompute = kinds[policy]


@contextmanager
def cached_bytes() -> Iterator[Callable[[], int]]:
    """A context with a function that counts the bytes that uncompiled selective checkpointing has kept since it was entered."""
    watched: list[dict[Any, Any]] = []
    _CACHES.watched = watched

    def count() -> int:
        found: dict[int, int] = {}
        for cache in watched:
            for leaf in torch.utils._pytree.tree_leaves(cache):
                tensor = getattr(leaf, "val", leaf)
                if isinstance(tensor, Tensor):
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(found.values())

    try:
        yield count
    finally:
        _CACHES.watched = None
