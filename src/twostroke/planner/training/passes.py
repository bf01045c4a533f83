"""Work of the passes of a training step on one rank, by component: products, attention, elementwise work, loss, update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import LayerKind, Matrix, layer_kinds
from twostroke.core.named import Mark, inputs, letter, named, records, within
from twostroke.core.optimizers import OPTIMIZERS
from twostroke.core.policy import NEWTON_SCHULZ_STEPS, loss_chunk_rows
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import (
    ASSUMED_BANDWIDTH_EFFICIENCY,
    Hardware,
)
from twostroke.planner.training import datasheet_rates
from twostroke.planner.training.datasheet_rates import LOW_PRECISIONS
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.memory import (
    EXPLICIT_ATTENTION,
    FP32,
    NATIVE_ATTENTION,
    PRECISIONS,
    attention_device,
    is_explicit,
    keys_walked,
    nf4_bytes_per_weight,
    saved_products,
    state_bytes,
)
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import RankLayer, RankProduct, head_on_rank, rank_layers, stage_held, stages_of
from twostroke.planner.work.component import Work
from twostroke.planner.work.flops import elementwise_elements, mean_keys


def _w(dtype: str) -> float:
    return letter("w", bytes_of("bf16" if dtype in LOW_PRECISIONS else dtype))


def product_forward(product: Matrix, rows: int, dtype: str, hardware: Hardware, calls: int = 1) -> Work:
    """(rows, k) × (k, n): 2·rows·n·k FLOP; ``calls`` matrices in a row."""
    return _products(product, rows, dtype, hardware, calls, (hardware.product_s, (rows, product.n, product.k)))


def input_gradient(product: Matrix, rows: int, dtype: str, hardware: Hardware, calls: int = 1) -> Work:
    """Backward of a frozen matrix: the input's gradient alone, (rows, n) × (n, k)."""
    return _products(product, rows, dtype, hardware, calls, (hardware.input_gradient_s, (rows, product.k, product.n)))


def product_backward(product: Matrix, rows: int, dtype: str, hardware: Hardware, calls: int = 1) -> Work:
    """Two products: the input's gradient (rows, n) × (n, k) and the weight's (n, rows) × (rows, k); 4·rows·n·k FLOP."""
    of_input = hardware.input_gradient_s, (rows, product.k, product.n)
    of_weight = hardware.weight_gradient_s, (product.n, product.k, rows)
    return _products(product, rows, dtype, hardware, calls, of_input, of_weight)


Laid = tuple[Callable[[str, int, int, int], float], tuple[int, int, int]]
"""What tells the seconds of a product in one layout of its operands, and its (m, n, k)."""


def _products(product: Matrix, rows: int, dtype: str, hardware: Hardware, calls: int, *laid: Laid) -> Work:
    """Products over one matrix, each of which reads both operands and writes the result once: w·(rows·k + k·n + rows·n) bytes.
    A measured rate already holds that traffic; a datasheet's does not, and the larger limit counts."""
    flops = 2.0 * len(laid) * rows * product.weights
    operands = rows * product.k + product.weights
    moved = len(laid) * (_w(dtype) * (operands + rows * product.n))
    memory_s, launch_s = moved / hardware.bandwidth(moved), len(laid) * hardware.linear_launch_s
    if hardware.basis == "measured":
        seconds = sum(product_s(dtype, *shape) for product_s, shape in laid)
        once = Work(product.component, flops, moved, seconds, memory_s, launch_s, seconds + launch_s)
        return once.times(calls) if calls > 1 else once
    seconds = sum(datasheet_rates.product_s(hardware, dtype, *shape, calls) for _, shape in laid)
    work = Work.limited(product.component, calls * flops, calls * moved, seconds, calls * memory_s, launch_s)
    cast = calls * (operands + (rows * product.n if len(laid) > 1 else 0))
    casting = datasheet_rates.cast_s(hardware, dtype, cast)
    return replace(work, seconds=work.seconds + casting) if casting else work


