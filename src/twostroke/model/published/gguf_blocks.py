"""The quantised types of GGUF: blocks of numbers, and which scheme of ours computes with their codes. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """A quantised type: ``n_values`` numbers in ``n_bytes``, with fp16 numbers at the bytes ``halves``. ``scheme`` is ours that
    holds its codes; None: they become plain numbers."""

    n_values: int
    n_bytes: int
    halves: tuple[int, ...]
    scheme: str | None = None


BLOCKS: dict[str, Block] = {
    "Q8_0": Block(32, 34, (0,), "int8-g32"),
    "Q4_0": Block(32, 18, (0,), "int4-g32"),
    "Q4_1": Block(32, 20, (0, 2)),
    "Q5_0": Block(32, 22, (0,), "int8-g32"),
    "Q5_1": Block(32, 24, (0, 2)),
    "Q2_K": Block(256, 84, (80, 82)),
    "Q3_K": Block(256, 110, (108,), "int8-g16"),
    "Q4_K": Block(256, 144, (0, 2), "int4-k"),
    "Q5_K": Block(256, 176, (0, 2)),
    "Q6_K": Block(256, 210, (208,), "int8-g16"),
    "IQ4_NL": Block(32, 18, (0,), "int8-g32"),
    "IQ4_XS": Block(256, 136, (0,), "int8-g32"),
    "MXFP4": Block(32, 17, (), "int8-g32"),
}
"""ggml's ``ggml-common.h``. Codes of fewer bits without minima are held in 8: the weights' numbers stay the same."""
