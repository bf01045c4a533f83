"""Context parallel: the ranks of a replica share each sequence, and keys and values go round them (ring attention).

Each rank holds the whole model. Of 2·C pieces of a sequence rank c has the c-th from the front and from the end, so that causal
attention is as much work on each (Liu et al. 2023, arXiv:2310.01889; the pairing is that of Llama 3, arXiv:2407.21783, 3.3.2).
A rank computes its queries with the keys it has while the next ones are on their way, and merges what it finds by the
logarithms of the sums. The backward pass sends the keys round again, and their gradients behind them. Attention's ``attend`` is
replaced from outside, and only while a sequence is cut: scoring runs the decoder as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import check_pieces
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.data.loader import Batch
from twostroke.model.attention import Attention, Packed
from twostroke.model.decoder import Decoder
from twostroke.training.exchanges import SENT
from twostroke.training.ranks import Ranks


def check_context(recipe: TrainRecipe, spec: ModelSpec, n: int) -> None:
    """Raise ConfigError if ``n`` ranks cannot share the sequences of ``spec``'s training."""
    if n == 1:
        return
    check_pieces(recipe.train.sequence_length, n)
    away = spec.departures
    refused = {
        "latent attention": spec.mla is not None,
        "dropout": spec.dropout > 0,
        "bounded scores of attention": away.attention_cap is not None,
        "attention sinks": away.attention_sinks,
        "rotary positions that depend on the sequence's length": any(
            rope.scaling in ("longrope", "dynamic") for rope in spec.ropes if rope is not None
        ),
    }
    for what, present in refused.items():
        if present:
            raise ConfigError(f"the model has {what}, which parallel.context={n} cannot cut yet. Use parallel.data or shard.")


class Ring:
    """The ``n`` ranks that share each sequence, of which this is number ``rank``, and the batch that is being computed."""

    def __init__(self, ranks: Ranks) -> None:
        self.group, self.rank, self.n = ranks.group("context"), ranks.at("context"), ranks.layout.context
        self.documents: Tensor | None = None  # (B, T) of the whole sequences, while they are cut

    @property
    def is_cut(self) -> bool:
        return self.documents is not None

    def begin(self, batch: Batch) -> Batch:
        """This rank's pieces of ``batch``, which attention reads as such until ``end``. ``n_valid`` stays that of the whole."""
        self.documents = batch.documents
        cut: dict[str, Any] = {
            name: torch.cat([getattr(batch, name)[:, piece] for piece in self._pieces(batch.tokens.shape[1])], dim=1)
            for name in ("tokens", "targets", "positions", "documents")
        }
        return dataclasses.replace(batch, **cut)

    def end(self) -> None:
        self.documents = None

    def numbers(self, rank: int) -> tuple[int, int]:
        """Of the pieces that ``rank`` holds."""
        return rank, 2 * self.n - 1 - rank

    def _pieces(self, n_tokens: int) -> list[slice]:
        each = n_tokens // (2 * self.n)
        return [slice(number * each, (number + 1) * each) for number in self.numbers(self.rank)]

    def passed_on(self, sent: Tensor) -> Iterator[Tensor]:
        """Send ``sent`` to the next rank; yields once, and then what has come from the one before."""
        received = torch.empty_like(sent)
        after, before = (dist.get_global_rank(self.group, (self.rank + step) % self.n) for step in (1, -1))
        requests = [dist.isend(sent, after, group=self.group), dist.irecv(received, before, group=self.group)]
        SENT["context"] += sent.numel() * sent.element_size()
        yield sent
        for request in requests:
            assert request is not None
            request.wait()
        yield received