BOUND_FLOPS = (40, 20)
"""FLOP of attention's products that take as long as bounding one score in the native attention, (forward, backward), the latter
counted times backward's 2.5: a tanh of 11 multiply-adds and a division. Measured on an EPYC Zen 4, one thread, in pairs: 38 and
19 with heads of 64, 50 and 22 of 256."""


def attention_work(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, kind: LayerKind, tensor: int, backward: bool
) -> Work:
    """softmax(QKᵀ)V of one layer: time from the keys walked, FLOP from the causal part that counts; q, k, v, o moved once
    (backward: read again with their gradients). Heads are divided by ``tensor``. An indexer's scores are counted with it."""
    tokens, w, length = shape.tokens_per_pass / tensor, _w(shape.dtype), shape.sequence_length
    window = min((n for n in (kind.window, kind.top_keys) if n is not None), default=None)
    causal_keys = mean_keys(length, window)
    attends_on = attention_device(hardware, spec, shape.dtype)
    walked_keys = keys_walked(attends_on, shape.dtype, length)
    if hardware.kind != "cpu" and window is not None:
        walked_keys = 2 * causal_keys  # kernels skip blocks outside a window
    scores = kind.index_flops_per_key * mean_keys(length)
    causal = tokens * (kind.flops_per_key * causal_keys + scores)
    walked = tokens * (kind.flops_per_key * walked_keys + 2 * scores)
    if attends_on == NATIVE_ATTENTION and spec.departures.attention_cap is not None:
        walked += tokens * kind.n_heads * letter("bounding", BOUND_FLOPS[backward]) * walked_keys
    share = 2.5 if backward else 1.0
    moved = share * tokens * w * (kind.qkv_elements + kind.n_heads * kind.v_dim)
    direction = "backward" if backward else "forward"
    rate = training_attention_rate(hardware, shape.dtype, shape.mode, direction, length, attends_on)
    return Work.limited(
        "attention",
        flops=(2 if backward else 1) * causal,
        n_bytes=moved,
        arithmetic_s=share * walked / rate,
        memory_s=moved / hardware.bandwidth(moved),
        launch_s=hardware.op_launch_s,
    )


LAUNCHES_PER_BLOCK = {"compiled": 4, "eager": 18}
"""Operations of one block's forward that are not products: fused kernels, or single torch operators. Backward: twice."""


