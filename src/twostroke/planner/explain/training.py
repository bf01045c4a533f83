"""The terms of a training plan: what a rank holds, memory, work, communication, time, failures, storage, money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twostroke.core.dtypes import bytes_of
from twostroke.core.policy import attends_explicitly, loss_chunk_rows
from twostroke.planner.explain.activations import below_adapters, explain_kept, kept_numbers
from twostroke.planner.explain.attention import PALM, explain_attention_flops, kinds_of
from twostroke.planner.explain.model import explain_model
from twostroke.planner.explain.money import explain_run_cost
from twostroke.planner.explain.ranks import explain_rank
from twostroke.planner.explain.step import explain_pass
from twostroke.planner.explain.term import Explanation
from twostroke.planner.layout import group_link
from twostroke.planner.memory import (
    NATIVE_ATTENTION,
    PRECISIONS,
    STATE_BLOCK,
    attention_device,
    gradient_bytes_per_parameter,
)
from twostroke.planner.sharding import (
    ALLOCATOR_SLACK,
    BACKWARD_SHARE,
    Held,
    Stage,
    backward_gradient_bytes,
    fullest_stage,
    kept_on_rank,
    micro_batches_in_flight,
    rank_layers,
    stage_held,
)
from twostroke.planner.stage_times import rate_dtype
from twostroke.planner.training import ASSUMED_DATA_TOKEN_S, TrainingPlan
from twostroke.planner.work import Work

ZERO = "Rajbhandari et al., arXiv 1910.02054, section 3"
RING = "ring, Patarasuk and Yuan 2009"


def explain_training(plan: TrainingPlan) -> Explanation:
    """Every number of ``plan``, in the order in which one follows from another."""
    terms = Explanation()
    stage = fullest_stage(plan.spec, plan.shape, plan.hardware, plan.layout)
    part = stage_held(plan.spec, plan.shape, plan.layout, stage)
    explain_model(terms, plan.spec)
    _batch(terms, plan)
    explain_rank(terms, plan, stage, part)
    _state(terms, plan, part)
    _activations(terms, plan, stage)
    _loss(terms, plan, stage, part)
    _rest(terms, plan, part)
    _work(terms, plan)
    _traffic(terms, plan)
    _time(terms, plan)
    _storage(terms, plan)
    explain_run_cost(terms, plan.cost, plan.hardware)
    return terms


def _batch(terms: Explanation, plan: TrainingPlan) -> None:
    shape = plan.shape
    terms.add(
        "batch", "tokens_per_pass", shape.tokens_per_pass, "tokens", "B·T", "of one replica, as asked for", "given",
        B=shape.batch_size, T=shape.sequence_length,
    )  # fmt: skip
    at_once = shape.tokens_at_once(plan.hardware.kind, plan.layout.n_devices)
    terms.add(
        "batch", "tokens_at_once", at_once, "tokens", "rows·T",
        "of a pass as it is computed: on a CPU the rows of a micro-batch that stay near the cache", "given",
        rows=at_once // shape.sequence_length, T=shape.sequence_length,
    )  # fmt: skip
    terms.add(
        "batch", "tokens_per_step", plan.tokens_per_step, "tokens", "tokens_per_pass·passes·data",
        "gradients of all passes and replicas are summed before one update", "given",
        passes=shape.grad_accumulation, data=plan.layout.data,
    )  # fmt: skip


# -- memory of the fullest rank -------------------------------------------------------------------------------------------


def _sum_over_ranks(part: Held, each: str, ranks: tuple[int, int]) -> str:
    """``each`` times what is trained, divided over (data ranks, ranks that hold the same experts)."""
    dense = f"{each}·N_trained" + (f"/{ranks[0]}" if ranks[0] > 1 else "")
    if not part.trained_experts:
        return dense
    return f"{dense} + {each}·N_trained_experts" + (f"/{ranks[1]}" if ranks[1] > 1 else "")


def _state(terms: Explanation, plan: TrainingPlan, part: Held) -> None:
    shape, layout, memory = plan.shape, plan.layout, plan.memory_bytes
    precision, alone = PRECISIONS[shape.dtype], layout.n_devices == 1
    every = (layout.data, layout.expert_data)
    weight_ranks = every if layout.zero == 3 else (1, 1)
    gradient_ranks = every if layout.zero >= 2 else (1, 1)
    state_ranks = every if layout.zero >= 1 else (1, 1)
    numbers = {"working": precision.working, "master": precision.master, "state": precision.state}
    shared = f"; ZeRO-{layout.zero} over {layout.data} ranks" if layout.zero else ""
    weights = [_sum_over_ranks(part, "working", weight_ranks)]
    weights += [_sum_over_ranks(part, "master", state_ranks)] if precision.master else []
    if part.frozen_bytes:
        weights.append("frozen_bytes" + (f"/{weight_ranks[0]}" if weight_ranks[0] > 1 else ""))
    if part.frozen_expert_bytes:
        weights.append("frozen_expert_bytes" + (f"/{weight_ranks[1]}" if weight_ranks[1] > 1 else ""))
    terms.add(
        "memory", "weights_bytes", memory["weights"], "bytes", " + ".join(weights),
        f"the copy that forward and backward read, and fp32 masters{shared}; {ZERO}", **numbers,
    )  # fmt: skip
    terms.add(
        "memory", "gradients_bytes", memory["gradients"], "bytes", _sum_over_ranks(part, "gradient", gradient_ranks),
        "what backward leaves and, alone on a device, the fp32 sum that the optimizer reads" + shared,
        gradient=gradient_bytes_per_parameter(shape.dtype, alone, shape.grad_accumulation),
    )  # fmt: skip
    formula, source = _optimizer(plan, part, state_ranks)
    if shape.average:
        formula += " + 4·N_trained" + (" + 4·N_trained_experts" if part.trained_experts else "")
        source += "; a running average of the weights in fp32"
    numbers |= {"M": part.matrices, "M_experts": part.expert_matrices, "block": STATE_BLOCK}
    terms.add("memory", "optimizer_bytes", memory["optimizer"], "bytes", formula, source + shared, **numbers)


def _optimizer(plan: TrainingPlan, part: Held, ranks: tuple[int, int]) -> tuple[str, str]:
    def over(formula: str, n: int) -> str:
        return f"({formula})/{n}" if n > 1 else formula

    kind = plan.shape.optimizer
    if kind == "muon":
        parts = [over("state·M + 2·state·(N_trained − M)", ranks[0])]
        if part.trained_experts:
            parts.append(over("state·M_experts + 2·state·(N_trained_experts − M_experts)", ranks[1]))
        return " + ".join(parts), "one momentum for the M elements of blocks' matrices, AdamW for the rest"
    each, source = {
        "sgd": ("state", "one momentum"),
        "adamw8bit": ("2·(1 + 4/block)", "two moments of a byte, an fp32 scale a block; arXiv 2110.02861"),
    }.get(kind, ("2·state", f"two moments; {ZERO}"))
    return _sum_over_ranks(part, each, ranks), source


def _activations(terms: Explanation, plan: TrainingPlan, stage: Stage) -> None:
    spec, shape, layout = plan.spec, plan.shape, plan.layout
    kind = attention_device(plan.hardware, spec, shape.compute_dtype)
    targets = shape.lora_targets if shape.method != "full" else ()
    cuts = (layout.tensor, layout.sequence_cut)
    kept = kept_on_rank(spec, shape.method, shape.lora_rank, targets, *cuts, shape.checkpointing)
    w = bytes_of(shape.compute_dtype)
    layers = explain_kept(terms, spec, shape, kind, kept, "kept")
    numbers: dict[str, float] = kept_numbers(spec, shape, kind, kept, kinds_of(spec)[0][1]) | {
        "w": w, "E": spec.d_model, "V": spec.vocab_size,
        "D_head": spec.head_dim, "T": shape.sequence_length, "L": spec.n_layers,
        "in_flight": micro_batches_in_flight(layout, shape.grad_accumulation, stage), "cut": layout.sequence_cut,
        "tensor": layout.tensor,
    }  # fmt: skip
    parts = [f"tokens_at_once·layers_here/L·({layers})" + ("·in_flight" if layout.pipeline > 1 else "")]
    if stage.first and kept.frozen:
        parts.append(f"(0 − tokens_at_once·({below_adapters(spec, shape, kind, kept)}))")
    if stage.last:
        explicit = attends_explicitly(kind, shape.compute_dtype, shape.sequence_length)
        around = ["8", f"{4 if kept.frozen else 8}·E + 4" if spec.norm == "rmsnorm" else "w·E + 2·w", "w·E"]
        around += ["4·D_head"] if spec.positions == "rope" else []
        mask = "4" if kind == NATIVE_ATTENTION else "w·T"
        around += [] if explicit and shape.checkpointing == "none" else [mask]
        around += ["(0 − w·T)"] if layout.n_devices > 1 else []
        parts.append(f"tokens_at_once·({' + '.join(around)})" + ("/cut" if layout.sequence_cut > 1 else ""))
        if shape.method == "full" and shape.logits == "chunked":
            parts.append("w·V·E" + ("/tensor" if layout.tensor > 1 else ""))
    terms.add(
        "memory", "activations_bytes", plan.memory_bytes["activations"], "bytes", " + ".join(parts),
        "blocks"
        + (
            "; around them ids, final norm, hidden gradients, rotary tables, mask; the head's gradient"
            if stage.last
            else "; embedding and head are on other stages"
        ),
        **numbers,
    )  # fmt: skip
    if "recomputed" in plan.memory_bytes:
        explain_kept(terms, spec, shape, kind, replace(kept, checkpointing="none"), "again")
        symbols = [t.symbol for t in terms if t.symbol.startswith("again_bytes")]
        again = f"max({', '.join(symbols)})" if len(symbols) > 1 else symbols[0]
        less = f" − ({layers})/L" if shape.checkpointing == "selective" else ""
        terms.add(
            "memory", "recomputed_bytes", plan.memory_bytes["recomputed"], "bytes", f"tokens_at_once·({again}{less})",
            "the one layer that is being computed again, beyond what was kept of it", **numbers,
        )  # fmt: skip


def _at_once(plan: TrainingPlan) -> str:
    """The symbols of all activations there are at once."""
    return "(activations_bytes + recomputed_bytes)" if "recomputed" in plan.memory_bytes else "activations_bytes"


def _loss(terms: Explanation, plan: TrainingPlan, stage: Stage, part: Held) -> None:
    spec, shape = plan.spec, plan.shape
    formula, source = "0", "the head is on another stage"
    logit = "2·w" if shape.compile else "(2·w + 5·4 + 1)"
    over = "/tensor" if plan.layout.tensor > 1 else ""
    if stage.last and shape.logits == "whole":
        formula, source = f"tokens_at_once·V·(w + 4){over}", "logits in the working type and in fp32"
    elif stage.last and shape.method == "full":
        formula = f"(chunk·V·{logit} + V·E·(4 + w)){over}"
        source = "one chunk's logits with their gradient, the head's gradient in fp32 beside a chunk's share"
    elif stage.last:
        formula, source = f"chunk·V·{logit}{over}", "one chunk's logits with their gradient"
    if plan.hardware.kind == "cpu":
        trained = "beside·N_trained" + (" − beside·N_trained_experts" if part.trained_experts else "")
        formula = f"max({formula} − {trained} − share·{_at_once(plan)}/layers_here, 0)"
        source += "; beyond what backward takes after it: its own gradients and those inside a layer"
    terms.add(
        "memory", "loss_bytes", plan.memory_bytes["loss"], "bytes", formula, source,
        beside=backward_gradient_bytes(shape.dtype), share=BACKWARD_SHARE, layers_here=stage.n_layers,
        chunk=loss_chunk_rows(shape.tokens_at_once(plan.hardware.kind, plan.layout.n_devices)),
        V=spec.vocab_size, E=spec.d_model,
        w=bytes_of(shape.compute_dtype), tensor=plan.layout.tensor,
    )  # fmt: skip


def _rest(terms: Explanation, plan: TrainingPlan, part: Held) -> None:
    memory, shape = plan.memory_bytes, plan.shape
    terms.add(
        "memory", "process_bytes", memory["process"], "bytes", "given",
        "resident memory of the process beside everything counted here; a GPU's memory holds none of it",
        "measured" if memory["process"] else "given", given=memory["process"],
    )  # fmt: skip
    if "workspace" in memory:
        on_cpu = plan.hardware.kind == "cpu"
        terms.add(
            "memory", "workspace_bytes", memory["workspace"], "bytes",
            f"slack·{_at_once(plan)} + share·{_at_once(plan)}/layers_here" if on_cpu else "0",
            "pieces of the heap that nothing fits into, and gradients inside a layer; fitted on CPUs, not counted on a GPU",
            slack=ALLOCATOR_SLACK, share=BACKWARD_SHARE,
        )  # fmt: skip
    if "snapshot" in memory:
        precision = PRECISIONS[shape.dtype]
        terms.add(
            "memory", "snapshot_bytes", memory["snapshot"], "bytes", "stored·trained + optimizer",
            "the copy that checkpoints are written from in the background", stored=precision.master or precision.working,
            trained=part.trained + part.trained_experts, optimizer=memory["optimizer"],
        )  # fmt: skip
    if "gathered" in memory:
        terms.add(
            "memory", "gathered_bytes", memory["gathered"], "bytes", "2·layer_bytes + ends + gradient·layer",
            "ZeRO-3 holds this layer and the next whole, embedding and head, and one layer's gradient",
            layer_bytes=part.layer_bytes, ends=part.embedding_bytes, layer=part.layer,
            gradient=PRECISIONS[shape.dtype].gradient,
        )  # fmt: skip
    if "dequantised" in memory:
        layers = rank_layers(plan.spec, plan.layout.tensor, plan.layout.expert)
        largest = max((p.product for layer in layers for p in layer.products), key=lambda product: product.weights)
        terms.add(
            "memory", "dequantised_bytes", memory["dequantised"], "bytes", "w·n·k",
            f"QLoRA's largest matrix ({largest.name}) in the working type", w=bytes_of(shape.compute_dtype), n=largest.n,
            k=largest.k,
        )  # fmt: skip
    parts = " + ".join(f"{name}_bytes" for name in memory)
    terms.add("memory", "peak_memory_bytes", plan.peak_memory_bytes, "bytes", parts, "what is alive when backward starts")


# -- work -----------------------------------------------------------------------------------------------------------------


def _work(terms: Explanation, plan: TrainingPlan) -> None:
    shape = plan.shape
    explain_attention_flops(terms, plan.spec, "T", shape.sequence_length)
    if shape.method == "full":
        formula, source = "6·N_multiplied + 3·attention_flops_per_token", f"2 forward, 4 backward; {PALM}"
    else:
        formula = "4·N_multiplied + 6·N_adapters + 3·attention_flops_per_token"
        source = "a frozen matrix has no gradient of its own: 2 forward, 2 backward; adapters 6"
    terms.add("work", "flops_per_token", plan.flops_per_token, "FLOP", formula, source, N_adapters=plan.trained_parameters)
    if plan.recomputed_flops_per_token:
        formula = "attention_flops_per_token"
        if shape.checkpointing == "full":
            active = "N_matrices_active" if any(t.symbol == "N_matrices_active" for t in terms) else "N_matrices"
            formula = f"2·{active} + attention_flops_per_token"
        terms.add(
            "work", "recomputed_flops_per_token", plan.recomputed_flops_per_token, "FLOP", formula,
            f"a second forward; checkpointing {shape.checkpointing}",
        )  # fmt: skip


# -- communication --------------------------------------------------------------------------------------------------------


def _traffic(terms: Explanation, plan: TrainingPlan) -> None:
    """Bytes that a rank sends in a step and the seconds of each collective, by kind."""
    layout, hardware = plan.layout, plan.hardware
    strides = {"tensor": 1, "expert": 1, "pipeline": layout.tensor * layout.data, "data": layout.tensor}
    seen: dict[str, int] = {}
    for traffic in plan.traffic:
        stride = layout.expert_cut if traffic.what.endswith("of experts") else strides[traffic.parallel]
        link = group_link(layout, hardware, traffic.n_ranks, stride)
        name = "_".join([traffic.parallel, *(w for w in traffic.what.replace("-", "_").replace(",", "").split())])
        seen[name] = seen.get(name, 0) + 1
        name += f"_{seen[name]}" if seen[name] > 1 else ""
        passes = 2 if "all-reduce" in traffic.what or "scatter and" in traffic.what else 1
        one, once = f"{passes}·(n − 1)/n·burst" if passes > 1 else "(n − 1)/n·burst", f"{passes}·(n − 1)·α + "
        if traffic.parallel == "pipeline":
            one, once = "burst", "α + "
        numbers = {
            "n": traffic.n_ranks, "bursts": traffic.bursts, "burst": traffic.burst_bytes, "α": link.alpha_s,
            "β": link.effective_bytes_per_s,
        }  # fmt: skip
        terms.add(
            "communication", f"sent_{name}_bytes", traffic.sent_bytes, "bytes", f"bursts·{one}",
            f"{traffic.what}, a rank and step; {RING}", **numbers,
        )  # fmt: skip
        terms.add(
            "communication", f"{name}_s", traffic.seconds, "s", f"bursts·({once}{one}/β)",
            f"{link.kind} link: {link.source}; hidden: {traffic.overlap}", **numbers,
        )  # fmt: skip
    if plan.traffic:
        exposed = " + ".join(f"exposed_{i}" for i in range(1, len(plan.traffic) + 1))
        terms.add(
            "communication", "communication_s", plan.communication_s, "s", exposed, "the parts that work does not hide",
            **{f"exposed_{i}": t.exposed_s for i, t in enumerate(plan.traffic, 1)},
        )  # fmt: skip
    if plan.bubble_s:
        inside = sum(t.exposed_s for t in plan.traffic if t.parallel != "data") / plan.shape.grad_accumulation
        waits = (layout.pipeline - 1) / layout.interleave
        terms.add(
            "communication", "bubble_s", plan.bubble_s, "s", "(pipeline − 1)/interleave·(micro_batch + waiting)",
            "filling and emptying the pipeline; Narayanan et al., arXiv 2104.04473, section 2.2",
            pipeline=layout.pipeline, interleave=layout.interleave, waiting=inside, micro_batch=plan.bubble_s / waits - inside,
        )  # fmt: skip


# -- time -----------------------------------------------------------------------------------------------------------------


def _components(works: Sequence[Work]) -> tuple[str, dict[str, float]]:
    """Formula and numbers of a pass: seconds of its components, one after another."""
    return " + ".join(w.component for w in works), {w.component: w.seconds for w in works}


def _time(terms: Explanation, plan: TrainingPlan) -> None:
    passes, basis = plan.shape.grad_accumulation, f"rates {plan.hardware.basis}"
    for direction, works, value in (("forward", plan.forward, plan.forward_s), ("backward", plan.backward, plan.backward_s)):
        numbers: dict[str, float] = {"passes": passes}
        if plan.shape.method == "full":
            formula = " + ".join(explain_pass(terms, plan, backward=direction == "backward"))
        else:  # adapters run beside every product: only the components are shown
            formula, components = _components(works)
            numbers |= components
        source = f"components one after another; {basis}"
        terms.add("time", f"{direction}_s", value, "s", f"passes·({formula})", source, **numbers)
    formula, numbers = _components(plan.optimizer)
    terms.add("time", "optimizer_s", plan.optimizer_s, "s", formula, f"one update; {basis}", **numbers)
    terms.add(
        "time", "data_s", plan.data_s, "s", "tokens_per_pass·passes·seconds_a_token", "cutting and packing a replica's batch",
        "assumed", passes=passes, seconds_a_token=ASSUMED_DATA_TOKEN_S,
    )  # fmt: skip
    parts = ["forward_s", "backward_s", "optimizer_s", "data_s"]
    parts += ["communication_s"] if plan.traffic else []
    parts += ["bubble_s"] if plan.bubble_s else []
    terms.add("time", "step_time_s", plan.step_time_s, "s", " + ".join(parts), "one after another; what is hidden is left out")
    terms.add("time", "tok_per_s", plan.tok_per_s, "tok/s", "tokens_per_step/step_time_s", "of the whole job")
    dtype, n_devices = rate_dtype(plan.shape, plan.hardware), plan.layout.n_devices
    over = "(π·n_devices)" if n_devices > 1 else "π"
    terms.add(
        "time", "MFU", plan.mfu, "share", f"flops_per_token·tok_per_s/{over}",
        f"π: {plan.hardware.basis} rate of {dtype} products", π=plan.hardware.peak(dtype), n_devices=n_devices,
    )  # fmt: skip
    if plan.train_time_s is not None:
        terms.add(
            "time", "train_time_s", plan.train_time_s, "s", "startup + steps·step_time_s",
            "importing and compiling, then all steps", startup=plan.startup_s, steps=plan.shape.steps,
        )  # fmt: skip


# -- storage --------------------------------------------------------------------------------------------------------------


def _storage(terms: Explanation, plan: TrainingPlan) -> None:
    shape, precision, found = plan.shape, PRECISIONS[plan.shape.dtype], plan.resilience
    n_matrices = plan.parameters.block_matrices if shape.method == "full" else plan.trained_parameters
    state = {
        "muon": "state·M + 2·state·(N_all_trained − M)", "sgd": "state·N_all_trained",
        "adamw8bit": "2·(1 + 4/block)·N_all_trained",
    }.get(shape.optimizer, "2·state·N_all_trained")  # fmt: skip
    numbers = {"N_all_trained": plan.trained_parameters, "M": n_matrices, "state": precision.state, "block": STATE_BLOCK}
    numbers["stored"] = 4 if precision.master else precision.working
    average = " + 4·N_all_trained" if shape.average else ""
    terms.add(
        "storage", "checkpoint_bytes", plan.checkpoint_bytes, "bytes", f"stored·N_all_trained + {state}{average}",
        "weights as they are trained and the optimizer's state, of all ranks", **numbers,
    )  # fmt: skip
    w = 4 if shape.dtype == "fp32" else bytes_of(shape.compute_dtype)
    terms.add(
        "storage", "model_bytes", plan.model_bytes, "bytes", "w·N_all_trained", "the finished model on disk", **numbers, w=w
    )
    if found is None:
        return
    terms.add(
        "storage", "mtbf_s", found.mtbf_s, "s", "mtbf_device_hours·3600/n_devices",
        f"any device's failure stops the job; {found.mtbf_kind}",
        "assumed" if found.mtbf_kind == "assumed" else "given", mtbf_device_hours=found.mtbf_device_hours,
        n_devices=found.n_devices,
    )  # fmt: skip
    terms.add("storage", "young_s", found.young_s, "s", "√(2·δ·mtbf_s)", "Young 1974", δ=found.checkpoint_s)
    if found.checkpoint_s < 2 * found.mtbf_s:
        terms.add(
            "storage", "interval_s", found.interval_s, "s", "young_s·(1 + √(δ/(2·mtbf_s))/3 + δ/(2·mtbf_s)/9) − δ",
            "work between checkpoints; Daly 2006, equation 37", δ=found.checkpoint_s,
        )  # fmt: skip
    if found.lost_share < 10:
        terms.add(
            "storage", "lost_share", found.lost_share, "share",
            "mtbf_s·exp(R/mtbf_s)·expm1((interval_s + δ)/mtbf_s)/interval_s − 1",
            "wall time beyond the work's; Daly 2006, equation 20", R=found.restart_s, δ=found.checkpoint_s,
            interval_s=found.interval_s,
        )  # fmt: skip
        if plan.wall_time_s is not None:
            terms.add(
                "storage",
                "wall_time_s",
                plan.wall_time_s,
                "s",
                "train_time_s·(1 + lost_share)",
                "with failures and checkpoints",
            )
