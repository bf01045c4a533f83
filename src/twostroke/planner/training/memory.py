"""Bytes that training holds, term by term."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import LayerKind
from twostroke.core.named import letter, named
from twostroke.core.optimizers import OPTIMIZERS
from twostroke.core.policy import NF4_BLOCK, NF4_SCALE_BLOCK, attends_explicitly, fits_native_attention, query_blocks
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware

FP32 = 4.0
"""Bytes."""


@dataclass(frozen=True)
class Precision:
    """Bytes of one trained parameter by what holds it: the copy that forward and backward read, the fp32 master, the gradient
    that backward leaves, one element of the optimizer's state."""

    working: float
    master: float
    gradient: float
    state: float


PRECISIONS = {
    "fp32": Precision(4, 0, 4, 4),
    "bf16": Precision(2, 4, 2, 4),
    "fp16": Precision(2, 4, 2, 4),
    "pure_bf16": Precision(2, 0, 2, 2),
}
"""Training types by name. bf16 and fp16 are mixed precision (Micikevicius et al., arXiv 1710.03740); pure_bf16 keeps nothing in
fp32, its optimizer's state included."""


def snapshot_bytes(dtype: str, trained: float, optimizer: float) -> float:
    """What a checkpoint holds, in memory: the masters, or where there are none the weights, and ``optimizer`` bytes of state.
    The copy is kept from a run's first checkpoint to its end (``training.saver``)."""
    precision = PRECISIONS[dtype]
    return (precision.master or precision.working) * trained + optimizer


STATE_BLOCK = 256
"""Elements of 8-bit optimizer state that share one fp32 scale (bitsandbytes; Dettmers et al., arXiv 2110.02861)."""


def nf4_bytes_per_weight() -> float:
    """4 bits, and with double quantisation 8/64 + 32/(64·256) bits of scales: 0.5159 bytes (QLoRA's 0.127 bits more)."""
    return letter("nf4", (4 + 8 / NF4_BLOCK + 32 / (NF4_BLOCK * NF4_SCALE_BLOCK)) / 8)


def gradient_bytes_per_parameter(dtype: str, alone: bool, n_micro_batches: int) -> float:
    """Bytes of gradient a trained parameter takes.

    Our engine, ``alone`` on its device, keeps backward's and an fp32 one that the optimizer reads: 2 + 4. Over several devices:
    2, as in the 16·N of ZeRO (arXiv 1910.02054), or 4 where several micro-batches are summed in fp32, as Megatron-LM does.
    """
    precision = PRECISIONS[dtype]
    if not precision.master:
        return precision.gradient
    if alone:
        return precision.gradient + FP32
    return precision.gradient if n_micro_batches == 1 else FP32


def state_bytes(n_parameters: float, n_matrix: float, optimizer: str, state: float = FP32) -> float:
    """adam, adamw: two moments of ``state`` bytes, 8·N in fp32. sgd: one momentum, 4·N. muon: one momentum for the block
    matrices, 4·N_matrices, and AdamW for the rest. adamw8bit: two moments of a byte and their scales, 2.03·N."""
    row = OPTIMIZERS[optimizer]
    if row.eight_bit:
        return row.moments * (1 + FP32 / letter("block", STATE_BLOCK)) * n_parameters
    if row.matrix_moments != row.moments:
        return row.matrix_moments * state * n_matrix + row.moments * state * (n_parameters - n_matrix)
    return row.moments * state * n_parameters


NATIVE_ATTENTION = "cpu with native attention"
"""In the place of a device's kind: training attends by the native library's operator, which keeps what the projection left,
its output and a number for each head, and knows documents by the first key that each token sees."""


def attention_device(hardware: Hardware, spec: ModelSpec, dtype: str) -> str:
    """What decides how training attends: the device's kind, or ``NATIVE_ATTENTION`` where calibration found the native library
    and it takes the model."""
    fits = fits_native_attention(hardware.kind, dtype, spec)
    return NATIVE_ATTENTION if fits and hardware.training.attends_natively else hardware.kind


def keys_walked(device_kind: str, dtype: str, sequence_length: int) -> float:
    """Keys that a training kernel multiplies an average query with: Σ length·end / T in explicit attention, all T in flash
    attention under a mask. At least the T/2 that causality asks for."""
    if not attends_explicitly(device_kind, dtype, sequence_length):
        return float(sequence_length)
    return letter("keys", sum((end - start) * end for start, end in query_blocks(sequence_length)) / sequence_length)