def elementwise_counts(
    spec: ModelSpec, layer: RankLayer, tensor: int, sequence_cut: int, backward: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """(elements read and written, FLOP) per token of the micro-batch in one layer by component, as a rank has them: norms are
    divided by the sequence cut, rotation by ``tensor``, the MLP as its last product is."""
    activated = sum(p.product.k * p.rows_per_token * p.calls for p in layer.products if p.product.name.endswith("down"))
    elements = elementwise_elements(spec, layer.kind, backward, activated)
    elements["norms"] /= sequence_cut
    elements["attention"] /= tensor
    times, heads = (2 if backward else 1), (layer.kind.n_heads + layer.kind.n_kv_heads) * layer.kind.qk_dim
    flops = {
        "norms": times * 10 * spec.d_model / sequence_cut,
        "attention": times * 3 * heads / tensor if spec.positions == "rope" else 0.0,
        "mlp": times * 5 * activated,
    }
    return elements, flops


BIAS_PASSES = (2, 1)
"""Times that an output of a product with a bias is written or read once more, (forward, backward), on a CPU: a copy of the bias
is there before the product adds to it, and the bias's gradient reads the output's."""

ROUTED_PASSES = (5, 7)
"""Times that a row of width E is read or written for each of a token's experts, (forward, backward), on a CPU: sorted by expert
(2), put back (2), weighted and summed (1); backward weighted (1), multiplied with what the shares were of (1), sorted again
(2), put back and summed (3)."""


SCORE_PASSES = {"cap": {"eager": (6, 7), "compiled": (1, 1)}, "sinks": {"eager": (2, 3), "compiled": (0, 0)}}
"""Times that a score is read or written, (forward, backward), where explicit attention bounds scores and where it puts sinks
beside them. Eager: divided, tanh, multiplied (2 each), backward 2, 3 and 2; joined with the sink's column (2), put into a
cleared row (3). Compiled: the tanh that is kept is written, and read."""


def elements_of_cpus(
    spec: ModelSpec, shape: TrainingShape, layer: RankLayer, layout: Layout, attends_on: str, backward: bool
) -> dict[str, float]:
    """Elements per token by component that a CPU reads and writes beside ``elementwise_counts``: biases, rows on their way to
    experts and back, and scores that explicit attention bounds or puts sinks beside. Accelerators add a bias inside the
    product, and have ``datasheet_rates.routing_work``."""
    elements = {"attention": 0.0, "mlp": 0.0}
    for part in layer.products:
        if part.product.bias:
            outputs = part.rows_per_token * part.calls * part.product.n
            elements[part.product.component] += letter("bias_passes", BIAS_PASSES[backward]) * outputs
    if spec.moe is not None and any(part.is_expert for part in layer.products):
        rows = spec.moe.top_k / layout.sequence_cut
        elements["mlp"] += letter("routed_passes", ROUTED_PASSES[backward]) * rows * spec.d_model
    if attends_on == EXPLICIT_ATTENTION:
        away = spec.departures
        for what, present in (("cap", away.attention_cap is not None), ("sinks", away.attention_sinks)):
            scores = layer.kind.n_heads / layout.tensor * keys_walked(attends_on, shape.dtype, shape.sequence_length)
            elements["attention"] += letter(what, SCORE_PASSES[what][shape.mode][backward]) * scores if present else 0.0
    return elements


ASSUMED_ELEMENTWISE_SHARE = {"norms": 0.53, "attention": 0.45, "mlp": 0.5}
"""Share of a datasheet's bandwidth that elementwise kernels of an accelerator reach, by component: medians over 1,072 public
timings of Llama-2 7B and 70B on A100 and H100 at 2,048 tokens and more (microsoft/vidur, data/profiling/compute @7d47513, MIT):
norms 0.34, residual sums 0.93 (together 0.53 by their bytes), rotation 0.45, gated activation 0.52."""


def _assumed_rate(hardware: Hardware, component: str, moved: float, unfused: bool) -> float:
    if hardware.kind == "cpu" or hardware.basis == "measured" or unfused:
        return hardware.bandwidth(moved)
    return hardware.bandwidth(moved) / ASSUMED_BANDWIDTH_EFFICIENCY * ASSUMED_ELEMENTWISE_SHARE[component]


def elementwise(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layer: RankLayer, layout: Layout, backward: bool
) -> list[Work]:
    """Norms, residual sums, rotation and activation of one layer, and QK-norm: bytes over the rate that a calibrated block
    reached (``block_rate``), or over the bandwidth, of an accelerator's datasheet ``ASSUMED_ELEMENTWISE_SHARE`` of it."""
    direction = "backward" if backward else "forward"
    measured = block_rate(hardware, shape.dtype, shape.mode, direction)
    elements, flops = elementwise_counts(spec, layer, layout.tensor, layout.sequence_cut, backward)
    if hardware.kind == "cpu":
        attends_on = attention_device(hardware, spec, shape.dtype)
        for component, count in elements_of_cpus(spec, shape, layer, layout, attends_on, backward).items():
            elements[component] += count
    unfused = hardware.accelerator is not None and not shape.compile
    if unfused:
        elements = {part: count * datasheet_rates.EAGER_PASSES[part][backward] for part, count in elements.items()}
    launch_s = LAUNCHES_PER_BLOCK[shape.mode] * (2 if backward else 1) * hardware.op_launch_s / len(elements)
    works = []
    for component, count in elements.items():
        moved = shape.tokens_per_pass * count * _w(shape.dtype)
        rate = letter("rate", measured or 0.0) or _assumed_rate(hardware, component, moved, unfused)
        work = Work.limited(component, shape.tokens_per_pass * flops[component], moved, 0.0, moved / rate, launch_s)
        works.append(work.called(f"{component}_elementwise", "one layer: its bytes at the rate of fused kernels"))
    if spec.qk_norm:
        normed = 1.0 * shape.tokens_per_pass * (layer.kind.n_heads + layer.kind.n_kv_heads) * layer.kind.qk_dim / layout.tensor
        moved = (3 if backward else 2) * normed * _w(shape.dtype)
        norm_rate = head_norm_rate(hardware, shape.dtype, shape.mode, direction)
        seconds = normed / letter("rate", norm_rate) if norm_rate else moved / hardware.bandwidth(moved)
        work = Work.limited("attention", (8 if backward else 4) * normed, moved, 0.0, seconds)
        works.append(work.called("head_norms", "one layer: elements of q and k"))
    return works


def loss_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, tensor: int, backward: bool) -> list[Work]:
    """The head and the loss, which takes the logits' gradient right after the logits, in chunks or of the whole micro-batch.

    Forward computes per chunk one product, then the cross-entropy and its gradient at the measured
    ``cross_entropy_logit_per_s``, or reads and writes the logits at the bandwidth. Backward computes per chunk two products and
    an fp32 sum of the weight's gradient, V·E·(2w + 8) bytes; beside a frozen base only the input's gradient. Each exit of an
    earlier layer is as much once more.
    """
    head, tokens = head_on_rank(spec, tensor), shape.tokens_per_pass
    rows = letter("chunk", loss_chunk_rows(tokens)) if shape.logits != "whole" else tokens
    n_heads = 1 + letter("exits", shape.exit_losses) if shape.exit_losses else 1
    n_chunks = -(-tokens // rows) * n_heads
    dtype = "bf16" if shape.dtype in LOW_PRECISIONS else shape.dtype
    source, mark = _rate_source(hardware, dtype)
    w = _w(dtype)
    if backward and shape.method != "full":
        return [input_gradient(head, rows, dtype, hardware).called("head_chunk", source, mark).times(n_chunks)]
    if backward:
        moved = n_chunks * head.weights * (2 * w + 8)
        summing = Work.limited("head", 0.0, moved, 0.0, moved / hardware.bandwidth(moved), n_chunks * hardware.op_launch_s)
        product = product_backward(head, rows, dtype, hardware).called("head_chunk", source, mark)
        summing = summing.called("head_summing", "fp32 sum of the weight's gradient, a chunk at a time")
        return [product.times(n_chunks), summing]
    logits = 1.0 * tokens * head.n * n_heads
    moved = 2 * w * logits
    rates = hardware.training.cross_entropy_logit_per_s
    rate = letter("rate", rates.get(shape.mode) or rates.get("eager") or 0.0)
    seconds = logits / rate if rate else moved / hardware.bandwidth(moved)
    entropy = Work.limited("head", 0.0, moved, 0.0, seconds, n_chunks * hardware.op_launch_s)
    product = product_forward(head, rows, dtype, hardware).called("head_chunk", source, mark)
    return [product.times(n_chunks), entropy.called("cross_entropy", "of all logits, with their gradient")]


def setup_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, backward: bool) -> list[Work]:
    """What surrounds the blocks: embedding, rotary tables and final norm, and forward the mask of packed documents, B·T²
    elements. Each goes at its measured rate, or at the bandwidth if nothing was measured."""
    w = _w(shape.dtype)
    if backward and shape.method != "full":
        return []
    moved = setup_bytes(spec, shape.tokens_per_pass, w, backward)
    rates = hardware.training
    rate = letter("rate", (rates.setup_backward_bytes_per_s if backward else rates.setup_forward_bytes_per_s) or 0.0)
    rate = rate or hardware.bandwidth(moved)
    setup = Work.limited("embedding", 0.0, moved, 0.0, moved / rate, hardware.op_launch_s)
    works = [setup.called("setup", "embedding, final norm, rotary tables: their bytes")]
    if not backward and hardware.kind == "cpu":
        # A GPU writes it too, in no time worth a term.
        elements = 1.0 * shape.tokens_per_pass * shape.sequence_length
        written = elements * w
        element_rate = letter("rate", rates.mask_element_per_s or 0.0)
        seconds = elements / element_rate if element_rate else 4 * written / hardware.bandwidth(written)
        works.append(Work.limited("attention", 0.0, written, 0.0, seconds).called("mask", "of packed documents"))
    return works


