"""``ModelSpec`` and canonical weights → a flat plan. What differs between families ends here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.crossovers import Crossovers
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.policy import type_beside
from twostroke.core.spec import ModelSpec
from twostroke.engine import plan as p
from twostroke.engine.packed_cache import Due, PackedCache
from twostroke.kernels.int4 import dequantize_groups, group_of, quantize_groups
from twostroke.kernels.matrix import FloatMatrix, Int8Matrix, Matrix, quantize_columns
from twostroke.kernels.native_matrix import FORMATS, NativeMatrix, NativePair
from twostroke.model.families import layout

if TYPE_CHECKING:
    from jaxtyping import Float

WEIGHTS = ("fp32", "bf16", "int8", "int4")
"""How weights may be held for torch. int8: the blocks' matrices in int8, everything else bf16; int4: their values in bf16."""

NATIVE_WEIGHTS = tuple(FORMATS)
"""The same for a native plan. int8_weight_only: activations stay fp32; int4: in groups of inputs, activations in int8."""

GROUP = 64
"""Inputs that share a scale in int4, where the codes are not given."""


def interleaved(head_dim: int) -> Tensor:
    """Order of a head's rows in which the two numbers that one angle turns are neighbours: 0, D/2, 1, D/2+1, …

    Rotation by halves (Hugging Face's layout) becomes the product of complex numbers, one operation in place (measured, one
    row of 8 heads: 3.3 against 5.9 µs). Scores do not change, because queries and keys are reordered alike.
    """
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