def explicit_attention_bytes(spec: ModelSpec, sequence_length: int, w: float) -> float:
    """Bytes kept per token by explicit attention: per head the probabilities (w for each key walked), the scaled query and the
    output (2·D·w), and each block's copy of its keys and values (2·D·w·Σends/T)."""
    keys = keys_walked("cpu", "bf16", sequence_length)
    copies = letter("copies", sum(end for _, end in query_blocks(sequence_length)) / sequence_length)
    return spec.n_heads * w * (keys + 2 * spec.head_dim + 2 * spec.head_dim * copies)


@dataclass(frozen=True)
class Kept:
    """How activations are kept on one rank: which parts ``tensor`` parallel and the sequence cut divide, what checkpointing
    leaves out; and beside a frozen base, products with an adapter, whose inputs are kept, and the width of all adapters of a
    layer together (None: everything is trained)."""

    tensor: int = 1
    sequence_cut: int = 1
    checkpointing: str = "none"
    inputs_of: frozenset[str] | None = None
    adapter_width: int = 0

    @property
    def frozen(self) -> bool:
        return self.inputs_of is not None

    def input_of(self, *products: str) -> bool:
        return self.inputs_of is None or any(product in self.inputs_of for product in products)


def kept_by_layer(
    spec: ModelSpec, kind: LayerKind, dtype: str, compiled: bool, sequence_length: int, device_kind: str, kept: Kept
) -> float:
    """Bytes kept from forward for backward, for one token in one layer of ``kind``.

    In the working type w: the inputs of both norms and their outputs (4E), the MLP's pre-activation and its activated product
    (3F gated, 2F plain), and for flash attention the packed q, k, v, the turned q and k where positions are rotary, the output
    and 4 bytes of log-sum-exp a head, no T×T matrix (``explicit_attention_bytes`` otherwise); 4 bytes of statistics per norm
    row. QK-norm keeps the packed q, k, v where explicit attention would not. Eager RMSNorm also keeps its
    row in fp32, 8 bytes an element in all with bf16, and eager SwiGLU the activated gate (F). Proven with autograd's saved
    tensors in tests/planner/test_activations.py.

    Norms are cut by the sequence, attention and MLP by ``tensor``. Routed experts keep, per expert passed, the token's copy,
    the pre-activation, the activated product and the output (whose product with the router's weight is differentiated).
    Checkpointing *full* keeps the layer's input alone, w·E; *selective* the results of products and of flash attention, and
    recomputes norms, rotary turn, activation, and explicit attention whole. Beside a frozen base a norm keeps no
    normed row, a matrix without an adapter no input, and an adapter its narrow product.
    """
    w, width, norms = letter("w", bytes_of(dtype)), spec.d_model, spec.departures.norms_per_block
    if kept.checkpointing == "full":
        return _named_kept(w * width / kept.sequence_cut)
    selective = kept.checkpointing == "selective"
    rms, eager = spec.norm == "rmsnorm", not compiled
    around = w * norms * width  # the residual stream where each norm reads it
    if not selective:
        around += w * width * (kept.input_of("qkv", "q", "q_a", "kv_a") + (norms > 1) * kept.input_of(*_MLP_INPUTS))
        around += norms * (FP32 if rms else 2 * w)
        around += norms * ((4 if kept.frozen else 8) - w) * width if eager and rms else 0.0
        around += w * kept.adapter_width
    attention = _attention_kept(spec, kind, dtype, eager, sequence_length, device_kind, kept)
    return _named_kept(
        around / kept.sequence_cut + (attention / kept.tensor + _mlp_kept(spec, kind, w, eager, kept) / kept.tensor)
    )


def _named_kept(n_bytes: float) -> float:
    source = "what autograd keeps (after Korthikanti et al., arXiv 2205.05198) of one token in one layer"
    return named("kept_bytes_a_token", n_bytes, "bytes", source)


def not_kept_at_the_bottom(
    spec: ModelSpec, kind: LayerKind, dtype: str, compiled: bool, sequence_length: int, device_kind: str, kept: Kept
) -> float:
    """Bytes a token of ``kept_by_layer`` that the first layer does not keep beside a frozen base, since nothing below its first
    adapter has a gradient: its first norm's input, where only its MLP has adapters the rest of attention too, and the ids."""
    if not kept.frozen or kept.checkpointing != "none":
        return 0.0
    w = letter("w", bytes_of(dtype))
    rms, eager = spec.norm == "rmsnorm", not compiled
    norm = ((4 if eager and rms else w) * spec.d_model + (FP32 if rms else 2 * w)) / kept.sequence_cut
    if kept.input_of(*(p.name for p in kind.matrices if p.component == "attention")):
        return norm + 8
    attention = _attention_kept(spec, kind, dtype, eager, sequence_length, device_kind, kept) / kept.tensor
    return 2 * norm + attention + 8


_MLP_INPUTS = ("gate_up", "up", "expert_gate_up", "expert_up")