@lru_cache(maxsize=256)
def matrices_of(kind: LayerKind) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of each matrix of a layer of ``kind``, packed ones taken apart, every expert's by itself."""
    return tuple((n, m.k) for m in kind.matrices for _ in range(m.copies) for _, n in m.parts)


def newton_schulz_products(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of the products of Muon's 5 iterations on one matrix, s = min, l = max: XXᵀ, its square, and the update."""
    small, large = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * ((small, small, large), (small, small, small), (small, large, small))


def newton_schulz(rows: int, columns: int, hardware: Hardware) -> tuple[float, float]:
    """(FLOP, seconds) of those products, 5·2·(2·s²·l + s³) FLOP, in bf16 where there is a rate for it."""
    scheme = "bf16" if hardware.has_scheme("bf16") else "fp32"
    products = newton_schulz_products(rows, columns)
    return sum(2.0 * m * n * k for m, n, k in products), sum(hardware.product_s(scheme, m, n, k) for m, n, k in products)


def optimizer_bytes_moved(n_parameters: float, dtype: str, state_bytes: float | None = None) -> float:
    """Bytes one update moves: the gradient is read and widened to fp32 (w + 4), normed (4), clipped (8) and read (4); master
    and state are read and written (8 a parameter, and twice ``state_bytes``, AdamW's 8·N by default); the master is read once
    more (4) and the working copy written (w). With fp32 there is neither widening nor a copy; pure bf16 norms (2), clips (4)
    and reads (2) the gradient and reads and writes the weight (4)."""
    each = {"fp32": 24.0, "pure_bf16": 12.0}.get(dtype) or 2 * _w(dtype) + 20 + 8 + 4
    return n_parameters * each + 2 * (8.0 * n_parameters if state_bytes is None else state_bytes)


def adding_up_bytes(n_parameters: float, shape: TrainingShape, layout: Layout) -> float:
    """Bytes that adding up the gradients of an update's micro-batches moves on one device: each but the first reads its own and
    reads and writes the fp32 sum (w + 8 a parameter; with fp32 12, with pure bf16 6, which autograd adds up itself)."""
    if layout.n_devices > 1:
        return 0.0
    each = {"fp32": 12.0, "pure_bf16": 6.0}.get(shape.dtype) or _w(shape.dtype) + 8
    return letter("added", shape.grad_accumulation - 1) * n_parameters * each


def optimizer_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout = SINGLE) -> Work:
    """One update of what a rank updates: bytes over ``adamw_bytes_per_s`` (measured) or the bandwidth, and for Muon the
    Newton–Schulz products, shared out over all devices. About 12 FLOP a parameter for AdamW. ZeRO divides the update by the
    data-parallel ranks."""
    part = stage_held(spec, shape, layout, stages_of(spec, shape, layout)[-1])
    ranks = layout.shared_by(1)
    n_parameters = part.trained_of(ranks)
    n_matrix = part.matrices / ranks[0] + part.expert_matrices / ranks[1]
    state = state_bytes(n_parameters, n_matrix, shape.optimizer, inputs(PRECISIONS[shape.dtype]).state)
    moved = optimizer_bytes_moved(n_parameters, shape.dtype, state) + adding_up_bytes(n_parameters, shape, layout)
    if passes := OPTIMIZERS[shape.optimizer].passes:
        moved += letter("passes", passes) * FP32 * n_parameters
    memory_s = moved / (letter("rate", hardware.training.adamw_bytes_per_s or 0.0) or hardware.bandwidth(moved))
    if is_rounded(shape, hardware):
        n_matrices = sum(count * len(matrices_of(kind)) for kind, count in layer_kinds(spec)) / layout.n_devices
        rest = letter("matrix_s", hardware.training.rounded_matrix_s) * n_matrices
        memory_s = n_parameters / letter("rounded", hardware.training.rounded_element_per_s or 0.0) + rest
    flops, arithmetic_s, launches = 12.0 * n_parameters, 0.0, 12.0
    if shape.optimizer == "muon":
        shared = layout.n_devices / layout.copies
        for kind, count in layer_kinds(spec):
            for rows, columns in matrices_of(kind):
                one_flops, one_s = newton_schulz(rows, columns, hardware)
                one_s = named("orthogonalising_s", one_s, "s", f"Newton–Schulz iterations of one {rows} × {columns} matrix")
                flops += count * one_flops / shared
                arithmetic_s += count * one_s / shared
                rest = letter("rate", hardware.training.muon_element_per_s or 0.0)
                if rest:
                    memory_s += count * (rows * columns / rest + letter("matrix_s", hardware.training.muon_matrix_s)) / shared
                else:
                    launches += count * (3 * NEWTON_SCHULZ_STEPS + 12) / shared
    launch_s = launches * hardware.op_launch_s
    if shape.targets:
        layers = rank_layers(spec, layout.tensor, layout.expert, shape.targets)
        n_adapters = sum(layer.count * sum(len(p.adapter_outputs) * p.calls for p in layer.products) for layer in layers)
        launch_s += letter("adapters", n_adapters) * letter("adapter_s", hardware.training.adapter_update_s or 0.0)
    seconds = arithmetic_s + memory_s + launch_s
    update = Work("optimizer", flops, moved, arithmetic_s, memory_s, launch_s, seconds)
    return update.called("update", "what the optimizer moves, its products, and starting its operations")


