"""E4M3 as DeepSeek and transformers publish it (``fp8``), and as FBGEMM writes it (``fbgemm_fp8``)."""

from __future__ import annotations

from typing import Any

from twostroke.core.documents import is_integer
from twostroke.core.errors import ConfigError
from twostroke.model.published.patterns import listed, named
from twostroke.model.published.scaled import Scaled
from twostroke.model.published.storage import MAX_GROUP, StorageOf


def block_sizes(sizes: Any, key: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale. Raises ConfigError for anything but two numbers above 0."""
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(is_integer(s) and 0 < s <= MAX_GROUP for s in sizes):
        raise ConfigError(f"config.json: quantization_config {key}={sizes!r:.100} must be two numbers above 0.")
    return sizes[0], sizes[1]


def storage_of(quantised: dict[str, Any]) -> StorageOf:
    """``quantization_config`` with ``quant_method`` "fp8": blocks under ``weight_scale_inv`` where it names their size, else
    one ``weight_scale`` a tensor; with "fbgemm_fp8" one an output."""
    if quantised.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ConfigError(f"quantization_config of method 'fp8' with fmt={quantised['fmt']!r:.100} is not supported. Use e4m3.")
    if quantised.get("quant_method") == "fbgemm_fp8":
        storage = Scaled("fp8", "channel")
    elif quantised.get("weight_block_size") is not None:
        sizes = block_sizes(quantised["weight_block_size"], "weight_block_size")
        storage = Scaled("fp8", "block", sizes, scale=".weight_scale_inv")
    else:
        storage = Scaled("fp8", "tensor")
    left_out = named((*listed(quantised, "modules_to_not_convert", "ignored_layers"), "lm_head"))
    return lambda module: None if left_out(module) else storage


METHOD, FBGEMM = "fp8", "fbgemm_fp8"
EXAMPLES = (Scaled("fp8", "block", (128, 128), scale=".weight_scale_inv"), Scaled("fp8", "tensor"))
FBGEMM_EXAMPLES = (Scaled("fp8", "channel"),)