def _mlp_kept(spec: ModelSpec, kind: LayerKind, w: float, eager: bool, kept: Kept) -> float:
    total = 0.0
    for product in kind.matrices:
        rows = product.active if product.split == "expert" else 1
        if product.name.endswith(("gate_up", "up")):
            total += w * rows * product.n
            total += w * rows * product.n / 2 if eager and kind.gated and kept.checkpointing == "none" else 0.0
            total += w * rows * spec.d_model if product.split == "expert" else 0.0  # the token's copy for each expert
        elif product.name.endswith("down"):
            total += w * rows * product.k if kept.checkpointing == "none" and kept.input_of(product.name) else 0.0
            total += w * rows * spec.d_model if product.split == "expert" else 0.0
        elif product.name == "router":
            total += 2 * FP32 * product.n  # logits and probabilities
    return total


def _attention_kept(
    spec: ModelSpec, kind: LayerKind, dtype: str, eager: bool, sequence_length: int, device_kind: str, kept: Kept
) -> float:
    w, selective = letter("w", bytes_of(dtype)), kept.checkpointing == "selective"
    packed = w * kind.qkv_elements
    if kind.latent_dim is not None:
        latents = sum(p.n for p in kind.matrices if p.name in ("q_a", "kv_a"))
        output = w * kind.n_heads * kind.v_dim + FP32 * kind.n_heads
        return packed + output + w * latents * (1 if selective else 2) * kept.tensor  # latents are not cut
    explicit = attends_explicitly(device_kind, dtype, sequence_length)
    total = 0.0
    if selective:
        total = packed if explicit else packed + w * kind.n_heads * kind.v_dim + FP32 * kind.n_heads
    elif explicit:
        total = explicit_attention_bytes(spec, sequence_length, w)
        total -= 0.0 if kept.input_of("out") else w * kind.n_heads * kind.v_dim  # its own products do not need the output
    else:
        turned = kind.n_heads * kind.qk_dim + kind.n_kv_heads * kind.qk_dim if spec.positions == "rope" else 0
        turned = 0 if device_kind == NATIVE_ATTENTION else turned
        total = packed + w * (turned + kind.n_heads * kind.v_dim) + FP32 * kind.n_heads
    if spec.qk_norm and not selective:
        total += FP32 * (kind.n_heads + kind.n_kv_heads) + (packed if explicit and not eager else 0.0)
        if eager:
            total += (8.0 if dtype != "fp32" else FP32) * (kind.n_heads + kind.n_kv_heads) * kind.qk_dim
    return total


def around_blocks_bytes(
    spec: ModelSpec,
    dtype: str,
    sequence_length: int,
    device_kind: str = "gpu",
    frozen: bool = False,
    checkpointing: str = "none",
) -> float:
    """Bytes kept per token outside the blocks: the ids (8), the eager final norm (8E + 4, frozen 4E + 4; LayerNorm w·(E + 2)),
    the gradient of the hidden state that the chunked loss computes ahead (w·E), rotary tables (4·D) or nothing, and the mask
    over packed documents (w·T), which explicit attention needs again only where it is computed again; native attention keeps
    the first key that each token sees (4)."""
    w, width = letter("w", bytes_of(dtype)), spec.d_model
    around = 8 + ((4 if frozen else 8) * width + FP32 if spec.norm == "rmsnorm" else w * width + 2 * w) + w * width
    around += FP32 * spec.head_dim if spec.positions == "rope" else 0.0
    needs_no_mask = attends_explicitly(device_kind, dtype, sequence_length) and checkpointing == "none"
    if device_kind == NATIVE_ATTENTION:
        return around + 4
    return around + (0.0 if needs_no_mask else w * sequence_length)


def loss_bytes(spec: ModelSpec, chunk_tokens: int, dtype: str, compiled: bool) -> float:
    """Bytes the chunked loss takes while it runs: one chunk's logits and their gradient in the working type (eager: also five
    fp32 copies and a mask), and the head's gradient summed in fp32 beside one chunk's share of it (V·E·(4 + w))."""
    w = letter("w", bytes_of(dtype))
    per_logit = 2 * w + (0.0 if compiled else 5 * FP32 + 1)
    return chunk_tokens * spec.vocab_size * per_logit + spec.vocab_size * spec.d_model * (FP32 + w)


def whole_logits_bytes(spec: ModelSpec, n_tokens: float, dtype: str) -> float:
    """Bytes of logits that are not taken in chunks: in the working type, and in fp32 for the softmax, (w + 4)·V a token
    (Korthikanti et al., arXiv 2205.05198, section 4.3 count the fp32 copy alone)."""
    return n_tokens * spec.vocab_size * (letter("w", bytes_of(dtype)) + FP32)
