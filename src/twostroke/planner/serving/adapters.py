"""Adapters beside a served model: which and how many, what they take of memory, and what the native engine's steps take longer.

A step reads both factors of every adapter that one of its requests names, rank·(inputs + outputs) numbers a matrix, and
multiplies each row by those of its own (Punica, arXiv 2310.18547; docs/decisions.md, 106).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from twostroke.core.checks import check_whole
from twostroke.core.documents import is_integer, read_object
from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.matrices import ALL_LINEAR, layer_kinds
from twostroke.core.named import letter, named, smallest
from twostroke.core.policy import ADAPTER_MEMORY_BYTES, MAX_ADAPTER_RANK, MAX_ADAPTERS
from twostroke.core.schemes import ADAPTER_CODES, native_product_name, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.work.component import Work
from twostroke.planner.work.params import adapter_parameters, targeted

if TYPE_CHECKING:
    from twostroke.planner.serving.shape import ServingShape

CODE_DIGITS = 2
"""Products of 8 bits that one of an adapter's codes takes: rows come in two digits."""

MANY_ROWS = 512
"""Thin products are as fast a FLOP as these rows are."""

CONFIG_NAME = "adapter_config.json"


@dataclass(frozen=True)
class ServedAdapters:
    """Adapters of one rank and the same targets, which requests name in turn. Raises ConfigError."""

    count: Annotated[int, "adapters"]
    rank: Annotated[int, "rank of each"]
    targets: Annotated[tuple[str, ...], "matrices that each adapts"] = (ALL_LINEAR,)

    def __post_init__(self) -> None:
        for name, most in (("count", MAX_ADAPTERS), ("rank", MAX_ADAPTER_RANK)):
            check_whole(name, getattr(self, name))
            if getattr(self, name) > most:
                raise ConfigError(f"{name}={getattr(self, name)} of adapters must be at most {most}.")
        if not self.targets:
            raise ConfigError(f"adapters without targets add nothing. Name matrices, as q_proj, or {ALL_LINEAR}.")

    @classmethod
    def parse(cls, text: str) -> ServedAdapters:
        """From ``count,rank`` and targets behind them, as in ``8,16,q_proj,v_proj``."""
        count, _, rest = text.partition(",")
        rank, _, targets = rest.partition(",")
        try:
            numbers = int(count), int(rank)
        except ValueError:
            raise ConfigError(
                f"--lora {text!r:.200} must be NAME=DIR, or how many adapters, their rank and their targets, as "
                "8,16,q_proj,v_proj."
            ) from None
        try:
            return cls(*numbers, tuple(targets.split(",")) if targets else (ALL_LINEAR,))
        except ConfigError as error:
            raise ConfigError(f"--lora {text!r:.200}: {error}") from None


def adapters_in(directories: Iterable[Path]) -> tuple[ServedAdapters, ...]:
    """Those of adapter directories in PEFT's layout, by their configurations alone: a single matrix's own rank is not looked
    at. Raises CorruptFileError, and ConfigError for targets that are a pattern."""
    found = Counter(_described(directory / CONFIG_NAME) for directory in directories)
    return tuple(ServedAdapters(count, rank, targets) for (rank, targets), count in found.items())


def _described(file: Path) -> tuple[int, tuple[str, ...]]:
    document = read_object(file)
    rank, modules = document.get("r"), document.get("target_modules") or []
    if not is_integer(rank):
        raise CorruptFileError(f"{file}: r={rank!r:.100} must be a whole number.")
    if modules == ALL_LINEAR:
        modules = [ALL_LINEAR]
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise ConfigError(f"{file}: target_modules={modules!r:.100} is a pattern, and plans need names. List them.")
    return rank, tuple(sorted(set(modules)))


def held_bytes(spec: ModelSpec, shape: ServingShape) -> float:
    """Bytes of all adapters, as far as the engine's default lets them stay in memory."""
    each = letter("w_adapter", bytes_of(_element(shape)))
    held = sum(group.count * each * adapter_parameters(spec, group.rank, group.targets) for group in shape.adapters)
    source = "rank·(inputs + outputs) of every targeted matrix of each adapter; at most what the engine gives adapters"
    return named("adapters_bytes", smallest(held, float(ADAPTER_MEMORY_BYTES)), "bytes", source)


def _element(shape: ServingShape) -> str:
    return scheme_of(shape.scheme).adapter_element(native=True)


def read_bytes(spec: ModelSpec, shape: ServingShape, requests: int) -> float:
    """Bytes of adapters that a step of so many requests reads."""
    each = bytes_of(_element(shape))
    return sum(used * each * adapter_parameters(spec, group.rank, group.targets) for group, used in _used(shape, requests))


def _used(shape: ServingShape, requests: int) -> list[tuple[ServedAdapters, float]]:
    """Of each kind how many a step reads: requests name all of them in turn."""
    n = sum(group.count for group in shape.adapters)
    return [(group, group.count / n * min(n, requests)) for group in shape.adapters]


def adapter_works(
    spec: ModelSpec, shape: ServingShape, hardware: Hardware, requests: int, rows: float, working_set: float
) -> list[Work]:
    """What adapters add to a step of ``rows`` tokens of ``requests``: in each adapted matrix the larger of reading and
    arithmetic."""
    if not shape.adapters:
        return []
    element = _element(shape)
    width = spec.d_model
    rate = hardware.product_rate(native_product_name(element), MANY_ROWS, width, width)
    digits = CODE_DIGITS if element == ADAPTER_CODES else 1
    each, bandwidth, found = letter("w_adapter", bytes_of(element)), hardware.bandwidth(working_set), list[Work]()
    for group, used in _used(shape, requests):
        own_rows = rows * group.count / sum(other.count for other in shape.adapters)
        for kind, n_layers in layer_kinds(spec):
            for product in kind.matrices:
                for outputs in targeted(product, group.targets, spec.family):
                    numbers = letter("rank", group.rank) * (product.k + outputs)
                    flop, n_bytes = 2.0 * own_rows * numbers, used * each * numbers
                    limits = letter("digits", digits) * flop / rate, n_bytes / bandwidth
                    work = Work.limited(product.component, flop, n_bytes, *limits)
                    found.append(work.times(n_layers).called(f"{product.name}_adapters", "reading or multiplying both factors"))
    return found
