"""Products of the native library as profiles and plans name them, with the bytes of their packed weights."""

from __future__ import annotations

PREFIX = "native_"

FORMATS: dict[str, tuple[str, int]] = {
    "native_fp32": ("fp32", 0),
    "native_bf16": ("bf16", 0),
    "native_int8": ("int8", 0),
    "native_int8_weight_only": ("int8_weight_only", 0),
    "native_int4_g32": ("int4", 32),
    "native_int4_g64": ("int4", 64),
    "native_int4_g128": ("int4", 128),
}
"""Name of a product → the library's format, and its group of inputs that share a scale (0: no groups)."""


def product_name(format: str, group: int = 0) -> str:
    """``native_int4_g64`` of ("int4", 64), ``native_bf16`` of ("bf16", 0): names of rates in a machine profile."""
    return f"{PREFIX}{format}_g{group}" if group else f"{PREFIX}{format}"
