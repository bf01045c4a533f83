"""``ModelSpec``: the one description of a model that planner, builder, engine and exporters read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from twostroke.core.errors import ConfigError

RopeScaling = Literal["none", "linear", "llama3"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned"]
Mlp = Literal["swiglu", "gelu"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
"""Beyond these a number is a mistake or an attack; below them, sizes multiply without overflow in 64 bits."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: inverse frequencies θ^(−2i/D), optionally rescaled.

    ``linear`` divides every frequency by ``factor``; ``llama3`` divides the low ones by ``factor``, keeps the high ones
    and blends between, by wavelength against ``original_max_positions`` (Llama 3.1 release, ``rope_type: llama3``).
    """

    theta: float = 10_000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"rope {name}={getattr(self, name)} must be positive and finite.")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}."
            )


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. One letter, one meaning, as in ``docs/notation.md``: V, L, E, H, K, D, F.

    ``sliding_window`` is the number of keys, itself included, that a query may see in the layers listed in
    ``sliding_window_layers`` (None there: in all of them). Raises ConfigError, naming field, value and rule.
    """

    family: str
    vocab_size: int  # V
    n_layers: int  # L
    d_model: int  # E
    n_heads: int  # H
    n_kv_heads: int  # K
    head_dim: int  # D
    d_ff: int  # F
    max_positions: int
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    positions: Positions = "rope"
    rope: RopeSpec = RopeSpec()
    mlp: Mlp = "swiglu"
    activation: Activation = "silu"
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    sliding_window: int | None = None
    sliding_window_layers: tuple[int, ...] | None = None
    dropout: float = 0.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
            most = MAX_LAYERS if name == "n_layers" else MAX_SIZE
            if value > most:
                raise ConfigError(f"{name}={value} must be at most {most}.")
        if self.n_heads % self.n_kv_heads:
            divisors = [d for d in range(1, self.n_heads + 1) if self.n_heads % d == 0]
            raise ConfigError(
                f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}. Use one of {', '.join(map(str, divisors))}."
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even for rotary positions. Use {self.head_dim + 1}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and less than 1.")
        if not 0 < self.norm_eps < float("inf"):
            raise ConfigError(f"norm_eps={self.norm_eps} must be positive and finite.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window={self.sliding_window} must be at least 1, or absent.")

    @property
    def queries_per_kv_head(self) -> int:
        """G = H / K, the size of a query group."""
        return self.n_heads // self.n_kv_heads

    @property
    def qkv_rows(self) -> int:
        """Rows of the packed query, key and value projection: (H + 2K)·D."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    def window_of_layer(self, layer: int) -> int | None:
        """Sliding window of ``layer`` in keys, or None where it attends to everything before it."""
        if self.sliding_window is None:
            return None
        if self.sliding_window_layers is None or layer in self.sliding_window_layers:
            return self.sliding_window
        return None

    def with_(self, **changes: Any) -> ModelSpec:
        """A copy with some fields changed, checked again."""
        known = {f.name for f in fields(self)}
        unknown = set(changes) - known
        if unknown:
            raise ConfigError(f"ModelSpec has no field {sorted(unknown)[0]!r}.")
        return replace(self, **changes)
