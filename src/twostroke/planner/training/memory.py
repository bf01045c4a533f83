"""Bytes that training holds, term by term."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import LayerKind
from twostroke.core.named import letter, named
from twostroke.core.optimizers import OPTIMIZERS
from twostroke.core.policy import (
    NF4_BLOCK,
    NF4_SCALE_BLOCK,
    attends_explicitly,
    fits_native_attention,
    is_beyond_sdpa,
    loss_chunk_rows,
    query_blocks,
)
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
    "fp8": Precision(2, 4, 2, 4),
    "mxfp8": Precision(2, 4, 2, 4),
    "nvfp4": Precision(2, 4, 2, 4),
}
"""Training types by name. bf16 and fp16 are mixed precision (Micikevicius et al., arXiv 1710.03740); pure_bf16 keeps nothing in
fp32, its optimizer's state included; the last three multiply in a narrower type what they hold as bf16 does."""


def snapshot_bytes(dtype: str, trained: float, optimizer: float) -> float:
    """Bytes of a checkpoint of ``trained`` parameters: their masters, or without masters the weights, and ``optimizer`` bytes
    of state. Its copy in memory is kept from a run's first checkpoint to its end (``training.saver``)."""
    precision = PRECISIONS[dtype]
    return (FP32 if precision.master else letter("working", precision.working)) * trained + optimizer


STATE_BLOCK = 256
"""Elements of 8-bit optimizer state that share one fp32 scale (bitsandbytes; Dettmers et al., arXiv 2110.02861)."""


def nf4_bytes_per_weight() -> float:
    """Bytes of a weight in NF4 under double quantisation: 4 bits and 8/64 + 32/(64·256) bits of scales, 0.5159 bytes (QLoRA's
    0.127 bits more)."""
    return letter("nf4", (4 + 8 / NF4_BLOCK + 32 / (NF4_BLOCK * NF4_SCALE_BLOCK)) / 8)


def gradient_bytes_per_parameter(dtype: str, alone: bool, n_micro_batches: int, n_sums: int = 0) -> float:
    """Bytes of gradient that a trained parameter takes.

    Our engine, ``alone`` on its device, keeps backward's gradient and an fp32 one that the optimizer reads: 2 + 4. Its ranks
    keep ``n_sums`` in fp32, in the first of which the optimizer reads the sum; what backward leaves beside them comes as
    activations go (``exchanging``). Another trainer's job over several devices keeps 2, as in the 16·N of ZeRO (arXiv
    1910.02054), or 4 if it sums several micro-batches in fp32, as Megatron-LM does.
    """
    precision = PRECISIONS[dtype]
    if n_sums:
        read_in_16_bits = 0 if precision.master or precision.gradient == FP32 else precision.gradient
        return read_in_16_bits + FP32 * letter("n_sums", n_sums)
    if not precision.master:
        return precision.gradient
    if alone:
        return precision.gradient + FP32
    return precision.gradient if n_micro_batches == 1 else FP32


def state_bytes(n_parameters: float, n_matrix: float, optimizer: str, state: float = FP32) -> float:
    """Bytes of an optimizer's state. adam and adamw keep two moments of ``state`` bytes, 8·N in fp32; sgd one momentum, 4·N;
    muon one momentum of the block matrices, 4·N_matrices, and AdamW's moments of the rest; adamw8bit two moments of a byte
    with their scales, 2.03·N."""
    row = OPTIMIZERS[optimizer]
    if row.eight_bit:
        return row.moments * (1 + FP32 / letter("block", STATE_BLOCK)) * n_parameters
    if row.matrix_moments != row.moments:
        return row.matrix_moments * state * n_matrix + row.moments * state * (n_parameters - n_matrix)
    return row.moments * state * n_parameters


NATIVE_ATTENTION = "cpu with native attention"
"""In the place of a device's kind: training attends by the native library's operator, which keeps what the projection left,
its output and a number for each head, and knows documents by the first key that each token sees."""

EXPLICIT_ATTENTION = "cpu with explicit attention"
"""The same of a model that torch's fused attention does not compute (``is_beyond_sdpa``), where the native library's is not
taken. An accelerator is planned as if its kernels did, as those of other trainers do."""


def attention_device(hardware: Hardware, spec: ModelSpec, dtype: str) -> str:
    """What decides how training attends: ``NATIVE_ATTENTION`` if calibration found the native library and that library takes
    the model, ``EXPLICIT_ATTENTION`` if a CPU can do nothing else, or the device's kind."""
    if fits_native_attention(hardware.kind, dtype, spec) and hardware.training.attends_natively:
        return NATIVE_ATTENTION
    return EXPLICIT_ATTENTION if hardware.kind == "cpu" and is_beyond_sdpa(spec) else hardware.kind


