"""The decoder with a KV cache of fixed size, of operations that ``torch.export`` traces, for runtimes on phones.

Blocks are those of ``model.decoder`` but for attention, which here reads the whole cache with a mask (a graph of such a
runtime has one shape of cache), and for experts: a token passes all of them, as two products of a dense layer, and those that
its router did not choose are multiplied by 0. No such runtime multiplies by matrices that a value chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from twostroke.core.errors import ConfigError
from twostroke.core.families import config_from_spec, layout
from twostroke.core.matrices import block_kinds, layer_kinds
from twostroke.core.spec import ModelSpec, RopeSpec
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.moved import Held, Made
from twostroke.model.attention import Attention
from twostroke.model.decoder import Decoder, capped
from twostroke.model.experts import ExpertsMlp, choose_experts
from twostroke.model.latent_attention import LatentAttention
from twostroke.model.load import filled
from twostroke.model.mlp import GatedMlp, PlainMlp
from twostroke.model.rope import angles, by_halves, rotate, turned_by_halves
from twostroke.model.save import bytes_of_files, generation_config, write_json, write_tokenizer

CONTEXT = 2048
"""Tokens of the cache, or those of a model that reads fewer: a program sets the whole of it aside from its start."""

GROUP = 32
"""Weights that share a scale in int4."""

PLAIN = ("router", "shared_gate")
"""Products that every precision leaves in fp32."""

Cache = list[tuple[Tensor, Tensor]]
"""Of each layer its keys and values (1, K, S, D)."""


def require_groups(spec: ModelSpec, target: str) -> None:
    """Raise ConfigError if ``GROUP`` does not divide the inputs of each product of a block, which int4 needs."""
    for matrix in (matrix for matrices, _ in block_kinds(spec) for matrix in matrices):
        if matrix.k % GROUP:
            raise ConfigError(
                f"--to {target} rounds to int4 in groups of {GROUP}, which do not divide the {matrix.k} inputs of "
                f"{matrix.name}. Use int8 or fp32."
            )


def write_companions(source: ExportSource, out: Path) -> None:
    """The configuration and the tokenizer beside a program."""
    write_json(out / "config.json", config_from_spec(source.spec))
    write_json(out / "generation_config.json", generation_config(source.spec))
    if source.tokenizer is not None:
        write_tokenizer(source.tokenizer, source.spec, out)


def is_rounded(module: nn.Module, name: str) -> bool:
    """Whether the precision of a program holds for ``module`` of a block: for products, those of routers apart, on which a
    token's path hangs."""
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] not in PLAIN


def expect_program(
    source: ExportSource,
    held: Held,
    precision: str,
    number_bytes: float = 4.0,
    output_bytes: float | None = None,
    group_bytes: float | None = None,
    one_table: bool = False,
) -> Made:
    """What such a program holds, nearly: numbers of ``number_bytes``, or products in codes with a scale an output (int8) or a
    group (int4), a head in int8 and an embedding in numbers. Beside the codes an output takes ``output_bytes`` and a group
    ``group_bytes``, by default a number each. A tied head is held beside the embedding, but for one in numbers of a program
    of ``one_table``. What compilers add is not known."""
    spec = source.spec
    head = spec.vocab_size * spec.d_model
    matrices = [entry for entry in layout(spec) if entry.matrix is not None]
    in_codes = sum(math.prod(entry.shape) for entry in matrices)
    rest = sum(math.prod(entry.shape) for entry in layout(spec)) - in_codes - (0 if spec.tied_embeddings else head)
    of_output = number_bytes if output_bytes is None else output_bytes
    of_group = number_bytes if group_bytes is None else group_bytes
    if precision not in ("int8", "int4"):
        n_bytes = number_bytes * (rest + in_codes + (0 if one_table and spec.tied_embeddings else head))
    elif precision == "int8":
        n_outputs = sum(entry.shape[0] for entry in matrices) + spec.vocab_size
        n_bytes = number_bytes * rest + of_output * n_outputs + in_codes + head
    else:
        n_bytes = number_bytes * rest + of_output * spec.vocab_size + in_codes * (0.5 + of_group / GROUP) + head
    n_bytes += bytes_of_files((config_from_spec(spec), generation_config(spec)), source.tokenizer)
    return Made(n_bytes)


