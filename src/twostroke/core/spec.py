"""``ModelSpec``: the one description of a model that planner, builder, engine and exporters read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from twostroke.core.checks import check_whole
from twostroke.core.errors import ConfigError

RopeScaling = Literal["none", "linear", "proportional", "llama3", "dynamic", "yarn", "longrope", "by_layer"]
ROPE_SCALINGS = frozenset(("none", "linear", "proportional", "llama3", "dynamic", "yarn", "longrope"))
"""Those whose angles are computed here."""
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned", "alibi"]
Mlp = Literal["swiglu", "gelu"]
"""swiglu: gated, two matrices up and one down, whatever the activation; gelu: plain, one up and one down."""
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swish", "relu"]
"""clamped_swish, of gated MLPs alone: min(g, 7)·σ(1.702·g)·(1 + u) of a gate g and an up u within ±7 (gpt-oss)."""
RouterScores = Literal["softmax", "sigmoid"]

MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
"""Beyond these a number is a mistake or an attack; below them, sizes multiply without overflow in 64 bits."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: inverse frequencies θ^(−2i/D), optionally rescaled.

    ``linear`` divides every frequency by ``factor``; ``proportional`` does so too, and turns only the leading ``turned_share``
    of the angles, their frequencies those of the whole head (Gemma 4, transformers 5); ``dynamic`` raises θ for sequences
    longer than the model's positions; ``llama3`` divides the low frequencies by ``factor``, keeps the high ones and blends
    between, by wavelength against ``original_max_positions`` (Llama 3.1 release); ``yarn`` blends between dimensions that turn
    ``beta_fast`` and ``beta_slow`` times (arXiv 2309.00071); ``longrope`` divides each by a factor of its own, ``long_factors``
    beyond ``original_max_positions`` (arXiv 2402.13753). The last two multiply sines and cosines by ``magnitude``. ``by_layer``
    is named for plans, which read no angle.
    """

    theta: Annotated[float, "base of the frequencies"] = 10_000.0
    scaling: Annotated[RopeScaling, "none, linear, proportional, llama3, dynamic, yarn, longrope or by_layer"] = "none"
    factor: Annotated[float, "of the scaling"] = 1.0
    low_freq_factor: Annotated[float, "llama3"] = 1.0
    high_freq_factor: Annotated[float, "llama3"] = 4.0
    original_max_positions: Annotated[int, "tokens before scaling"] = 8192
    beta_fast: Annotated[float, "yarn: turns above which a dimension is not scaled"] = 32.0
    beta_slow: Annotated[float, "yarn: turns below which one is scaled wholly"] = 1.0
    truncate: Annotated[bool, "yarn: the two bounds are whole dimensions"] = True
    magnitude: Annotated[float, "yarn, longrope: of sines and cosines"] = 1.0
    short_factors: Annotated[tuple[float, ...], "longrope: divisors up to the tokens before scaling"] = ()
    long_factors: Annotated[tuple[float, ...], "longrope: divisors beyond them"] = ()
    turned_share: Annotated[float, "proportional: of a head's angles, those that turn"] = 1.0

    def __post_init__(self) -> None:
        numbers = "theta factor low_freq_factor high_freq_factor original_max_positions beta_fast beta_slow magnitude"
        for name in numbers.split():
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"rope {name}={getattr(self, name)} must be positive and finite.")
        if not 0 < self.turned_share <= 1:
            raise ConfigError(f"rope turned_share={self.turned_share} must be above 0 and at most 1.")
        for name in ("short_factors", "long_factors"):
            if not all(0 < divisor < float("inf") for divisor in getattr(self, name)):
                raise ConfigError(f"rope {name} must be positive and finite numbers.")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}."
            )


def _check_sizes(owner: str, values: Mapping[str, Any], least: int = 1) -> None:
    """ConfigError for the first value that is not a whole number from ``least`` to ``MAX_SIZE``."""
    for name, value in values.items():
        check_whole(f"{owner}{name}", value, least, MAX_SIZE)


def _check_heads(owner: str, n_kv_heads: int, n_heads: int) -> None:
    """ConfigError, naming up to ten nearest divisors, where key heads do not divide query heads evenly."""
    if n_heads % n_kv_heads == 0:
        return
    small = [d for d in range(1, math.isqrt(n_heads) + 1) if n_heads % d == 0]
    nearest = sorted({*small, *(n_heads // d for d in small)}, key=lambda d: abs(d - n_kv_heads))[:10]
    raise ConfigError(
        f"{owner}n_kv_heads={n_kv_heads} must divide n_heads={n_heads}. Use one of {', '.join(map(str, sorted(nearest)))}."
    )


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: a router picks ``top_k`` of ``n_experts`` MLPs of width ``d_expert`` for each token."""

    n_experts: Annotated[int, "routed experts of a layer"]
    top_k: Annotated[int, "experts that one token passes"]
    d_expert: Annotated[int, "width of one"]
    n_shared_experts: Annotated[int, "experts every token passes"] = 0
    d_shared: Annotated[int, "width of one of those"] = 0
    layers: Annotated[tuple[int, ...] | None, "layers with experts, the others having the dense MLP; null: all"] = None
    router_bias: Annotated[bool, "the router has a bias"] = False
    expert_bias: Annotated[bool, "experts have biases"] = False
    correction_bias: Annotated[
        bool, "one stored number an expert balances the choice (DeepSeek-V3, arXiv 2412.19437, 2.1.2)"
    ] = False
    router_scales: Annotated[bool, "a scale per router input and one per expert (Gemma 4)"] = False
    shared_gate: Annotated[bool, "one number a token weighs the shared experts (Qwen1.5-MoE)"] = False
    scores: Annotated[RouterScores, "softmax over all experts, or sigmoid of each (DeepSeek-V3)"] = "softmax"
    normalised: Annotated[bool, "the chosen experts' shares are divided by their sum"] = True
    share_scale: Annotated[float, "of the shares"] = 1.0
    n_groups: Annotated[int, "groups of experts"] = 1
    top_groups: Annotated[int, "groups that a token's experts are chosen from (DeepSeek-V2, arXiv 2405.04434, 2.2.2)"] = 1

    def __post_init__(self) -> None:
        sizes = ("n_experts", "top_k", "d_expert", "n_groups", "top_groups")
        _check_sizes("moe ", {name: getattr(self, name) for name in sizes})
        _check_sizes("moe ", {name: getattr(self, name) for name in ("n_shared_experts", "d_shared")}, least=0)
        if self.top_k > self.n_experts:
            raise ConfigError(f"moe top_k={self.top_k} must be at most n_experts={self.n_experts}.")
        if not 0 < self.share_scale < float("inf"):
            raise ConfigError(f"moe share_scale={self.share_scale} must be positive and finite.")
        if self.n_experts % self.n_groups or self.top_groups > self.n_groups:
            raise ConfigError(
                f"moe n_groups={self.n_groups} must divide n_experts={self.n_experts}, and top_groups={self.top_groups} "
                "must be at most n_groups."
            )
        if self.correction_bias and self.n_groups == self.n_experts > 1:
            raise ConfigError(
                f"moe n_groups={self.n_groups} leaves one expert in a group, but with a correction bias groups are "
                "ranked by their two best. Use fewer groups."
            )
        if self.top_groups * (self.n_experts // self.n_groups) < self.top_k:
            raise ConfigError(f"moe top_groups={self.top_groups} must hold top_k={self.top_k} experts.")
        if self.n_shared_experts and not self.d_shared:
            raise ConfigError(f"moe d_shared must be given where n_shared_experts={self.n_shared_experts}.")

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together."""
        return self.n_shared_experts * self.d_shared


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are rebuilt from one cached latent vector.

    Cached per token and layer: ``kv_lora_rank + qk_rope_dim`` elements.
    """

    q_lora_rank: Annotated[int | None, "width of the compressed query; null: queries are not compressed"]
    kv_lora_rank: Annotated[int, "width of the compressed keys and values"]
    qk_nope_dim: Annotated[int, "dimensions of a head without position"]
    qk_rope_dim: Annotated[int, "dimensions with rotary position"]
    v_dim: Annotated[int, "dimensions of a value"]

    def __post_init__(self) -> None:
        _check_sizes("mla ", {name: getattr(self, name) for name in ("kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_dim")})
        if self.q_lora_rank is not None:
            _check_sizes("mla ", {"q_lora_rank": self.q_lora_rank})
        if self.qk_rope_dim % 2:
            raise ConfigError(f"mla qk_rope_dim={self.qk_rope_dim} must be even. Use {self.qk_rope_dim + 1}.")


@dataclass(frozen=True)
class IndexerSpec:
    """Sparse attention (DeepSeek-V3.2, GLM-5): small heads score every key, and attention reads the ``top_k`` best."""

    n_heads: Annotated[int, "heads that score keys"]
    head_dim: Annotated[int, "their width"]
    top_k: Annotated[int, "keys that attention reads"]

    def __post_init__(self) -> None:
        _check_sizes("indexer ", {name: getattr(self, name) for name in ("n_heads", "head_dim", "top_k")})


@dataclass(frozen=True)
class GlobalAttention:
    """Shape of attention in the layers without a window where it is another than in those with one (Gemma 4)."""

    n_kv_heads: Annotated[int, "key heads"]
    head_dim: Annotated[int, "width of a head"]
    keys_are_values: Annotated[bool, "one projection serves both"] = False

    def __post_init__(self) -> None:
        _check_sizes("global attention ", {name: getattr(self, name) for name in ("n_kv_heads", "head_dim")})


@dataclass(frozen=True)
class Departures:
    """Where a model departs from Llama's block. All of it is counted; ``names`` are what the decoder does not build."""

    parallel_block: Annotated[bool, "attention and MLP side by side"] = False
    norms_per_block: Annotated[int, "norms of width E: 4 are before and after each branch, 1 serves both branches"] = 2
    norms_after: Annotated[bool, "norms of what attention and MLP add, instead of what they read"] = False
    norm_bias: Annotated[bool, "a LayerNorm has a bias"] = True
    norm_offset: Annotated[bool, "norms multiply by 1 + their stored weight"] = False
    final_norm: Annotated[bool, "a norm after the last block"] = True
    embedding_norm: Annotated[bool, "a norm on the embedding"] = False
    embedding_dim: Annotated[int | None, "width of the embedding where two projections join it to E"] = None
    embedding_scale: Annotated[float, "of a token's embedding"] = 1.0
    extra_positions: Annotated[int, "rows of the position table that no token reaches"] = 0
    head_bias: Annotated[bool, "the output head has a bias"] = False
    logit_scale: Annotated[float, "of the logits"] = 1.0
    logit_cap: Annotated[float | None, "c of logits bounded to c·tanh(logit/c)"] = None
    attention_scale: Annotated[float | None, "of the scores; null: 1/√D"] = None
    attention_cap: Annotated[float | None, "c of scores bounded to c·tanh(score/c)"] = None
    attention_sinks: Annotated[bool, "a learned logit a head"] = False
    residual_scale: Annotated[float, "of what attention and MLP add"] = 1.0
    rotary_dim: Annotated[int | None, "leading dimensions of a head that are turned; null: all"] = None
    neighbours_turn: Annotated[bool, "an angle turns two neighbours, not one number of each half"] = False
    unrotated_layers: Annotated[tuple[int, ...], "layers without positions"] = ()
    windowed_rope: Annotated[RopeSpec | None, "rotary positions of windowed layers where they have their own"] = None
    qk_norm_over_heads: Annotated[bool, "one norm over all heads"] = False
    layer_scale: Annotated[bool, "a stored number a layer"] = False
    without_parameters: Annotated[tuple[str, ...], "features that change what is computed and add nothing to count"] = ()

    def __post_init__(self) -> None:
        _check_sizes("", {"norms_per_block": self.norms_per_block})
        _check_sizes("", {"extra_positions": self.extra_positions}, least=0)
        for name in ("embedding_dim", "rotary_dim"):
            if getattr(self, name) is not None:
                _check_sizes("", {name: getattr(self, name)})
        for name in ("embedding_scale", "logit_scale", "logit_cap", "attention_scale", "attention_cap", "residual_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be positive and finite.")

    @property
    def norms_around(self) -> bool:
        """Whether each branch has a norm before it and another after it."""
        return self.norms_per_block == 4

    @property
    def one_norm(self) -> bool:
        """Whether both branches read the same norm."""
        return self.parallel_block and self.norms_per_block == 1

    @property
    def names(self) -> tuple[str, ...]:
        """Each departure that is not built, in words."""
        usual = (1, 2) if self.parallel_block else (2, 4)
        named = {
            "other norms than two a block and a final one": not self.final_norm or self.norms_per_block not in usual,
            "a norm on the embedding": self.embedding_norm,
            "a projected embedding": self.embedding_dim is not None,
            "offset positions": self.extra_positions > 0,
            "a bias on the output head": self.head_bias,
            "a scale per layer": self.layer_scale,
        }
        return tuple(name for name, present in named.items() if present) + self.without_parameters


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. One letter, one meaning, as in ``docs/notation.md``: V, L, E, H, K, D, F.

    Every model can be planned; ``unbuilt_features`` names what decoder and engine do not compute, such as ``indexer`` and
    ``global_attention``. With latent attention ``head_dim`` is the width of a rebuilt key, ``n_kv_heads`` the number of query
    heads. Raises ConfigError, naming field, value and rule.
    """

    family: Annotated[str, "model_type of config.json"]
    vocab_size: Annotated[int, "V, entries of the vocabulary"]
    n_layers: Annotated[int, "L, layers"]
    d_model: Annotated[int, "E, width of the model"]
    n_heads: Annotated[int, "H, query heads"]
    n_kv_heads: Annotated[int, "K, key heads"]
    head_dim: Annotated[int, "D, width of a head"]
    d_ff: Annotated[int, "F, width of the MLP"]
    max_positions: Annotated[int, "tokens of the longest context"]
    norm: Annotated[Norm, "rmsnorm or layernorm"] = "rmsnorm"
    norm_eps: Annotated[float, "its ε"] = 1e-5
    positions: Annotated[Positions, "rope, learned or alibi"] = "rope"
    rope: Annotated[RopeSpec, "rotary positions"] = RopeSpec()
    mlp: Annotated[Mlp, "swiglu (gated) or gelu (plain)"] = "swiglu"
    activation: Annotated[Activation, "silu, gelu, gelu_tanh or relu"] = "silu"
    qkv_bias: Annotated[bool, "biases of query, key and value"] = False
    attn_out_bias: Annotated[bool, "bias of attention's output"] = False
    mlp_bias: Annotated[bool, "biases of the MLP"] = False
    qk_norm: Annotated[bool, "queries and keys are normed"] = False
    tied_embeddings: Annotated[bool, "the head is the embedding"] = False
    sliding_window: Annotated[int | None, "keys, itself included, that a query sees in windowed layers"] = None
    sliding_window_layers: Annotated[tuple[int, ...] | None, "the windowed layers; null: all"] = None
    dropout: Annotated[float, "share dropped in training"] = 0.0
    bos_token_id: Annotated[int | None, "first token"] = None
    eos_token_ids: Annotated[tuple[int, ...], "tokens that end an answer"] = ()
    moe: Annotated[MoeSpec | None, "experts, where there are any"] = None
    mla: Annotated[MlaSpec | None, "latent attention, where it is used"] = None
    indexer: Annotated[IndexerSpec | None, "sparse attention, where it is used"] = None
    global_attention: Annotated[GlobalAttention | None, "another shape of unwindowed layers"] = None
    departures: Annotated[Departures, "from Llama's block"] = Departures()
    checkpoint_scheme: Annotated[str | None, "format of the published weights where it is quantised"] = field(
        default=None, compare=False
    )
    early_exit: Annotated[bool, "the head was trained to read every layer"] = field(default=False, compare=False)
    notes: Annotated[tuple[str, ...], "what was left out or taken from elsewhere"] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_positions"):
            value, most = getattr(self, name), MAX_LAYERS if name == "n_layers" else MAX_SIZE
            check_whole(name, value, most=most)
        _check_heads("", self.n_kv_heads, self.n_heads)
        if self.positions == "rope" and self.mla is None and self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even for rotary positions. Use {self.head_dim + 1}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and less than 1.")
        if not 0 < self.norm_eps < float("inf"):
            raise ConfigError(f"norm_eps={self.norm_eps} must be positive and finite.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window={self.sliding_window} must be at least 1, or absent.")
        if self.global_attention is not None:
            _check_heads("global ", self.global_attention.n_kv_heads, self.n_heads)
        if self.moe is not None and self.moe.layers is not None and not set(self.moe.layers) <= set(range(self.n_layers)):
            raise ConfigError(f"moe layers must be among 0 to {self.n_layers - 1}.")
        turned = self.departures.rotary_dim
        if turned is not None and (turned > self.head_dim or turned % 2):
            raise ConfigError(f"rotary_dim={turned} must be even and at most head_dim={self.head_dim}.")
        for rope in (self.rope, self.departures.windowed_rope):
            if rope is not None and self.mla is None:
                self._check_rope(rope)
        if not set(self.departures.unrotated_layers) <= set(range(self.n_layers)):
            raise ConfigError(f"unrotated_layers must be among 0 to {self.n_layers - 1}.")
        if self.indexer is not None and (self.mla is None or self.mla.q_lora_rank is None):
            raise ConfigError("an indexer needs latent attention with q_lora_rank: its queries are made from that latent.")

    def _check_rope(self, rope: RopeSpec) -> None:
        n_angles, lengths = self.rotary_dim // 2, {len(rope.short_factors), len(rope.long_factors)}
        if lengths not in ({0}, {n_angles}):
            raise ConfigError(f"rope short_factors and long_factors must be {n_angles} numbers each, one for each angle.")
        if rope.scaling == "yarn" and rope.theta <= 1:
            raise ConfigError(f"rope theta={rope.theta} must be above 1 for yarn scaling.")
        if rope.scaling == "dynamic" and n_angles < 2:
            raise ConfigError(f"rotary_dim={self.rotary_dim} must be above 2 for dynamic scaling.")

    def __hash__(self) -> int:
        """Of the fields that are compared, computed once: a plan asks caches for the same spec hundreds of times."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, one.name) for one in fields(self) if one.compare))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process would compute differently."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_hash", "_attended")}

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer`` has experts in the place of its MLP."""
        return self.moe is not None and (self.moe.layers is None or layer in self.moe.layers)

    @property
    def attended(self) -> ModelSpec:
        """The model as the engine's attention and cache see it: itself, or with latent attention one key head of the rotated
        dimensions and the latent, which all query heads share (arXiv 2405.04434, 2.1.2, after absorption)."""
        if self.mla is None:
            return self
        known: ModelSpec | None = self.__dict__.get("_attended")
        if known is None:
            away = replace(self.departures, rotary_dim=self.mla.qk_rope_dim, attention_scale=self.attention_scale)
            width = self.mla.qk_rope_dim + self.mla.kv_lora_rank
            known = replace(self, mla=None, n_kv_heads=1, head_dim=width, qk_norm=False, departures=away)
            object.__setattr__(self, "_attended", known)
        return known

    @property
    def queries_per_kv_head(self) -> int:
        """G = H / K, the size of a query group."""
        return self.n_heads // self.n_kv_heads

    def window_of_layer(self, layer: int) -> int | None:
        """Sliding window of ``layer`` in keys, or None where it attends to everything before it."""
        if self.sliding_window is None:
            return None
        if self.sliding_window_layers is None or layer in self.sliding_window_layers:
            return self.sliding_window
        return None

    def rope_of_layer(self, layer: int) -> RopeSpec | None:
        """The rotary positions of ``layer``; None where it has none."""
        if self.positions != "rope" or layer in self.departures.unrotated_layers:
            return None
        own = self.departures.windowed_rope
        return self.rope if own is None or self.window_of_layer(layer) is None else own

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary positions of all layers, in order of first appearance."""
        found = (self.rope_of_layer(layer) for layer in range(self.n_layers))
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that positions turn."""
        return self.departures.rotary_dim or self.head_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied with before the softmax."""
        own = self.departures.attention_scale
        return float(self.head_dim**-0.5) if own is None else own

    @property
    def window_of_every_layer(self) -> int | None:
        """The window where all layers have one: keys beyond it are never read again. None where a layer sees everything."""
        if self.sliding_window is None:
            return None
        everywhere = all(self.window_of_layer(layer) is not None for layer in range(self.n_layers))
        return self.sliding_window if everywhere else None

    @property
    def unbuilt_features(self) -> tuple[str, ...]:
        """What the decoder and the engine do not compute yet, in words; empty where the model can be built."""
        moe, away = self.moe, self.departures
        named = {
            "a scale per router input": moe is not None and moe.router_scales,
            "experts without a gate": moe is not None and self.mlp != "swiglu",
            "norms of what experts add": moe is not None and (away.norms_after or away.norms_around or away.parallel_block),
            "latent attention beside another norm or place of it": self.mla is not None
            and (away.norms_after or away.norms_around or away.parallel_block or self.norm != "rmsnorm" or self.qk_norm),
            "sparse attention by an indexer": self.indexer is not None,
            "global attention of another shape": self.global_attention is not None,
            "ALiBi positions": self.positions == "alibi",
            "the ReLU activation": self.activation == "relu",
            f"{self.rope.scaling} rotary scaling": self.rope.scaling not in ROPE_SCALINGS,
        }
        return tuple(name for name, present in named.items() if present) + self.departures.names

    def require_buildable(self) -> None:
        """ConfigError, naming the features, where the model can be planned and not built."""
        if not self.unbuilt_features:
            return
        features = ", ".join(self.unbuilt_features)
        raise ConfigError(f"model_type={self.family!r} can be planned but not built yet: {features}.")

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelSpec:
        """The inverse of ``dataclasses.asdict``, also after a journey through JSON. TypeError for a field that is not known
        or not of its kind."""
        parts = {"rope": RopeSpec, "moe": MoeSpec, "mla": MlaSpec, "indexer": IndexerSpec}
        parts |= {"global_attention": GlobalAttention, "departures": Departures}

        def plain(table: Mapping[str, Any]) -> dict[str, Any]:
            if not isinstance(table, Mapping):
                raise TypeError(f"{table!r:.80} is not a table of fields")
            return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}

        given = plain(values)
        if isinstance(given.get("departures"), Mapping):
            own = plain(given["departures"])
            if own.get("windowed_rope") is not None:
                own["windowed_rope"] = RopeSpec(**plain(own["windowed_rope"]))
            given["departures"] = own
        built = {key: parts[key](**plain(value)) for key, value in given.items() if key in parts and value is not None}
        return ModelSpec(**(given | built))

    def with_(self, **changes: Any) -> ModelSpec:
        """A copy with some fields changed, checked again."""
        known = {f.name for f in fields(self)}
        unknown = set(changes) - known
        if unknown:
            raise ConfigError(f"ModelSpec has no field {sorted(unknown)[0]!r}.")
        return replace(self, **changes)