def is_rounded(shape: TrainingShape, hardware: Hardware) -> bool:
    """Whether an update computes in fp32 and rounds to bf16, matrix by matrix, at a rate that was measured (Muon's is not)."""
    return shape.dtype == "pure_bf16" and shape.optimizer != "muon" and hardware.training.rounded_element_per_s is not None


# -- a layer --------------------------------------------------------------------------------------------------------------


def adapter_works(part: RankProduct, shape: TrainingShape, hardware: Hardware, rows: int, backward: bool) -> list[Work]:
    """The two narrow products of each adapter of a matrix; ``part.calls`` matrices in a row."""
    make = product_backward if backward else product_forward
    works = []
    for outputs in part.adapter_outputs:
        for n, k in ((shape.lora_rank, part.product.k), (outputs, shape.lora_rank)):
            narrow = Matrix(part.product.component, "adapter", n, k)
            work = make(narrow, rows, shape.dtype, hardware)
            works.append(work.called(f"{part.product.name}_adapter", "a narrow product of it").times(part.calls))
    rates = hardware.training
    each_s = letter("adapter_s", (rates.adapter_backward_s if backward else rates.adapter_forward_s) or 0.0)
    if each_s and part.adapter_outputs:
        starting = Work.limited(part.product.component, 0.0, 0.0, 0.0, 0.0, len(part.adapter_outputs) * part.calls * each_s)
        works.append(starting.called(f"{part.product.name}_adapters", "dropout, scaling, adding, starting them", "measured"))
    return works


