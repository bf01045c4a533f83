"""Devices as people and drivers write them: "4090", "rtx 4090", "NVIDIA GeForce RTX 4090", "Tesla T4", "m4-max-64gb"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_SILENT = frozenset({
    "nvidia", "geforce", "tesla", "quadro", "amd", "radeon", "instinct", "intel", "apple", "r", "tm", "corporation",
    "gpu", "graphics", "generation", "edition", "server", "workstation", "hbm2", "hbm2e", "hbm3", "hbm3e", "macbook",
    "mac", "studio",
})  # fmt: skip
"""Words that tell no device from another. "laptop" does tell them apart: a laptop's RTX 4090 is another chip."""

_SERIES = ("rtx", "rx")
"""What people leave out before a number."""

_GIB = re.compile(r"(\d+)(?:gb|gib|g)")

_COUNT = re.compile(r"\s*(?:(\d+)\s*[x×*]\s*(\S.*?)|(\S.*?)\s+[x×*]\s*(\d+))\s*", re.IGNORECASE)


class Meant(NamedTuple):
    """The device that a text means, and the memory in GiB that it names beside (0: none)."""

    device: str
    memory_gib: int = 0


def words_of(text: str) -> list[str]:
    """Letters and digits in small letters: "A100-SXM4-80GB" is a100, sxm, 80gb; "rtx4090" is rtx, 4090."""
    text = re.sub(r"\b(rtx|rx)(?=\d)", r"\1 ", re.sub(r"\bsxm\d", "sxm", text.lower()))
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=\d) (?=gi?b\b)", "", text))


def count_in(text: str) -> tuple[int, str] | None:
    """How many devices and which, of "8xH100", "2 x rtx 3090" and "h100 x8"; None where no count is there."""
    found = _COUNT.fullmatch(text)
    if found is None:
        return None
    return (int(found[1]), found[2]) if found[1] else (int(found[4]), found[3])


def device_meant(text: str, names: Mapping[str, str]) -> Meant | None:
    """The device of ``names`` (name or alias → device) with the most of the words of ``text``, if none is left over but silent
    ones and a size of memory; None otherwise."""
    said = words_of(text)
    for words in (set(said), *({series, *said} for series in _SERIES)):
        fitting = [name for name in names if set(words_of(name)) <= words]
        if not fitting:
            continue
        best = max(fitting, key=lambda name: len(set(words_of(name))))
        left = words - set(words_of(best)) - _SILENT
        sizes = [match for word in left if (match := _GIB.fullmatch(word))]
        if len(left) == len(sizes) <= 1:
            return Meant(names[best], int(sizes[0][1]) if sizes else 0)
    return None
