"""What one rank of a layout holds: its part of the parameters, stage by stage, and memory by term.

ZeRO with Adam and N ranks, Ψ parameters in mixed precision (Rajbhandari et al., arXiv 1910.02054, figure 1): 16Ψ bytes; ZeRO-1
4Ψ + 12Ψ/N; ZeRO-2 2Ψ + 14Ψ/N; ZeRO-3 16Ψ/N. Tensor, pipeline and expert parallel divide Ψ itself first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from twostroke.core.compressions import COMPRESSIONS
from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import ALL_LINEAR, LayerKind, Matrix, head_matrix, layer_kinds, layers_by_kind
from twostroke.core.named import inputs, largest, letter, named, smallest
from twostroke.core.policy import layers_of, numbers_of_expert_rows
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.anchors import ADAPTER_ANCHOR, ADAPTER_RANK, TrainingAnchor, training_anchors
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.exchanging import (
    beside_sums_of_replicas,
    beside_sums_of_shards,
    exchanged_bytes,
    largest_buckets,
    reducing_bytes,
    under_way_bytes,
)
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.memory import (
    FP32,
    PRECISIONS,
    ActivationPolicy,
    around_blocks_bytes,
    attention_device,
    gradient_bytes_per_parameter,
    kept_by_layer,
    loss_bytes,
    nf4_bytes_per_weight,
    not_kept_at_the_bottom,
    read_out_bytes,
    snapshot_bytes,
    state_bytes,
)
from twostroke.planner.training.offload import kept_on_device, state_in_memory_bytes
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.params import check_targets, count_parameters, targeted


@dataclass(frozen=True)
class RankProduct:
    """A product as one rank runs it: its part of the matrix, rows per token of the micro-batch, matrices in a row.
    ``adapter_outputs`` are the outputs of the modules with an adapter."""

    product: Matrix
    rows_per_token: float
    calls: int
    adapter_outputs: tuple[int, ...] = ()

    @property
    def is_expert(self) -> bool:
        return self.product.split == "expert"

    @property
    def weights(self) -> int:
        """Elements of its matrices that the rank holds, biases apart."""
        return self.calls * self.product.weights

    @property
    def elements(self) -> float:
        """Parameters of it that the rank holds, biases included (those of a row cut stay whole)."""
        return self.calls * (self.product.weights + (self.product.n if self.product.bias else 0))

    def adapters(self, rank: int) -> int:
        """Adapter parameters that the rank holds: of the two factors one is cut with the matrix and one is whole."""
        return self.calls * sum(rank * (self.product.k + outputs) for outputs in self.adapter_outputs)


def rank_product(
    product: Matrix, kind: LayerKind, layout: Layout, targets: tuple[str, ...] = (), family: str = "llama"
) -> RankProduct:
    """``product`` cut for one rank: columns or rows by ``tensor``; experts by ``expert`` and, beyond it, inside by ``tensor``.
    Key-value heads are not cut below one."""
    tensor = layout.tensor
    outputs = targeted(product, targets, family) if targets else ()
    if product.split == "expert":
        within = max(1, tensor // layout.expert)
        if product.name.endswith("down"):
            cut = replace(product, k=product.k // within)
        else:
            cut = replace(product, n=product.n // within)
        rows = product.active * max(1, layout.expert // tensor) / product.copies
        return RankProduct(cut, rows, product.copies // layout.expert, outputs)
    if product.split == "replicated" or tensor == 1:
        return RankProduct(product, 1, 1, outputs)
    if product.split == "row":
        return RankProduct(replace(product, k=product.k // tensor), 1, 1, outputs)
    if product.name == "qkv":
        of_a_head = letter("D_kv", (product.n - kind.n_heads * kind.qk_dim) // kind.n_kv_heads)
        keys_and_values = of_a_head * max(1, kind.n_kv_heads // tensor)
        cut = replace(product, n=kind.n_heads * kind.qk_dim // tensor + keys_and_values)
        return RankProduct(cut, 1, 1, tuple(o // tensor for o in outputs))
    return RankProduct(replace(product, n=-(-product.n // tensor)), 1, 1, tuple(o // tensor for o in outputs))


@dataclass(frozen=True)
class RankLayer:
    """One kind of layer on one rank, and how many layers of the model are of it."""

    kind: LayerKind
    count: int
    products: tuple[RankProduct, ...]

    @property
    def dense(self) -> float:
        """Parameters that every rank of the data group holds alike."""
        of_matrices = sum(p.elements for p in self.products if not p.is_expert)
        whole = of_matrices + self.kind.norm_parameters + self.kind.other_parameters
        return named("layer_dense", whole, "parameters", "one layer on one rank, experts apart", section="rank")

    @property
    def experts(self) -> float:
        held_here = sum(p.elements for p in self.products if p.is_expert)
        return named("layer_experts", held_here, "parameters", "the experts of one layer that a rank holds", section="rank")


@lru_cache(maxsize=4096)
def rank_layers(spec: ModelSpec, tensor: int, expert: int, targets: tuple[str, ...] = ()) -> tuple[RankLayer, ...]:
    """Every kind of layer as a rank of a group of ``tensor`` and ``expert`` devices holds it."""
    plane = Layout(tensor=tensor, expert=expert, data=max(1, expert // tensor))
    return tuple(
        RankLayer(kind, count, tuple(rank_product(p, kind, plane, targets, spec.family) for p in kind.matrices))
        for kind, count in layer_kinds(spec)
    )


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers, and whether embedding and head are on it. ``kinds`` are how many of its layers are of
    each of the model's kinds, in their order; it has its share of each where that is empty."""

    index: int
    n_layers: float
    first: bool
    last: bool
    kinds: tuple[float, ...] = ()

    def counts(self, spec: ModelSpec) -> tuple[float, ...]:
        """Its layers of each kind."""
        if self.kinds:
            return tuple(letter(f"here_{i}", n) for i, n in enumerate(self.kinds, 1))
        share = self.n_layers / spec.n_layers
        return tuple(share * count for _, count in layer_kinds(spec))


