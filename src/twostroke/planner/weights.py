"""Bytes that a loaded model takes, that a step reads of it, and that a token adds to its KV cache: what both phases share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.planner.params import LayerKind, Product, block_products, count_parameters, layer_kinds

FP32 = 4.0
"""Bytes."""
KEPT = 2.0
"""Bytes of an element that a quantised scheme leaves in 16 bits."""


@dataclass(frozen=True)
class Scheme:
    """How weights are held: ``element_bytes`` of one element of a quantised matrix, and ``scale_bytes`` for every block of
    ``block_rows`` × ``block_columns`` elements (0 columns: the whole row), the last block of a row or column being smaller.

    ``experts_only``: in a mixture of experts nothing but the experts' matrices is quantised.
    """

    element_bytes: float
    scale_bytes: float = 0.0
    block_rows: int = 1
    block_columns: int = 0
    quantised: bool = True
    experts_only: bool = False

    def matrix_bytes(self, product: Product) -> float:
        """Bytes of one copy of the matrix of ``product`` with its scales."""
        columns = math.ceil(product.k / self.block_columns) if self.block_columns else 1
        blocks = math.ceil(product.n / self.block_rows) * columns
        return self.element_bytes * product.weights + self.scale_bytes * blocks

    def quantises(self, product: Product, of_experts: bool) -> bool:
        """Whether the matrices of ``product``, in a mixture of experts or not, are quantised. Routers never are: they are
        small, and a token's path hangs on them (gpt-oss and DeepSeek-V3 leave them out too)."""
        if not self.quantised or product.name in ("router", "shared_gate"):
            return False
        return product.split == "expert" or not (self.experts_only and of_experts)


SCHEMES: dict[str, Scheme] = {
    "fp32": Scheme(4.0, quantised=False),
    "bf16": Scheme(2.0, quantised=False),
    "fp16": Scheme(2.0, quantised=False),
    # e4m3 with one fp32 scale per block of 128 × 128: DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3.2).
    "fp8": Scheme(1.0, FP32, 128, 128),
    # One fp32 scale an output row, as `twostroke quantize` writes it; w8a8 holds the same and quantises activations too.
    "int8": Scheme(1.0, FP32),
    "w8a8": Scheme(1.0, FP32),
    # Groups of 128 inputs share an fp16 scale and a 4-bit zero point, as AWQ and GPTQ pack them: 4.16 bits an element.
    "int4": Scheme(0.5, 2.5, 1, 128),
    # OCP Microscaling 1.0: blocks of 32 with one 8-bit exponent, 4.25 bits an element.
    "mxfp4": Scheme(0.5, 1.0, 1, 32, experts_only=True),
    # NVIDIA's: blocks of 16 with one e4m3 scale, 4.5 bits an element.
    "nvfp4": Scheme(0.5, 1.0, 1, 16),
}
"""Schemes by the name that options and ledger records use, as accelerators serve them. All but the first three quantise the
blocks' matrices, routers aside; embedding, positions, output head, norms, biases and other small tensors stay in 16 bits."""


OURS: dict[str, Scheme] = {
    "int8_weight_only": SCHEMES["int8"],
    "int4-g32": Scheme(0.5, 4.5, 1, 32),
    "int4-g64": Scheme(0.5, 4.5, 1, 64),
    "int4-g128": Scheme(0.5, 4.5, 1, 128),
}
"""Those that only our engine serves, as `twostroke quantize` writes them: a group has an fp32 scale and a 4-bit zero point."""


def scheme_of(name: str) -> Scheme:
    """The scheme called ``name``; ConfigError for another name."""
    known = SCHEMES | OURS
    if name not in known:
        raise ConfigError(f"scheme={name!r} is not a way to hold weights. Use one of {', '.join(known)}.")
    return known[name]


def matrix_bytes(spec: ModelSpec, product: Product, scheme: str) -> float:
    """Bytes of one copy of the matrix of ``product`` under ``scheme``, its scales included, its bias not."""
    how = scheme_of(scheme)
    if how.quantises(product, spec.moe is not None):
        return how.matrix_bytes(product)
    return (KEPT if how.quantised else how.element_bytes) * product.weights


