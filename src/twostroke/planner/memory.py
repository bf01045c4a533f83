"""Bytes that training holds, term by term."""

from __future__ import annotations

from twostroke.core.dtypes import bytes_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.params import Parameters
from twostroke.planner.weights import FP32


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


EXPLICIT_ATTENTION_TOKENS = 2048
"""Longest sequence that bf16 training on a CPU attends to by products and a softmax, keeping probabilities
(``model.attention.MAX_EXPLICIT_TOKENS``); everything else uses flash attention."""


def attends_explicitly(device_kind: str, dtype: str, sequence_length: int) -> bool:
    """Whether training keeps probabilities, as ``model.attention.prefers_explicit`` decides."""
    return device_kind == "cpu" and dtype == "bf16" and sequence_length <= EXPLICIT_ATTENTION_TOKENS


def query_blocks(sequence_length: int) -> list[tuple[int, int]]:
    """(start, end) of the blocks of max(128, ⌈T/4⌉) queries that explicit attention walks; each sees keys up to its end."""
    step = max(128, -(-sequence_length // 4))
    return [(start, min(start + step, sequence_length)) for start in range(0, sequence_length, step)]


def keys_walked(device_kind: str, dtype: str, sequence_length: int) -> float:
    """Keys that a training kernel multiplies an average query with: Σ length·end / T in explicit attention, all T in flash
    attention under a mask. At least the T/2 that causality asks for."""
    if not attends_explicitly(device_kind, dtype, sequence_length):
        return float(sequence_length)
    return sum((end - start) * end for start, end in query_blocks(sequence_length)) / sequence_length


def explicit_attention_bytes(spec: ModelSpec, sequence_length: int, w: float) -> float:
    """Bytes kept per token by explicit attention: per head the probabilities (w for each key walked), the scaled query and the
    output (2·D·w), and each block's copy of its keys and values (2·D·w·Σends/T)."""
    keys = keys_walked("cpu", "bf16", sequence_length)
    copies = sum(end for _, end in query_blocks(sequence_length)) / sequence_length
    return spec.n_heads * w * (keys + 2 * spec.head_dim + 2 * spec.head_dim * copies)


def flash_attention_bytes(spec: ModelSpec, w: float) -> float:
    """Bytes kept per token by flash attention: the packed q, k, v, the turned q and k where positions are rotary, the output,
    and 4 bytes of log-sum-exp per head. No T×T matrix."""
    inner, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    turned = inner + kv if spec.positions == "rope" else 0
    return w * (spec.qkv_rows + turned + inner) + FP32 * spec.n_heads


def activation_bytes_per_token_and_layer(
    spec: ModelSpec, dtype: str, compiled: bool, sequence_length: int = 0, device_kind: str = "gpu"
) -> float:
    """Bytes kept from forward for backward, for one token in one block.

    In the working type w: the inputs of both norms and their outputs (4E), the MLP's pre-activation and its activated product
    (3F gated, 2F plain), and what attention keeps (``flash_attention_bytes`` or ``explicit_attention_bytes``); 4 bytes of
    statistics per norm row. QK-norm keeps the packed q, k, v where explicit attention would not. Eager RMSNorm also keeps its
    row in fp32, 8 bytes an element in all with bf16, and eager SwiGLU the activated gate (F). Proven with autograd's saved
    tensors in tests/planner/test_activations.py.
    """
    w = bytes_of(dtype)
    gated, rms = spec.mlp == "swiglu", spec.norm == "rmsnorm"
    explicit = attends_explicitly(device_kind, dtype, sequence_length)
    kept = w * (4 * spec.d_model + (3 if gated else 2) * spec.d_ff)
    kept += 2 * (FP32 if rms else 2 * w)
    kept += explicit_attention_bytes(spec, sequence_length, w) if explicit else flash_attention_bytes(spec, w)
    if spec.qk_norm:
        kept += FP32 * (spec.n_heads + spec.n_kv_heads) + (w * spec.qkv_rows if explicit and compiled else 0.0)
    if not compiled:
        kept += w * spec.d_ff if gated else 0.0
        kept += 2 * (8 - w) * spec.d_model if rms else 0.0
        if spec.qk_norm:
            kept += (8.0 if dtype != "fp32" else FP32) * (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    return kept


def activation_bytes(
    spec: ModelSpec, dtype: str, compiled: bool, batch_size: int, sequence_length: int, device_kind: str = "gpu"
) -> float:
    """Bytes kept from forward for backward by a whole micro-batch of packed documents.

    L blocks; around them per token the ids (8), the eager final norm (8E + 4; LayerNorm w·(E + 2)), rotary
    tables (4·D) or nothing, the mask of flash attention (w·T); and what the chunked loss computes ahead: the gradients of the
    hidden states (w·E a token) and of the head (w·V·E).
    """
    w, width = bytes_of(dtype), spec.d_model
    block = activation_bytes_per_token_and_layer(spec, dtype, compiled, sequence_length, device_kind)
    around = 8 + (8 * width + FP32 if spec.norm == "rmsnorm" else w * width + 2 * w) + w * width
    around += FP32 * spec.head_dim if spec.positions == "rope" else 0.0
    around += 0.0 if attends_explicitly(device_kind, dtype, sequence_length) else w * sequence_length
    return batch_size * sequence_length * (spec.n_layers * block + around) + w * spec.vocab_size * width


def loss_bytes(spec: ModelSpec, chunk_tokens: int, dtype: str, compiled: bool) -> float:
    """Bytes the chunked loss takes while it runs: one chunk's logits and their gradient in the working type (eager: also five
    fp32 copies and a mask), and the head's gradient summed in fp32 beside one chunk's share of it (V·E·(4 + w))."""
    w = bytes_of(dtype)
    per_logit = 2 * w + (0.0 if compiled else 5 * FP32 + 1)
    return chunk_tokens * spec.vocab_size * per_logit + spec.vocab_size * spec.d_model * (FP32 + w)


def checkpoint_bytes(parameters: Parameters, optimizer: str) -> float:
    """A checkpoint on disk: fp32 master weights and the optimizer's state."""
    return FP32 * parameters.total + optimizer_bytes(parameters, optimizer)


def model_bytes(parameters: Parameters, dtype: str = "bf16") -> float:
    """The finished model on disk: w·N."""
    return bytes_of(dtype) * parameters.total
