"""Floating-point operations of both phases. A multiply–add is 2 FLOP. Sources: PaLM (arXiv 2204.02311, appendix B) and
Korthikanti et al. (arXiv 2205.05198); causal attention is counted as the half that is used, not the square a kernel may run."""

from __future__ import annotations

from twostroke.core.matrices import LayerKind, after_attention, block_kinds, head_matrix, layer_kinds
from twostroke.core.named import named, smallest
from twostroke.core.spec import ModelSpec
from twostroke.planner.work.params import count_parameters

PALM = "PaLM, arXiv 2204.02311, appendix B, with the causal half of the keys"


def mean_keys(n_tokens: float, window: int | None = None) -> float:
    """Keys an average query of a sequence of ``n_tokens`` attends to: s/2, or w − w²/2s with a window of w < s keys."""
    if window is None or window >= n_tokens:
        return n_tokens / 2
    return window - window * window / (2 * n_tokens)


def visible_pairs(start: int, count: int, window: int) -> int:
    """Pairs of a query and a key that it sees, of tokens start + 1 … start + count: Σ min(start + i, window), i = 1 … count."""
    growing = min(max(window - start, 0), count)
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window


def _keys_read(kind: LayerKind) -> int | None:
    """Most keys a query reads: those of a window or those an indexer picked; None: all before it."""
    return kind.top_keys if kind.window is None else kind.window


def attention_flops_per_token(spec: ModelSpec, n_tokens: float) -> float:
    """FLOP of QKᵀ and of PV for an average token of a causal sequence: Σ_layers 2·H·(d_qk + d_v)·mean_keys. Forward only.

    Latent attention is counted with its keys and values rebuilt, as training and prefill run it. An indexer adds
    2·(index heads)·(index dim + 1) for every key it scores: the product, and the weighted sum over its heads.
    """
    flops = 0.0
    for kind, count in layer_kinds(spec):
        scored = kind.index_flops_per_key * mean_keys(n_tokens)
        flops += count * (kind.flops_per_key * mean_keys(n_tokens, _keys_read(kind)) + scored)
    return named("attention_flops_per_token", flops, "FLOP", PALM)


def training_flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """6·N + 6·L·H·D·s FLOP a token, forward and backward: the numerator of MFU (DESIGN decision 11).

    N counts the parameters a token is multiplied with: the experts it passes, neither an untied input embedding nor learned
    positions. With latent attention 2·D is d_qk + d_v: DeepSeek-V3 at 4,096 tokens costs 250 GFLOP a token (arXiv 2505.09343,
    table 2; tests/planner/test_flops.py). Recomputation is excluded, as MFU asks; a sliding window shortens s.
    """
    return 6 * count_parameters(spec).in_products + 3 * attention_flops_per_token(spec, sequence_length)


def row_flop(spec: ModelSpec) -> int:
    """FLOP of one token's products in the blocks that our engine runs: after the last layer's attention only tokens that are
    sampled from go on."""
    whole = sum(len(layers) * sum(m.passed for m in matrices) for matrices, layers in block_kinds(spec))
    return 2 * (whole - last_block_elements(spec))


def last_block_elements(spec: ModelSpec) -> int:
    """Elements of the matrices after the last layer's attention that one token is multiplied with."""
    matrices = next(matrices for matrices, layers in block_kinds(spec) if spec.n_layers - 1 in layers)
    return sum(matrix.passed for matrix in matrices if after_attention(matrix))


def prefill_flops(spec: ModelSpec, prompt_tokens: int) -> float:
    """2·N_blocks·s + 2·V·E (the head, for the last token only) + causal attention, FLOP for one prompt.

    N_blocks are the matrices that one token passes: ``top_k`` of a layer's experts.
    """
    head = 2 * head_matrix(spec).weights
    return _matrix_flops(spec) * prompt_tokens + head + attention_flops_per_token(spec, prompt_tokens) * prompt_tokens


def _matrix_flops(spec: ModelSpec) -> float:
    parameters = count_parameters(spec)
    return 2 * (parameters.active_matrices + parameters.projections)


def decode_flops(spec: ModelSpec, context: int) -> float:
    """FLOP of one new token with ``context`` keys before it: 2·(active block matrices + V·E) + Σ_layers 2·H·(d_qk + d_v)·keys.

    Latent attention is counted absorbed, as engines decode it: queries are taken into the latent space, where a key costs
    2·H·(2·d_c + d_rope), and the two halves of the matrix that rebuilds keys and values are each used once, as before.
    """
    flops = _matrix_flops(spec) + 2 * head_matrix(spec).weights
    for kind, count in layer_kinds(spec):
        keys = smallest(context, _keys_read(kind) or context)
        flops += count * (kind.decode_flops_per_key * keys + kind.index_flops_per_key * context)
    return flops


def elementwise_elements(spec: ModelSpec, kind: LayerKind, backward: bool, activated: float | None = None) -> dict[str, float]:
    """Elements that fused elementwise work reads and writes per token in one layer of ``kind``, by component.

    Forward: norms and residual sums 9E (first norm 2E; sum and second norm 4E; sum 3E), rotation 2(H+K)D, activation 3F gated
    or 2F plain. Backward: norms and sums 14E (each norm reads its input, its gradient and the residual's and writes one: 4E
    twice; two recomputed normed inputs 2E each; the output's gradient twice), rotation 2(H+K)D and the gathering of dq, dk, dv
    2(H+2K)D, activation 6F gated (reads 2F + F, writes 2F and the recomputed product F) or 3F plain. F is the width that is
    activated, of routed experts ``top_k`` of theirs; ``activated`` is the part of it that one rank has.
    """
    if activated is None:
        activated = sum(p.active * p.k for p in kind.matrices if p.name.endswith("down"))
    queries_and_keys = kind.n_heads * kind.qk_dim + kind.n_kv_heads * kind.qk_dim
    rotated = queries_and_keys if spec.positions == "rope" else 0
    if backward:
        attention = 2 * rotated + 2 * (queries_and_keys + kind.n_kv_heads * kind.v_dim)
        return {"norms": 14 * spec.d_model, "attention": attention, "mlp": (6 if kind.gated else 3) * activated}
    return {"norms": 9 * spec.d_model, "attention": 2 * rotated, "mlp": (3 if kind.gated else 2) * activated}
