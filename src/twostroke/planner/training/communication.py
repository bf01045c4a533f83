"""What one rank sends in a training step, by parallelism: bytes, bursts, seconds, and the part that work does not hide.

Every burst happens in lockstep: all ranks of a group send at once and wait for the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from twostroke.core.compressions import COMPRESSIONS, factored_elements
from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import LayerKind, Matrix, block, layer_kinds
from twostroke.core.named import largest, letter, named, records, smallest
from twostroke.core.policy import BUCKET_BYTES
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware import network
from twostroke.planner.hardware.device import Hardware, Link
from twostroke.planner.training.layout import Layout, group_link
from twostroke.planner.training.memory import FP32, PRECISIONS, gradient_bytes_per_parameter
from twostroke.planner.training.passes import attention_work
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import Held, Stage, sums_bucket_by_bucket, whole_parameters

BUCKET_PARAMETERS = 40_000_000
"""Gradients that a burst reduces together under DDP and ZeRO-1/2, or a million a rank where that is more (Megatron-LM's
``bucket_size``); ZeRO-3 gathers and reduces layer by layer."""


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in one optimizer step."""

    parallel: Annotated[str, "data, tensor, context, pipeline, expert or host"]
    what: Annotated[str, "the collective"]
    n_ranks: Annotated[int, "ranks that take part"]
    bursts: Annotated[float, "messages of a step"]
    burst_bytes: Annotated[float, "bytes", "of the tensor of one"]
    sent_bytes: Annotated[float, "bytes", "that a rank sends in a step, all bursts together"]
    seconds: Annotated[float, "s", "of a rank, all bursts together"]
    exposed_s: Annotated[float, "s", "of it that `overlap` leaves on the critical path"]
    overlap: Annotated[str, "behind what the rest is hidden"]
    link_kind: Annotated[str, "measured, datasheet or assumed"]
    apart_s: Annotated[float, "s", "from one burst to the next, where work between them takes longer than the wire"] = 0.0
    in_a_row: Annotated[float, "bursts that follow each other so; 0: all of a step"] = 0.0
    together_bytes: Annotated[float, "bytes", "that a rank sends at an end of a pass, where no work is between bursts"] = 0.0

    def leaves(self, hidden_s: float, times: int) -> float:
        """Seconds of ``hidden_s`` that are left for other traffic to hide in, where this one comes ``times`` a step."""
        return max(0.0, hidden_s - self.seconds / times)


COLLECTIVES_SLOW_BY = 0.2
"""Share of its own time by which a hidden collective delays an accelerator's products: NCCL takes up to 32 of an H100's 132
multiprocessors, and bandwidth of the memory beside them."""

RING = "ring, Patarasuk and Yuan 2009"


