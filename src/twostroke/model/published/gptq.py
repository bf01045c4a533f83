"""GPTQ as AutoGPTQ, GPTQModel and AutoRound write it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.reader import Reader
from twostroke.model.published.patterns import Budget, Pattern, pattern
from twostroke.model.published.storage import (
    FLOATS,
    Storage,
    StorageOf,
    Stored,
    StoredMatrix,
    checked_group,
    eight_bit_codes,
    four_bit_codes,
    integer_scheme,
    integer_values,
    n_groups,
)

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.kernels.codes import Codes

BITS = (4, 8)
FORMATS = ("gptq", "gptq_v2")
"""Of ``checkpoint_format``: the first stores zero points less 1. Others (marlin, bitblas, planar) lie differently."""


@dataclass(frozen=True)
class Gptq(Storage):
    """``qweight`` (k·bits/32, n) and ``qzeros`` (groups, n·bits/32) pack codes in 32-bit words, along the inputs and along the
    outputs; ``scales`` are (groups, n), ``g_idx`` the group of each input.

    ``group`` −1: all inputs. ``scattered``: inputs were put in groups by importance (``desc_act``), so that one's inputs do not
    lie together. ``format`` is one of ``FORMATS``, None where nothing says which.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    scattered: bool = False
    format: str | None = None

    @property
    def label(self) -> str:
        by = "one scale an output" if self.group == -1 else f"groups of {self.group}"
        order = ", inputs grouped by importance" if self.scattered else ""
        return f"{self.bits} bits, {by}{'' if self.symmetric else ' with zero points'}{order}"

    @property
    def timed_as(self) -> str:
        return "GPTQ"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        per_word, count = 32 // self.bits, n_groups(self.group, k)
        return (
            Stored(".qweight", ((-(-k // per_word), n),), ("I32",)),
            Stored(".qzeros", ((count, -(-n // per_word)),), ("I32",)),
            Stored(".scales", ((count, n),), FLOATS),
            Stored(".g_idx", ((k,),), ("I32",), optional=not self.scattered),
        )

    def scheme(self, k: int) -> str | None:
        if self.scattered and n_groups(self.group, k) > 1:
            return None
        return integer_scheme(self.bits, self.group, k, self.symmetric)

    def read(self, matrix: StoredMatrix) -> Codes | Tensor:
        import torch

        from twostroke.kernels.words import unpack_words

        n, k, count = matrix.n, matrix.k, n_groups(self.group, matrix.k)
        codes = unpack_words(matrix[".qweight"].t(), k, self.bits)
        scales, in_order = matrix.scales(".scales").t(), torch.arange(k) // (k if count == 1 else self.group)
        group_of_input = matrix.groups(".g_idx", count) if ".g_idx" in matrix else in_order
        words = matrix[".qzeros"]
        zeros = unpack_words(words, n, self.bits)
        if not self._stores_zeros_whole(codes, zeros):
            # Whole words, as GPTQModel does: what a zero point of 0 borrowed from its neighbour comes back.
            one_each = sum(1 << shift for shift in range(0, 32, self.bits))
            more = (words.long() + one_each) % 2**32
            zeros = unpack_words(torch.where(more >= 2**31, more - 2**32, more).int(), n, self.bits)
        zeros = zeros.t()
        if self.scheme(k) is None:
            return integer_values(codes, scales, zeros, group_of_input)
        if not torch.equal(group_of_input, in_order):
            raise matrix.error("'g_idx' must put inputs in groups in their order, because desc_act is false,")
        if self.bits == 4:
            return four_bit_codes(codes, scales, zeros, self.group)
        if not bool((zeros == 128).all()):
            raise matrix.error("zero points must be 128, because sym is true,")
        if not bool((scales > 0).all()):
            raise matrix.error("scales must be positive")
        return eight_bit_codes(codes, scales)

    def _stores_zeros_whole(self, codes: Tensor, stored: Tensor) -> bool:
        """Whether zero points are stored as they are, and not less 1.

        Labels lie (vllm-project/vllm#38966), so symmetric codes decide by themselves: their zero point is the middle. Else the
        label counts. Files without one mostly are older than the second format; of 4 bits, codes lie around their zero points,
        so the nearer mean is right. (Of 8 bits a small matrix does not say: its means lie further apart by chance.)
        """
        middle, first = 1 << (self.bits - 1), int(stored.flatten()[0])
        if self.symmetric and first in (middle - 1, middle) and bool((stored == first).all()):
            return first == middle
        if self.format is not None or self.bits != 4:
            return self.format == "gptq_v2"
        return float(codes.float().mean() - stored.float().mean()) < 0.5


def storage_of(quantised: dict[str, Any]) -> StorageOf:
    """``quantization_config`` with ``quant_method`` "gptq"."""
    read = Reader(quantised)
    bits, stated = read.integer("bits", 4), quantised.get("checkpoint_format")
    if bits not in BITS:
        raise ConfigError(f"quantization_config of method 'gptq' with bits={bits} is not supported. Supported: 4, 8.")
    if stated is not None and stated not in FORMATS:
        raise ConfigError(
            f"quantization_config of method 'gptq' with checkpoint_format={stated!r:.100} is not supported. "
            f"Supported: {', '.join(FORMATS)}."
        )
    if read.flag("lm_head", False):
        raise ConfigError("quantization_config of method 'gptq' with lm_head=true is not supported: the head must be plain.")
    usual = Gptq(
        bits, checked_group(read.integer("group_size", 128)), read.flag("sym", True),
        read.flag("desc_act", False) and not read.flag("static_groups", False), stated,
    )  # fmt: skip
    only, rules = _only(quantised), _rules(quantised, usual)

    def of(module: str) -> Storage | None:
        if module == "lm_head" or (only and not module.endswith(only)):
            return None
        for fits, storage in rules:
            if fits(module):
                return storage
        return usual

    return of


def _only(quantised: dict[str, Any]) -> tuple[str, ...]:
    """Ends of the names of the layers that are quantised; nothing: all are."""
    lists = quantised.get("modules_in_block_to_quantize") or []
    if not isinstance(lists, list) or not all(isinstance(names, list) for names in lists):
        raise ConfigError("config.json: quantization_config modules_in_block_to_quantize must be lists of names.")
    names = [name for names in lists for name in names]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError("config.json: quantization_config modules_in_block_to_quantize must be lists of names.")
    return tuple(f".{name}" for name in names)


def _rules(quantised: dict[str, Any], usual: Gptq) -> list[tuple[Pattern, Gptq | None]]:
    """GPTQModel's ``dynamic``: patterns of names with other settings, or of layers that are left out ("-:")."""
    found: list[tuple[Pattern, Gptq | None]] = []
    budget = Budget()
    for text, settings in Reader(quantised).object("dynamic").items():
        fits = pattern(re.sub(r"^[+-]:", "", text), budget)
        if text.startswith("-:"):
            found.append((fits, None))
            continue
        if not isinstance(settings, dict):
            raise ConfigError(f"config.json: quantization_config dynamic {text!r:.100} must be an object of settings.")
        own = Reader(settings)
        changed = replace(
            usual, bits=own.integer("bits", usual.bits), group=checked_group(own.integer("group_size", usual.group)),
            symmetric=own.flag("sym", usual.symmetric), scattered=own.flag("desc_act", usual.scattered),
        )  # fmt: skip
        if changed.bits not in BITS:
            raise ConfigError(f"quantization_config dynamic with bits={changed.bits} is not supported. Supported: 4, 8.")
        found.append((fits, changed))
    return found


METHOD = "gptq"
EXAMPLES = (
    Gptq(4, 128), Gptq(4, 64), Gptq(4, 32), Gptq(4, -1), Gptq(4, 128, False), Gptq(4, 128, False, True), Gptq(8, -1),
    Gptq(8, 128),
)  # fmt: skip