def is_explicit(attends_on: str, dtype: str, sequence_length: int) -> bool:
    """Whether what ``attention_device`` found keeps probabilities, and computes them again under selective checkpointing."""
    return attends_on == EXPLICIT_ATTENTION or attends_explicitly(attends_on, dtype, sequence_length)


def keys_walked(attends_on: str, dtype: str, sequence_length: int) -> float:
    """Keys that a training kernel multiplies an average query with: Σ length·end / T in explicit attention, all T in flash
    attention under a mask. At least the T/2 that causality asks for. The native kind's rate is counted over explicit
    attention's, as calibration does."""
    if attends_on != NATIVE_ATTENTION and not is_explicit(attends_on, dtype, sequence_length):
        return float(sequence_length)
    return letter("keys", sum((end - start) * end for start, end in query_blocks(sequence_length)) / sequence_length)


def explicit_attention_bytes(spec: ModelSpec, sequence_length: int, w: float) -> float:
    """Bytes kept per token by explicit attention: per head the probabilities (w for each key walked), the scaled query and the
    output (2·D·w), and each block's copy of its keys and values (2·D·w·Σends/T). Bounded scores keep their tanh (w for each
    key), and a sink is one key more among the probabilities."""
    away, keys = spec.departures, keys_walked(EXPLICIT_ATTENTION, "bf16", sequence_length)
    scores = keys * (2 if away.attention_cap is not None else 1) + (1 if away.attention_sinks else 0)
    copies = letter("copies", sum(end for _, end in query_blocks(sequence_length)) / sequence_length)
    return spec.n_heads * w * (scores + 2 * spec.head_dim + 2 * spec.head_dim * copies)


@dataclass(frozen=True)
class ActivationPolicy:
    """What decides which activations a rank keeps from forward for backward.

    ``attends_on`` is what ``attention_device`` found. Tensor parallel divides attention and the MLP, ``sequence_cut``
    norms and the residual stream. Beside a frozen base ``inputs_of`` are the products with an adapter, whose inputs are kept
    (None: everything is trained), and ``adapter_width`` is the width of all adapters of a layer together.
    """

    dtype: str = "bf16"
    compiled: bool = True
    sequence_length: int = 0
    attends_on: str = "gpu"
    tensor: int = 1
    sequence_cut: int = 1
    checkpointing: str = "none"
    inputs_of: frozenset[str] | None = None
    adapter_width: int = 0

    @property
    def w(self) -> float:
        """Bytes of an element in the working type."""
        return letter("w", bytes_of(self.dtype))

    @property
    def frozen(self) -> bool:
        return self.inputs_of is not None

    @property
    def selective(self) -> bool:
        return self.checkpointing.startswith("selective")

    @property
    def attends_explicitly(self) -> bool:
        return is_explicit(self.attends_on, self.dtype, self.sequence_length)

    def keeps_input_of(self, *products: str) -> bool:
        return self.inputs_of is None or any(product in self.inputs_of for product in products)


def kept_by_layer(spec: ModelSpec, kind: LayerKind, policy: ActivationPolicy) -> float:
    """Bytes kept from forward for backward, for one token in one layer of ``kind``.

    In the working type w a layer keeps the inputs of both norms and their outputs (4E), the MLP's pre-activation and its
    activated product (3F gated, 2F plain), and 4 bytes of statistics per norm row. Flash attention keeps the packed q, k, v,
    the rotated q and k where positions are rotary, its output and 4 bytes of log-sum-exp a head, and no T×T matrix; explicit
    attention keeps ``explicit_attention_bytes``. Under QK-norm, compiled, that and the native kind keep the packed q, k, v
    too. Eager RMSNorm also keeps its row in fp32, 8 bytes an element in all with bf16, and eager SwiGLU the activated gate (F).
    tests/planner/test_activations.py holds this to autograd's saved tensors.

    Norms are cut by the sequence, attention and MLP by ``tensor``. Routed experts keep, per expert passed, the token's copy,
    the pre-activation, the activated product and the output (whose product with the router's weight is differentiated).
    Checkpointing *full* keeps the layer's input alone, w·E; *selective* keeps the results of products and of flash attention,
    and computes norms, rotation, activation and all of explicit attention again. Beside a frozen base a norm keeps no normed
    row, a matrix without an adapter no input, and an adapter its narrow product.
    """
    w, width, norms, rms = policy.w, spec.d_model, spec.departures.norms_per_block, spec.norm == "rmsnorm"
    if policy.checkpointing == "full":
        kept = w * width / policy.sequence_cut
    elif policy.checkpointing == "selective_op":
        saved = w * sum(n for n, _, is_saved in saved_products(kind) if is_saved)
        attended = w * kind.n_heads * kind.v_dim + FP32 * kind.n_heads
        kept = w * width / policy.sequence_cut + (saved + attended) / policy.tensor
    else:
        around = w * norms * width  # the residual stream where each norm reads it
        if policy.selective:
            around = 2 * w * width  # the block's input and the result of attention's last product: all else follows from them
        elif spec.departures.parallel_block and (policy.compiled or policy.dtype == "fp32" or not rms):
            around -= w * (norms - 1) * width  # both norms read the same
        if not policy.selective:
            read_by_attention, read_by_mlp = (policy.keeps_input_of(*names) for names in (_ATTENTION_INPUTS, _MLP_INPUTS))
            around += w * width * (read_by_attention + (norms > 1) * read_by_mlp)
            around += norms * (FP32 if rms else 2 * w)
            around += norms * ((4 if policy.frozen else 8) - w) * width if rms and not policy.compiled else 0.0
            around += w * policy.adapter_width
        attention, mlp = _attention_kept(spec, kind, policy), _mlp_kept(spec, kind, policy)
        kept = around / policy.sequence_cut + (attention / policy.tensor + mlp / policy.tensor)
    source = "what autograd keeps (after Korthikanti et al., arXiv 2205.05198) of one token in one layer"
    return named("kept_bytes_a_token", kept, "bytes", source)