def shown_traffic(traffic: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    """``traffic``, whose bytes and seconds become lines of the explanation."""
    return tuple(map(_shown, traffic)) if records() else traffic


def _shown(t: Traffic) -> Traffic:
    name = "_".join([t.parallel, *t.what.replace("-", "_").replace(",", "").split()])
    return replace(
        t,
        sent_bytes=named(f"sent_{name}_bytes", t.sent_bytes, "bytes", f"{t.what}, a rank and step; {RING}", section=_TRAFFIC),
        seconds=named(f"{name}_s", t.seconds, "s", f"{t.link_kind} link; hidden: {t.overlap}", section=_TRAFFIC),
        exposed_s=named(
            f"exposed_{name}_s", t.exposed_s, "s", f"of it on the critical path; hidden: {t.overlap}", section=_TRAFFIC
        ),
    )


_TRAFFIC = "communication"


def within_micro_batch(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout, stage: Stage
) -> list[Traffic]:
    """Tensor, expert and pipeline traffic of a step: all of it on the critical path of each micro-batch.

    Tensor: 2 all-reduces of w·s·b·E a layer forward and 2 backward, or as many pairs of reduce-scatter and all-gather under
    sequence parallel (the same bytes; Korthikanti et al., arXiv 2205.05198); full checkpointing repeats the forward ones. One
    more of each for the embedding and for the head, whose vocabulary is cut. Under sequence parallel gradients of norms and
    routers, which are whole, are added up once a step. The three numbers a token that a cut loss exchanges are not counted.
    Expert: 2 all-to-alls each way of s·b·k·E·w, of a rank's part of the sequence under sequence parallel. Pipeline:
    w·s·b·E/t each way over each boundary, once per chunk of layers (Narayanan et al., arXiv 2104.04473, section 4.1 scatter
    and gather it over the tensor group).
    """
    w, n_micro = letter("w", bytes_of(shape.compute_dtype)), shape.grad_accumulation
    hidden = w * shape.tokens_per_pass * spec.d_model
    here = list(zip(layer_kinds(spec), stage.counts(spec), strict=True))
    passes = 3 if shape.checkpointing == "full" else 2
    found = []
    if layout.tensor > 1:
        by_experts = layout.expert > 1 and layout.expert >= layout.tensor
        per_pass = sum(n * _tensor_pairs(kind, by_experts) for (kind, _), n in here)
        what = "reduce-scatter and all-gather" if layout.sequence_parallel else "all-reduce"
        link = group_link(layout, hardware, layout.tensor)
        once_s = network.ring_all_reduce_s(hidden, layout.tensor, link)
        sent = network.all_reduce_sent_bytes(hidden, layout.tensor)
        ends = int(stage.first) + int(stage.last)
        bursts = n_micro * (passes * per_pass + ends)
        found.append(_waited_for("tensor", what, layout.tensor, link, bursts, hidden, sent, once_s))
        if layout.sequence_parallel:
            found.append(_sum_of_whole(spec, shape, layout, stage, link))
    if layout.context > 1:
        found.append(_ring_attention(spec, shape, hardware, layout, stage, passes))
    if layout.expert > 1 and spec.moe is not None:
        moe_layers = sum(n for (kind, _), n in here if kind.mlp == "moe")
        routed = hidden * spec.moe.top_k / layout.sequence_cut
        link, bursts = group_link(layout, hardware, layout.expert), n_micro * passes * 2 * moe_layers
        once_s = all_to_all_s(routed, spec.moe.top_k, layout, hardware)
        sent = network.gather_sent_bytes(routed, layout.expert)
        found.append(_waited_for("expert", "all-to-all", layout.expert, link, bursts, routed, sent, once_s))
    if layout.pipeline > 1:
        message = hidden / layout.tensor  # each of the tensor group sends its part, and they gather at the other end
        link = group_link(layout, hardware, layout.pipeline, layout.tensor * layout.replicas)
        what, bursts = "send to the next stage, and back", n_micro * 2 * layout.interleave
        once_s = network.send_s(message, link)
        # Of a stage's chunks that at an end of the model sends one way alone; of two stages each waits for the other.
        ends = int(stage.first or stage.last) if layout.pipeline == 2 else 0
        sent = message * (1 - ends / (2 * layout.interleave))
        found.append(_waited_for("pipeline", what, layout.pipeline, link, bursts, message, sent, once_s))
        if spec.tied_embeddings and shape.method == "full" and (stage.first or stage.last):
            found.append(_tied_head(spec, shape, layout, stage, link))
    return found


def _tensor_pairs(kind: LayerKind, by_experts: bool) -> int:
    """Pairs of gather and scatter of a layer's pass: around attention, and around what of the MLP is cut. Where experts are
    shared out whole (``by_experts``) that is what every row passes."""
    cut = [m for m in kind.matrices if m.component == "mlp" and m.split in ("row", "column")]
    return 2 if cut or not by_experts else 1


def _sum_of_whole(spec: ModelSpec, shape: TrainingShape, layout: Layout, stage: Stage, link: Link) -> Traffic:
    """Of what tensor parallel leaves whole each rank has the gradient of its part of the sequence: an all-reduce in fp32 once a
    step, after the last pass, of the pieces that a rank of the shards holds."""
    whole = whole_parameters(spec, shape, layout, stage)
    n_bytes = letter("gradient", FP32) * whole / layout.shared_by(2)[0]
    seconds = network.ring_all_reduce_s(n_bytes, layout.tensor, link)
    sent = network.all_reduce_sent_bytes(n_bytes, layout.tensor)
    what, overlap = "all-reduce of gradients of what is whole", "none: the update waits for it"
    return Traffic("tensor", what, layout.tensor, 1, n_bytes, sent, seconds, seconds, overlap, link.kind)


def _tied_head(spec: ModelSpec, shape: TrainingShape, layout: Layout, stage: Stage, link: Link) -> Traffic:
    """Of an embedding that is the head too: its gradient from the last stage to the first, once a micro-batch, or the new
    weight back, of which each rank of a sharded first stage sends its rows."""
    w, width = letter("w", bytes_of(shape.compute_dtype)), spec.departures.embedding_dim or spec.d_model
    table = w * spec.vocab_size * width / layout.tensor
    if stage.last:
        what, n, overlap = "gradient of the head, to the embedding", shape.grad_accumulation, "behind the passes that follow"
    else:
        what, n, overlap = "the embedding to the head", 1, "none: the next step needs it"
        table /= layout.shared_by(2)[0]
    once_s = network.send_s(table, link)
    return Traffic("pipeline", what, 2, n, table, n * table, n * once_s, once_s, overlap, link.kind)


def all_to_all_s(n_bytes: float, top_k: int, layout: Layout, hardware: Hardware) -> float:
    """Seconds of an all-to-all of ``top_k`` rows a token among the experts' devices.

    What goes to other nodes leaves each device by its own port: one row for each of m nodes that a token's experts are on,
    (m − 1)·(1 − (1 − 1/m)^k) of them if experts are picked evenly: DeepEP and HybridEP spread a row inside the node
    that it has reached. A plain all-to-all sends one for each expert.
    """
    node = min(layout.expert, layout.devices_per_node or hardware.devices_per_node)
    inside_s = network.all_to_all_s(n_bytes, node, hardware.link) if node > 1 else 0.0
    if node == layout.expert:
        return inside_s
    nodes = layout.expert / node
    across = n_bytes / top_k * (nodes - 1) * (1 - (1 - 1 / nodes) ** top_k)
    return largest(inside_s, network.send_s(across, hardware.network) + (layout.expert // node - 2) * hardware.network.alpha_s)


def _ring_attention(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout, stage: Stage, passes: int
) -> Traffic:
    """Keys and values that go round the ranks of a sequence, (c−1)/c·w·(k and v of all its tokens) a layer forward and, with
    their gradients, twice that backward (Liu et al., arXiv 2310.01889), behind the attention of what is there."""
    c, n_micro = layout.context, shape.grad_accumulation
    shape = replace(shape, dtype=shape.compute_dtype)
    link = group_link(layout, hardware, c, layout.tensor)
    sent = seconds = exposed = bursts = message = 0.0
    for (kind, _), here in zip(layer_kinds(spec), stage.counts(spec), strict=True):
        message = (
            bytes_of(shape.compute_dtype) * shape.tokens_per_pass * kind.n_kv_heads * (kind.qk_dim + kind.v_dim) / layout.tensor
        )
        for backward, times in ((False, passes - 1), (True, 1)):
            n = n_micro * here * times
            ring_s = (2 if backward else 1) * (c - 1) * network.send_s(message, link)
            attends_s = attention_work(spec, shape, hardware, kind, layout.tensor, backward).seconds
            seconds, exposed = seconds + n * ring_s, exposed + n * largest(0.0, ring_s - attends_s)
            sent += n * (2 if backward else 1) * (c - 1) * message
            bursts += n * (c - 1)
    what, overlap = "keys and values round the sequence", "behind attention over what is there"
    return Traffic("context", what, c, bursts, message, sent, seconds, exposed, overlap, link.kind)


_WAITING = {
    "tensor": "none: the next product waits for it",
    "expert": "none: experts wait for their tokens",
    "pipeline": "none: a stage waits for its input",
}


def _waited_for(
    parallel: str, what: str, n_ranks: int, link: Link, bursts: float, burst_bytes: float, sent_bytes: float, once_s: float
) -> Traffic:
    """``bursts`` that nothing hides, each of which sends ``sent_bytes`` and takes ``once_s``."""
    sent, seconds = bursts * sent_bytes, bursts * once_s
    return Traffic(parallel, what, n_ranks, bursts, burst_bytes, sent, seconds, seconds, _WAITING[parallel], link.kind)


def across_data(
    spec: ModelSpec,
    shape: TrainingShape,
    hardware: Hardware,
    layout: Layout,
    part: Held,
    n_layers: float,
    forward_s: float,
    backward_s: float,
) -> list[Traffic]:
    """Gradients and weights between data-parallel ranks, with ``forward_s`` and ``backward_s`` of one micro-batch to hide in.

    DDP all-reduces the gradients, 2·Ψ elements a rank. ZeRO-1 reduce-scatters them and all-gathers the new weights, 2·Ψ. ZeRO-2
    does the same, but reduce-scatters in every micro-batch, since no rank keeps a whole gradient. ZeRO-3 all-gathers weights
    twice and reduce-scatters in every micro-batch, 3·Ψ (arXiv 1910.02054, section 7), but those outside of the blocks once a
    pass through a chunk of layers, because they stay gathered until its backward pass; our ranks without stages those and
    the first block's once a step, and the last block's once a micro-batch. Reductions hide behind the backward pass
    they follow, gathers behind the pass they serve. Copies of shards add up what a rank holds of the gradients once a step
    (HSDP; Zhao et al., arXiv 2304.11277, section 3.2.2). What is longer than that pass, and one burst, is exposed; on CPUs two
    bursts, because they follow each other at an end of the pass. Of what traffic takes from the products beside it, the
    processors' copies are counted on CPUs and ``COLLECTIVES_SLOW_BY`` on accelerators. Replicas that train apart
    (``outer_every``) exchange what changed in one burst, which nothing hides but, on a CPU, passes of the ``outer_overlap``
    steps that follow. With ``compress_weights`` ZeRO-2 gathers codes of what an update changed instead of weights; that all
    ranks begin from gathered weights is once a run and not counted.
    """
    if layout.replicas == 1:
        return []
    precision, n_micro = PRECISIONS[shape.dtype], shape.grad_accumulation
    held = gradient_bytes_per_parameter(shape.dtype, False, n_micro)
    if layout.zero == 3 and precision.master and hardware.accelerator:
        held = FP32  # FSDP2's trainers reduce in it, whatever backward leaves
    way = COMPRESSIONS[shape.compress]
    if way.name != "none":
        held = way.bytes_per_element
    elif shape.outer_every:
        held = FP32
    gradient = letter("gradient", shape.gradient_bits / 8 or held)
    forward_s, backward_s = letter("hidden", forward_s), letter("hidden", backward_s)
    n_copies = layout.copies
    pace = letter("pace", shape.pace_mbit * 1e6 / 8)
    group = _Group.of(layout, hardware, layout.replicas // n_copies, layout.tensor, "", pace)
    groups = [(group, part.trained, part.frozen_bytes, part.outside)]
    if part.trained_experts or part.frozen_expert_bytes:
        group = _Group.of(layout, hardware, layout.expert_data // n_copies, layout.expert_cut, " of experts", pace)
        groups.append((group, part.trained_experts, part.frozen_expert_bytes, 0.0))
    found = []
    for group, trained, frozen_bytes, outside in groups:
        if n_copies > 1:
            # Once a step, in the type of the sums, after the last pass: nothing hides it.
            stride = layout.n_devices // n_copies
            others = _Group.of(layout, hardware, n_copies, stride, f"{group.suffix} between copies", pace)
            of_a_rank = letter("copied", FP32) * trained / group.ranks
            found.append(others.all_reduced(of_a_rank, max(1.0, of_a_rank / FP32 / BUCKET_PARAMETERS), 0.0))
        if group.ranks == 1:
            continue
        sent = trained - (_left_out_by_factors(spec, shape.compress_rank) if way.low_rank else 0)
        gradients, weights = gradient * sent, precision.working * trained
        # On CPUs our own ranks are planned, on accelerators others' too.
        together = max(BUCKET_PARAMETERS, 1_000_000 * group.ranks) if hardware.accelerator else BUCKET_BYTES / FP32
        buckets = max(1.0, trained / letter("together", together))
        gathered: Traffic | None = None
        if layout.zero == 0 and shape.outer_every:
            every = letter("H", shape.outer_every)
            reduced = group.all_reduced(gradients, buckets, 0.0, 1 / every)
            reduced = replace(reduced, in_a_row=buckets / shape.outer_fragments)
            if shape.outer_overlap and not hardware.accelerator:  # on a GPU it is queued between passes
                beside = smallest(1.0 * shape.outer_overlap * shape.outer_fragments, every) / every
                exposed = largest(0.0, reduced.seconds - beside * n_micro * (forward_s + backward_s))
                reduced = replace(reduced, exposed_s=exposed, overlap=f"behind the {shape.outer_overlap} steps that follow")
        elif layout.zero == 0:
            behind_backward = hardware.accelerator or sums_bucket_by_bucket(shape, layout)
            reduced = group.all_reduced(gradients, buckets, backward_s if behind_backward else 0.0)
        elif layout.zero < 3:
            if layout.zero == 2 and not hardware.accelerator:
                buckets = n_layers + (1 if outside else 0)  # FSDP2's units
            last = gradient * outside if layout.zero == 2 and not hardware.accelerator else 0.0
            reduced = group.scattered(gradients, buckets, n_micro if layout.zero == 2 else 1, backward_s, last)
            if shape.compress_weights == "none":
                gathered = group.gathered(weights, buckets, 1, forward_s, "the next forward")
                found.append(gathered)
            else:
                changes = letter("changes", COMPRESSIONS[shape.compress_weights].bytes_per_element) * trained
                found.append(group.differences(changes, buckets))
        else:
            around = precision.working * outside
            blocks, n_units, n_gathered = weights + frozen_bytes - around, layout.interleave if outside else 0, n_layers
            if shape.gradient_sums and layout.pipeline == 1:
                # Of ours the first block stays from one micro-batch to the next, the last one from forward to backward, and
                # what is outside of the blocks for the whole step.
                found.append(group.gathered_once(around + blocks / n_layers, 2 if outside else 1))
                blocks, n_units, n_gathered = blocks * (1 - 1 / n_layers), 0, max(n_layers - 1, 1)
            gathered = group.gathered(blocks + n_units * around, n_gathered + n_units, n_micro, forward_s, "forward")
            again = group.gathered(blocks, n_gathered, n_micro, backward_s, "backward")
            backward_s = again.leaves(backward_s, n_micro)
            n_reduced = n_layers + (1 if outside and shape.method == "full" else 0)
            last = gradient * outside if n_reduced > n_layers else 0.0
            reduced = group.scattered(gradients, n_reduced, n_micro, backward_s, last)
            found += [gathered, again]
        found.append(reduced)
        # Two groups share the link, so what one hides in is not there for the next.
        backward_s = reduced.leaves(backward_s, n_micro if layout.zero >= 2 else 1)
        forward_s = gathered.leaves(forward_s, n_micro if layout.zero == 3 else 1) if gathered else forward_s
    return [traffic for traffic in found if traffic.sent_bytes]


def _left_out_by_factors(spec: ModelSpec, rank: int) -> int:
    """Elements of the matrices that are sent as two factors, less those of the factors."""
    table = (spec.vocab_size, spec.departures.embedding_dim or spec.d_model)
    shapes = [table] * (1 if spec.tied_embeddings else 2)
    for layer in range(spec.n_layers):
        shapes += [(m.rows, m.k) for m in block(spec, layer) if isinstance(m, Matrix)]
    return sum(n * k - factors for n, k in shapes if (factors := factored_elements((n, k), rank)))


@dataclass(frozen=True)
class _Group:
    """Data-parallel ranks that hold the same parameters, and the link between them."""

    ranks: int
    link: Link
    suffix: str
    slows: float = 0.0
    on_accelerator: bool = False

    @classmethod
    def of(cls, layout: Layout, hardware: Hardware, ranks: int, stride: int, suffix: str, pace: float) -> _Group:
        """``ranks`` that are ``stride`` apart and send ``pace`` bytes a second at most, if that is not 0."""
        link = group_link(layout, hardware, ranks, stride)
        if hardware.accelerator:
            return cls(ranks, link, suffix, letter("slows", COLLECTIVES_SLOW_BY), True)
        if pace and pace < link.effective_bytes_per_s:
            link = Link(link.alpha_s, pace, "measured", "the recipe's pace")
        if hardware.link.kind != "measured":
            return cls(ranks, link, suffix)
        # Between ranks of one machine nothing but the processors' copies takes time, and others' links need the same copies.
        return cls(ranks, link, suffix, smallest(1.0, link.effective_bytes_per_s / hardware.link.effective_bytes_per_s))

    def all_reduced(self, whole: float, bursts: float, hidden_s: float, times: float = 1) -> Traffic:
        once = network.ring_all_reduce_s(whole / bursts, self.ranks, self.link)
        sent = network.all_reduce_sent_bytes(whole, self.ranks)
        what = "all-reduce of gradients" if times == 1 else "all-reduce of outer gradients"
        return self._traffic(what, whole, sent, once, bursts, times, hidden_s, "backward")

    def scattered(self, whole: float, bursts: float, times: int, hidden_s: float, last: float = 0.0) -> Traffic:
        """Gradients that are reduced in ``bursts`` a pass, at its end one of ``last`` bytes if that is not 0."""
        once = network.all_gather_s(whole / bursts, self.ranks, self.link)
        sent = network.gather_sent_bytes(whole, self.ranks)
        return self._traffic("reduce-scatter of gradients", whole, sent, once, bursts, times, hidden_s, "backward", last)

    def gathered(self, whole: float, bursts: float, times: int, hidden_s: float, behind: str) -> Traffic:
        once = network.all_gather_s(whole / bursts, self.ranks, self.link)
        sent = network.gather_sent_bytes(whole, self.ranks)
        return self._traffic("all-gather of weights", whole, sent, once, bursts, times, hidden_s, behind)

    def gathered_once(self, whole: float, bursts: int) -> Traffic:
        """Weights that stay gathered from micro-batch to micro-batch."""
        traffic = self.gathered(whole, bursts, 1, 0.0, "")
        what = f"all-gather of the first weights{self.suffix}"
        return replace(traffic, what=what, overlap="none: the first block waits for them")

    def differences(self, whole: float, bursts: float) -> Traffic:
        """Codes of what an update changed of weights that all hold (SDP4Bit, arXiv 2410.15526), which the next pass waits for.
        Making and reading codes is not counted."""
        once = network.all_gather_s(whole / bursts, self.ranks, self.link)
        sent = network.gather_sent_bytes(whole, self.ranks)
        traffic = self._traffic("all-gather of weight differences", whole, sent, once, bursts, 1, 0.0, "")
        return replace(traffic, overlap="none: the next pass needs them")

    def _traffic(
        self,
        what: str,
        whole: float,
        sent: float,
        once_s: float,
        bursts: float,
        times: float,
        hidden_s: float,
        behind: str,
        last: float = 0.0,
    ) -> Traffic:
        # At an end of a pass two bursts follow each other, and nothing is computed between them.
        share = (last + (whole - last) / largest(bursts - 1, 1)) / whole if last else smallest(1.0, 2 / bursts)
        wire_s = bursts * once_s
        delay_s = self.slows * smallest(wire_s, hidden_s)
        if self.on_accelerator:
            exposed_s = largest(once_s, wire_s - hidden_s + delay_s)
        else:
            exposed_s = smallest(wire_s, largest(share * wire_s, wire_s - hidden_s) + delay_s)
        return Traffic(
            parallel="data",
            what=what + self.suffix,
            n_ranks=self.ranks,
            bursts=times * bursts,
            burst_bytes=whole / bursts,
            sent_bytes=times * sent,
            seconds=times * wire_s,
            exposed_s=times * exposed_s,
            overlap=f"behind {behind}, all but {'one burst' if self.on_accelerator else 'two bursts'}",
            link_kind=self.link.kind,
            apart_s=hidden_s / bursts,
            in_a_row=bursts,
            together_bytes=sent * share,
        )
