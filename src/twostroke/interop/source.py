"""Defines the result of every importer: a spec, weights that are read one at a time, and a tokenizer or None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from twostroke.core.spec import ModelSpec
from twostroke.interop.moved import Held
from twostroke.model.published.gguf import KeptRows


@dataclass(frozen=True)
class SourceTokenizer:
    """A tokenizer that was made from a source's tables, and keys for its ``tokenizer_config.json`` beside bos and eos."""

    tokenizer: Tokenizer
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceModel:
    """An imported model. ``dtype`` is the format that holds the source's weights exactly, ``auto`` the one that they are stored
    in unless another is asked for (None: ``dtype``), ``codes`` what is stored as it is. ``held`` says what reading it takes.
    ``tokenizer`` is a directory of files or a tokenizer made from tables."""

    kind: str
    spec: ModelSpec
    state: Mapping[str, Tensor]
    dtype: str
    held: Held
    tokenizer: Path | SourceTokenizer | None
    notes: tuple[str, ...] = ()
    auto: str | None = None
    codes: KeptRows | None = None


def halves_from_pairs(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a query or key projection, reordered for a rotary embedding that rotates halves instead of neighbours.

    llama2.c and GGUF's llama rotate the pair of rows (2j, 2j+1) of a head, Hugging Face the pair (j, j + D/2). The permutation
    is the same for queries and keys, so scores do not change.
    """
    rows = weight.shape[0]
    return weight.view(n_heads, rows // n_heads // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def pairs_from_halves(weight: Tensor, n_heads: int) -> Tensor:
    """The inverse of ``halves_from_pairs``."""
    rows = weight.shape[0]
    return weight.reshape(n_heads, 2, rows // n_heads // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