def saved_products(kind: LayerKind) -> list[tuple[int, int, bool]]:
    """(outputs, inputs, whether its result is kept) of each product of a layer that is no expert's, in the order of forward:
    torchtitan's selective checkpointing "op" keeps the first, the third, … of a block, and none of a grouped product
    (distributed/activation_checkpoint.py)."""
    parts = [(n, m.k) for m in kind.matrices if m.split != "expert" for _, n in m.parts]
    return [(n, k, number % 2 == 0) for number, (n, k) in enumerate(parts)]


_ATTENTION_INPUTS = ("qkv", "q", "q_a", "kv_a")
_MLP_INPUTS = ("gate_up", "up", "shared_gate_up", "shared_up")
"""Products that read a norm's output as it is; experts have copies of its rows."""


def not_kept_at_the_bottom(spec: ModelSpec, kind: LayerKind, policy: ActivationPolicy) -> float:
    """Bytes a token of ``kept_by_layer`` that the first layer does not keep beside a frozen base, since nothing below its first
    adapter has a gradient: its first norm's input and the ids, and the rest of attention too if only its MLP has adapters."""
    if not policy.frozen or policy.checkpointing != "none":
        return 0.0
    w, rms = policy.w, spec.norm == "rmsnorm"
    row = (4 if rms and not policy.compiled else w) * spec.d_model
    norm = (row + (FP32 if rms else 2 * w)) / policy.sequence_cut
    if policy.keeps_input_of(*(p.name for p in kind.matrices if p.component == "attention")):
        return norm + 8
    return 2 * norm + _attention_kept(spec, kind, policy) / policy.tensor + 8


CLAMPED_STEPS = 4
"""Tensors of width F that eager ``clamped_swish`` keeps: the clamped gate, its sigmoid, their product, and what that is
multiplied with."""


def _mlp_kept(spec: ModelSpec, kind: LayerKind, policy: ActivationPolicy) -> float:
    w, keeps_all, total = policy.w, policy.checkpointing == "none", 0.0
    experts_again = policy.selective and policy.attends_on != "gpu"  # ours keeps the router's product alone
    for product in kind.matrices:
        routed = product.split == "expert"
        if experts_again and (routed or product.name == "router"):
            total += w * product.n if product.name == "router" else 0.0
            continue
        rows = product.active if routed else 1
        if product.name.endswith(("gate_up", "up")):
            total += w * rows * product.n
            if kind.gated and keeps_all and not policy.compiled:  # the activated gate, or each step to a clamped one
                total += w * rows * product.n / 2 * (CLAMPED_STEPS if spec.activation == "clamped_swish" else 1)
            copied = routed and policy.keeps_input_of(product.name)
            total += w * rows * spec.d_model if copied else 0.0  # the token's copy for each expert
        elif product.name.endswith("down"):
            total += w * rows * product.k if keeps_all and policy.keeps_input_of(product.name) else 0.0
            total += w * rows * spec.d_model if routed else 0.0
        elif product.name == "router":
            total += 2 * FP32 * product.n  # logits and probabilities
    return total


