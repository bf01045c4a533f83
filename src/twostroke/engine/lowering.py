"""Lowers a ``ModelSpec`` with canonical weights to a flat plan. Nothing after this knows of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.crossovers import Crossovers
from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.families import layout
from twostroke.core.matrices import Matrix as Described
from twostroke.core.matrices import attention_matrices, has_norm_bias, head_norms, mlp_matrices, qkv_rows
from twostroke.core.schemes import SCHEMES, TORCH_WEIGHTS, W8A8, WEIGHTS, Scheme, scheme_of
from twostroke.core.spec import MlaSpec, ModelSpec
from twostroke.engine import plan as p
from twostroke.engine.packed_cache import Due, PackedCache
from twostroke.kernels.codes import CODE_TYPES, Codes, quantize
from twostroke.kernels.matrix import ExpertMatrices, FloatMatrix, Int8Matrix, Matrix, SeparateMatrices
from twostroke.kernels.native_matrix import PANEL_OUTPUTS, NativeExperts, NativeMatrix, NativePair
from twostroke.model.latent_attention import LATENT_NORM_EPS
from twostroke.model.norm import norm_offset
from twostroke.model.rope import by_halves

if TYPE_CHECKING:
    from jaxtyping import Float


def interleaved(head_dim: int) -> Tensor:
    """The order of a head's rows that makes neighbours of the two numbers that one angle rotates: 0, D/2, 1, D/2+1, …

    Rotation by halves (Hugging Face's layout) is then a product of complex numbers, one operation in place (one row of 8 heads:
    3.3 µs instead of 5.9). Scores do not change, because queries and keys are reordered alike.
    """
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


def head_order(spec: ModelSpec) -> Tensor | None:
    """Order of a head's numbers in which the two that one angle rotates are neighbours; None if none are rotated."""
    if not spec.ropes:
        return None
    return by_halves(torch.arange(spec.head_dim), spec)[interleaved(spec.head_dim)]


def head_rows(spec: ModelSpec) -> Tensor | None:
    """Order of the rows of the packed projection; None if heads are not rotated."""
    order = head_order(spec)
    if order is None:
        return None
    n_rotated = spec.n_heads + spec.n_kv_heads
    rotated = (torch.arange(n_rotated)[:, None] * spec.head_dim + order).reshape(-1)
    return torch.cat((rotated, torch.arange(n_rotated * spec.head_dim, qkv_rows(spec))))


