"""Formulas of a training step's passes: each matrix product at the rate of its shape, then each component of a pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from twostroke.core.dtypes import bytes_of
from twostroke.planner.explain.attention import kinds_of
from twostroke.planner.explain.term import Explanation, Mark
from twostroke.planner.hardware import ASSUMED_PRODUCT_EFFICIENCY, Hardware
from twostroke.planner.passes import (
    attention_work,
    elementwise,
    loss_work,
    product_backward,
    product_bytes,
    product_forward,
    recomputed_works,
    setup_work,
    stage_layers,
)
from twostroke.planner.sharding import RankProduct, Stage
from twostroke.planner.stage_times import anchor_ratios, rate_dtype, stage_time
from twostroke.planner.training import TrainingPlan, TrainingShape
from twostroke.planner.work import Work

NEGLIGIBLE = 1e-10
"""Ratios nearer to 1 than this are rounding."""


def _seconds(works: Iterable[Work], component: str) -> float:
    return sum(work.seconds for work in works if work.component == component)


def _source(hardware: Hardware, dtype: str) -> tuple[str, Mark]:
    if hardware.basis == "measured":
        return f"{dtype} rate measured on this machine, between calibrated shapes", "measured"
    return f"datasheet's {dtype} peak × {ASSUMED_PRODUCT_EFFICIENCY} assumed", "datasheet"


def _product(
    terms: Explanation, part: RankProduct, suffix: str, shape: TrainingShape, hardware: Hardware, backward: bool
) -> str:
    """One matrix of one layer: max(arithmetic at the rate of its shape, reading its second operand) + launch; a datasheet's
    rate holds no traffic, so all operands count. Backward is two products: the input's gradient, and the weight's."""
    product, dtype = part.product, shape.dtype
    rows = max(1, round(shape.tokens_per_pass * part.rows_per_token))
    w, n, k = bytes_of(dtype), product.n, product.k
    shapes = ((rows, k, n), (n, k, rows)) if backward else ((rows, n, k),)
    numbers: dict[str, float] = {"rows": rows, "n": n, "k": k, "w": w, "launch": hardware.linear_launch_s}
    each = []
    for i, (m, columns, inner) in enumerate(shapes, 1):
        numbers |= {
            f"R_{i}": hardware.product_rate(dtype, m, columns, inner),
            f"β_{i}": hardware.bandwidth(columns * inner * w),
        }
        operand = "k·rows" if i == 2 else "n·k"
        each.append(f"max(2·rows·n·k/R_{i}, w·{operand}/β_{i})")
    formula = " + ".join(each)
    times = len(shapes)
    if hardware.basis != "measured":
        numbers["β"] = hardware.bandwidth(times * product_bytes(product, rows, w))
        moved = f"{times}·w·(rows·k + k·n + rows·n)/β" if times > 1 else "w·(rows·k + k·n + rows·n)/β"
        formula = f"max({formula}, {moved})"
    work = (product_backward if backward else product_forward)(product, rows, dtype, hardware)
    symbol = f"{'backward' if backward else 'forward'}_{product.name}{suffix}_s"
    source, mark = _source(hardware, dtype)
    terms.add("time", symbol, work.seconds, "s", f"{formula} + {times}·launch", f"one layer; {source}", mark, **numbers)
    return f"{part.calls}·{symbol}" if part.calls > 1 else symbol


def explain_pass(terms: Explanation, plan: TrainingPlan, backward: bool) -> list[str]:
    """A term for each product and each component of one pass over a micro-batch on the slowest stage; their symbols."""
    spec, hardware, layout = plan.spec, plan.hardware, plan.layout
    shape = replace(plan.shape, dtype=rate_dtype(plan.shape, hardware))
    stage: Stage = stage_time(spec, shape, hardware, layout).stage
    name = "backward" if backward else "forward"
    ends = loss_work(spec, shape, hardware, layout.tensor, backward) if stage.last else []
    ends += setup_work(spec, shape, hardware, backward) if stage.first else []
    layers = list(zip(kinds_of(spec), stage_layers(spec, layout, shape, stage), strict=True))
    products: dict[str, dict[str, list[str]]] = {}
    own: dict[str, list[Work]] = {}
    for (suffix, kind, _), (layer, _) in layers:
        products[suffix] = {}
        for part in layer.products:
            symbol = _product(terms, part, suffix, shape, hardware, backward)
            products[suffix].setdefault(part.product.component, []).append(symbol)
        own[suffix] = [attention_work(spec, shape, hardware, kind, layout.tensor, backward)]
        own[suffix] += elementwise(spec, shape, hardware, layer, layout, backward)
        own[suffix] += recomputed_works(spec, shape, hardware, layer, layout) if backward else []
    works = plan.backward if backward else plan.forward
    ratios = anchor_ratios(spec, shape, hardware)
    of_layers, of_rest = ratios.layer[name], ratios.around[name]
    found = []
    for work in works:
        component, numbers, parts = work.component, {}, []
        for (suffix, _, _), (_, count) in layers:
            inner = list(products[suffix].get(component, ()))
            rest = _seconds(own[suffix], component)
            if rest:
                inner.append(f"own{suffix}")
                numbers[f"own{suffix}"] = rest
            if inner:
                numbers[f"layers{suffix}"] = count
                parts.append(f"layers{suffix}·({' + '.join(inner)})")
        formula = " + ".join(parts)
        if parts and abs(of_layers - 1) > NEGLIGIBLE:
            formula, numbers["anchors"] = f"anchors·({formula})", of_layers
        around = _seconds(ends, component)
        if around:
            outside, numbers["outside"] = "outside", around
            if abs(of_rest - 1) > NEGLIGIBLE:
                outside, numbers["anchors_outside"] = "anchors_outside·outside", of_rest
            formula = f"{formula} + {outside}" if formula else outside
        symbol = f"{name}_{component}_s"
        again = f", checkpointing {shape.checkpointing} recomputes" if backward and shape.checkpointing != "none" else ""
        terms.add(
            "time", symbol, work.seconds, "s", formula or "0",
            f"products, attention's own and elementwise work, what is outside the layers; {work.bound}-bound{again}",
            **numbers,
        )  # fmt: skip
        found.append(symbol)
    return found
