"""What importing or exporting a model moves, said before a weight is read: by headers on one side, by writers on the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from twostroke.core.dtypes import bytes_of
from twostroke.core.heap import LARGEST_KEPT
from twostroke.core.spec import ModelSpec
from twostroke.planner.training.moving import Moving


@dataclass(frozen=True)
class HeldTensor:
    """A canonical tensor of a source: ``n`` numbers, which are of ``dtype`` once they are read. ``decoded``: how many of them
    by what they are stored as, in calibration's names. ``is_new``: reading makes a copy, and no view of a mapped file."""

    n: int
    dtype: str
    decoded: Mapping[str, int] = field(default_factory=dict)
    is_new: bool = False

    @property
    def n_bytes(self) -> float:
        return self.n * bytes_of(self.dtype)


@dataclass(frozen=True)
class Held:
    """A source by its headers: bytes of its weights, the most of them that are mapped at once, and its canonical tensors in the
    order in which they are read."""

    read_bytes: int
    mapped_bytes: int
    tensors: Mapping[str, HeldTensor]

    @property
    def dtype(self) -> str:
        """The type that holds all tensors as they are read."""
        found = {tensor.dtype for tensor in self.tensors.values()}
        return found.pop() if len(found) == 1 else "fp32"


@dataclass(frozen=True)
class Made:
    """What a writer will write: bytes of files, numbers by what they are rounded to (calibration's names) in ``n_coded``
    matrices, bytes of new memory that it fills, as ``new_memory`` counts them, and the most that is held of a tensor beside
    what was read."""

    n_bytes: float
    encoded: Mapping[str, float] = field(default_factory=dict)
    n_coded: int = 0
    new_bytes: float = 0.0
    held_bytes: float = 0.0


def moving(held: Held, made: Made) -> Moving:
    """The whole way from ``held`` to ``made``."""
    decoded: Counter[str] = Counter()
    checked: Counter[str] = Counter()
    new_bytes, n_coded = made.new_bytes, made.n_coded
    for tensor in held.tensors.values():
        decoded.update(tensor.decoded)
        checked[tensor.dtype] += tensor.n
        n_coded += len(tensor.decoded)
    made_here = [tensor.n_bytes if tensor.is_new else 0.0 for tensor in held.tensors.values()]
    new_bytes += new_memory(made_here)
    two = max((one + other for one, other in pairwise([0.0, *made_here])), default=0.0)  # one goes when the next has come
    held_bytes = held.mapped_bytes + two + made.held_bytes
    return Moving(held.read_bytes, made.n_bytes, decoded, made.encoded, checked, new_bytes, n_coded, held_bytes)


def new_memory(sizes: Iterable[float], times: float = 1.0) -> float:
    """Bytes that the system has to give for buffers of ``sizes``, each filled ``times``: what was freed serves smaller ones."""
    return times * sum(size for size in sizes if size >= LARGEST_KEPT)


def cast(held: Held, dtype: str) -> list[float]:
    """Bytes of every tensor of ``held`` that changes its type to ``dtype``."""
    return [tensor.n * bytes_of(dtype) for tensor in held.tensors.values() if tensor.dtype != dtype]


WORDS = "words of a vocabulary"
"""What calibration calls reading and writing one."""


def words_of(tokenizer: object, spec: ModelSpec) -> dict[str, float]:
    """The words that are read and written with a model, of ``encoded``; none without a ``tokenizer``."""
    return {} if tokenizer is None else {WORDS: float(spec.vocab_size)}