def notes_of(spec: ModelSpec) -> tuple[str, ...]:
    """What a fixed context changes, and what every token's passing all experts costs."""
    notes = []
    if spec.moe is not None:
        notes.append(
            f"each token passes all {spec.moe.n_experts} experts, of which its router chooses {spec.moe.top_k}: these programs "
            "cannot multiply by matrices that a router chooses."
        )
    if spec.max_positions > CONTEXT:
        notes.append(f"the program's cache holds {CONTEXT} of the model's {spec.max_positions} tokens.")
    if any(rope.scaling in ("longrope", "dynamic") for rope in spec.ropes):
        notes.append(f"the angles of {spec.rope.scaling} positions are those of the program's context.")
    return tuple(notes)


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU by tanh, written out: ExecuTorch 1.5 gives XNNPACK ``gelu`` without its ``approximate``, an error of 2e-4."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def _gated_by_gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return _gelu_tanh(gate) * up


@dataclass
class _Call:
    """What one pass hands to every layer's attention beside the residual stream: the cache before, and as it becomes."""

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    before: Cache = field(default_factory=list)
    after: Cache = field(default_factory=list)


class _CachedAttention(nn.Module):
    """``Attention`` of new tokens over the cache of layer number ``len(call.after)``, in which they are stored first."""

    def __init__(self, attention: Attention, call: _Call) -> None:
        super().__init__()
        self.qkv, self.out = attention.qkv, attention.out
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.spec, self.call, self.sinks = attention.spec, call, attention.sinks

    def _heads(self, x: Tensor, norm: nn.Module | None, n_heads: int, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """(1, heads, T, D) of the projection (1, T, heads·D), normed and turned by its position."""
        spec, shape = self.spec, (1, -1, n_heads, self.spec.head_dim)
        over_all = spec.departures.qk_norm_over_heads
        x = x if norm is None or not over_all else norm(x)
        x = x.view(shape)
        x = x if norm is None or over_all else norm(x)
        if rope is not None:
            x = rotate(x if turned_by_halves(spec) else by_halves(x, spec), *rope)
        return x.transpose(1, 2)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor) -> Tensor:
        spec = self.spec
        h, k, d = spec.n_heads, spec.n_kv_heads, spec.head_dim
        q, key, value = self.qkv(x).split((h * d, k * d, k * d), dim=-1)
        new = self._heads(key, self.k_norm, k, rope), self._heads(value, None, k, None)
        return self.out(_attended(spec, self.call, self._heads(q, self.q_norm, h, rope), new, mask, self.sinks))


class _CachedLatentAttention(nn.Module):
    """The same of ``LatentAttention``: the cache has the keys and values of every head, as they are rebuilt."""

    def __init__(self, spec: ModelSpec, attention: LatentAttention, call: _Call) -> None:
        super().__init__()
        self.attention, self.spec, self.call = attention, spec, call

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor) -> Tensor:
        q, key, value = self.attention.heads(x, rope)
        return self.attention.out(_attended(self.spec, self.call, q, (key, value), mask, None))


