"""Formulas of what a layer keeps from forward for backward, by kind of layer, checkpointing policy and cut."""

from __future__ import annotations

from twostroke.core.dtypes import bytes_of
from twostroke.core.matrices import LayerKind
from twostroke.core.policy import attends_explicitly, query_blocks
from twostroke.core.spec import ModelSpec
from twostroke.planner.explain.attention import kinds_of
from twostroke.planner.explain.model import letters, rows_and_columns, total
from twostroke.planner.explain.term import Explanation
from twostroke.planner.memory import NATIVE_ATTENTION, Kept, kept_by_layer, keys_walked
from twostroke.planner.training import TrainingShape

KORTHIKANTI = "what autograd keeps (after Korthikanti et al., arXiv 2205.05198), one token"


def explain_kept(terms: Explanation, spec: ModelSpec, shape: TrainingShape, device_kind: str, kept: Kept, prefix: str) -> str:
    """A term for each kind of layer, ``<prefix>_bytes_a_token``; returns the formula of their sum over all layers."""
    dtype, length = shape.compute_dtype, shape.sequence_length
    explicit = attends_explicitly(device_kind, dtype, length)
    parts = []
    for suffix, kind, count in kinds_of(spec):
        symbol = f"{prefix}_bytes_a_token{suffix}"
        numbers = kept_numbers(spec, shape, device_kind, kept, kind)
        attention = "explicit attention keeps its probabilities" if explicit else "flash attention keeps no T×T matrix"
        value = kept_by_layer(spec, kind, dtype, shape.compile, length, device_kind, kept)
        terms.add(
            "memory", symbol, value, "bytes", _kept(spec, kind, shape, device_kind, kept),
            f"{KORTHIKANTI}, one layer{f' of {count}' if suffix else ''}; checkpointing {kept.checkpointing}; {attention}",
            **numbers,
        )  # fmt: skip
        parts.append(f"{count}·{symbol}")
    return total(parts)


def below_adapters(spec: ModelSpec, shape: TrainingShape, device_kind: str, kept: Kept) -> str:
    """Formula of what a token of the first layer does not keep beside a frozen base, since nothing below its first adapter has
    a gradient: its first norm's input, and where only its MLP has adapters the rest of attention too; and the ids."""
    if not kept.frozen or kept.checkpointing != "none":
        return "0"
    kind = kinds_of(spec)[0][1]
    rms, eager = spec.norm == "rmsnorm", not shape.compile
    cut = "/cut" if kept.sequence_cut > 1 else ""
    norm = f"({'4' if eager and rms else 'w'}·E + {'4' if rms else '2·w'}){cut}"
    if kept.input_of(*(p.name for p in kind.matrices if p.component == "attention")):
        return f"{norm} + 8"
    attention = total(_attention(spec, kind, shape, device_kind, kept))
    return f"2·{norm} + ({attention})" + ("/tensor" if kept.tensor > 1 else "") + " + 8"


def kept_numbers(spec: ModelSpec, shape: TrainingShape, device_kind: str, kept: Kept, kind: LayerKind) -> dict[str, float]:
    """Name → number for the formulas of this file."""
    dtype, length = shape.compute_dtype, shape.sequence_length
    numbers = letters(spec, kind) | {"w": bytes_of(dtype), "tensor": kept.tensor, "cut": kept.sequence_cut}
    numbers["adapter_width"] = kept.adapter_width
    if attends_explicitly(device_kind, dtype, length):
        numbers |= {"keys": keys_walked(device_kind, dtype, length), "H_spec": spec.n_heads, "D_spec": spec.head_dim}
        numbers["copies"] = sum(end for _, end in query_blocks(length)) / length
    return numbers


def _kept(spec: ModelSpec, kind: LayerKind, shape: TrainingShape, device_kind: str, kept: Kept) -> str:
    norms, rms, eager = spec.departures.norms_per_block, spec.norm == "rmsnorm", not shape.compile
    cut = "/cut" if kept.sequence_cut > 1 else ""
    if kept.checkpointing == "full":
        return f"w·E{cut}"
    around = [f"{norms}·w·E"]
    if kept.checkpointing == "none":
        inputs = int(kept.input_of("qkv", "q", "q_a", "kv_a"))
        inputs += int(norms > 1) * int(kept.input_of("gate_up", "up", "expert_gate_up", "expert_up"))
        around += [f"{inputs}·w·E"] if inputs else []
        around.append(f"{norms}·4" if rms else f"{norms}·2·w")
        around += [f"{norms}·({4 if kept.frozen else 8} − w)·E"] if eager and rms else []
        around += ["w·adapter_width"] if kept.adapter_width else []
    inner = [*_attention(spec, kind, shape, device_kind, kept), *_mlp(kind, eager, kept)]
    if kept.tensor > 1:
        return f"({total(around)}){cut} + ({total(inner)})/tensor"
    return total([f"({total(around)}){cut}" if cut else total(around), *inner])


def _attention(spec: ModelSpec, kind: LayerKind, shape: TrainingShape, device_kind: str, kept: Kept) -> list[str]:
    explicit = attends_explicitly(device_kind, shape.compute_dtype, shape.sequence_length)
    selective = kept.checkpointing == "selective"
    packed = "w·(H·D + K·(D + D_v))"
    output = "w·H·D_v + 4·H"
    if kind.latent_dim is not None:
        latents = " + ".join(["R_q"] * any(p.name == "q_a" for p in kind.matrices) + ["R_kv + D_rope"])
        whole = "·tensor" if kept.tensor > 1 else ""
        return [packed, output, f"{1 if selective else 2}·w·({latents}){whole}"]
    if selective:
        return [packed] if explicit else [packed, output]
    parts = [packed, output]
    if explicit:
        parts = ["H_spec·w·(keys + 2·D_spec + 2·D_spec·copies)"]
        # Its own products do not need the output, only an adapter on the next matrix does.
        parts += [] if kept.input_of("out") else ["(0 − w·H·D_v)"]
    elif spec.positions == "rope" and device_kind != NATIVE_ATTENTION:
        parts.append("w·(H + K)·D")
    if spec.qk_norm:
        parts.append("4·(H + K)")
        parts += [packed] if explicit and shape.compile else []
        if not shape.compile:
            parts.append(f"{4 if shape.compute_dtype == 'fp32' else 8}·(H + K)·D")
    return parts


def _mlp(kind: LayerKind, eager: bool, kept: Kept) -> list[str]:
    parts, nothing_recomputed = [], kept.checkpointing == "none"
    for product in kind.matrices:
        rows, columns = rows_and_columns(product, kind)
        times = "X_active·" if product.split == "expert" else ""
        if product.name.endswith(("gate_up", "up")):
            parts.append(f"w·{times}{rows}")
            parts += [f"w·{times}{rows}/2"] if eager and kind.gated and nothing_recomputed else []
            parts += ["w·X_active·E"] if times else []
        elif product.name.endswith("down"):
            parts += [f"w·{times}{columns}"] if nothing_recomputed and kept.input_of(product.name) else []
            parts += ["w·X_active·E"] if times else []
        elif product.name == "router":
            parts.append("2·4·X")
    return parts