@dataclass(frozen=True)
class _Shape:
    """What decides which keys a query sees."""

    ring: Ring
    documents: Tensor  # (B, T)
    window: int | None
    scale: float

    def pairs(self, n_tokens: int, other: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """(queries, keys, whether one sees the other (B, 1, 1, m, m)) of each pair of this rank's pieces with those of rank
        ``other``, of ``n_tokens`` each, in which some query may see a key."""
        m, device = n_tokens // 2, self.documents.device
        index = torch.arange(m, device=device)
        for i, query_piece in enumerate(self.ring.numbers(self.ring.rank)):
            for j, key_piece in enumerate(self.ring.numbers(other)):
                nearest = (query_piece - key_piece - 1) * m + 1
                if query_piece < key_piece or (self.window is not None and nearest >= self.window):
                    continue
                distance = (query_piece - key_piece) * m + index[:, None] - index[None, :]
                allowed = distance >= 0
                if self.window is not None:
                    allowed = allowed & (distance < self.window)
                of_queries, of_keys = (self.documents[:, p * m : (p + 1) * m] for p in (query_piece, key_piece))
                allowed = allowed & (of_queries[:, :, None] == of_keys[:, None, :])
                yield slice(i * m, (i + 1) * m), slice(j * m, (j + 1) * m), allowed[:, None, None]


class _RingAttention(torch.autograd.Function):
    """softmax(q·kᵀ·scale)·v of q (B, K, G, t, D) with keys and values (B, K, t, D) of all ranks. Sums are in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shape: _Shape) -> Tensor:
        ring, n_tokens = shape.ring, q.shape[3]
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        log_sums = torch.full(q.shape[:-1], float("-inf"), dtype=torch.float32, device=q.device)
        here = torch.stack((k, v))
        for step in range(ring.n):
            transfer = ring.passed_on(here) if step < ring.n - 1 else iter((here, here))
            keys, values = next(transfer)[:, :, :, None]
            for queries, seen, allowed in shape.pairs(n_tokens, (ring.rank - step) % ring.n):
                scores = _scores(q[..., queries, :], keys[..., seen, :], shape.scale, allowed)
                # Without any key the sum is 0, and its logarithm −∞ must not be subtracted from −∞.
                found = scores.logsumexp(dim=-1)
                weights = (scores - found.masked_fill(found.isinf(), 0.0)[..., None]).exp()
                part = (weights.to(q.dtype) @ values[..., seen, :]).float()
                before = log_sums[..., queries]
                both = torch.logaddexp(before, found)
                shares = [
                    (t - both).nan_to_num(nan=float("-inf"), neginf=float("-inf")).exp()[..., None] for t in (before, found)
                ]
                log_sums[..., queries] = both
                out[..., queries, :] = out[..., queries, :] * shares[0] + part * shares[1]
            here = next(transfer)
        out = out.to(q.dtype)
        ctx.shape = shape
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        shape, (gradient,) = ctx.shape, upstream
        ring, n_tokens = shape.ring, q.shape[3]
        total = (gradient.float() * out.float()).sum(dim=-1)
        q_gradient = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        here = torch.stack((k, v))
        own = torch.zeros(here.shape, dtype=torch.float32, device=q.device)
        travelling: Tensor | None = None  # gradients of the keys and values that are here, by the ranks they came past
        for step in range(ring.n):
            transfer = ring.passed_on(here) if step < ring.n - 1 else iter((here, here))
            keys, values = next(transfer)[:, :, :, None]
            fresh = own if step == 0 else torch.zeros_like(own)
            for queries, seen, allowed in shape.pairs(n_tokens, (ring.rank - step) % ring.n):
                scores = _scores(q[..., queries, :], keys[..., seen, :], shape.scale, allowed)
                weights = (scores - log_sums[..., queries, None]).exp()
                upper = gradient[..., queries, :]
                fresh[1][..., seen, :] += (weights.to(q.dtype).transpose(-1, -2) @ upper).float().sum(dim=2)
                into = weights * ((upper @ values[..., seen, :].transpose(-1, -2)).float() - total[..., queries, None])
                into = (into * shape.scale).to(q.dtype)
                q_gradient[..., queries, :] += (into @ keys[..., seen, :]).float()
                fresh[0][..., seen, :] += (into.transpose(-1, -2) @ q[..., queries, :]).float().sum(dim=2)
            if step:
                fresh = fresh if travelling is None else fresh + travelling.float()
                *_, travelling = ring.passed_on(fresh.to(q.dtype))
            here = next(transfer)
        if travelling is not None:
            own += travelling.float()
        return q_gradient.to(q.dtype), *own.to(q.dtype).unbind(), None


def _scores(q: Tensor, k: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """(B, K, G, m, m) in fp32, −∞ where a query does not see a key."""
    return ((q * scale) @ k.transpose(-1, -2)).float().masked_fill(~allowed, float("-inf"))


def ring_attention(decoder: Decoder, ranks: Ranks) -> Ring | None:
    """Let ``decoder`` attend round the ranks of each sequence while the ring that is returned has one; None without context
    parallel."""
    if ranks.layout.context == 1:
        return None
    ring = Ring(ranks)
    for layer, block in enumerate(decoder.blocks):
        _attend_round(cast(Any, block).attn, ring, decoder.spec.window_of_layer(layer))
    return ring


def _attend_round(attention: Attention, ring: Ring, window: int | None) -> None:
    plain, alone = attention.mixed, attention.attend

    @torch.compiler.disable
    def round_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert ring.documents is not None
        shape = _Shape(ring, ring.documents.to(q.device), window, attention.scale)
        grouped = q.unflatten(1, (k.shape[1], -1))
        found: Tensor = _RingAttention.apply(grouped, k, v, shape)
        return found.flatten(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return round_ranks(q, k, v) if ring.is_cut else alone(q, k, v, mask)

    def mixed(x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | Packed | None) -> Tensor:
        return plain(x, rope, None if ring.is_cut else mask)  # the mask is of a rank's tokens alone

    attention.attend, attention.mixed = attend, mixed  # type: ignore[method-assign]