class _Lowering:
    def __init__(
        self,
        spec: ModelSpec,
        state: Mapping[str, Tensor],
        weights: str,
        head: str,
        crossovers: Crossovers,
        native: bool,
        packed: PackedCache | None,
        group: int,
    ) -> None:
        self.spec, self.state, self.crossovers, self.packed = spec, state, crossovers, packed
        self.weights, self.head, self.native, self.group = weights, head, native, group
        self.shapes = {} if packed is None else {entry.canonical: entry.shape for entry in layout(spec)}
        self.dtype = torch.float32 if weights == "fp32" or native else torch.bfloat16
        self.rotary = spec.positions == "rope"

    def get(self, name: str) -> Tensor:
        try:
            return self.state[name]
        except KeyError:
            raise CorruptFileError(f"the weights have no tensor {name!r}, which a {self.spec.family} model needs.") from None

    def vector(self, name: str, wanted: bool = True) -> Tensor | None:
        return self.get(name).to(self.dtype, copy=True) if wanted else None

    def matrix(
        self,
        name: str,
        bias: bool,
        rows: Tensor | slice | None = None,
        weights: str | None = None,
        get: Callable[[str], Tensor] | None = None,
    ) -> Matrix:
        """The matrix ``name`` with its bias, or its ``rows`` in that order, held as ``weights`` (default: the plan's way).

        ``get``: where its tensors come from (default: the state)."""
        get = get or self.get
        weights = weights or self.weights
        vector = self.vector(f"{name}.bias", bias)
        if rows is not None and vector is not None:
            vector = vector[rows]
        if not self.native:
            return self._torch_matrix(name, weights, vector, rows)

        def pack() -> NativeMatrix:
            weight, scale, zero, held = self._stored(name, weights, rows, get)
            group = GROUP if scale is None or zero is None else group_of(weight, scale)
            return NativeMatrix(weight, held, vector, scale, zero, group)

        return pack() if self.packed is None else self.packed.matrix(pack, self._due(name, weights, rows), vector)

    def _due(self, name: str, weights: str, rows: Tensor | slice | None) -> Due:
        """What ``matrix`` packs, known without reading a tensor."""
        n, k = self.shapes[f"{name}.weight"]
        if isinstance(rows, slice):
            n = len(range(*rows.indices(n)))
        coded, grouped = f"{name}.scale" in self.state, f"{name}.zero" in self.state
        held = "int8" if weights == "int4" and coded and not grouped else weights
        group = 0 if held != "int4" else self.group if grouped else GROUP
        return Due(held, group, n if not isinstance(rows, Tensor) else len(rows), k)

    def _stored(
        self, name: str, weights: str, rows: Tensor | slice | None, get: Callable[[str], Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
        """Weight, where it is held in codes their scales and, of 4-bit codes, zero points; and how it is to be held:
        ``weights``, but int8 where an int4 model has that instead."""
        weight = get(f"{name}.weight")
        scale = None if weight.is_floating_point() else get(f"{name}.scale")
        zero = get(f"{name}.zero") if weight.dtype == torch.uint8 else None
        if rows is not None:
            weight = weight[rows]
            scale, zero = (None if t is None else t[rows] for t in (scale, zero))
        if weights == "int4" and scale is not None and zero is None:
            weights = "int8"
        if scale is not None and weights not in (("int8", "int8_weight_only") if zero is None else ("int4",)):
            held = "int8" if zero is None else "int4"
            raise ConfigError(f"{name} is held in {held} on disk; this model can only be lowered with weights={held!r}.")
        return weight, scale, zero, weights

    def _torch_matrix(self, name: str, weights: str, vector: Tensor | None, rows: Tensor | slice | None) -> Matrix:
        weight, scale, zero, weights = self._stored(name, weights, rows, self.get)
        if weights == "int4":  # torch has no kernel for them that is worth its rounding: expanded once, at loading
            group = GROUP if scale is None or zero is None else group_of(weight, scale)
            codes = quantize_groups(weight, group) if scale is None or zero is None else (weight, scale, zero)
            return FloatMatrix(dequantize_groups(*codes, group).to(self.dtype), vector)
        if weights != "int8":
            return FloatMatrix(weight.to(self.dtype), vector)
        if scale is None:
            weight, scale = quantize_columns(weight)
        return Int8Matrix(weight, scale, vector, self.crossovers)

    def gate_up(self, name: str) -> Matrix:
        """Gate and up as one matrix, or for the native step as two."""
        width, bias = self.spec.d_ff, self.spec.mlp_bias
        if not self.native:
            return self.matrix(name, bias)
        once = cache(self.get)  # Hugging Face has them apart, and joining them copies both
        gate, up = (self.matrix(name, bias, slice(i * width, (i + 1) * width), get=once) for i in range(2))
        assert isinstance(gate, NativeMatrix)
        assert isinstance(up, NativeMatrix)
        return NativePair(gate, up)

    def norm(self, name: str) -> p.Normalise:
        weight = self.vector(f"{name}.weight")
        assert weight is not None
        return p.Normalise(weight, self.vector(f"{name}.bias", self.spec.norm == "layernorm"), self.spec.norm_eps)

    def embed(self) -> p.Embed:
        # A step reads a few rows of it, so the table stays as it is stored, mapped from its file.
        return p.Embed(self.get("embed.weight"), self.get("position_embed.weight") if not self.rotary else None)

    def head_rows(self) -> Tensor | None:
        """Order of the rows of the packed projection; None where positions do not turn heads."""
        spec = self.spec
        if not self.rotary:
            return None
        order = interleaved(spec.head_dim)
        n_turned = spec.n_heads + spec.n_kv_heads
        turned = (torch.arange(n_turned)[:, None] * spec.head_dim + order).reshape(-1)
        return torch.cat((turned, torch.arange(n_turned * spec.head_dim, spec.qkv_rows)))

    def head_norms(self, block: str) -> Float[Tensor, "heads D"]:
        spec = self.spec
        order = interleaved(spec.head_dim) if self.rotary else torch.arange(spec.head_dim)
        q, k = (self.get(f"{block}.attn.{name}.weight").to(self.dtype)[order] for name in ("q_norm", "k_norm"))
        return torch.cat((q.expand(spec.n_heads, -1), k.expand(spec.n_kv_heads, -1)))

    def block(self, i: int) -> list[p.Op]:
        spec, name = self.spec, f"blocks.{i}"
        ops: list[p.Op] = [
            self.norm(f"{name}.attn_norm"),
            p.ProjectHeads(self.matrix(f"{name}.attn.qkv", spec.qkv_bias, self.head_rows())),
        ]
        if spec.qk_norm:
            ops.append(p.NormaliseHeads(self.head_norms(name), spec.norm_eps))
        ops += [p.TurnAndStore(i, self.rotary), p.Attend(i, spec.window_of_layer(i))]
        if i == spec.n_layers - 1:
            ops.append(p.KeepSampledRows())
        ops += [p.AddMixed(self.matrix(f"{name}.attn.out", spec.attn_out_bias)), self.norm(f"{name}.mlp_norm")]
        gated = spec.mlp == "swiglu"
        wide = self.gate_up(f"{name}.mlp.gate_up") if gated else self.matrix(f"{name}.mlp.up", spec.mlp_bias)
        ops += [p.Widen(wide, spec.activation, gated), p.AddNarrowed(self.matrix(f"{name}.mlp.down", spec.mlp_bias))]
        return ops

    def ops(self) -> tuple[p.Op, ...]:
        spec = self.spec
        ops: list[p.Op] = [self.embed()]
        for i in range(spec.n_layers):
            ops += self.block(i)
        head = self.matrix("embed" if spec.tied_embeddings else "head", bias=False, weights=self.head)
        return (*ops, self.norm("final_norm"), p.Head(head))


@torch.inference_mode()
def lower(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    weights: str = "bf16",
    crossovers: Crossovers | None = None,
    native: bool = False,
    head: str | None = None,
    packed: PackedCache | None = None,
    group: int = GROUP,
) -> p.Plan:
    """The plan of ``spec`` with the canonical tensors of ``state``, packed for the kernels; ``state`` is not kept.

    ``weights``: how the blocks' matrices are held (those of ``state`` that are codes already, with their ``.scale``, are taken
    as they are). ``head``: the same for the output head; default fp32 in an fp32 plan, else bf16. ``native``: matrices are
    packed for the native library, once for any number of rows, and everything between them is fp32; else for torch's kernels,
    and everything that is not quantised is bf16, unless ``weights`` is fp32. ``packed`` may have native
    matrices already; ``group`` is that of the 4-bit codes in ``state``. Raises ConfigError for another name and for a model
    that is planned only, and CorruptFileError where a tensor is missing.
    """
    known = NATIVE_WEIGHTS if native else WEIGHTS
    head = head or type_beside(weights)
    for option, value in (("weights", weights), ("head", head)):
        if value not in known:
            raise ConfigError(f"{option}={value!r} is not a way to hold weights. Use one of {', '.join(known)}.")
    spec.require_buildable()
    crossovers = crossovers or Crossovers()
    lowering = _Lowering(spec, state, weights, head, crossovers, native, packed, group)
    return p.Plan(spec, lowering.ops(), weights, "fp32" if weights == "fp32" or native else "bf16", crossovers)