@lru_cache(maxsize=1024)
def weights_bytes(spec: ModelSpec, scheme: str) -> float:
    """Bytes of the weights that an engine holds under ``scheme``, all experts included.

    Σ_matrices copies·(element bytes·n·k + scale bytes·blocks) + 2·(every other parameter); without quantisation w·N.
    ``SCHEMES`` says what each name means. (An int8 weight counted as half a byte is a known mistake of other calculators.)
    gpt-oss-20b takes 12.8 GiB and gpt-oss-120b 60.8 GiB in mxfp4, as their model card says (tests/planner/test_weights.py).
    """
    how, parameters = scheme_of(scheme), count_parameters(spec)
    if not how.quantised:
        return how.element_bytes * parameters.total
    matrices = sum(n * p.copies * matrix_bytes(spec, p, scheme) for kind, n in layer_kinds(spec) for p in kind.products)
    return matrices + KEPT * (parameters.total - parameters.block_matrices)


def mixed_weights_bytes(spec: ModelSpec, scheme: str, in_int8: tuple[str, ...]) -> float:
    """``weights_bytes`` with the matrices ``in_int8`` ("<layer>.<product>") of a dense model held so instead."""
    extra = {p.name: matrix_bytes(spec, p, "int8") - matrix_bytes(spec, p, scheme) for p in block_products(spec)}
    return weights_bytes(spec, scheme) + sum(extra[name.partition(".")[2]] for name in in_int8)


def experts_touched(n_experts: int, top_k: int, n_tokens: float) -> float:
    """Experts of a layer that a step of ``n_tokens`` reads, if routing were uniform and independent: E·[1 − (1 − k/E)^n]."""
    return n_experts * (1.0 - (1.0 - top_k / n_experts) ** n_tokens)


def weights_read_bytes(spec: ModelSpec, scheme: str, n_tokens: float = 1.0) -> float:
    """Bytes of weights that one step of ``n_tokens`` tokens reads: of experts those touched, of everything else all.

    An untied input embedding and learned positions are read a row a token, which is left out.
    """
    how, parameters = scheme_of(scheme), count_parameters(spec)
    read = 0.0
    for kind, count in layer_kinds(spec):
        for p in kind.products:
            copies = p.copies if p.copies == 1 else experts_touched(p.copies, p.active, n_tokens)
            read += count * copies * matrix_bytes(spec, p, scheme)
    looked_up = parameters.positions + (0 if spec.tied_embeddings else parameters.embedding)
    rest = parameters.total - parameters.block_matrices - looked_up
    return read + (KEPT if how.quantised else how.element_bytes) * rest


def kv_bytes_per_token(spec: ModelSpec, dtype: str = "bf16") -> float:
    """Bytes that one token adds to the cache while no window is full: Σ_layers (elements cached)·w.

    2·K·D elements a layer, key and value; with latent attention d_c + d_rope, and the indexer's key where there is one (counted
    in the same type). The factor 2 and the K (not H) heads matter: Llama-3-8B at 8,192 tokens is 1.00 GiB in bf16
    (tests/planner/test_planner_memory.py); DeepSeek-V3 70,272 bytes a token (arXiv 2505.09343, table 1). In int8 each head's
    key and value has an fp32 scale of its own, as our engine holds it: ``kv_scale_bytes``.
    """
    return sum(count * (kind.kv_elements * bytes_of(dtype) + kv_scale_bytes(kind, dtype)) for kind, count in layer_kinds(spec))


def kv_scale_bytes(kind: LayerKind, dtype: str) -> float:
    """Bytes of the scales of one token in one layer of an int8 cache: 2·K·4 (of latent attention 4); none in other types."""
    if dtype != "int8":
        return 0.0
    return FP32 * (1 if kind.latent_dim is not None else 2 * kind.n_kv_heads)


def kv_bytes(spec: ModelSpec, dtype: str, n_tokens: float) -> float:
    """Bytes that one request of ``n_tokens`` needs in the cache: Σ_layers (elements cached)·w·min(n, window).

    Pages are not rounded here, and an engine that frees nothing behind a window holds n·``kv_bytes_per_token`` instead.
    """
    return sum(
        count
        * (kind.kv_elements * bytes_of(dtype) + kv_scale_bytes(kind, dtype))
        * (n_tokens if kind.window is None else min(n_tokens, kind.window))
        for kind, count in layer_kinds(spec)
    )
