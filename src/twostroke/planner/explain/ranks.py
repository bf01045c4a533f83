"""Formulas of what one rank of a layout holds: its part of each matrix, of the layers, of what is trained."""

from __future__ import annotations

from twostroke.core.matrices import LayerKind
from twostroke.planner.explain.attention import kinds_of
from twostroke.planner.explain.model import letters, outside_matrices, rows_and_columns, stored, total
from twostroke.planner.explain.term import Explanation
from twostroke.planner.layout import Layout
from twostroke.planner.memory import PRECISIONS, nf4_bytes_per_weight
from twostroke.planner.params import count_parameters
from twostroke.planner.sharding import Held, RankLayer, RankProduct, Stage, rank_layers
from twostroke.planner.training import TrainingPlan


def _product(held: RankProduct, kind: LayerKind, layout: Layout) -> str:
    """Formula of the parameters of one matrix that a rank holds."""
    original = next(p for p in kind.matrices if p.name == held.product.name)
    rows, columns = rows_and_columns(original, kind)
    if original.split == "expert":
        copies = "X" if layout.expert == 1 else "⌊X/expert⌋"
        within = max(1, layout.tensor // layout.expert)
        if within > 1 and original.name.endswith("down"):
            columns = f"⌊{columns}/{within}⌋"
        elif within > 1:
            rows = f"⌊{rows}/{within}⌋"
        one = f"({rows}·{columns} + {rows})" if original.bias else f"{rows}·{columns}"
        return f"{copies}·{one}"
    if layout.tensor == 1 or original.split == "replicated":
        return stored(original, kind)
    if original.split == "row":
        columns = f"⌊{columns}/tensor⌋"
    elif original.name == "qkv":
        sides = 1 if rows == "(H + K)·D" else 2
        rows = f"(H·D/tensor + {sides}·max(1, ⌊K/tensor⌋)·D)"
    else:
        rows = f"⌈{rows}/tensor⌉"
    return f"{rows}·{columns}" + (f" + {rows}" if original.bias else "")


def _layer(terms: Explanation, plan: TrainingPlan, suffix: str, layer: RankLayer) -> None:
    """Parameters of one layer on a rank: those all data ranks hold, and those of experts."""
    spec, layout, kind = plan.spec, plan.layout, layer.kind
    numbers = letters(spec, kind) | {"tensor": layout.tensor, "expert": layout.expert}
    norm = "2·E" if spec.norm == "layernorm" else "E"
    dense = [_product(p, kind, layout) for p in layer.products if p.product.split != "expert"]
    experts = [_product(p, kind, layout) for p in layer.products if p.product.split == "expert"]
    outside = [f"{spec.departures.norms_per_block}·{norm}", *outside_matrices(spec, kind)]
    cut = "cut by tensor parallel: columns, or rows with whole biases" if layout.tensor > 1 else "whole"
    terms.add(
        "rank", f"layer_dense{suffix}", layer.dense, "parameters", total([*dense, *outside]),
        f"one layer on one rank, experts apart, {cut}", **numbers,
    )  # fmt: skip
    if experts:
        terms.add(
            "rank", f"layer_experts{suffix}", layer.experts, "parameters", total(experts),
            "the experts of one layer that a rank holds", **numbers,
        )  # fmt: skip


def _ends(plan: TrainingPlan, stage: Stage) -> list[str]:
    """Formulas of what surrounds the blocks on this stage."""
    spec, counts = plan.spec, count_parameters(plan.spec)
    over = "/tensor" if plan.layout.tensor > 1 else ""
    parts = []
    if stage.first:
        parts.append(f"N_embedding{over}")
        parts += ["N_positions"] if counts.positions else []
        parts += ["N_projections"] if counts.projections else []
    if stage.last:
        parts += [f"N_head{over}"] if counts.head else []
        parts += ["N_final_norm"] if counts.final_norm else []
        parts += [f"N_embedding{over}"] if spec.tied_embeddings and not stage.first else []
    return parts


def explain_rank(terms: Explanation, plan: TrainingPlan, stage: Stage, part: Held) -> None:
    """What the fullest rank trains and holds frozen, before ZeRO divides it."""
    spec, shape, layout, counts = plan.spec, plan.shape, plan.layout, count_parameters(plan.spec)
    if layout.n_devices > 1:
        terms.add(
            "rank", "n_devices", layout.n_devices, "devices", "data·tensor·pipeline", "the layout asked for", "given",
            data=layout.data, tensor=layout.tensor, pipeline=layout.pipeline,
        )  # fmt: skip
    numbers: dict[str, float] = {"L": spec.n_layers, "pipeline": layout.pipeline, "tensor": layout.tensor}
    formula = "L/pipeline"
    if layout.pipeline > 1 and spec.n_layers % (layout.pipeline * layout.interleave):
        formula = "(L + 2)/pipeline" + ("" if not (stage.first or stage.last) else " − 1")
    if layout.pipeline == 1:
        formula = "L"
    terms.add("rank", "layers_here", stage.n_layers, "layers", formula, f"of stage {stage.index}, the fullest", **numbers)
    targets = shape.lora_targets if shape.method != "full" else ()
    layers = rank_layers(spec, layout.tensor, layout.expert, targets)
    for (suffix, _, count), layer in zip(kinds_of(spec), layers, strict=True):
        numbers[f"L{suffix}"] = count
        _layer(terms, plan, suffix, layer)
    numbers["L"] = spec.n_layers
    share = "layers_here/L·"
    each = {
        name: [
            f"L{suffix}·{name}{suffix}"
            for (suffix, _, _), layer in zip(kinds_of(spec), layers, strict=True)
            if name == "layer_dense" or layer.experts
        ]
        for name in ("layer_dense", "layer_experts")
    }
    if counts.final_norm:
        terms.add(
            "rank", "N_final_norm", counts.final_norm, "parameters", "given", "norms outside blocks", given=counts.final_norm
        )
    blocks, experts = f"{share}({total(each['layer_dense'])})", f"{share}({total(each['layer_experts'])})"
    if shape.method == "full":
        terms.add(
            "rank", "N_trained", part.trained, "parameters", total([blocks, *_ends(plan, stage)]),
            "trained on this rank, experts apart", **numbers,
        )  # fmt: skip
        if part.trained_experts:
            terms.add("rank", "N_trained_experts", part.trained_experts, "parameters", experts, "its experts", **numbers)
        return
    _adapters(terms, plan, part, layers, numbers, share)
    numbers |= {"w": PRECISIONS[shape.dtype].working, "nf4": nf4_bytes_per_weight()}
    for symbol, all_of_it, of_experts, value in (
        ("frozen_bytes", total([blocks, *_ends(plan, stage)]), False, part.frozen_bytes),
        ("frozen_expert_bytes", experts, True, part.frozen_expert_bytes),
    ):
        if not value:
            continue
        formula, source = f"w·({all_of_it})", "the frozen base in the working type"
        if shape.method == "qlora":
            matrices = f"{share}({_matrices(plan, layers, of_experts)})"
            formula = f"nf4·{matrices} + w·({all_of_it} − {matrices})"
            source = "block matrices in NF4 with double quantisation (QLoRA, arXiv 2305.14314), the rest in the working type"
        terms.add("rank", symbol, value, "bytes", formula, source, **numbers)


def _matrices(plan: TrainingPlan, layers: tuple[RankLayer, ...], of_experts: bool) -> str:
    """Formula of the elements of matrices on a rank, all layers."""
    return total(
        f"L{suffix}·{sum(p.calls * p.product.weights for p in layer.products if (p.product.split == 'expert') == of_experts)}"
        for (suffix, _, _), layer in zip(kinds_of(plan.spec), layers, strict=True)
    )


def _adapters(
    terms: Explanation, plan: TrainingPlan, part: Held, layers: tuple[RankLayer, ...], numbers: dict[str, float], share: str
) -> None:
    """Low-rank factors: rank·(inputs + outputs) of every matrix that gets one."""
    for symbol, experts, value in (
        ("N_trained", False, part.trained),
        ("N_trained_experts", True, part.trained_experts),
    ):
        if experts and not value:
            continue
        of_kinds = []
        for (suffix, _, _), layer in zip(kinds_of(plan.spec), layers, strict=True):
            found = [
                f"{p.calls}·({p.product.k} + {outputs})" if p.calls > 1 else f"({p.product.k} + {outputs})"
                for p in layer.products
                if (p.product.split == "expert") == experts
                for outputs in p.adapter_outputs
            ]
            if found:
                of_kinds.append(f"L{suffix}·rank·({total(found)})")
        terms.add(
            "rank", symbol, value, "parameters", f"{share}({total(of_kinds)})",
            "two factors for every targeted matrix: rank·(inputs + outputs); LoRA, arXiv 2106.09685",
            **numbers, rank=plan.shape.lora_rank,
        )  # fmt: skip
