"""MXFP4 as gpt-oss is published."""

from __future__ import annotations

from typing import Any

from twostroke.model.published.fp4 import Mxfp4
from twostroke.model.published.patterns import listed, named
from twostroke.model.published.storage import StorageOf


def storage_of(quantised: dict[str, Any]) -> StorageOf:
    """``quantization_config`` with ``quant_method`` "mxfp4"."""
    storage = Mxfp4()
    left_out = named((*listed(quantised, "modules_to_not_convert"), "lm_head"))
    return lambda module: None if left_out(module) else storage


METHOD = "mxfp4"
EXAMPLES = (Mxfp4(),)
