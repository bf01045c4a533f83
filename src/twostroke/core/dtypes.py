"""Number formats by name, with their size. Names are the ones recipes, options and ledger records use."""

from __future__ import annotations

from twostroke.core.errors import ConfigError

FP8 = "fp8"

BYTES: dict[str, float] = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, FP8: 1.0, "int8": 1.0, "int6": 0.75, "int5": 0.625, "int4": 0.5, "fp4": 0.5,
}  # fmt: skip
"""Bytes of one stored element, without the scales of quantised formats (those are counted where the scheme is known)."""

TORCH_NAMES: dict[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
"""Attribute of ``torch`` for each format, and the spelling of ``torch_dtype`` in a Hugging Face ``config.json``."""


def bytes_of(dtype: str) -> float:
    """Bytes an element of ``dtype`` takes; raises ConfigError for a name that is not in ``BYTES``."""
    try:
        return BYTES[dtype]
    except KeyError:
        raise ConfigError(f"dtype={dtype!r} is not known. Use one of {', '.join(BYTES)}.") from None
