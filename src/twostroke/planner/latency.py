"""Rates and counts that both phases share: flash attention, and the elementwise work between the products of a block."""

from __future__ import annotations

from twostroke.core.matrices import qkv_rows
from twostroke.core.named import letter
from twostroke.core.policy import PREFILL_QUERIES, attends_explicitly
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware import ASSUMED_ATTENTION_EFFICIENCY, Hardware, interpolate_log


def training_attention_rate(hardware: Hardware, dtype: str, mode: str, direction: str, sequence_length: int) -> float:
    """FLOP/s of a training block's attention, counted over the keys that its kernel walks (2 products forward, 5 backward):
    that of a block by itself, or of an eager one where no compiler was there.

    Beyond the longest explicit attention a CPU's flash kernel multiplies bf16 as it does fp32, so that rate is taken.
    Datasheets get an assumed share of peak, for the causal half of the keys.
    """
    if hardware.kind == "cpu" and not attends_explicitly(hardware.kind, dtype, sequence_length):
        dtype = "fp32"
    block = hardware.training.block(dtype, mode, direction) or hardware.training.block(dtype, "eager", direction)
    if block is not None:
        return letter("rate", block.attention_flop_per_s)
    return 2 * ASSUMED_ATTENTION_EFFICIENCY * hardware.peak(dtype)


def keys_of_prefill(n_tokens: int) -> float:
    """Keys an average query of a prompt is multiplied with, in blocks of ``PREFILL_QUERIES``: Σ queries·last key / T."""
    ends = [min(start + PREFILL_QUERIES, n_tokens) for start in range(0, n_tokens, PREFILL_QUERIES)]
    starts = range(0, n_tokens, PREFILL_QUERIES)
    return letter("keys", sum((end - start) * end for start, end in zip(starts, ends, strict=True)) / n_tokens)


def prefill_attention_rate(hardware: Hardware, dtype: str, n_tokens: int) -> float:
    """FLOP/s of a prompt's attention in the engine, counted over the keys walked: measured at a few lengths and interpolated in
    log T; datasheets get an assumed share of peak, for the causal half of the keys."""
    measured = hardware.torch_runner.prompt_attention
    points = [(float(point.tokens), point.flop_per_s) for point in measured if point.dtype == dtype]
    if points:
        return letter("rate", interpolate_log(points, n_tokens))
    return ASSUMED_ATTENTION_EFFICIENCY * hardware.peak(dtype) * keys_of_prefill(n_tokens) * 2 / n_tokens


def elementwise_elements(spec: ModelSpec, backward: bool) -> dict[str, float]:
    """Elements read and written per token and block by fused elementwise work, by component.

    Forward: norms and residual sums 9E (first norm 2E; sum and second norm 4E; sum 3E), rotary turn 2(H+K)D, activation 3F
    gated or 2F plain. Backward: norms and sums 14E (each norm reads its input, its gradient and the residual's and writes one:
    4E twice; two recomputed normed inputs 2E each; the output's gradient twice), rotary turn 2(H+K)D and the gathering of
    dq, dk, dv 2(H+2K)D, activation 6F gated (reads 2F + F, writes 2F and the recomputed product F) or 3F plain.
    """
    width, heads = spec.d_model, (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    turn = 2 * heads if spec.positions == "rope" else 0
    gated = spec.mlp == "swiglu"
    if backward:
        return {"norms": 14 * width, "attention": turn + 2 * qkv_rows(spec), "mlp": (6 if gated else 3) * spec.d_ff}
    return {"norms": 9 * width, "attention": turn, "mlp": (3 if gated else 2) * spec.d_ff}


def block_rate(hardware: Hardware, dtype: str, mode: str, direction: str) -> float | None:
    """Bytes/s at which a block's elementwise work went; None where nothing was measured. Compiled fp32 is not measured: it is
    taken to pass as many elements a second as compiled bf16, twice the bytes."""
    block = hardware.training.block
    found = block(dtype, mode, direction)
    if found is None and dtype == "fp32" and mode == "compiled" and (half := block("bf16", mode, direction)) is not None:
        return 2 * half.elementwise_bytes_per_s
    found = found or block(dtype, "eager", direction)
    return None if found is None else found.elementwise_bytes_per_s


def head_norm_rate(hardware: Hardware, dtype: str, mode: str, direction: str) -> float | None:
    """Elements of q and k that QK-norm passes per second, or the eager rate; None where nothing was measured."""
    blocks = (hardware.training.block(dtype, m, direction) for m in (mode, "eager"))
    return next((b.head_norm_element_per_s for b in blocks if b is not None and b.head_norm_element_per_s is not None), None)


def setup_bytes(spec: ModelSpec, tokens: float, width: float, backward: bool) -> float:
    """Bytes moved around the blocks: rows of the embedding read and written and the final norm's input and output, 4·E·w a
    token, and rotary tables, 4·D fp32 bytes; backward the same without tables, and the V·E gradient of the embedding cleared
    and added to."""
    around = tokens * 4 * spec.d_model * width
    if backward:
        return around + 2 * spec.vocab_size * spec.d_model * width
    return around + (tokens * 4 * spec.head_dim if spec.positions == "rope" else 0.0)


def elementwise_flops(spec: ModelSpec, backward: bool) -> dict[str, float]:
    """FLOP per token and block of the same work, by component, for its arithmetic intensity: 4 per element normed and 1 per
    residual sum (10E), 3 per element turned, 5 per activation (an exponential counted as 1); backward twice that. Model FLOP
    (``flops.py``) exclude all of it."""
    heads = (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    times = 2 if backward else 1
    return {
        "norms": times * 10 * spec.d_model,
        "attention": times * 3 * heads if spec.positions == "rope" else 0.0,
        "mlp": times * 5 * spec.d_ff,
    }