@lru_cache(maxsize=4096)
def stages(n_layers: int, pipeline: int, interleave: int) -> tuple[Stage, ...]:
    """The stages that can be the fullest or the slowest: the first, the second where the ends have fewer layers, the last.

    Chunks have ⌈L/(p·v)⌉ layers. Where that is more than there are, the last and the first, which also hold head and embedding,
    have fewer (the Llama 3 report, arXiv 2407.21783, section 3.3.2; DeepSeek-V3's 61 layers), and then others.
    """
    if pipeline == 1:
        return (Stage(0, n_layers, first=True, last=True),)
    each = -(-n_layers // (pipeline * interleave)) * interleave
    lacking = each * pipeline - n_layers
    at_first, at_last = min(lacking // 2, each), min(lacking - lacking // 2, each)
    ends = (
        Stage(0, _layers_here(each - at_first), True, False),
        Stage(pipeline - 1, _layers_here(each - at_last), False, True),
    )
    return ends if pipeline == 2 or not lacking else (ends[0], Stage(1, _layers_here(each), False, False), ends[1])


def stages_of(spec: ModelSpec, shape: TrainingShape, layout: Layout) -> tuple[Stage, ...]:
    """``stages`` of ``layout``; in a run of our trainer those that it makes, with the layers that are there (``layers_of``). Of
    stages in the middle with the same layers the one that is nearest to the first has most micro-batches under way."""
    if layout.pipeline == 1 or not shape.gradient_sums:
        return stages(spec.n_layers, layout.pipeline, layout.interleave)
    return _stages_made(spec, layout.pipeline, layout.interleave)


@lru_cache(maxsize=4096)
def _stages_made(spec: ModelSpec, pipeline: int, interleave: int) -> tuple[Stage, ...]:
    n_chunks, n_kinds = int(pipeline * interleave), len(layer_kinds(spec))
    kinds = layers_by_kind(spec)
    found: dict[tuple[bool, bool, tuple[float, ...]], Stage] = {}
    for index in range(int(pipeline)):
        chunks = (layers_of(chunk, n_chunks, int(spec.n_layers)) for chunk in range(index, n_chunks, int(pipeline)))
        here = [kinds[layer] for layers in chunks for layer in layers]
        first, last = index == 0, index == pipeline - 1
        counts = tuple(float(here.count(kind)) for kind in range(n_kinds)) if n_kinds > 1 else ()
        stage = Stage(index, _layers_here(len(here)), first, last, counts)
        found.setdefault((first, last, counts or (float(len(here)),)), stage)
    return tuple(found.values())


def _layers_here(n_layers: float) -> float:
    return named("layers_here", n_layers, "layers", "of the stage that holds most or takes longest", section="rank")


@dataclass(frozen=True)
class Held:
    """Parameters of one stage on one rank before ZeRO divides them. ``trained`` and ``frozen_bytes`` are alike on every data
    rank, those of experts on ``Layout.expert_data`` ranks. ``layer`` is the trained parameters of its largest layer, ``ends``
    those of the head, ``matrix`` those of its largest matrix. ``outside`` are parameters outside of the blocks, trained or
    not."""

    trained: float
    trained_experts: float
    matrices: float
    expert_matrices: float
    frozen_bytes: float
    frozen_expert_bytes: float
    layer: float
    layer_bytes: float
    head_bytes: float
    embedding_bytes: float
    ends: float
    matrix: float
    outside: float

    def trained_of(self, ranks: tuple[int, int]) -> float:
        """Trained parameters of one rank where ``ranks`` share them (``Layout.shared_by``)."""
        return self.trained / ranks[0] + self.trained_experts / ranks[1]


@lru_cache(maxsize=8192)
def held(
    spec: ModelSpec, method: str, rank: int, targets: tuple[str, ...], working: float, tensor: int, expert: int, stage: Stage
) -> Held:
    """What a rank of ``stage`` holds when ``method`` trains: everything (full), or adapters beside a frozen base in the working
    type (lora) or with its block matrices in NF4 (qlora)."""
    counts = count_parameters(spec)
    layers = rank_layers(spec, tensor, expert, targets)
    here = stage.counts(spec)
    dense = sum(n * layer.dense for n, layer in zip(here, layers, strict=True))
    experts = sum(n * layer.experts for n, layer in zip(here, layers, strict=True))
    ends = 0.0
    if stage.first:
        ends += counts.embedding / tensor + counts.positions + counts.projections
    if stage.last:
        ends += counts.head / tensor + counts.final_norm
        ends += counts.embedding / tensor if spec.tied_embeddings and not stage.first else 0.0  # the head's own copy

    def of_blocks(count: Callable[[RankProduct], int], experts: bool) -> float:
        """``count`` of the products of the stage's blocks: those of experts or all others."""
        each = ((n, p) for n, layer in zip(here, layers, strict=True) for p in layer.products)
        return sum(n * count(p) for n, p in each if p.is_expert == experts)

    dense_matrices, expert_matrices = (of_blocks(lambda p: p.weights, experts) for experts in (False, True))
    most = max(layer.dense + layer.experts for layer in layers)
    frozen = frozen_experts = 0.0
    if method == "full":
        trained = _of_rank("N_trained", dense + ends, f"trained on a rank of stage {stage.index}, experts apart")
        trained_experts = _of_rank("N_trained_experts", experts, "its experts")
        matrices = _of_rank("M", dense_matrices, "matrices of its blocks")
        matrices_of_experts = _of_rank("M_experts", expert_matrices, "matrices of its experts")
        layer, of_matrices = most, working
    else:
        lora = "two factors for every targeted matrix: rank·(inputs + outputs); LoRA, arXiv 2106.09685"
        adapters, adapters_of_experts = (of_blocks(lambda p: p.adapters(rank), experts) for experts in (False, True))
        trained = matrices = _of_rank("N_trained", adapters, lora)
        trained_experts = matrices_of_experts = _of_rank("N_trained_experts", adapters_of_experts, lora)
        layer = max(sum(p.adapters(rank) for p in layer.products) for layer in layers)
        of_matrices = nf4_bytes_per_weight() if method == "qlora" else working
        base = "the frozen base: block matrices in NF4 with double quantisation (QLoRA, arXiv 2305.14314), or the working type"
        frozen = of_matrices * dense_matrices + working * (dense + ends - dense_matrices)
        frozen = named("frozen_bytes", frozen, "bytes", base, section="rank")
        frozen_experts = of_matrices * expert_matrices + working * (experts - expert_matrices)
        frozen_experts = named("frozen_expert_bytes", frozen_experts, "bytes", base, section="rank")
    return Held(
        trained=trained,
        trained_experts=trained_experts,
        matrices=matrices,
        expert_matrices=matrices_of_experts,
        frozen_bytes=frozen,
        frozen_expert_bytes=frozen_experts,
        layer=layer,
        layer_bytes=of_matrices * most,
        head_bytes=working * head_matrix(spec).weights / tensor,
        embedding_bytes=working * (counts.embedding + counts.head) / tensor,
        ends=head_matrix(spec).weights / tensor if method == "full" else 0.0,
        matrix=max(p.product.weights / len(p.product.parts) for layer in layers for p in layer.products)
        if method == "full"
        else 0.0,
        outside=ends,
    )


def whole_parameters(spec: ModelSpec, shape: TrainingShape, layout: Layout, stage: Stage) -> float:
    """Trained parameters of a stage that tensor parallel leaves whole: norms, routers and other matrices that are not cut,
    biases of row cuts and positions, or of adapters the factor on the side that is not cut.

    Sinks, which are cut, and correction biases, which have no gradient, are counted with the norms: a few numbers a layer.
    """
    layers = rank_layers(spec, layout.tensor, layout.expert, shape.targets)
    each = zip(stage.counts(spec), layers, strict=True)
    whole = sum(n * _whole_of(layer, shape.method == "full", shape.lora_rank) for n, layer in each)
    if shape.method == "full":
        counts = count_parameters(spec)
        whole += counts.positions + counts.projections if stage.first else 0.0
        whole += counts.final_norm if stage.last else 0.0
    return _of_rank("N_whole", whole, "left whole by tensor parallel")


def _whole_of(layer: RankLayer, is_full: bool, rank: int) -> float:
    found = layer.kind.norm_parameters + layer.kind.other_parameters if is_full else 0
    for part in layer.products:
        product = part.product
        biases = product.n if product.bias else 0
        if product.split == "replicated":
            found += part.calls * (product.weights + biases) if is_full else part.adapters(rank)
        elif product.split == "row":
            found += part.calls * biases if is_full else rank * sum(part.adapter_outputs)
        elif product.split == "column" and not is_full:
            found += rank * product.k * len(part.adapter_outputs)
    return found


def _of_rank(symbol: str, parameters: float, source: str) -> float:
    return named(symbol, parameters, "parameters", source, section="rank")


def micro_batches_in_flight(layout: Layout, n_micro_batches: int, stage: Stage) -> float:
    """Micro-batches whose activations a stage holds at once, 1F1B: min(m, p − i), and interleaved (p − 1)/v more (Korthikanti
    et al., arXiv 2205.05198, section 4.2.3: L·(1 + (p−1)/(p·v)) layers' worth on the first stage)."""
    if layout.pipeline == 1:
        return 1.0
    extra = (layout.pipeline - 1) / layout.interleave if layout.interleave > 1 else 0.0
    return smallest(1.0 * n_micro_batches, layout.pipeline - stage.index + extra)


@lru_cache(maxsize=8192)
def _kept_per_token(spec: ModelSpec, policy: ActivationPolicy, stage: Stage) -> tuple[float, float]:
    """(bytes a token keeps in the layers of ``stage``, in the layer that keeps most when nothing is recomputed)."""
    kinds = [kind for kind, _ in layer_kinds(spec)]
    here = sum(n * kept_by_layer(spec, kind, policy) for n, kind in zip(stage.counts(spec), kinds, strict=True))
    whole = replace(policy, checkpointing="none")
    return here, max(kept_by_layer(spec, kind, whole) for kind in kinds)


@lru_cache(maxsize=4096)
def _adapted(spec: ModelSpec, targets: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """(products with an adapter, adapters that a token passes in the layer that has most)."""
    layers = [[(p, len(targeted(p, targets, spec.family))) for p in kind.matrices] for kind, _ in layer_kinds(spec)]
    names = frozenset(p.name for layer in layers for p, n_adapters in layer if n_adapters)
    return names, max(sum(p.active * n_adapters for p, n_adapters in layer) for layer in layers)


def rank_shape(shape: TrainingShape, layout: Layout) -> TrainingShape:
    """``shape`` as one rank computes it: its part of each sequence."""
    return shape if layout.context == shape.sequence_ranks else replace(shape, sequence_ranks=layout.context)


def activation_policy(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout) -> ActivationPolicy:
    """What a rank keeps: everything, or beside a frozen base the inputs and narrow products of adapters."""
    dtype = shape.compute_dtype
    inputs_of, n_adapters = _adapted(spec, shape.targets) if shape.targets else (None, 0)
    return ActivationPolicy(
        dtype, shape.compile, shape.sequence_length, attention_device(hardware, spec, dtype),
        layout.tensor, layout.sequence_cut, recomputation_of(shape, layout), inputs_of, shape.lora_rank * n_adapters,
    )  # fmt: skip


def recomputation_of(shape: TrainingShape, layout: Layout) -> str:
    """``shape.checkpointing``, of which *selective* is per operation in a job over FSDP2: what torchtitan, the trainer of such
    jobs, does under that name."""
    return "selective_op" if shape.checkpointing == "selective" and layout.zero == 3 else shape.checkpointing


def training_memory(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout = SINGLE) -> dict[str, float]:
    """Bytes by term on the rank that holds most, when they are all alive, at the start of a backward pass.

    ``weights`` are the working copy and the masters. ``gathered`` is what ZeRO-3 holds whole for the moment: this layer and the
    next, embedding and head, and one layer's gradient. ``dequantised`` is QLoRA's largest matrix in the working type.
    It takes about 50 µs once a model's shapes are cached.
    """
    layout.check(spec)
    if shape.targets:
        check_targets(spec, shape.targets)
    shape = rank_shape(shape, layout)
    counted = [_stage_terms(spec, shape, hardware, layout, stage) for stage in stages_of(spec, shape, layout)]
    found = [terms | {"process": process_bytes(shape, hardware, sum(terms.values()))} for terms in counted]
    return max(found, key=lambda terms: sum(terms.values()))


def rank_state_bytes(shape: TrainingShape, layout: Layout, part: Held) -> dict[str, float]:
    """weights, masters (a part of them), gradients and optimizer of one stage, divided as ``layout.zero`` says."""
    precision = inputs(PRECISIONS[shape.dtype])
    weight_ranks, gradient_ranks, state_ranks = (layout.shared_by(zero) for zero in (3, 2, 1))
    alone, n_sums = layout.n_devices == 1, shape.gradient_sums
    in_fp32 = n_sums and layout.zero >= 2  # FSDP2's masters and a rank's rows of a pass's sum
    left_in = "fp32" if in_fp32 else shape.dtype
    gradient = letter("gradient", gradient_bytes_per_parameter(left_in, alone, shape.grad_accumulation, n_sums))
    left = 0.0
    if n_sums:
        left = letter("left", PRECISIONS[left_in].gradient) * part.trained_of(gradient_ranks)
        source = "gradients that a backward pass of our ranks leaves beside their sums"
        left = named("left_bytes", left, "bytes", source, section="rank")
    gathered_apart = in_fp32 and layout.zero == 2 and not precision.master  # from rows that stay beside what is gathered
    masters = (letter("rows_held", FP32) if gathered_apart else precision.master) * part.trained_of(state_ranks)
    working = precision.working * part.trained_of(weight_ranks)
    frozen = part.frozen_bytes / weight_ranks[0] + part.frozen_expert_bytes / weight_ranks[1]
    optimizer = state_bytes(part.trained, part.matrices, shape.optimizer, precision.state) / state_ranks[0]
    optimizer += state_bytes(part.trained_experts, part.expert_matrices, shape.optimizer, precision.state) / state_ranks[1]
    if shape.offload_optimizer == "disk":
        updated, matrices = part.trained + part.trained_experts, part.matrices + part.expert_matrices
        largest_ones = part.matrix, part.ends
        optimizer = state_in_memory_bytes(updated, matrices, *largest_ones, shape.optimizer, precision.state)
    if shape.average:
        optimizer += FP32 * (part.trained + part.trained_experts)
    if shape.outer_every:
        optimizer += 2 * FP32 * part.trained  # outer weights and their momentum
    if shape.residuals:
        optimizer += FP32 * part.trained
    gradients = gradient * part.trained_of(gradient_ranks)
    if shape.optimizer_in_backward:
        gradients = smallest(gradients, gradient * largest(part.layer, part.ends))
    if shape.offload_optimizer == "cpu":
        masters = optimizer = 0.0
    masters = named("masters_bytes", masters, "bytes", "fp32 masters; ZeRO, arXiv 1910.02054, section 3, divides them")
    return {
        "weights": _term("weights", working + frozen + masters),
        "masters": masters,
        "gradients": _term("gradients", gradients),
        "left": left,
        "optimizer": _term("optimizer", optimizer),
    }


_TERMS = {
    "weights": "the copy that forward and backward read, and masters; over the ranks that ZeRO divides them by",
    "gradients": "what backward leaves and, alone on a device, the fp32 sum that the optimizer reads",
    "optimizer": "moments as the optimizer keeps them; a running average of weights, outer weights, residuals of compression",
    "activations": "blocks; around them ids, final norm, hidden gradients, rotary tables, mask; the head's gradient",
    "exchange": "beyond activations: gradients that are not added up yet, and buffers in which ranks exchange them",
    "recomputed": "the one layer that is being computed again, beyond what was kept of it",
    "loss": "logits with their gradient, the head's gradient; on a CPU beyond what backward takes after it",
    "workspace": "pieces of the heap that nothing fits into, and gradients inside a layer; fitted on CPUs",
    "expert_products": "oneDNN's compiled products of experts: one for each number of rows, forward and two backward",
    "snapshot": "the copy that checkpoints are written from in the background",
    "gathered": "ZeRO-3 holds this layer and the next whole, embedding and head, and one layer's gradient",
    "dequantised": "QLoRA's largest matrix in the working type",
}


def _term(name: str, n_bytes: float) -> float:
    return named(f"{name}_bytes", n_bytes, "bytes", _TERMS[name])


def stage_held(spec: ModelSpec, shape: TrainingShape, layout: Layout, stage: Stage) -> Held:
    working = letter("working", PRECISIONS[shape.dtype].working)
    return held(spec, shape.method, shape.lora_rank, shape.targets, working, layout.tensor, layout.expert, stage)


def _stage_terms(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout, stage: Stage) -> dict[str, float]:
    """Bytes by term on a rank of ``stage``, all but the process at rest."""
    part, policy = stage_held(spec, shape, layout, stage), activation_policy(spec, shape, hardware, layout)
    state = rank_state_bytes(shape, layout, part)
    tokens = shape.tokens_at_once(hardware.kind, layout.n_devices)
    activations, recomputed = _stage_activations(spec, shape, layout, stage, policy, tokens)
    if shape.offload_activations == "cpu" and stage.n_layers:
        activations = kept_on_device(activations, stage.n_layers)
    if shape.offload_activations == "disk":
        there = tokens * offloaded_a_token(spec, shape, hardware, layout, stage)
        activations += there / (stage.n_layers or 1.0) - there  # backward has those of one layer in memory
    loss = loss_bytes(spec, tokens, shape.logits, policy) / layout.tensor if stage.last else 0.0
    ours = shape.gradient_sums > 0  # what backward leaves is in ``exchange``
    beside = letter("beside", 0.0 if ours else backward_gradient_bytes(shape.dtype)) * (part.trained + part.trained_experts)
    activations, recomputed = _term("activations", activations), _term("recomputed", recomputed)
    n_layers = stage.n_layers or 1.0  # the embedding or the head alone: backward differentiates it as it would one layer
    differentiated = letter("share", backward_share(shape)) * (activations + recomputed) / n_layers
    terms = {
        "weights": state["weights"],
        "gradients": state["gradients"],
        "optimizer": state["optimizer"],
        "activations": activations,
        "loss": _term("loss", loss_at_peak_bytes(loss, beside, differentiated, hardware)),
        "workspace": _term("workspace", workspace_bytes(activations + recomputed, differentiated, hardware)),
    }
    if ours:
        most = activations + recomputed + terms["loss"]
        taken = differentiated if hardware.accelerator is None else 0.0
        beside = exchange_bytes(spec, shape, layout, stage, part, state["left"], most, taken, hardware)
        terms["exchange"] = _term("exchange", beside)
    if recomputed:
        terms["recomputed"] = recomputed
    compiled = expert_products_bytes(spec, shape, tokens, hardware)
    if compiled:
        terms["expert_products"] = _term("expert_products", compiled)
    if shape.snapshot and hardware.kind != "gpu":  # a GPU's copy is in the host's memory
        copied = snapshot_bytes(shape.dtype, part.trained + part.trained_experts, state["optimizer"])
        terms["snapshot"] = _term("snapshot", copied)
    on_accelerator = hardware.accelerator is not None
    gathered = gathered_bytes(spec, shape, layout, part, tokens, policy.w, on_accelerator)
    if gathered:
        terms["gathered"] = _term("gathered", gathered)
    if shape.method == "qlora":
        terms["dequantised"] = _term("dequantised", policy.w * largest_matrix(spec, layout, on_accelerator))
    whole_rows = 2 * policy.w * tokens * spec.d_model if layout.sequence_cut > 1 else 0.0  # the head's input and its gradient
    return _at_peak(terms, shape, layout, stage, part, whole_rows) if on_accelerator else terms


def largest_matrix(spec: ModelSpec, layout: Layout, as_on_disk: bool) -> float:
    """Weights of the largest matrix that QLoRA expands at once: our engine's are packed, others hold each by itself."""
    products = [p.product for layer in rank_layers(spec, layout.tensor, layout.expert) for p in layer.products]
    return max(p.weights / (len(p.parts) if as_on_disk else 1) for p in products)


TENSOR_PARALLEL_COPIES = 4
"""Whole sequences that tensor parallel holds in the layer being computed: the gathered inputs of attention and of the MLP, one
result before it is scattered and its gradient."""


def gathered_bytes(
    spec: ModelSpec, shape: TrainingShape, layout: Layout, part: Held, tokens: float, w: float, on_accelerator: bool
) -> float:
    """What is whole for the moment: under ZeRO-3 this layer, the next and one layer's gradient, in fp32 too where it is reduced
    in it, and on a CPU embedding and head; under tensor parallel with sequences cut, sequences of the layer being computed."""
    gathered = 0.0
    if layout.zero == 3:
        precision = PRECISIONS[shape.dtype]
        reduced = FP32 if precision.master and on_accelerator else 0.0
        gathered = 2 * part.layer_bytes
        gathered += 0.0 if shape.gradient_sums else (precision.gradient + reduced) * part.layer  # ours: ``exchange``
        gathered += 0.0 if on_accelerator else part.embedding_bytes
    if on_accelerator and layout.sequence_cut > 1:
        gathered += TENSOR_PARALLEL_COPIES * w * tokens * spec.d_model
    return gathered


def _at_peak(
    terms: dict[str, float], shape: TrainingShape, layout: Layout, stage: Stage, part: Held, whole_rows: float
) -> dict[str, float]:
    """``terms`` as far as an accelerator holds them at one moment, of three: the loss, with the head and its ``whole_rows``
    gathered; the first layer that backward takes; its end, when activations have gone and gradients are there. The allocator
    reuses what one moment leaves for the next. Gradients stay if several micro-batches or replicas add to them, or if the
    optimizer reads an fp32 sum. Activations that wait in the host's memory are all there during the loss.
    """
    layer = sum(terms.get(name, 0.0) for name in ("exchange", "recomputed", "gathered", "dequantised"))
    layer += terms["activations"] if shape.offload_activations == "cpu" else 0.0
    head = part.head_bytes if layout.zero == 3 and stage.last else 0.0
    head += whole_rows if stage.last else 0.0
    loss = largest(terms["loss"] + head - layer, 0.0)
    stays = shape.grad_accumulation > 1 or layout.replicas > 1 or PRECISIONS[shape.dtype].master
    made = terms["gradients"]
    gradients = made if stays else largest(0.0, made - terms["activations"] - loss)
    return terms | {"loss": loss, "gradients": _term("gradients", gradients)}


def exchange_bytes(
    spec: ModelSpec, shape: TrainingShape, layout: Layout, stage: Stage, part: Held, left: float, activations: float,
    differentiated: float, hardware: Hardware,
) -> float:  # fmt: skip
    """What a rank of ours holds of gradients beside their sums at the peak, beyond ``activations`` and what the layer takes
    that is ``differentiated`` (``exchanging``). ``left`` is what a pass leaves."""
    of_a_layer = activations / (stage.n_layers or 1.0)
    precision, ranks = PRECISIONS[shape.dtype], layout.shared_by(2)[0]
    # What a tree of sums held until they were one is there for the buffers.
    sums = letter("n_sums", shape.gradient_sums) - 1
    free = FP32 * sums * part.trained_of(layout.shared_by(2)) if shape.gradient_sums > 1 else 0.0
    apart, on_accelerator = layout.copies if layout.zero >= 2 else layout.replicas, hardware.accelerator is not None
    sizes = [size / ranks for size in trained_tensors(spec, shape, layout, stage)]
    bucket_by_bucket = sums_bucket_by_bucket(shape, layout)
    bucket, before = largest_buckets(reversed(sizes) if bucket_by_bucket else sizes)
    buffers = 0.0
    if apart > 1 and not shape.outer_every:
        under_way = before if bucket_by_bucket else 0.0
        buffers = largest(exchanged_bytes(shape, bucket, under_way, apart, on_accelerator) - free, 0.0)
    if layout.zero < 2:
        if bucket_by_bucket:
            left = smallest(left, precision.gradient * bucket)
        return beside_sums_of_replicas(left, activations, of_a_layer, differentiated, buffers)
    outside = part.outside if shape.method == "full" else 0.0
    of_blocks = left - FP32 / ranks * outside
    beside = beside_sums_of_shards(
        precision.gradient, of_blocks, part.layer, outside, ranks, reducing_bytes(shape, ranks, on_accelerator),
        under_way_bytes(shape, on_accelerator), activations, of_a_layer, differentiated,
    )  # fmt: skip
    return largest(beside, buffers - (activations + differentiated))


def sums_bucket_by_bucket(shape: TrainingShape, layout: Layout) -> bool:
    """Whether our replicas take what a pass leaves bucket by bucket (``training.replicas``)."""
    alone = layout.zero == 0 and layout.tensor == layout.pipeline == layout.expert == 1
    return alone and not shape.outer_every and not COMPRESSIONS[shape.compress].low_rank


def trained_tensors(spec: ModelSpec, shape: TrainingShape, layout: Layout, stage: Stage) -> Iterator[float]:
    """Elements of a stage's trained parameters, in the order in which their gradients are exchanged."""
    counts, full = count_parameters(spec), shape.method == "full"
    if full and stage.first:
        yield counts.embedding / layout.tensor
    layers = rank_layers(spec, layout.tensor, layout.expert, shape.targets)
    for n, layer in zip(stage.counts(spec), layers, strict=True):
        for _ in range(round(n)):
            yield from (p.elements if full else p.adapters(shape.lora_rank) for p in layer.products)
            yield layer.kind.norm_parameters + layer.kind.other_parameters if full else 0.0
    if full and stage.last:
        yield counts.final_norm
        yield counts.head / layout.tensor


def offloaded_a_token(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout, stage: Stage) -> float:
    """Bytes of a token's activations on a stage that wait in the host's memory, or on its disk, where the final norm's are
    too."""
    policy = activation_policy(spec, shape, hardware, layout)
    kept = _kept_per_token(spec, policy, stage)[0]
    if shape.offload_activations == "disk" and stage.last:
        kept += read_out_bytes(spec, policy) - policy.w * spec.d_model  # without the gradient that the loss computes ahead
    return kept


def _stage_activations(
    spec: ModelSpec, shape: TrainingShape, layout: Layout, stage: Stage, policy: ActivationPolicy, tokens: float
) -> tuple[float, float]:
    """(bytes kept for backward, bytes of the one layer that is being computed again beyond what was kept of it)."""
    here, most = _kept_per_token(spec, policy, stage)
    kept = tokens * here * micro_batches_in_flight(layout, shape.grad_accumulation, stage)
    layer = here / (stage.n_layers or 1.0)
    recomputed = 0.0 if shape.checkpointing == "none" else tokens * max(most - (layer if policy.selective else 0), 0.0)
    if stage.first:
        kept -= tokens * not_kept_at_the_bottom(spec, layer_kinds(spec)[0][0], policy)
    if stage.last:
        around = around_blocks_bytes(spec, policy)
        if shape.exit_losses:
            around += letter("exits", shape.exit_losses) * read_out_bytes(spec, policy)
        if layout.n_devices > 1 and policy.attends_on == "gpu":
            around -= policy.w * shape.sequence_length  # packed documents are told by their boundaries, not by a mask
        kept += tokens * around / layout.sequence_cut
        if shape.method == "full" and shape.logits == "chunked":
            kept += policy.w * spec.vocab_size * spec.d_model / layout.tensor  # the head's gradient, computed ahead
    return kept, recomputed


ALLOCATOR_SLACK = 0.09
BACKWARD_SHARE = 1.1
"""What training on a CPU holds beyond its tensors, as shares of all activations and of one layer's: freed pieces of the heap
that nothing fits into, and gradients of a layer that is being differentiated. Found over 44 compiled runs of
benchmarks/planner/engines (glibc 2.36, torch 2.13), whose peaks they leave with a median error of 2%."""

ADAPTED_BACKWARD_SHARE = 2.6
"""That of a compiled layer with adapters: each of its matrices gives two gradients of its input, through the base and through
its adapter's dropout. Found over the adapters' runs of 2026-11-28 (Zen 3), which were planned 5 to 11% too low."""


def backward_share(shape: TrainingShape) -> float:
    """Gradients of a layer that is being differentiated, as a share of what it keeps for that."""
    return ADAPTED_BACKWARD_SHARE if shape.targets and shape.mode == "compiled" else BACKWARD_SHARE


def workspace_bytes(activations: float, differentiated: float, hardware: Hardware) -> float:
    """``ALLOCATOR_SLACK``·activations, and the gradients of the layer that is ``differentiated``, on a CPU. A GPU's caching
    allocator was not measured: nothing is added there."""
    if hardware.kind == "gpu":
        return 0.0
    return letter("slack", ALLOCATOR_SLACK) * activations + differentiated


COMPILED_PRODUCT_BYTES = 0.65e6
"""Resident bytes of a product that oneDNN has compiled: 0.55 to 0.60 MB of heap and 0.1 of code, of 15 products of 5 to 1,664
rows and of any shape (bf16, torch 2.13, Zen 4)."""

MOST_COMPILED_PRODUCTS = 1024
"""Products that oneDNN keeps (its default capacity)."""


def expert_products_bytes(spec: ModelSpec, shape: TrainingShape, tokens: float, hardware: Hardware) -> float:
    """What oneDNN keeps of the products of experts on a CPU, in 16 bits: a router gives an expert any number of rows, and each
    (as ``expert_rows`` rounds it) is a product of its own, forward and for both gradients. Frozen experts have no gradient of
    their own, and their adapters two factors. fp32 products are another library's, which compiles none."""
    if hardware.kind != "cpu" or bytes_of(shape.compute_dtype) == FP32:
        return 0.0
    experts = [m for kind, _ in layer_kinds(spec) for m in kind.matrices if m.split == "expert"]
    shapes = {(m.n, m.k) for m in experts}
    factors = {
        factor
        for m in experts
        for n in targeted(m, shape.targets, spec.family)
        for factor in ((shape.lora_rank, m.k), (n, shape.lora_rank))
    }
    trained = letter("passes", 2 if shape.targets else 3) * len(shapes) + 3 * len(factors)
    n_products = trained * letter("numbers_of_rows", numbers_of_expert_rows(int(tokens)))
    return letter("compiled", COMPILED_PRODUCT_BYTES) * smallest(n_products, float(MOST_COMPILED_PRODUCTS))


def backward_gradient_bytes(dtype: str) -> float:
    """Bytes a parameter of the gradients that a backward pass leaves beside the fp32 ones; none where those are the same."""
    precision = PRECISIONS[dtype]
    return precision.gradient if precision.master else 0.0


def loss_at_peak_bytes(loss: float, backward_gradients: float, differentiated: float, hardware: Hardware) -> float:
    """What the loss adds to the peak. On a CPU it is over when backward begins, so it adds what it takes beyond backward's own
    gradients and those of the layer that is ``differentiated``; on a GPU, where that was not measured, all of it."""
    if hardware.kind == "gpu":
        return loss
    return largest(loss - backward_gradients - differentiated, 0.0)


def process_bytes(shape: TrainingShape, hardware: Hardware, counted_bytes: float) -> float:
    """Resident bytes of the process beside the ``counted_bytes`` that a plan counts: Python, torch, and the compiler if it
    compiles; and of eager steps what the allocator keeps of what they freed.

    It is the measured peak of an anchor's steps less the terms planned for them, the mean of both depths, or without an anchor
    what torch takes after a first product (``Process.resident_bytes``). Where the peaks of two depths grow by more than was
    counted, so does each byte.
    The memory of a GPU holds none of it.
    """
    if hardware.kind == "gpu":
        return 0.0
    resident, kept = hardware.process.resident_bytes, 0.0
    plain = training_anchors(shape.mode, hardware.kind)[0], "full"
    adapted = ((ADAPTER_ANCHOR, "lora"),) if shape.mode == "compiled" and shape.targets else ()
    for (anchor, method), dtype in itertools.product((*adapted, plain), (shape.compute_dtype, "bf16")):
        steps = (hardware.training.step(anchor.width, n, dtype, shape.mode, method) for n in (anchor.shallow, anchor.deep))
        peaks = [step.peak_bytes for step in steps if step is not None and step.peak_bytes is not None]
        if peaks:
            like = anchor_shape(anchor, dtype, shape)
            if method != "full":
                like = replace(like, method=method, lora_rank=ADAPTER_RANK, lora_targets=(ALL_LINEAR,))
            counted = [_anchor_bytes(anchor, n_layers, like, hardware) for n_layers in (anchor.shallow, anchor.deep)]
            if len(peaks) == 2:
                kept = min(max((peaks[1] - peaks[0]) / (counted[1] - counted[0]) - 1.0, 0.0), MOST_KEPT)
            rest = [peak - (1.0 + kept) * planned for peak, planned in zip(peaks, counted, strict=False)]
            resident = max(sum(rest) / len(rest), 0.0)
            break
    source = "resident memory of the process beside everything counted here"
    whole = letter("process", resident) + letter("kept", kept) * letter("counted", counted_bytes)
    return named("process_bytes", whole, "bytes", source, "measured")


MOST_KEPT = 1.0
"""As many bytes again as are counted: peaks that grow faster were disturbed by something else."""


def _anchor_bytes(anchor: TrainingAnchor, n_layers: int, like: TrainingShape, hardware: Hardware) -> float:
    """What is planned for an anchor of so many layers."""
    stage = Stage(0, n_layers, first=True, last=True)
    return sum(_stage_terms(anchor.spec(n_layers), like, hardware, SINGLE, stage).values())


def anchor_shape(anchor: TrainingAnchor, dtype: str, shape: TrainingShape) -> TrainingShape:
    """How an anchor was trained: as ``shape`` is, compiled or not, with AdamW and nothing else asked for."""
    return TrainingShape(anchor.batch_size, anchor.sequence_length, dtype=dtype, compile=shape.compile)


@lru_cache(maxsize=4096)
def head_on_rank(spec: ModelSpec, tensor: int) -> Matrix:
    head = head_matrix(spec)
    return replace(head, n=-(-head.n // tensor))
