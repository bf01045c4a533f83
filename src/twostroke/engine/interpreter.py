"""Runs a plan with torch operators, one step with any mix of requests at a time. It is the reference for faster runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.engine import plan as p
from twostroke.engine.adapters import Parts
from twostroke.engine.batch import Group, StepBatch
from twostroke.engine.expert_load import ExpertLoad
from twostroke.engine.kv_pool import KVPool
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.kernels.attention import attention
from twostroke.model.decoder import capped
from twostroke.model.experts import choose_experts
from twostroke.model.mlp import ACTIVATIONS, gated

if TYPE_CHECKING:
    from jaxtyping import Float

Run = Callable[["Buffers"], None]


class Buffers:
    """The plan's buffers during one step (``engine.plan`` says what each holds)."""

    __slots__ = (
        "adapted", "attention_out", "batch", "chosen", "hidden", "logits", "mlp_inner", "normed", "qkv", "residual", "routed",
        "shared_shares", "shares",
    )  # fmt: skip

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self.adapted = _grouped(batch, batch.adapter_of)
        self.residual: Any = None
        self.normed: Any = None
        self.qkv: Any = None
        self.attention_out: Any = None
        self.mlp_inner: Any = None
        self.routed: Any = None
        self.chosen: Any = None
        self.shares: Any = None
        self.shared_shares: Any = None
        self.hidden: Any = None
        self.logits: Any = None


def _grouped(batch: StepBatch, adapter_of: Tensor | None) -> list[tuple[Parts, Tensor]]:
    """The rows of each adapter."""
    if adapter_of is None:
        return []
    return [(parts, (adapter_of == i).nonzero()[:, 0]) for i, parts in enumerate(batch.adapters)]


def adapt(module: str, inside: Tensor, outputs: Tensor, adapted: list[tuple[Parts, Tensor]]) -> Tensor:
    """``outputs`` of the matrix ``module``, to which rows with an adapter have added (inside·Aᵀ)·Bᵀ, in place. Both products
    round what they read to the adapter's own type."""
    for parts, rows in adapted:
        for part in parts.get(module, ()):
            own, dtype = part.a.dtype, inside.dtype
            thin = F.linear(inside[rows].to(own).to(dtype), part.a.to(dtype))
            columns = slice(part.begin, part.begin + len(part.b))
            outputs[rows, columns] += F.linear(thin.to(own).to(dtype), part.b.to(dtype))
    return outputs


