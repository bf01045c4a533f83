"""``ModelSpec`` and canonical weights → a flat plan. What differs between families ends here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.spec import ModelSpec
from twostroke.engine import plan as p
from twostroke.kernels.crossovers import Crossovers
from twostroke.kernels.matrix import FloatMatrix, Int8Matrix, Matrix, quantize_columns

if TYPE_CHECKING:
    from jaxtyping import Float

WEIGHTS = ("fp32", "bf16", "int8")
"""How weights may be held. int8: matrices of the blocks in int8, everything else bf16."""


def interleaved(head_dim: int) -> Tensor:
    """Order of a head's rows in which the two numbers that one angle turns are neighbours: 0, D/2, 1, D/2+1, …

    Rotation by halves (Hugging Face's layout) becomes the product of complex numbers, one operation in place (measured, one
    row of 8 heads: 3.3 against 5.9 µs). Scores do not change, because queries and keys are reordered alike.
    """
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


class _Lowering:
    def __init__(self, spec: ModelSpec, state: Mapping[str, Tensor], weights: str, crossovers: Crossovers) -> None:
        self.spec, self.state, self.crossovers = spec, state, crossovers
        self.int8 = weights == "int8"
        self.dtype = torch.float32 if weights == "fp32" else torch.bfloat16
        self.rotary = spec.positions == "rope"

    def get(self, name: str) -> Tensor:
        try:
            return self.state[name]
        except KeyError:
            raise CorruptFileError(f"the weights have no tensor {name!r}, which a {self.spec.family} model needs.") from None

    def vector(self, name: str, wanted: bool = True) -> Tensor | None:
        return self.get(name).to(self.dtype, copy=True) if wanted else None

    def matrix(self, name: str, bias: bool, rows: Tensor | None = None, plain: bool = False) -> Matrix:
        """The matrix ``name`` with its bias, its ``rows`` reordered; ``plain``: never in int8."""
        weight = self.get(f"{name}.weight")
        vector = self.vector(f"{name}.bias", bias)
        if rows is not None:
            weight = weight[rows]
            vector = None if vector is None else vector[rows]
        if weight.dtype == torch.int8 and (not self.int8 or plain):
            raise ConfigError(f"{name} is held in int8 on disk; this model can only be lowered with weights='int8'.")
        if not self.int8 or plain:
            return FloatMatrix(weight.to(self.dtype), vector)
        if weight.dtype == torch.int8:
            scale = self.get(f"{name}.scale")
            scale = scale if rows is None else scale[rows]
        else:
            weight, scale = quantize_columns(weight)
        return Int8Matrix(weight, scale, vector, self.crossovers)

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
        wide = self.matrix(f"{name}.mlp.{'gate_up' if gated else 'up'}", spec.mlp_bias)
        ops += [p.Widen(wide, spec.activation, gated), p.AddNarrowed(self.matrix(f"{name}.mlp.down", spec.mlp_bias))]
        return ops

    def ops(self) -> tuple[p.Op, ...]:
        spec = self.spec
        ops: list[p.Op] = [self.embed()]
        for i in range(spec.n_layers):
            ops += self.block(i)
        head = self.matrix("embed" if spec.tied_embeddings else "head", bias=False, plain=True)
        return (*ops, self.norm("final_norm"), p.Head(head))


@torch.inference_mode()
def lower(spec: ModelSpec, state: Mapping[str, Tensor], weights: str = "bf16", crossovers: Crossovers | None = None) -> p.Plan:
    """The plan of ``spec`` with the canonical tensors of ``state``, packed for the kernels; ``state`` is not kept.

    ``weights``: fp32; bf16; or int8, the blocks' matrices in int8 (those of ``state`` that are int8 already, with their
    ``.scale``, are taken as they are), the rest and all activations bf16. Raises ConfigError for another name and for a
    model that is planned only, and CorruptFileError where a tensor is missing.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"weights={weights!r} is not a way to hold weights. Use one of {', '.join(WEIGHTS)}.")
    spec.require_buildable()
    crossovers = crossovers or Crossovers()
    lowering = _Lowering(spec, state, weights, crossovers)
    return p.Plan(spec, lowering.ops(), weights, "fp32" if weights == "fp32" else "bf16", crossovers)
