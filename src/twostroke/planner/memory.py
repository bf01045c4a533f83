"""Bytes that training and serving hold, term by term."""

from __future__ import annotations

from twostroke.core.dtypes import bytes_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.params import Parameters, block_products, count_parameters

FP32 = 4.0

# -- both phases ----------------------------------------------------------------------------------------------------------


def weights_bytes(spec: ModelSpec, scheme: str) -> float:
    """Bytes of the weights that an engine holds under ``scheme``.

    fp32 4·N, bf16 and fp16 2·N. int8: 1 byte per element of the block matrices and one fp32 scale per output row; embedding,
    head, norms and biases stay bf16. (An int8 weight counted as half a byte is a known mistake of other calculators.)
    """
    parameters = count_parameters(spec)
    if scheme != "int8":
        return bytes_of(scheme) * parameters.total
    rows = spec.n_layers * sum(p.n for p in block_products(spec))
    return parameters.block_matrices * 1.0 + rows * FP32 + 2.0 * (parameters.total - parameters.block_matrices)


def kv_bytes_per_token(spec: ModelSpec, dtype: str = "bf16") -> float:
    """2·L·K·D·w bytes: key and value of one token in every layer. The factor 2 and the K (not H) heads matter: Llama-3-8B
    at 8,192 tokens is 1.00 GiB in bf16 (tests/planner/test_memory.py)."""
    return 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * bytes_of(dtype)


# -- training -------------------------------------------------------------------------------------------------------------


def training_weights_bytes(parameters: Parameters, dtype: str) -> float:
    """4·N for the fp32 master weights, and 2·N more for the bf16 working copy that forward and backward read."""
    return parameters.total * (FP32 + (0.0 if dtype == "fp32" else bytes_of(dtype)))


def gradients_bytes(parameters: Parameters, dtype: str) -> float:
    """4·N for the fp32 gradients that the optimizer reads and, with bf16 compute, 2·N for those that backward leaves beside
    them at the end of a step."""
    return parameters.total * (FP32 + (0.0 if dtype == "fp32" else bytes_of(dtype)))


def optimizer_bytes(parameters: Parameters, optimizer: str) -> float:
    """adamw: two fp32 moments, 8·N. muon: one fp32 momentum for the block matrices, 4·N_matrices, and AdamW for the rest."""
    if optimizer == "muon":
        return FP32 * parameters.block_matrices + 2 * FP32 * (parameters.total - parameters.block_matrices)
    return 2 * FP32 * parameters.total


def activation_bytes_per_token_and_layer(spec: ModelSpec, dtype: str, compiled: bool) -> float:
    """Bytes kept from forward for backward, for one token in one block, with flash attention (no T×T matrix).

    Kept in the working type: the block's input and the sum after attention (2E), q, k, v as attention reads them ((H+2K)·D),
    attention's output (H·D), the MLP's pre-activation (2F gated, F plain); and in fp32 attention's log-sum-exp (4·H) and one
    statistic per norm row (4 each, 8 for LayerNorm). Compiled, the normed inputs and the activation are recomputed from those;
    eager keeps them too: 2E normed, 2·F (the activation and the gated product), and rotation's inputs in fp32.
    """
    w = bytes_of(dtype)
    width, inner = spec.d_model, spec.n_heads * spec.head_dim
    pre_activation = (2 if spec.mlp == "swiglu" else 1) * spec.d_ff
    kept = w * (2 * width + spec.qkv_rows + inner + pre_activation)
    kept += FP32 * spec.n_heads + 2 * FP32 * (2 if spec.norm == "layernorm" else 1)
    if not compiled:
        gated = (2 if spec.mlp == "swiglu" else 1) * spec.d_ff
        kept += w * (2 * width + gated)
    return kept


def logits_bytes(spec: ModelSpec, chunk_tokens: int, dtype: str) -> float:
    """Bytes of one chunk of logits while its loss is differentiated: in the working type, in fp32, and their fp32 gradient."""
    return chunk_tokens * spec.vocab_size * (bytes_of(dtype) + 2 * FP32)


def checkpoint_bytes(parameters: Parameters, optimizer: str) -> float:
    """A checkpoint on disk: fp32 master weights and the optimizer's state."""
    return FP32 * parameters.total + optimizer_bytes(parameters, optimizer)


def model_bytes(parameters: Parameters, dtype: str = "bf16") -> float:
    """The finished model on disk: w·N."""
    return bytes_of(dtype) * parameters.total