class TorchInterpreter:
    """Runs operations; it knows no families of models. ``watch``, if given, is called after each operation, with the operation
    and the buffers. ``experts``, if given, counts which ones are chosen."""

    def __init__(
        self,
        plan: p.Plan,
        pool: KVPool | TiledKVPool,
        watch: Callable[[p.Op, Buffers], None] | None = None,
        experts: ExpertLoad | None = None,
    ) -> None:
        self.plan, self.pool, self.watch, self.experts = plan, pool, watch, experts
        spec = plan.spec.attended
        self.n_heads, self.n_kv_heads, self.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.group = spec.queries_per_kv_head
        self.scale = spec.attention_scale
        self.dtype = torch.float32 if plan.dtype == "fp32" else torch.bfloat16
        run: dict[type, Callable[[Any, Buffers], None]] = {
            p.Embed: self._embed,
            p.Norm: self._norm,
            p.QkvProjection: self._qkv_projection,
            p.LatentProjection: self._latent_projection,
            p.LatentValues: self._latent_values,
            p.QkNorm: self._qk_norm,
            p.RopeAndCacheWrite: self._rope_and_cache_write,
            p.PagedAttention: self._paged_attention,
            p.GatherSampledRows: self._gather_sampled_rows,
            p.OutProjectionAdd: self._out_projection_add,
            p.MlpUp: self._mlp_up,
            p.MlpDownAdd: self._mlp_down_add,
            p.RouteTokens: self._route_tokens,
            p.ExpertsAdd: self._experts_add,
            p.LmHead: self._lm_head,
        }
        self._program = tuple((run[type(op)], op) for op in plan.ops)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Float[Tensor, "sampled V"]:
        """fp32 logits of the rows that a token is sampled from; the last ``n_hidden`` have ``hidden`` states instead.

        Keys and values of all rows are in the pool afterwards."""
        buffers = Buffers(batch)
        for run, op in self._program:
            run(op, buffers)
            if self.watch is not None:
                self.watch(op, buffers)
        self.hidden: Tensor = buffers.hidden
        logits: Tensor = buffers.logits
        return logits

    def _embed(self, op: p.Embed, b: Buffers) -> None:
        b.residual = F.embedding(b.batch.tokens, op.table).to(self.dtype)
        if op.scale != 1.0:
            b.residual *= op.scale
        if op.positions is not None:
            b.residual += F.embedding(b.batch.positions, op.positions).to(self.dtype)

    @staticmethod
    def _normed(norm: p.Norm, x: Tensor) -> Tensor:
        if norm.weight is None:
            return x
        if norm.bias is None:
            return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)

    def _norm(self, op: p.Norm, b: Buffers) -> None:
        b.normed = self._normed(op, b.residual)

    def _qkv_projection(self, op: p.QkvProjection, b: Buffers) -> None:
        qkv = adapt(op.module, b.normed, op.matrix(b.normed), b.adapted)
        b.qkv = qkv.view(b.batch.n_rows, -1, self.head_dim)  # (n, H + 2K, D)

    def _latent_projection(self, op: p.LatentProjection, b: Buffers) -> None:
        mla, inside = op.mla, b.normed
        if op.down is not None and op.down_norm is not None:
            inside = F.rms_norm(op.down(inside), op.down_norm.shape, op.down_norm, op.eps)
        queries = op.matrix(inside).view(b.batch.n_rows, self.n_heads, -1)
        nope, turned = queries.split((mla.qk_nope_dim, mla.qk_rope_dim), dim=-1)
        absorbed = torch.stack([op.absorb.of(h)(nope[:, h]) for h in range(self.n_heads)], dim=1)
        latent, key = op.kv(b.normed).split((mla.kv_lora_rank, mla.qk_rope_dim), dim=-1)
        latent = F.rms_norm(latent, op.kv_norm.shape, op.kv_norm, op.eps)
        key_and_value = torch.stack((torch.cat((key, latent), -1), torch.cat((torch.zeros_like(key), latent), -1)), dim=1)
        b.qkv = torch.cat((torch.cat((turned, absorbed), dim=-1), key_and_value), dim=1)  # (n, H + 2, D)

    def _latent_values(self, op: p.LatentValues, b: Buffers) -> None:
        summed = b.attention_out.view(len(b.attention_out), self.n_heads, -1)[..., op.mla.qk_rope_dim :]
        b.attention_out = torch.cat([op.heads.of(h)(summed[:, h]) for h in range(self.n_heads)], dim=-1)

    def _qk_norm(self, op: p.QkNorm, b: Buffers) -> None:
        if op.over_heads:
            for rows in (slice(self.n_heads), slice(self.n_heads, self.n_heads + self.n_kv_heads)):
                weight, together = op.weight[rows].flatten(), b.qkv[:, rows]
                together.copy_(F.rms_norm(together.flatten(1), weight.shape, weight, op.eps).view(together.shape))
            return
        heads = b.qkv[:, : self.n_heads + self.n_kv_heads]
        # Query and key heads have different weights, so the norm of all heads takes none, and they are multiplied afterwards.
        heads.copy_(F.rms_norm(heads, (self.head_dim,), None, op.eps).mul_(op.weight))

    def _rope_and_cache_write(self, op: p.RopeAndCacheWrite, b: Buffers) -> None:
        if op.rope is not None:
            rotated = b.qkv[:, : self.n_heads + self.n_kv_heads]
            values = rotated.float()  # the same tensor if it is fp32
            # Two neighbours are one complex number, because ``lowering.interleaved`` has reordered each head's rows.
            torch.view_as_complex(values.view(*values.shape[:2], -1, 2)).mul_(b.batch.rotations[op.rope])
            if values.dtype != rotated.dtype:
                rotated.copy_(values)
        keys_and_values = b.qkv[:, self.n_heads :].transpose(0, 1)  # (2K, n, D)
        self.pool.write(op.layer, b.batch.slots, keys_and_values)

    def _paged_attention(self, op: p.PagedAttention, b: Buffers) -> None:
        n = b.batch.n_rows
        queries = b.qkv[:, : self.n_heads].view(n, self.n_kv_heads, self.group, self.head_dim)
        groups = b.batch.groups[op.window]
        if len(groups) == 1 and groups[0].keys.n_rows == n:  # all rows decode in one group: nothing to put together
            b.attention_out = self._attend_group(op, groups[0], queries).reshape(n, -1)
            return
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in groups:
            out[group.rows] = self._attend_group(op, group, queries[group.rows])
        b.attention_out = out.view(n, -1)

    def _attend_group(self, op: p.PagedAttention, group: Group, queries: Tensor) -> Tensor:
        """(rows, K, G, D) → (rows, K, G, D)."""
        keys, layer = group.keys, op.layer
        if keys.pages is None:
            k, v = self.pool.run(layer, keys.first_slot, keys.n_slots)
        else:
            k, v = self.pool.gather(layer, keys.pages, keys.n_rows)
        k, v = k.to(queries.dtype), v.to(queries.dtype)  # the same tensors, unless the cache has another type
        shape = (keys.n_rows, -1, self.n_kv_heads, self.group, self.head_dim)
        q = queries.view(shape).permute(2, 0, 1, 3, 4)  # (K, B, T, G, D)
        parts = []
        for block in group.blocks:
            length = block.end_slot - block.first_slot
            whole = length == k.shape[2]
            parts.append(
                attention(
                    q if len(group.blocks) == 1 else q[:, :, block.first : block.end],
                    k if whole else k.narrow(2, block.first_slot, length),
                    v if whole else v.narrow(2, block.first_slot, length),
                    block.mask,
                    self.scale,
                    self.plan.crossovers,
                    self.pool.poisoned,
                    op.cap,
                    op.sinks,
                )
            )
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return out.permute(1, 2, 0, 3, 4).reshape(queries.shape)

    def _gather_sampled_rows(self, op: p.GatherSampledRows, b: Buffers) -> None:
        rows = b.batch.sampled_rows
        if rows is not None:
            b.residual, b.attention_out = b.residual[rows], b.attention_out[rows]
            if b.batch.adapter_of is not None:
                b.adapted = _grouped(b.batch, b.batch.adapter_of[rows])

    def _added(
        self, op: p.OutProjectionAdd | p.MlpDownAdd, inside: Tensor, residual: Tensor, adapted: list[tuple[Parts, Tensor]]
    ) -> Tensor:
        if op.norm is None and op.scale == 1.0:
            return adapt(op.module, inside, op.matrix(inside, residual), adapted)
        added = adapt(op.module, inside, op.matrix(inside), adapted)
        return residual + op.scale * (added if op.norm is None else self._normed(op.norm, added))

    def _out_projection_add(self, op: p.OutProjectionAdd, b: Buffers) -> None:
        b.residual = self._added(op, b.attention_out, b.residual, b.adapted)

    def _mlp_up(self, op: p.MlpUp, b: Buffers) -> None:
        wide = adapt(op.module, b.normed, op.matrix(b.normed), b.adapted)
        b.mlp_inner = gated(op.activation)(*wide.chunk(2, dim=-1)) if op.gated else ACTIVATIONS[op.activation](wide)
        if op.shared:
            b.mlp_inner *= b.shared_shares

    def _mlp_down_add(self, op: p.MlpDownAdd, b: Buffers) -> None:
        b.residual = self._added(op, b.mlp_inner, b.residual, b.adapted)

    def _route_tokens(self, op: p.RouteTokens, b: Buffers) -> None:
        b.shares, b.chosen = choose_experts(op.moe, op.matrix(b.normed), op.correction)
        b.routed = b.normed
        if op.shared_gate is not None:
            b.shared_shares = torch.sigmoid(op.shared_gate(b.normed))

    def _experts_add(self, op: p.ExpertsAdd, b: Buffers) -> None:
        if self.experts is not None:
            counts = torch.bincount(b.chosen.flatten(), minlength=op.gate_up.copies).cpu().numpy()
            self.experts.counts[op.layer] += counts
            self.experts.touched[0] += int((counts > 0).sum())
        activation, added = gated(op.activation), torch.zeros_like(b.residual)
        for expert in b.chosen.unique().tolist():
            rows, places = torch.where(b.chosen == expert)
            inner = activation(*op.gate_up.of(expert)(b.routed[rows]).chunk(2, dim=-1))
            shares = b.shares[rows, places, None].to(inner.dtype)
            added.index_add_(0, rows, op.down.of(expert)(inner) * shares)
        b.residual = b.residual + op.scale * added

    def _lm_head(self, op: p.LmHead, b: Buffers) -> None:
        n = len(b.normed) - b.batch.n_hidden
        b.hidden = b.normed[n:].float()
        b.logits = capped(op.matrix(b.normed[:n]).float(), op.cap)