class _Lowering:
    def __init__(
        self,
        spec: ModelSpec,
        state: Mapping[str, Tensor],
        scheme: Scheme,
        head: Scheme,
        crossovers: Crossovers,
        native: bool,
        packed: PackedCache | None,
    ) -> None:
        self.spec, self.state, self.crossovers, self.packed = spec, state, crossovers, packed
        self.scheme, self.head, self.native, self.ropes = scheme, head, native, spec.ropes
        self.coded = any(name.endswith(".scale") for name in state)
        self.shapes = {} if packed is None else {entry.canonical: entry.shape for entry in layout(spec)}
        self.dtype = torch.float32 if native else getattr(torch, TORCH_NAMES[scheme.kept])

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
        scheme: Scheme | None = None,
        get: Callable[[str], Tensor] | None = None,
    ) -> Matrix:
        """The matrix ``name`` with its bias, or only its ``rows`` in their order, held in ``scheme`` (default: the plan's).

        ``get`` reads its tensors (default: from the state).
        """
        held, vector = scheme or self._held(name), self.vector(f"{name}.bias", bias)
        if rows is not None and vector is not None:
            vector = vector[rows]

        def read() -> Tensor | Codes:
            return self._read(name, held, rows, get or self.get)

        if not self.native:
            return self._torch_matrix(read(), held, vector)

        def pack() -> NativeMatrix:
            return packed_matrix(read(), held, vector)

        return pack() if self.packed is None else self.packed.matrix(pack, self._due(name, held, rows), vector)

    def _held(self, name: str) -> Scheme:
        """The plan's scheme. Of a state with codes: the one beside it if ``name`` has codes without zero points and the plan's
        have some, and plain numbers if it has no codes."""
        scheme, coded = self.scheme, f"{name}.scale" in self.state
        if self.coded and not coded:
            return SCHEMES[scheme.kept]
        centred = coded and f"{name}.zero" not in self.state
        return SCHEMES[scheme.beside] if centred and scheme.beside is not None else scheme

    def _due(self, name: str, scheme: Scheme, rows: Tensor | slice | None) -> Due:
        """What ``matrix`` will pack. It is known without reading a tensor, so a file of packed matrices can be checked."""
        n, k = self.shapes[f"{name}.weight"]
        if isinstance(rows, slice):
            n = len(range(*rows.indices(n)))
        group = scheme.group if scheme.computes_in_codes else None
        return Due(scheme.native, group or 0, n if not isinstance(rows, Tensor) else len(rows), k)

    def _read(self, name: str, scheme: Scheme, rows: Tensor | slice | None, get: Callable[[str], Tensor]) -> Tensor | Codes:
        """The weight, or its codes if it is stored as codes. Raises ConfigError for codes of another scheme."""
        weight = get(f"{name}.weight")
        if f"{name}.scale" not in self.state:
            return weight if rows is None else weight[rows]
        if weight.dtype is not CODE_TYPES.get(scheme.element):
            held = next(element for element, dtype in CODE_TYPES.items() if dtype is weight.dtype)
            raise ConfigError(f"{name} is held in {held} on disk, so this model can only be lowered with weights={held!r}.")
        zero = get(f"{name}.zero") if f"{name}.zero" in self.state else None
        codes = Codes(weight, get(f"{name}.scale"), zero)
        n_scales = codes.scale.shape[:2].numel()  # in blocks each is two numbers
        if n_scales != scheme.scales(*weight.shape):
            raise ConfigError(f"{name} has {n_scales} scales, but {scheme.name} needs {scheme.scales(*weight.shape)}.")
        return codes if rows is None else codes.of_rows(rows)

    def _torch_matrix(self, weight: Tensor | Codes, scheme: Scheme, bias: Tensor | None) -> Matrix:
        if scheme.quantised:
            codes = weight if isinstance(weight, Codes) else quantize(weight, scheme)
            if W8A8 in scheme.torch:
                return Int8Matrix(codes.codes, codes.scale, bias, self.crossovers)
            weight = codes.values()  # no other torch kernel is worth the rounding: they are expanded once, at loading
        assert isinstance(weight, Tensor)
        return FloatMatrix(weight.to(self.dtype), bias)

    def gate_up(self, name: str, up: Described) -> Matrix:
        """Gate and up as one matrix; as two for the native library, which gives a thread the same outputs of both."""
        if not self.native or not up.packed:
            return self.matrix(name, up.bias)
        width, once = up.n // 2, cache(self.get)  # Hugging Face stores them apart, and joining them copies both
        gate, up_only = (self.matrix(name, up.bias, rows, get=once) for rows in (slice(width), slice(width, 2 * width)))
        assert isinstance(gate, NativeMatrix)
        assert isinstance(up_only, NativeMatrix)
        return NativePair(gate, up_only)

    def experts(self, block: str, matrix: Described) -> ExpertMatrices:
        """All experts' matrices of a kind: one tall one for the native library, which gives a thread outputs of each. Raises
        ConfigError for a width that its panels do not divide."""
        name = f"{block}.{matrix.module}"
        if self.native:
            width = matrix.n // max(1, len(matrix.packed))
            if width % PANEL_OUTPUTS:
                raise ConfigError(
                    f"runner='native' needs experts whose widths are multiples of {PANEL_OUTPUTS}, and {matrix.name} has "
                    f"{width} outputs. Use runner='torch'."
                )
            tall = self.matrix(name, matrix.bias)
            assert isinstance(tall, NativeMatrix)
            return NativeExperts(tall, matrix.copies)
        once, n = cache(self.get), matrix.n
        each = (self.matrix(name, matrix.bias, slice(e * n, (e + 1) * n), get=once) for e in range(matrix.copies))
        return SeparateMatrices([*each])

    def norm(self, name: str, scale: float = 1.0) -> p.Norm:
        """The norm ``name``; its result times ``scale``, which weight and bias hold."""
        weight, bias = self.get(f"{name}.weight").float() + norm_offset(self.spec), None
        if self.spec.norm == "layernorm":
            bias = self.get(f"{name}.bias").float() if has_norm_bias(self.spec) else torch.zeros_like(weight)
            bias = (bias * scale).to(self.dtype)
        return p.Norm((weight * scale).to(self.dtype), bias, self.spec.norm_eps)

    def embed(self) -> p.Embed:
        # A step reads a few rows of the table, so it stays in its file's format, mapped from the file.
        learned = self.spec.positions == "learned"
        scale = self.spec.departures.embedding_scale
        return p.Embed(self.get("embed.weight"), self.get("position_embed.weight") if learned else None, scale)

    def head_norms(self, block: str) -> Float[Tensor, "heads D"]:
        spec, order = self.spec, head_order(self.spec)
        q, k = (self.get(f"{block}.{norm.module}.weight").view(-1, spec.head_dim) for norm in head_norms(spec))
        weight = torch.cat((q.expand(spec.n_heads, -1), k.expand(spec.n_kv_heads, -1))).to(self.dtype) + norm_offset(spec)
        return weight if order is None else weight[:, order]

    def projection(self, block: str) -> p.Op:
        """What makes queries, keys and values."""
        if self.spec.mla is not None:
            return self.latent_projection(block, self.spec.mla)
        qkv = attention_matrices(self.spec)[0]
        module = f"{block}.{qkv.module}"
        return p.QkvProjection(self.matrix(module, qkv.bias, head_rows(self.spec)), module)

    def latent_projection(self, block: str, mla: MlaSpec) -> p.LatentProjection:
        held = {matrix.name: matrix for matrix in attention_matrices(self.spec)}
        down = held.get("q_a")
        queries, kv = held["q" if down is None else "q_b"], held["kv_a"]
        turned = None if self.spec.departures.neighbours_turn else interleaved(mla.qk_rope_dim)
        q_rows, kv_rows = (
            None if turned is None else torch.cat((torch.arange(n), n + turned)) for n in (mla.qk_nope_dim, mla.kv_lora_rank)
        )
        if q_rows is not None:
            q_rows = (torch.arange(self.spec.n_heads)[:, None] * len(q_rows) + q_rows).reshape(-1)
        absorb = self.rebuilding(block)[:, : mla.qk_nope_dim].transpose(1, 2)
        return p.LatentProjection(
            mla,
            None if down is None else self.matrix(f"{block}.{down.module}", down.bias),
            self.vector(f"{block}.attn.q_a_norm.weight", down is not None),
            self.matrix(f"{block}.{queries.module}", queries.bias, q_rows),
            self.matrix(f"{block}.{kv.module}", kv.bias, kv_rows),
            self.get(f"{block}.attn.kv_a_norm.weight").to(self.dtype, copy=True),
            self.of_heads(absorb),
            LATENT_NORM_EPS,
        )

    def rebuilding(self, block: str) -> Float[Tensor, "H outputs latent"]:
        """What rebuilds each head's keys and values from the latent, keys first; of codes their values."""
        name = f"{block}.attn.kv_b"
        held = self._read(name, self._held(name), None, self.get)
        weight = held.values() if isinstance(held, Codes) else held
        return weight.unflatten(0, (self.spec.n_heads, -1))

    def of_heads(self, weights: Float[Tensor, "H n k"]) -> ExpertMatrices:
        """A matrix a head, plain under every scheme: they are small, and codes cannot be transposed."""
        plain = SCHEMES[self.scheme.kept]
        if not self.native:
            return SeparateMatrices([FloatMatrix(weight.to(self.dtype)) for weight in weights])
        if weights.shape[1] % PANEL_OUTPUTS:
            raise ConfigError(
                f"runner='native' needs latent attention whose widths are multiples of {PANEL_OUTPUTS}, and one is "
                f"{weights.shape[1]}. Use runner='torch'."
            )
        tall = weights.flatten(0, 1)

        def pack() -> NativeMatrix:
            return NativeMatrix(tall.contiguous(), plain.native)

        due = Due(plain.native, 0, *tall.shape)
        return NativeExperts(pack() if self.packed is None else self.packed.matrix(pack, due, None), len(weights))

    def block(self, i: int) -> list[p.Op]:
        spec, name, away = self.spec, f"blocks.{i}", self.spec.departures
        out = attention_matrices(spec)[-1]
        none, scale = p.Norm(None, None, spec.norm_eps), away.residual_scale
        attn_norm = self.norm(f"{name}.attn_norm")
        mlp_norm = attn_norm if away.one_norm else self.norm(f"{name}.mlp_norm")
        read_by_attn, read_by_mlp, of_attn, of_mlp = attn_norm, mlp_norm, None, None
        if away.norms_after:  # OLMo 2 norms what attention and MLP return instead of what they read
            read_by_attn, read_by_mlp, of_attn, of_mlp = none, none, attn_norm, mlp_norm
        elif away.norms_around:
            of_attn, of_mlp = (self.norm(f"{name}.{norm}") for norm in ("attn_post_norm", "mlp_post_norm"))
        ops: list[p.Op] = [
            read_by_attn,
            self.projection(name),
        ]
        if spec.qk_norm:
            ops.append(p.QkNorm(self.head_norms(name), spec.norm_eps, away.qk_norm_over_heads))
        rope = spec.rope_of_layer(i)
        ops += [
            p.RopeAndCacheWrite(i, None if rope is None else self.ropes.index(rope)),
            p.PagedAttention(i, spec.window_of_layer(i), away.attention_cap, self.sinks(name)),
        ]
        if i == spec.n_layers - 1:
            ops.append(p.GatherSampledRows())
        if spec.mla is not None:
            ops.append(p.LatentValues(spec.mla, self.of_heads(self.rebuilding(name)[:, spec.mla.qk_nope_dim :])))
        parallel = away.parallel_block
        to_out = f"{name}.{out.module}"
        attention = p.OutProjectionAdd(self.matrix(to_out, out.bias), of_attn, scale, parallel, to_out)
        if spec.has_experts(i):
            return [*ops, attention, *self.mixture(name, i, read_by_mlp)]
        mlp = self.mlp(name, read_by_mlp, of_mlp, mlp_matrices(spec, i), not parallel)
        # Beside attention the MLP comes first: the residual stream is still what both branches read.
        return [*ops, *mlp, attention] if parallel else [*ops, attention, *mlp]

    def sinks(self, block: str) -> Tensor | None:
        return self.vector(f"{block}.attn.sinks", self.spec.departures.attention_sinks)

    def mlp(
        self,
        block: str,
        read: p.Norm,
        post_norm: p.Norm | None,
        matrices: tuple[Described, ...],
        ends: bool,
        shared: bool = False,
    ) -> list[p.Op]:
        """Up and down of ``matrices``; ``shared``: each row is weighed by its share of shared experts."""
        up, down = matrices
        modules = f"{block}.{up.module}", f"{block}.{down.module}"
        wide, spec, narrow = self.gate_up(modules[0], up), self.spec, self.matrix(modules[1], down.bias)
        return [
            read,
            p.MlpUp(wide, spec.activation, bool(up.packed), shared, modules[0]),
            p.MlpDownAdd(narrow, post_norm, spec.departures.residual_scale, ends, modules[1]),
        ]

    def mixture(self, block: str, layer: int, read: p.Norm) -> list[p.Op]:
        """A router, the shared experts, then those that it chose."""
        spec, scale = self.spec, self.spec.departures.residual_scale
        assert spec.moe is not None
        held = {matrix.name: matrix for matrix in mlp_matrices(spec, layer)}
        plain = SCHEMES["fp32" if self.native else self.scheme.kept]
        router, gate = (
            self.matrix(f"{block}.{held[name].module}", held[name].bias, scheme=plain) if name in held else None
            for name in ("router", "shared_gate")
        )
        assert router is not None
        wide, narrow = (self.experts(block, held[name]) for name in ("expert_gate_up", "expert_down"))
        correction = self.vector(f"{block}.mlp.correction_bias", spec.moe.correction_bias)
        ops: list[p.Op] = [read, p.RouteTokens(router, spec.moe, correction, gate, wide)]
        if "shared_down" in held:
            matrices = held["shared_gate_up"], held["shared_down"]
            ops += self.mlp(block, read, None, matrices, ends=False, shared=gate is not None)
        return [*ops, p.ExpertsAdd(layer, wide, narrow, spec.activation, spec.moe.top_k, scale)]

    def ops(self) -> tuple[p.Op, ...]:
        spec, away = self.spec, self.spec.departures
        ops: list[p.Op] = [self.embed()]
        for i in range(spec.n_layers):
            ops += self.block(i)
        head = self.matrix("embed" if spec.tied_embeddings else "head", bias=False, scheme=self.head)
        return (*ops, self.norm("final_norm", away.logit_scale), p.LmHead(head, away.logit_cap))