DECODING_BYTES = 20.0
"""A weight, written and read between the operations that decode NF4: half a code in 32 bits, its value and the value times its
scale in fp32."""


def dequantising(part: RankProduct, shape: TrainingShape, hardware: Hardware) -> Work:
    """NF4 read and the working type written before a product of QLoRA, at the rate that was measured, else at the bandwidth. By
    single operations, as experts are decoded in any case, what lies between moves too (``DECODING_BYTES``)."""
    fused = shape.compile and not part.is_expert
    n_weights = part.calls * part.product.weights
    moved = n_weights * (nf4_bytes_per_weight() + (0.0 if fused else letter("between", DECODING_BYTES)) + _w(shape.dtype))
    rate = letter("decoded", hardware.training.nf4_weight_per_s.get("compiled" if fused else "eager", 0.0))
    seconds = n_weights / rate if rate else moved / hardware.bandwidth(moved)
    return Work.limited(part.product.component, 0.0, moved, 0.0, seconds, hardware.op_launch_s)


def _rate_source(hardware: Hardware, dtype: str) -> tuple[str, Mark]:
    if not records():
        return "", "predicted"
    if hardware.basis == "measured":
        return f"{dtype} rate measured on this machine, between calibrated shapes", "measured"
    return f"share of the datasheet's {dtype} peak that large products sustain", "datasheet"