def _attended(
    spec: ModelSpec, call: _Call, q: Tensor, new: tuple[Tensor, Tensor], mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """softmax(q·Kᵀ)·V (1, T, H·D_v) of queries (1, H, T, D) over the next layer's cache, in which ``new`` keys and values
    (1, K, T, D) are stored first."""
    keys, values = (old.index_copy(2, call.positions, one) for old, one in zip(call.before[len(call.after)], new, strict=True))
    call.after.append((keys, values))
    h, k = q.shape[1], keys.shape[1]
    q, groups = q * spec.attention_scale, []
    for i, group in enumerate(q.view(k, h // k, -1, q.shape[-1]).unbind(1)):  # one product of G·T rows: a size not traced
        scores = capped(torch.bmm(group, keys[0].transpose(-1, -2)), spec.departures.attention_cap) + mask  # (K, T, S)
        if sinks is None:
            shares = torch.softmax(scores, dim=-1)
        else:
            sink = sinks.view(k, -1)[:, i, None, None] + torch.zeros_like(scores[..., :1])
            shares = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
        groups.append(torch.bmm(shares, values[0]))
    mixed = torch.stack(groups, dim=1).view(h, -1, values.shape[-1])
    return mixed.transpose(0, 1).reshape(1, -1, h * values.shape[-1])


class _EveryExpert(nn.Module):
    """Σ share_e · down_e(activation(gate_e(x)) · up_e(x)) over all experts, as one product (2·X·F outputs) and another (X·F
    inputs), and the shared experts. The share of an expert that was not chosen is 0.

    All gates come before all ups, so that both are parts of (1, T, 2·X·F): ExecuTorch 1.5.1 takes the number of tokens for
    fixed where a tensor is split whose first dimension it is.
    """

    def __init__(self, mlp: ExpertsMlp) -> None:
        super().__init__()
        x = mlp.moe.n_experts
        up, down = mlp.expert_gate_up, mlp.expert_down

        def gates_first(rows: Tensor) -> Tensor:
            return rows.detach().unflatten(0, (x, 2, -1)).transpose(0, 1).flatten(0, 2)

        self.gate_up = _linear(gates_first(up.weight), None if up.bias is None else gates_first(up.bias))
        self.down = _linear(down.weight.detach().unflatten(0, (x, -1)).transpose(0, 1).flatten(1), None)  # (E, X·F)
        self.down_bias = None if down.bias is None else nn.Parameter(down.bias.detach().view(x, -1))
        del mlp.expert_gate_up, mlp.expert_down
        self.mlp = mlp

    def forward(self, normed: Tensor) -> Tensor:
        mlp, n = self.mlp, self.mlp.moe.n_experts
        shares, chosen = choose_experts(mlp.moe, mlp.router(normed)[0], mlp.correction_bias)
        is_chosen = chosen[..., None] == torch.arange(n)  # (T, k, X)
        share = torch.where(is_chosen, shares[..., None], 0.0).sum(dim=1)[None]  # (1, T, X)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        inner = mlp.activation(gate, up).view(1, -1, n, self.down.in_features // n) * share[..., None]
        y = self.down(inner.view(1, -1, self.down.in_features))
        if self.down_bias is not None:
            y = y + share @ self.down_bias
        return mlp.with_shared(y, normed)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


class StaticDecoder(nn.Module):
    """The decoder of ``source`` in fp32. ``forward(tokens (1, T), positions (T), cache)`` gives logits (1, V) of the last token
    and the cache with the new tokens' keys and values. Memory: the model, and one layer's experts."""

    def __init__(self, source: ExportSource) -> None:
        spec = source.spec
        super().__init__()
        self.spec, self.n_context, self.call = spec, min(spec.max_positions, CONTEXT), _Call()
        decoder = filled(Decoder(spec, device="meta"), "cpu", source.state.items())
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False, device="meta")
        self.head.weight = nn.Parameter(decoder.head_weight.detach())
        for block in decoder.blocks:
            if spec.activation == "gelu_tanh" and isinstance(block.mlp, GatedMlp | ExpertsMlp):
                block.mlp.activation = _gated_by_gelu_tanh
            elif spec.activation == "gelu_tanh" and isinstance(block.mlp, PlainMlp):
                block.mlp.activation = _gelu_tanh
            if isinstance(block.mlp, ExpertsMlp):
                block.mlp = _EveryExpert(block.mlp)
            if isinstance(block.attn, LatentAttention):
                block.attn = _CachedLatentAttention(spec, block.attn, self.call)
            else:
                assert isinstance(block.attn, Attention)
                block.attn = _CachedAttention(block.attn, self.call)
        self.decoder = decoder.requires_grad_(False)
        self.tables = {rope: angles(spec, rope, self.n_context) for rope in spec.ropes}

    def empty_cache(self) -> Cache:
        """Zeros for every layer."""
        kind = layer_kinds(self.spec)[0][0]  # all are alike in this
        shapes = [(1, kind.n_kv_heads, self.n_context, n) for n in (kind.qk_dim, kind.v_dim)]
        return [(torch.zeros(shapes[0]), torch.zeros(shapes[1])) for _ in range(self.spec.n_layers)]

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        spec, decoder = self.spec, self.decoder
        x = decoder.embedded(tokens)
        if decoder.position_embed is not None:
            x = x + decoder.position_embed(positions)
        turns: dict[RopeSpec | None, tuple[Tensor, Tensor] | None] = {None: None}
        for rope, (frequencies, magnitudes) in self.tables.items():
            turned = positions[None, :, None].float() * frequencies
            turns[rope] = (turned.cos() * magnitudes, turned.sin() * magnitudes)
        distance = positions[:, None] - torch.arange(self.n_context)  # (T, S)
        masks = {}
        for window in dict.fromkeys(spec.window_of_layer(i) for i in range(spec.n_layers)):
            seen = distance >= 0
            seen = seen if window is None else seen & (distance < window)
            masks[window] = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        call = self.call
        call.positions, call.before, call.after = positions, cache, []
        for layer, block in enumerate(decoder.blocks):
            x = block(x, turns[spec.rope_of_layer(layer)], masks[spec.window_of_layer(layer)])
        after, call.before, call.after = call.after, [], []
        call.positions = torch.empty(0, dtype=torch.int64)
        return capped(self.head(decoder.read_out(x[:, -1])), decoder.logit_cap), after