def packed_matrix(weight: Tensor | Codes, scheme: Scheme, bias: Tensor | None) -> NativeMatrix:
    """The matrix in the library's format. Codes stay codes if the library multiplies them; else their values are packed."""
    if scheme.quantised and not scheme.computes_in_codes:
        weight = (weight if isinstance(weight, Codes) else quantize(weight, scheme)).values()
    if isinstance(weight, Tensor):
        return NativeMatrix(weight, scheme.native, bias, group=scheme.group or 0)
    return NativeMatrix(weight.codes, scheme.native, bias, weight.scale, weight.zero, scheme.group or 0)


@torch.inference_mode()
def lower(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    weights: str = "bf16",
    crossovers: Crossovers | None = None,
    native: bool = False,
    head: str | None = None,
    packed: PackedCache | None = None,
) -> p.Plan:
    """The plan of ``spec`` with the canonical tensors of ``state``, packed for the kernels. ``state`` is not kept.

    ``weights`` is the scheme of the blocks' matrices and may name a group (int4-g32); codes in ``state`` stay as they are.
    ``head`` is the scheme of the output head, by default fp32 in an fp32 plan, else bf16. With ``native``, matrices are packed
    for the native library, once for any number of rows, and everything between them is fp32. Without, they are packed for
    torch's kernels, and everything that is not quantised is bf16, unless ``weights`` is fp32. ``packed`` may supply native
    matrices that an earlier start has packed. Raises ConfigError for an unknown scheme and for a model that can only be
    planned, and CorruptFileError if a tensor is missing.
    """
    known = WEIGHTS if native else TORCH_WEIGHTS
    scheme = SCHEMES.get(weights)
    head = head or (scheme.kept if scheme is not None else weights)
    for option, value in (("weights", weights), ("head", head)):
        if value.partition("-")[0] not in known:
            raise ConfigError(f"{option}={value!r} is not a way to hold weights. Use one of {', '.join(known)}.")
    spec.require_buildable()
    crossovers = crossovers or Crossovers()
    scheme = scheme_of(weights).here
    lowering = _Lowering(spec, state, scheme, scheme_of(head).here, crossovers, native, packed)
    return p.Plan(spec, lowering.ops(), scheme.family, "fp32" if native else scheme.kept, crossovers)