def layer_works(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layer: RankLayer, layout: Layout, backward: bool
) -> list[Work]:
    """One layer's forward or backward over a micro-batch on one rank, recomputation apart."""
    works = []
    trains_matrices = shape.method == "full"
    for part in layer.products:
        rows = rows_of(shape, part)
        source, mark = _rate_source(hardware, shape.dtype)
        if not backward:
            work = product_forward(part.product, rows, shape.dtype, hardware, part.calls)
        elif trains_matrices:
            work = product_backward(part.product, rows, shape.dtype, hardware, part.calls)
        else:
            work = input_gradient(part.product, rows, shape.dtype, hardware, part.calls)
        works.append(work.called(part.product.name, f"one layer; {source}", mark))
        if not trains_matrices:
            works += adapter_works(part, shape, hardware, rows, backward)
            if shape.method == "qlora":
                works.append(dequantising(part, shape, hardware))
    attention = attention_work(spec, shape, hardware, layer.kind, layout.tensor, backward)
    works.append(attention.called("attention_walk", "one layer: keys that the kernel walks, or moving q, k, v and the output"))
    if hardware.accelerator is not None and any(part.is_expert for part in layer.products):
        works.append(datasheet_rates.routing_work(spec, shape, hardware, layout, backward))
    return works + elementwise(spec, shape, hardware, layer, layout, backward)


def recomputed_works(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layer: RankLayer, layout: Layout, recomputation: str
) -> list[Work]:
    """What backward computes again of one layer: nothing; elementwise work and explicit attention (selective; on a CPU experts'
    products too), every second product with it (selective_op); everything."""
    if recomputation == "full":
        with within("recomputed"):
            return layer_works(spec, shape, hardware, layer, layout, False)
    if recomputation.startswith("selective"):
        works = elementwise(spec, shape, hardware, layer, layout, False)
        if recomputation == "selective_op":
            works += products_again(shape, hardware, layer, layout.tensor)
        elif hardware.kind == "cpu":
            works += experts_again(shape, hardware, layer)
        if is_explicit(attention_device(hardware, spec, shape.dtype), shape.dtype, shape.sequence_length):
            works.append(attention_work(spec, shape, hardware, layer.kind, layout.tensor, False))
        return works
    return []


def experts_again(shape: TrainingShape, hardware: Hardware, layer: RankLayer) -> list[Work]:
    """The forward products of experts."""
    return [
        product_forward(p.product, rows_of(shape, p), shape.dtype, hardware, p.calls) for p in layer.products if p.is_expert
    ]


def products_again(shape: TrainingShape, hardware: Hardware, layer: RankLayer, tensor: int) -> list[Work]:
    """The products whose results were not kept (``saved_products``), and those of experts."""
    again = [Matrix("mlp", "again", -(-n // tensor), k) for n, k, is_saved in saved_products(layer.kind) if not is_saved]
    of_others = [product_forward(matrix, shape.tokens_per_pass, shape.dtype, hardware) for matrix in again]
    return experts_again(shape, hardware, layer) + of_others


def rows_of(shape: TrainingShape, part: RankProduct) -> int:
    """Rows that a product of one rank has in a micro-batch."""
    return max(1, round(shape.tokens_per_pass * part.rows_per_token))


def training_attention_rate(
    hardware: Hardware, dtype: str, mode: str, direction: str, sequence_length: int, attends_on: str
) -> float:
    """FLOP/s of a training block's attention, counted over the keys that its kernel walks (2 products forward, 5 backward):
    that of a block by itself, or of an eager one where no compiler was there.

    Beyond the longest explicit attention a CPU's flash kernel multiplies bf16 as it does fp32, so that rate is taken.
    Datasheets get an assumed share of peak, for the causal half of the keys.
    """
    if hardware.kind == "cpu" and attends_on != NATIVE_ATTENTION and not is_explicit(attends_on, dtype, sequence_length):
        dtype = "fp32"
    block = hardware.training.block(dtype, mode, direction) or hardware.training.block(dtype, "eager", direction)
    if block is not None:
        return letter("rate", block.attention_flop_per_s)
    return 2 * datasheet_rates.attention_rate(hardware, "bf16" if dtype in LOW_PRECISIONS else dtype)


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
