"""Bytes that a loaded model takes, that a step reads of it, and that a token adds to its KV cache: what both phases share."""

from __future__ import annotations

from functools import lru_cache

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import LayerKind, Matrix, block_kinds, head_matrix, layer_kinds
from twostroke.core.named import letter, named
from twostroke.core.schemes import CACHES, Scheme, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.work.params import count_parameters


def quantises(how: Scheme, product: Matrix, of_experts: bool) -> bool:
    """Whether ``how`` quantises the matrices of ``product``, in a mixture of experts or not. Routers never are: they are small,
    and a token's path hangs on them (gpt-oss and DeepSeek-V3 leave them out too)."""
    if not how.quantised or product.name in ("router", "shared_gate"):
        return False
    return product.split == "expert" or not (how.experts_only and of_experts)


def matrix_bytes(spec: ModelSpec, product: Matrix, scheme: str) -> float:
    """Bytes of one copy of the matrix of ``product`` under ``scheme``, its scales included, its bias not."""
    how = scheme_of(scheme)
    if quantises(how, product, spec.moe is not None) or not how.quantised:
        if not how.mix:
            return how.matrix_bytes(product.n, product.k)
        return sum(how.part_bytes(part.rpartition("_")[2], n, product.k) for part, n in product.parts)
    return how.kept_bytes * product.weights


def head_bytes(spec: ModelSpec, scheme: str) -> float:
    """Bytes of the output head: 16 bits a weight under every scheme but fp32 and GGUF's, which quantise it too."""
    how, head = scheme_of(scheme), head_matrix(spec)
    return how.kept_bytes * head.weights if how.head is None else scheme_of(how.head).matrix_bytes(head.n, head.k)


def embedding_bytes(spec: ModelSpec, scheme: str) -> float:
    """Bytes of the table of embeddings, of which a token looks one row up; a tied one is held as the head."""
    how, table = scheme_of(scheme), head_matrix(spec)
    if how.head is None:
        return how.kept_bytes * count_parameters(spec).embedding
    return head_bytes(spec, scheme) if spec.tied_embeddings else how.matrix_bytes(table.n, table.k)


@lru_cache(maxsize=1024)
def weights_bytes(spec: ModelSpec, scheme: str) -> float:
    """Bytes of the weights that an engine holds under ``scheme``, all experts included.

    Σ_matrices copies·(element bytes·n·k + scale bytes·blocks) + 2·(every other parameter); without quantisation w·N. GGUF
    quantises embedding and head too: Llama-3-8B takes 4.92 GB in Q4_K_M, as its file does.
    ``core.schemes`` says what each name means. (An int8 weight counted as half a byte is a known mistake of other calculators.)
    gpt-oss-20b takes 12.8 GiB and gpt-oss-120b 60.8 GiB in mxfp4, as their model card says (tests/planner/test_weights.py).
    """
    how, parameters = scheme_of(scheme), count_parameters(spec)
    if not how.quantised:
        return letter("w", how.element_bytes) * parameters.total
    if how.head is None:
        return matrices_bytes(spec, scheme) + how.kept_bytes * (parameters.total - parameters.block_matrices)
    rest = parameters.total - parameters.block_matrices - parameters.embedding - parameters.head
    ends = embedding_bytes(spec, scheme) + (0.0 if spec.tied_embeddings else head_bytes(spec, scheme))
    return matrices_bytes(spec, scheme) + ends + how.kept_bytes * rest


@lru_cache(maxsize=1024)
def matrices_bytes(spec: ModelSpec, scheme: str) -> float:
    """Bytes of the blocks' matrices under ``scheme``, all experts included."""
    source = f"of a layer, in {scheme} with its scales"
    matrices = sum(
        n * sum(named(f"{p.name}_bytes", p.copies * matrix_bytes(spec, p, scheme), "bytes", source) for p in kind.matrices)
        for kind, n in layer_kinds(spec)
    )
    return named("matrices_bytes", matrices, "bytes", "of all blocks")


def mixed_weights_bytes(spec: ModelSpec, scheme: str, others: tuple[tuple[str, str], ...]) -> float:
    """``weights_bytes`` with ``others``, ("<layer>.<product>", scheme) of matrices that are held in another one."""
    products = {p.name: p for alike, _ in block_kinds(spec) for p in alike}
    schemes = {scheme, *dict(others).values()}
    each = {(p.name, how): matrix_bytes(spec, p, how) for p in products.values() for how in schemes}
    extra = 0.0
    for name, how in others:
        product = products[name.partition(".")[2]]
        extra += product.copies * (each[product.name, how] - each[product.name, scheme])
    more = letter("others", extra) if others else 0
    source = f"every parameter, as {scheme} holds it: scales for the blocks' matrices, other tensors in 16 bits"
    if not scheme_of(scheme).quantised:
        source = f"every parameter in {scheme}"
    return named("model_bytes", weights_bytes(spec, scheme) + more, "bytes", source)


def experts_touched(n_experts: int, top_k: int, n_tokens: float) -> float:
    """Experts of a layer that a step of ``n_tokens`` reads, if routing were uniform and independent: E·[1 − (1 − k/E)^n]."""
    return n_experts * (1.0 - (1.0 - top_k / n_experts) ** n_tokens)


def kv_bytes_per_token(spec: ModelSpec, dtype: str = "bf16") -> float:
    """Bytes that one token adds to the cache while no window is full: Σ_layers (elements cached)·w.

    2·K·D elements a layer, key and value; with latent attention d_c + d_rope, and the indexer's key where there is one (counted
    in the same type). The factor 2 and the K (not H) heads matter: Llama-3-8B at 8,192 tokens is 1.00 GiB in bf16
    (tests/planner/test_planner_memory.py); DeepSeek-V3 70,272 bytes a token (arXiv 2505.09343, table 1). In int8 and
    int4 each head's key and value has a scale of its own, as our engine holds it: ``kv_scale_bytes``.
    """
    w = letter("w", bytes_of(dtype))
    each = sum(count * (kind.kv_elements * w + kv_scale_bytes(kind, dtype)) for kind, count in layer_kinds(spec))
    return named("kv_bytes_per_token", each, "bytes", f"keys and values of every layer in {dtype}; K key heads, not H")


def kv_scale_bytes(kind: LayerKind, dtype: str) -> float:
    """Bytes of the scales of one token in one layer: 2·K scales, of latent attention one; none but in int8 and int4."""
    return CACHES[dtype].scale_bytes * (1 if kind.latent_dim is not None else 2 * kind.n_kv_heads)
