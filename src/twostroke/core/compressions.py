"""How ranks send gradients in fewer bits: one row a way. Training sends by it, and plans count its bytes."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 256
"""Elements that share one scale, and that a Hadamard rotation mixes. A scale in bf16 adds 1/16 of a bit to each."""

SCALE_BITS = 16


@dataclass(frozen=True)
class Compression:
    """``bits`` of an element. A code has a scale for each ``BLOCK``. ``rotated``: blocks are multiplied by a Hadamard matrix
    first, which spreads an outlier over its block (QuaRot, arXiv 2404.00456; SDP4Bit, arXiv 2410.15526). ``feeds_back``: what
    rounding left out can be added to the next step's gradient (Karimireddy et al. 2019, arXiv 1901.09847)."""

    name: str
    bits: int
    is_code: bool = False
    rotated: bool = False
    feeds_back: bool = False
    low_rank: bool = False
    says: str = ""

    @property
    def bytes_per_element(self) -> float:
        """Bytes that an element takes on the wire, with its share of a scale."""
        return (self.bits + (SCALE_BITS / BLOCK if self.is_code else 0)) / 8

    @property
    def multiple(self) -> int:
        """What a message's elements are padded to."""
        return BLOCK if self.is_code else 1


COMPRESSIONS = {
    row.name: row
    for row in (
        Compression("none", 32, says="as exact says"),
        Compression("bf16", 16, says="half of fp32"),
        Compression("fp16", 16, says="half of fp32"),
        Compression("int8", 8, is_code=True, feeds_back=True, says="a quarter"),
        Compression("int4", 4, is_code=True, rotated=True, feeds_back=True, says="an eighth"),
        Compression("powersgd", 32, feeds_back=True, low_rank=True, says="two thin factors of each matrix"),
    )
}


def factored_elements(shape: tuple[int, ...], rank: int) -> int:
    """Elements that PowerSGD of ``rank`` sends of a matrix of ``shape``, those of its two factors: r·(rows + columns) (Vogels
    et al. 2019, arXiv 1905.13727). 0 for what is sent whole: vectors, and matrices that have no more elements themselves."""
    if len(shape) < 2:
        return 0
    columns = _elements(shape[1:])
    both = rank * (shape[0] + columns)
    return both if both < shape[0] * columns else 0


def _elements(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
