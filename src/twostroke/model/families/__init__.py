"""Weight names of each supported family: the registry and the two directions, streamed by tensor.

``twostroke.core.families`` reads and writes the ``config.json`` of the same families; a test holds the two lists equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from twostroke.core.errors import UnsupportedFamilyError
from twostroke.core.spec import ModelSpec
from twostroke.model.families import gpt2, llama
from twostroke.model.families.layout import Entry, Layout, read_entry, write_entry

# Mistral, Qwen2 and Qwen3 name their weights as Llama does; their differences (windows, biases, QK-norm) are in the spec.
LAYOUTS: dict[str, Layout] = {
    "llama": llama.layout,
    "mistral": llama.layout,
    "qwen2": llama.layout,
    "qwen3": llama.layout,
    "gpt2": gpt2.layout,
}

_BASE_PREFIX = {"gpt2": "transformer."}

_RECOMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
"""Buffers that old checkpoints hold beside the weights (rotary frequencies, causal masks): computed here, never read."""


def layout(spec: ModelSpec) -> Iterator[Entry]:
    """Every tensor of a model of ``spec``, canonical beside stored."""
    spec.require_buildable()
    if spec.family not in LAYOUTS:
        raise UnsupportedFamilyError(f"family={spec.family!r} is not supported. Supported families: {', '.join(LAYOUTS)}.")
    return LAYOUTS[spec.family](spec)


def stored_name(spec: ModelSpec, name: str, present: Iterable[str]) -> str:
    """``name`` as this checkpoint spells it: one of the bare model, as ``openai-community/gpt2``, has no prefix."""
    prefix = _BASE_PREFIX.get(spec.family, "model.")
    short = name.removeprefix(prefix)
    return short if name not in present and short in present else name


def is_recomputed(spec: ModelSpec, name: str) -> bool:
    """True for a stored tensor that is no weight of ours: a buffer, or a second copy of a tied embedding."""
    return bool(_RECOMPUTED.match(name)) or (spec.tied_embeddings and name == "lm_head.weight")


def to_canonical(spec: ModelSpec, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, tensor) one by one, from ``get(stored name)``."""
    for entry in layout(spec):
        yield entry.canonical, read_entry(entry, get)


def from_canonical(spec: ModelSpec, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(stored name, tensor) one by one, from ``get(canonical name)``."""
    for entry in layout(spec):
        yield from write_entry(entry, get(entry.canonical))
