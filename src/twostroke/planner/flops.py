"""Floating-point operations of both phases. A multiply–add is 2 FLOP. Sources: PaLM (arXiv 2204.02311, appendix B) and
Korthikanti et al. (arXiv 2205.05198); causal attention is counted as the half that is used, not the square a kernel may run."""

from __future__ import annotations

from twostroke.core.spec import ModelSpec
from twostroke.planner.params import count_parameters


def mean_keys(n_tokens: float, window: int | None = None) -> float:
    """Keys an average query of a sequence of ``n_tokens`` attends to: s/2, or w − w²/2s with a window of w < s keys."""
    if window is None or window >= n_tokens:
        return n_tokens / 2
    return window - window * window / (2 * n_tokens)


def attention_flops_per_token(spec: ModelSpec, n_tokens: float) -> float:
    """FLOP of QKᵀ and of PV for an average token of a causal sequence: Σ_layers 4·H·D·mean_keys. Forward only."""
    keys = sum(mean_keys(n_tokens, spec.window_of_layer(i)) for i in range(spec.n_layers))
    return 4 * spec.n_heads * spec.head_dim * keys


def training_flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """6·N + 6·L·H·D·s FLOP a token, forward and backward: the numerator of MFU (DESIGN decision 11).

    N counts the parameters a token is multiplied with, so neither an untied input embedding nor learned positions.
    Recomputation is excluded, as MFU asks; a sliding window shortens s.
    """
    return 6 * count_parameters(spec).in_products + 3 * attention_flops_per_token(spec, sequence_length)


def mfu(spec: ModelSpec, sequence_length: int, tok_per_s: float, peak_flop_per_s: float) -> float:
    """Model FLOP utilisation, a fraction: training FLOP a token · tokens/s ÷ the measured 4096³ product rate of the type."""
    return training_flops_per_token(spec, sequence_length) * tok_per_s / peak_flop_per_s


def prefill_flops(spec: ModelSpec, prompt_tokens: int) -> float:
    """2·N_blocks·s + 2·V·E (the head, for the last token only) + causal attention, FLOP for one prompt."""
    head = 2 * spec.vocab_size * spec.d_model
    blocks = 2 * count_parameters(spec).block_matrices * prompt_tokens
    return blocks + head + attention_flops_per_token(spec, prompt_tokens) * prompt_tokens


def decode_flops(spec: ModelSpec, context: int) -> float:
    """FLOP of one new token with ``context`` keys before it: 2·(block matrices + V·E) + Σ_layers 4·H·D·keys."""
    keys = sum(min(context, spec.window_of_layer(i) or context) for i in range(spec.n_layers))
    products = 2 * (count_parameters(spec).block_matrices + spec.vocab_size * spec.d_model)
    return products + 4 * spec.n_heads * spec.head_dim * keys
