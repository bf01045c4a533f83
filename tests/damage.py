"""Damage to files, drawn from a seeded generator: by bytes, by numbers in text, and by values of a JSON document."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

_BYTES = b'\x00\x01\x7f\x80\xff"[]{},:.-0159eE\\'
_WORDS = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_NUMBERS = (
    "0", "1", "-1", "2", "3", "1.5", "1e30", "1e308", "1e999", "-1e999", "NaN", "Infinity", "2147483648", "9" * 19, "9" * 40,
    "9" * 299, "9" * 400, "9" * 5000, "1e-320", "-0.0", "true", "null", '"7"', "[]", "{}", "[[[[]]]]",
)  # fmt: skip
_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 10**299, -(10**200), 0.5, -2.5, 1e308, float("inf"), float("nan"), "",
    "a", "llama", "\x00", "\ud800", "é" * 300, "../../etc/passwd", "/dev/zero", [], {}, [[]], [None] * 50,
)  # fmt: skip
_DIGITS = re.compile(rb"-?\d[\d.eE+-]*")


def damaged_bytes(data: bytes, rng: random.Random, head: int | None = None) -> bytes:
    """``data`` after one to four changes, most of them in its first ``head`` bytes, where formats keep what they promise."""
    content = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        if not content:
            break
        end = min(head, len(content)) if head and rng.random() < 0.9 else len(content)
        at = rng.randrange(end)
        length = rng.choice((1, 2, 4, 8, 16, 64, 300))
        kind = rng.randrange(8)
        if kind == 0:
            content[at] = rng.randrange(256)
        elif kind == 1:
            content[at] = rng.choice(_BYTES)
        elif kind == 2:
            size = rng.choice((4, 8))
            content[at : at + size] = (rng.choice(_WORDS) % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == 3:
            content[at : at + length] = b""
        elif kind == 4:
            content[at:at] = content[at : at + length] * rng.choice((1, 1, 2, 50))
        elif kind == 5:
            source = rng.randrange(end)
            content[at : at + length] = content[source : source + length]
        elif kind == 6 and rng.random() < 0.4:
            del content[rng.randrange(len(content)) :]
        else:
            numbers = list(_DIGITS.finditer(bytes(content[:end])))
            if numbers:
                span = rng.choice(numbers).span()
                content[span[0] : span[1]] = rng.choice(_NUMBERS).encode()
    return bytes(content)


def damaged_json(document: Any, rng: random.Random) -> bytes:
    """``document`` as JSON after one to three of its values were replaced, removed, renamed or repeated; some as bytes too."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.randrange(1, 4)):
        document = _changed(document, rng, 0)
    raw = json.dumps(document, indent=rng.choice((None, 1))).encode()
    return damaged_bytes(raw, rng) if rng.random() < 0.2 else raw


def any_value(rng: random.Random) -> Any:
    if rng.random() < 0.8:
        return copy.deepcopy(rng.choice(_LEAVES))
    if rng.random() < 0.5:
        return [any_value(rng) for _ in range(rng.randrange(4))]
    return {rng.choice(("a", "type", "rope_type", "content", "id", "")): any_value(rng) for _ in range(rng.randrange(4))}


def _changed(value: Any, rng: random.Random, depth: int) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1 * depth:
        if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
            return rng.choice((value + 1, value - 1, -value, value * 2, 0, value / 2, value * 10**9, str(value)))
        return any_value(rng)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    kind = rng.randrange(10)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value[rng.choice((*keys, "x"))] = value.pop(key)
    elif kind == 2:
        other = rng.choice(keys)
        value[key], value[other] = value[other], value[key]
    elif kind == 3 and isinstance(value, list):
        value.extend(value[: rng.choice((1, 8))] * rng.choice((1, 20)))
    else:
        value[key] = _changed(value[key], rng, depth + 1)
    return value


def damaged_toml(text: str, rng: random.Random) -> bytes:
    """``text`` with values of some keys replaced, or damaged as bytes."""
    if rng.random() < 0.4:
        return damaged_bytes(text.encode(), rng)
    lines = text.split("\n")
    assignments = [i for i, line in enumerate(lines) if re.match(r"\s*[\w.]+\s*=", line)]
    for i in rng.sample(assignments, min(len(assignments), rng.randrange(1, 4))):
        key = lines[i].partition("=")[0]
        values = (
            *_NUMBERS,
            "[1, 2]",
            '["a"]',
            "{a = 1}",
            "1979-05-27",
            "inf",
            "nan",
            "'''x'''",
            "0x" + "f" * 300,
            '"\\u0000"',
            "",
        )
        lines[i] = f"{key}= {rng.choice(values)}"
    return "\n".join(lines).encode()
