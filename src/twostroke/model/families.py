"""Converts weights between a family's stored tensors and the canonical ones, in both directions and one tensor at a time.

``twostroke.core.families`` says which stored tensors a canonical one consists of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from twostroke.core.families import layout, weight_names
from twostroke.core.families.weights import Entry
from twostroke.core.spec import ModelSpec

_RECOMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
"""Buffers that old checkpoints hold beside the weights (rotary frequencies, causal masks). They are computed and not read."""


def stored_name(spec: ModelSpec, name: str, present: Iterable[str]) -> str:
    """``name`` as this checkpoint writes it. Checkpoints of the model without its head, as ``openai-community/gpt2``, have no
    prefix."""
    short = name.removeprefix(weight_names(spec.family).base)
    return short if name not in present and short in present else name


def is_recomputed(spec: ModelSpec, name: str) -> bool:
    """True for a stored tensor that is not needed: a buffer, or a second copy of a tied embedding."""
    return bool(_RECOMPUTED.match(name)) or (spec.tied_embeddings and name == f"{weight_names(spec.family).head}.weight")


def read_entry(entry: Entry, get: Callable[[str], Tensor]) -> Tensor:
    """The canonical tensor of ``entry`` from stored tensors. A single untransposed part is returned without a copy."""
    tensors = [get(part.name).mT if entry.turns(part) else get(part.name) for part in entry.parts]
    return held_order(entry, tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=0 if entry.copies == 1 else 1))


def write_entry(entry: Entry, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(stored name, stored tensor) for each part of ``entry``: the inverse of ``read_entry``."""
    for part, piece in zip(entry.parts, stored_rows(entry, tensor), strict=True):
        yield part.name, piece.mT if entry.turns(part) else piece


def held_order(entry: Entry, tensor: Tensor) -> Tensor:
    """``tensor``, the rows of ``entry`` or a number for each, from the order of the disk to the canonical one."""
    if entry.interleaved:
        tensor = tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    if entry.copies > 1:
        tensor = tensor.flatten(0, 1)
    if entry.by_group is None:
        return tensor
    heads = tensor.unflatten(0, (*entry.by_group, -1))
    return torch.cat((heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)))


def stored_rows(entry: Entry, tensor: Tensor) -> Iterator[Tensor]:
    """The inverse of ``held_order``, a stored part after another: ``tensor``, the rows of ``entry`` or a number for each, in
    the order of the disk. A part that holds several matrices gets a dimension for them."""
    tensor, start = stored_order(entry.by_group, tensor), 0
    if entry.copies > 1:
        tensor = tensor.unflatten(0, (entry.copies, -1))
    for part in entry.parts:
        rows = part.rows // entry.copies
        piece = tensor.narrow(0 if entry.copies == 1 else 1, start, rows)
        if entry.interleaved:
            piece = piece.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        yield piece
        start += rows


def stored_order(by_group: tuple[int, int] | None, tensor: Tensor) -> Tensor:
    """The inverse of ``held_order`` for an entry of ``by_group``."""
    if by_group is None:
        return tensor
    groups, heads = by_group
    parts = tensor.split([groups * n * (len(tensor) // (groups * heads)) for n in (heads - 2, 1, 1)])
    by_head = [part.unflatten(0, (groups, n, -1)) for part, n in zip(parts, (heads - 2, 1, 1), strict=True)]
    return torch.cat(by_head, dim=1).flatten(0, 2)


def to_canonical(spec: ModelSpec, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, tensor) one by one, from ``get(stored name)``."""
    for entry in layout(spec):
        yield entry.canonical, read_entry(entry, get)