def _attention_kept(spec: ModelSpec, kind: LayerKind, policy: ActivationPolicy) -> float:
    w, selective, explicit = policy.w, policy.selective, policy.attends_explicitly
    packed = w * kind.qkv_elements
    output = w * kind.n_heads * kind.v_dim
    if kind.latent_dim is not None:
        latents = sum(p.n for p in kind.matrices if p.name in ("q_a", "kv_a"))
        flash = packed + (output + FP32 * kind.n_heads)
        return flash + w * latents * (1 if selective else 2) * policy.tensor  # latents are not cut
    if selective:
        return packed if explicit else packed + output + FP32 * kind.n_heads
    if explicit:
        total = explicit_attention_bytes(spec, policy.sequence_length, w)
        total -= 0.0 if policy.keeps_input_of("out") else output  # its own products do not need the output
    else:
        rotates = spec.positions == "rope" and policy.attends_on != NATIVE_ATTENTION
        rotated = kind.n_heads * kind.qk_dim + kind.n_kv_heads * kind.qk_dim if rotates else 0
        total = packed + w * (rotated + kind.n_heads * kind.v_dim) + FP32 * kind.n_heads
    if spec.qk_norm:
        joined = explicit or policy.attends_on == NATIVE_ATTENTION  # normed heads beside those that the norm read
        total += FP32 * (kind.n_heads + kind.n_kv_heads) + (packed if joined and policy.compiled else 0.0)
        if not policy.compiled:
            total += (8.0 if policy.dtype != "fp32" else FP32) * (kind.n_heads + kind.n_kv_heads) * kind.qk_dim
    return total


def read_out_bytes(spec: ModelSpec, policy: ActivationPolicy) -> float:
    """Bytes kept per token where the head reads a layer: of the final norm, and the gradient that the loss computes ahead."""
    w, width = policy.w, spec.d_model
    return ((4 if policy.frozen else 8) * width + FP32 if spec.norm == "rmsnorm" else w * width + 2 * w) + w * width


def around_blocks_bytes(spec: ModelSpec, policy: ActivationPolicy) -> float:
    """Bytes kept per token outside the blocks: the ids (8), the eager final norm (8E + 4, frozen 4E + 4; LayerNorm w·(E + 2)),
    the gradient of the hidden state that the chunked loss computes ahead (w·E), rotary tables (4·D) or nothing, and the mask
    over packed documents (w·T), which explicit attention needs again only where it is computed again. Native attention keeps
    the first key that each token sees (4) instead of a mask. On a CPU layers of different windows have a mask each."""
    w = policy.w
    around = 8 + read_out_bytes(spec, policy)
    around += FP32 * spec.head_dim if spec.positions == "rope" else 0.0
    masks = 1 if policy.attends_on == "gpu" else len({spec.window_of_layer(layer) for layer in range(spec.n_layers)})
    if policy.attends_on == NATIVE_ATTENTION:
        return around + 4 * masks
    needs_no_mask = policy.attends_explicitly and policy.checkpointing == "none"
    return around + (0.0 if needs_no_mask else w * policy.sequence_length * masks)


WHOLE_LOGITS_IN_FP32 = 3
"""Tensors as large as the logits that torch's cross-entropy holds in fp32 at once: the log-softmax that it saved, the gradient
that arrives at it and the one that leaves it."""


LISTED_CHUNKS = 8
"""Chunks of a list of logits (torchtune's ``CEWithChunkedOutputLoss``, num_output_chunks)."""

EAGER_LOGITS = 4
"""Tensors as large as a chunk's logits that are alive at once in an eager loss, all in fp32: logits, softmax, softmax less the
target, and what is left of it in valid rows. Beside them is the mask of targets. tests/training/test_loss.py counts them."""


def loss_bytes(spec: ModelSpec, n_tokens: int, logits: str, policy: ActivationPolicy) -> float:
    """Bytes that the loss takes while it runs, for ``n_tokens`` on one rank that holds the whole head.

    Chunked logits: one chunk's logits and their gradient in the working type, eager ``EAGER_LOGITS`` in fp32 and a mask, and
    where the head is trained its gradient summed in fp32 beside one chunk's share of it, V·E·(4 + w). Whole logits: the working
    type, and when backward begins in fp32 the log-softmax, its gradient and the logits' gradient, (w + 3·4)·V a token. Listed
    logits: all of them in the working type, each chunk's gradient in the place that its logits leave, one more chunk, and the
    head's gradient beside a chunk's share of it.
    """
    w = policy.w
    if logits == "whole":
        return n_tokens * spec.vocab_size * (w + WHOLE_LOGITS_IN_FP32 * FP32)
    if logits == "listed":
        of_head = 0.0 if policy.frozen else 2 * w * spec.vocab_size * spec.d_model
        return n_tokens * (1 + 1 / letter("chunks", LISTED_CHUNKS)) * spec.vocab_size * w + of_head
    chunk = letter("chunk", loss_chunk_rows(n_tokens))
    per_logit = 2 * w if policy.compiled else EAGER_LOGITS * FP32 + 1
    of_head = 0.0 if policy.frozen else spec.vocab_size * spec.d_model * (FP32 + w)
    return chunk * spec.vocab_size * per_logit + of_head
