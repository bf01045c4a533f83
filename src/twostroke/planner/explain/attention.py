"""Formulas of attention's FLOP, by kind of layer."""

from __future__ import annotations

from twostroke.core.matrices import LayerKind, layer_kinds
from twostroke.core.spec import ModelSpec
from twostroke.planner.explain.model import letters, total
from twostroke.planner.explain.term import Explanation
from twostroke.planner.flops import attention_flops_per_token

PALM = "PaLM, arXiv 2204.02311, appendix B, with the causal half of the keys"

_OF_KIND = ("H", "K", "D", "D_v", "window", "top_keys")
"""Names whose numbers differ between kinds of layer."""


def kinds_of(spec: ModelSpec) -> list[tuple[str, LayerKind, int]]:
    """(suffix, kind, how many layers): no suffix where all layers are of one kind."""
    kinds = layer_kinds(spec)
    return [(f"_{i}" if len(kinds) > 1 else "", kind, count) for i, (kind, count) in enumerate(kinds, 1)]


def numbers_of_kinds(spec: ModelSpec) -> dict[str, float]:
    """Letters, those of each kind of layer under its suffix."""
    numbers = letters(spec)
    for suffix, kind, count in kinds_of(spec):
        own = letters(spec, kind) | {"window": kind.window or 0, "top_keys": kind.top_keys or 0}
        numbers |= {f"{name}{suffix}": own[name] for name in _OF_KIND}
        numbers[f"L{suffix}"] = count
    numbers["L"] = spec.n_layers
    return numbers


def _heads(suffix: str, kind: LayerKind) -> str:
    if kind.qk_dim == kind.v_dim:
        return f"4·H{suffix}·D{suffix}"
    return f"2·H{suffix}·(D{suffix} + D_v{suffix})"


def _limit(suffix: str, kind: LayerKind) -> tuple[str, int] | None:
    """Name and number of the most keys a query reads."""
    if kind.window is not None:
        return f"window{suffix}", kind.window
    return (f"top_keys{suffix}", kind.top_keys) if kind.top_keys is not None else None


def _mean_keys(suffix: str, kind: LayerKind, tokens: str, n_tokens: float) -> str:
    limit = _limit(suffix, kind)
    if limit is None or limit[1] >= n_tokens:
        return f"{tokens}/2"
    return f"({limit[0]} − {limit[0]}²/(2·{tokens}))"


def explain_attention_flops(terms: Explanation, spec: ModelSpec, tokens: str, n_tokens: float) -> None:
    """FLOP of QKᵀ and PV of an average token of a causal sequence of ``tokens``."""
    parts = []
    for suffix, kind, _ in kinds_of(spec):
        one = f"L{suffix}·{_heads(suffix, kind)}·{_mean_keys(suffix, kind, tokens, n_tokens)}"
        if kind.index_heads:
            one += f" + L{suffix}·2·H_index·(D_index + 1)·{tokens}/2"
        parts.append(one)
    terms.add(
        "work", "attention_flops_per_token", attention_flops_per_token(spec, n_tokens), "FLOP", total(parts), PALM,
        **numbers_of_kinds(spec) | {tokens: n_tokens},
    )  # fmt: skip
