"""JSON and TOML files that a stranger may have written, read within limits of size and of memory.

A file is read whole only where it is as small as its kind may be, and parsed only where what it would become is not far larger
than itself: ``[]`` takes three bytes of a file and seventy of memory. Each break is a sentence that names the file.
``tests/fuzz`` sends both readers damaged files and measures what hostile ones take.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, TypeGuard

from twostroke.core.errors import CorruptFileError

MAX_DOCUMENT_BYTES = 4 * 2**20
"""Of a config.json, an index of adapters, a manifest: hand-sized documents. Larger kinds name their own limit."""

MAX_TOML_BYTES = 2**18  # a recipe has three thousand; the parser's tables take a hundred times a hostile file's bytes

MAX_KEY_PARTS = 32
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_KEY_PARTS}}}""")
"""A dotted key of TOML: the standard library's parser takes a time and a memory that grow with the square of its parts."""

MAX_DIGITS = 300
"""Of an integer: longer ones are more than any float holds, and no size, id or count."""

SPARE_BYTES = 40 * 2**20
"""What reading a file may take beyond twice its size; 64 MiB with what the libraries' own tables and rounding add."""

# Measured over sixteen patterns (CPython 3.11): what a bracket, a comma and a colon of JSON stand for at most once parsed.
_BRACKET_BYTES, _COMMA_BYTES, _COLON_BYTES = 96, 80, 156


MAX_INTEGER, MAX_NUMBER = 2**63 - 1, 1e30
"""Of any number in a config, a recipe or an adapter's settings: beyond them nothing is a size, an id or a scale, and
arithmetic leaves the range of its types."""


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a whole number whose size does not pass ``MAX_INTEGER``."""
    return isinstance(value, int) and not isinstance(value, bool) and -MAX_INTEGER <= value <= MAX_INTEGER


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether ``value`` is a number, not NaN, whose size does not pass ``MAX_NUMBER``: a float of it exists and is finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER <= value <= MAX_NUMBER


class Allowance:
    """Memory that reading ``file`` may take beside its own bytes: once more its ``size``, and ``SPARE_BYTES``.

    Readers ``take`` what a count in the file will cost before they pay it.
    """

    def __init__(self, file: Path, size: int) -> None:
        self.file, self.left = file, size + SPARE_BYTES

    def take(self, n_bytes: int, what: str) -> None:
        """Raises CorruptFileError where ``what`` takes more than is left."""
        if n_bytes > self.left:
            raise CorruptFileError(
                f"{self.file}: {what} would take {n_bytes} bytes of memory and {self.left} are left of its size and "
                f"{SPARE_BYTES}, the most there may be. It is damaged, or was made to exhaust memory."
            )
        self.left -= n_bytes


def parsed_bytes(raw: bytes) -> int:
    """At most how much memory the JSON in ``raw`` takes when it has been decoded and parsed."""
    width = 1
    if not raw.isascii() or b"\\u" in raw:
        beyond_16_bits = b"\\ud" in raw or b"\\uD" in raw or any(byte in raw for byte in range(0xF0, 0xF5))
        width = 4 if beyond_16_bits else 2  # of each character of a text that has one such
    brackets = raw.count(b"[") + raw.count(b"{")
    structure = brackets * _BRACKET_BYTES + raw.count(b",") * _COMMA_BYTES + raw.count(b":") * _COLON_BYTES
    return 2 * width * len(raw) + structure


def parse_json(raw: bytes, what: str, allowance: Allowance) -> Any:
    """The JSON in ``raw``. Raises CorruptFileError, with a sentence that begins with ``what``, if ``raw`` is not JSON, if a key
    of an object occurs twice, and if it takes more memory than ``allowance`` has.

    NaN and Infinity are read, because transformers writes them; readers of a number check that it is finite.
    """
    allowance.take(parsed_bytes(raw), what)
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats, parse_int=_integer)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except UnicodeEncodeError:
        raise CorruptFileError(f"{what} holds half of a surrogate pair, which is not a character.") from None
    except RecursionError:
        raise CorruptFileError(f"{what} is not valid JSON: it nests too deep.") from None
    except ValueError as error:  # of which UnicodeDecodeError and JSONDecodeError are kinds
        raise CorruptFileError(f"{what} is not valid JSON: {error}.") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r:.80} occurs twice, and readers differ in which of them counts")
    return table


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits, {digits[:20]}…; {MAX_DIGITS} are the most")
    return int(digits)


def read_bytes(file: Path, most_bytes: int) -> bytes:
    """The content of ``file``. Raises CorruptFileError where it is missing, cannot be read or is longer than ``most_bytes``."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            raw = stream.read(min(size, most_bytes) + 1)  # that many are allotted at once; a device or a pipe has no size
    except FileNotFoundError:
        raise CorruptFileError(f"{file} is missing.") from None
    except OSError as error:
        raise CorruptFileError(f"{file} cannot be read: {error.strerror}.") from None
    if len(raw) > most_bytes:
        raise CorruptFileError(f"{file} is {size} bytes; such a file is at most {most_bytes}.")
    return raw


def read_json(file: Path, most_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """The JSON in ``file``. Raises CorruptFileError as ``read_bytes`` and ``parse_json``."""
    raw = read_bytes(file, most_bytes)
    return parse_json(raw, str(file), Allowance(file, len(raw)))


def read_object(file: Path, most_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
    """The JSON object in ``file``. Raises CorruptFileError as ``read_json``, and where it is something else."""
    document = read_json(file, most_bytes)
    if not isinstance(document, dict):
        raise CorruptFileError(f"{file} must hold a JSON object.")
    return document


def read_toml(file: Path, most_bytes: int = MAX_TOML_BYTES) -> dict[str, Any]:
    """The TOML in ``file``. Raises CorruptFileError as ``read_bytes``, and where it is not valid."""
    try:
        text = read_bytes(file, most_bytes).decode("utf-8")
        long_key = _LONG_KEY.search(text)
        if long_key is not None:
            raise ValueError(f"the key {long_key.group()[:40]}… has more than {MAX_KEY_PARTS} parts")
        return tomllib.loads(text)
    except RecursionError:
        raise CorruptFileError(f"{file} is not valid TOML: it nests too deep.") from None
    except ValueError as error:
        raise CorruptFileError(f"{file} is not valid TOML: {error}.") from None
