"""The scheme of a published checkpoint's weights, from the ``quantization_config`` that its ``config.json`` holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.reader import Reader
from twostroke.core.schemes import SCHEMES, Scheme, published_schemes

OURS = "compressed-tensors"
"""The layout that ``twostroke.quantization`` writes."""

BITSANDBYTES = "bitsandbytes"

GGUF = "gguf"
"""The layout in which ``twostroke import`` keeps the blocks of a GGUF file."""

_NUMBERS = {"int": "int", "float": "fp"}
"""compressed-tensors' types of number, as our elements begin."""

MAX_NAME = 100
"""Characters of a type's name that are read."""


def published_scheme(config: dict[str, Any]) -> str | None:
    """The scheme nearest to the checkpoint's; None for plain weights. Raises ConfigError for a method without a scheme."""
    quantised = Reader(config).object("quantization_config")
    method = quantised.get("quant_method")
    if not quantised:
        return None
    if method == OURS:
        return _compressed_tensors(quantised)
    if method == GGUF:
        return _gguf(quantised)
    if isinstance(method, str) and method.startswith("modelopt"):
        return _modelopt(quantised)
    found = published_schemes(method)
    if not found:
        raise _unknown(f"of method {method!r:.100}")
    if len(found) == 1:
        return found[0].name
    read = Reader(quantised)
    eight, four = read.flag("load_in_8bit", False), read.flag("load_in_4bit", False)
    if method == BITSANDBYTES and not (eight or four):
        raise _unknown(f"of method {method!r} without load_in_4bit or load_in_8bit")
    stated = 8 if eight else 4  # bitsandbytes names no number
    bits, names = read.first_integer("bits", "w_bit", default=stated), {int(8 * row.element_bytes): row.name for row in found}
    if bits not in names:
        supported = ", ".join(map(str, sorted(names)))
        raise ConfigError(
            f"quantization_config of method {method!r} with bits={bits} is not supported. Supported: {supported}."
        )
    return names[bits]


def checkpoint_scheme(config: dict[str, Any]) -> str | None:
    """``published_scheme`` of a layout that we do not write; None where the weights are plain or in ``OURS``."""
    return None if Reader(config).object("quantization_config").get("quant_method") == OURS else published_scheme(config)


def published_cache(config: dict[str, Any]) -> str | None:
    """The type of KV cache that a checkpoint has scales for, "fp8" mostly; None where it says nothing. Model Optimizer names it
    (``kv_cache_quant_algo``) or describes it as compressed-tensors do (``kv_cache_scheme``). It may be none of ``CACHES``."""
    quantised = Reader(config).object("quantization_config")
    described, stated = Reader(quantised).object("kv_cache_scheme"), quantised.get("kv_cache_quant_algo")
    if stated is None and described:
        numbers, bits = described.get("type"), Reader(described).integer("num_bits", 8)
        stated = f"{_NUMBERS.get(str(numbers), numbers)}{bits}"
    return None if stated is None else str(stated)[:MAX_NAME].casefold()


def _modelopt(quantised: dict[str, Any]) -> str:
    """Of several algorithms the one of most layers: in a mixture of experts, that of the experts."""
    layers = Reader(quantised).object("quantized_layers").values()
    each = Counter(str(layer.get("quant_algo")) for layer in layers if isinstance(layer, dict))
    algorithm = each.most_common(1)[0][0] if each else str(quantised.get("quant_algo"))
    found = published_schemes(algorithm)
    if not found:
        raise _unknown(f"of method 'modelopt' with quant_algo={algorithm!r:.100}")
    return found[0].name


def _gguf(quantised: dict[str, Any]) -> str:
    """The row of the type that most layers have, a mix (Q4_K_M) where it has no row of its own. Types that no row begins with
    are counted as the smallest that is planned."""
    types = Reader(quantised).object("types")
    most = max(types, key=lambda kind: len(types[kind]) if isinstance(types[kind], list) else 0, default="")
    rows = [name for name, row in SCHEMES.items() if most and name.casefold().startswith(most.casefold()) and row.planned]
    return rows[0] if rows else "Q4_K_S"


def _compressed_tensors(quantised: dict[str, Any]) -> str:
    """The first group of layers decides: its numbers, whether attention is left out, how many share a scale, and whether
    activations are rounded too."""
    groups = Reader(quantised).object("config_groups")
    first = Reader(groups).object(next(iter(groups), ""))
    weights = Reader(Reader(first).object("weights"))
    numbers, bits, group = weights.config.get("type"), weights.integer("num_bits", 8), weights.optional_integer("group_size")
    element = f"{_NUMBERS.get(str(numbers))}{bits}"
    fitting = [row for row in SCHEMES.values() if row.element == element and row.planned]
    if not fitting:
        raise _unknown(f"of method {OURS!r} with {bits}-bit {numbers!r:.100} weights")
    rounded, only_experts = first.get("input_activations") is not None, _leaves_attention_out(quantised, first)
    return min(fitting, key=lambda row: _distance(row, group, rounded, only_experts)).name


def _leaves_attention_out(quantised: dict[str, Any], group: dict[str, Any]) -> bool:
    """Whether a pattern of ``ignore`` names attention, or all that is asked for are experts."""
    ignored, targets = (value if isinstance(value, list) else [] for value in (quantised.get("ignore"), group.get("targets")))
    patterns = [name for name in ignored if isinstance(name, str) and name.startswith("re:")]
    return any("attn" in name for name in patterns) or (bool(targets) and all("experts" in str(name) for name in targets))


def _distance(row: Scheme, group: int | None, rounded: bool, only_experts: bool) -> tuple[bool, int, bool, bool]:
    """How far a row is from a checkpoint's: first in what it quantises beside experts, if the checkpoint nothing, then in
    inputs that share a scale, then in what it leaves in 16 bits, last in what becomes of activations."""
    more, less = only_experts and not row.experts_only, row.experts_only and not only_experts
    return more, abs((row.group or 0) - (group or 0)), less, (row.activations != "bf16") != rounded


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"quantization_config {what} is not supported. Start from the unquantised model and run `twostroke quantize`."
    )
