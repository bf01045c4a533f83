"""Llama, Mistral, Qwen2 and Qwen3: one layout of keys, different defaults, biases, QK-norm and windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.reader import ACTIVATION_NAMES, Reader, activation
from twostroke.core.spec import MAX_LAYERS, Departures, ModelSpec, RopeSpec


@dataclass(frozen=True)
class Defaults:
    """What transformers assumes where a family's config.json lacks a key. ``n_kv_heads`` None: as many as query heads."""

    max_positions: int
    n_kv_heads: int | None = None
    bos: int | None = None
    eos: int | None = None


def llama_like(
    family: str, config: dict[str, Any], defaults: Defaults, rope: RopeSpec | None = None, **extra: Any
) -> ModelSpec:
    """The keys that Llama and its relatives share; ``extra`` replaces or adds fields; ``rope`` None is read."""
    r = Reader(config)
    heads = r.integer("num_attention_heads")
    width = r.integer("hidden_size")
    # An explicit null means one KV head for each query head, in every family.
    kv_heads = heads if "num_key_value_heads" in config or defaults.n_kv_heads is None else defaults.n_kv_heads
    if config.get("head_dim") is None and heads > 0 and width % heads:
        raise ConfigError(f"config.json: num_attention_heads={heads} must divide hidden_size={width}, or head_dim be given.")
    head_dim = r.integer("head_dim", width // heads if heads > 0 else 1)
    turned = r.rotary_dim(head_dim)
    unusual = () if turned is None else ("partial rotary positions in this family",)
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": r.integer("vocab_size"),
        "n_layers": r.integer("num_hidden_layers"),
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": r.integer("num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "d_ff": r.integer("intermediate_size"),
        "max_positions": r.integer("max_position_embeddings", defaults.max_positions),
        "norm_eps": r.number("rms_norm_eps", 1e-6),
        "rope": rope or r.rope(),
        "departures": Departures(rotary_dim=turned, without_parameters=unusual),
        "activation": activation(config.get("hidden_act", "silu")),
        "tied_embeddings": r.flag("tie_word_embeddings", False),
        "dropout": r.number("attention_dropout", 0.0),
        "bos_token_id": r.token_id("bos_token_id", defaults.bos),
        "eos_token_ids": r.token_ids("eos_token_id", defaults.eos),
    }
    return ModelSpec(**(values | extra))


def parse_llama(config: dict[str, Any]) -> ModelSpec:
    """RMSNorm before each branch, rotary positions, grouped queries, a gated MLP: what the others are told by."""
    r = Reader(config)
    bias = r.flag("attention_bias", False)
    defaults = Defaults(max_positions=2048, bos=1, eos=2)
    return llama_like("llama", config, defaults, qkv_bias=bias, attn_out_bias=bias, mlp_bias=r.flag("mlp_bias", False))


def parse_mistral(config: dict[str, Any]) -> ModelSpec:
    """Llama with a window in every layer, where there is one."""
    # A missing key means transformers' default of 4096; an explicit null means no window.
    windowless = "sliding_window" in config and config["sliding_window"] is None
    window = None if windowless else Reader(config).integer("sliding_window", 4096)
    defaults = Defaults(max_positions=131_072, n_kv_heads=8, bos=1, eos=2)
    return llama_like("mistral", config, defaults, sliding_window=window)


def qwen_window(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen windows only some layers, and only when ``use_sliding_window`` says so."""
    r = Reader(config)
    if not r.flag("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        return {}
    n_layers = r.integer("num_hidden_layers")
    if not 0 < n_layers <= MAX_LAYERS:
        return {}  # ModelSpec says what is wrong with it
    kinds = config.get("layer_types")
    if kinds is None:
        layers = tuple(range(max(0, r.integer("max_window_layers", 28)), n_layers))
    else:
        if not isinstance(kinds, list) or len(kinds) != n_layers:
            raise ConfigError(f"config.json: layer_types must list num_hidden_layers={n_layers} kinds.")
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"sliding_window": r.integer("sliding_window", 4096), "sliding_window_layers": layers}


def windowed_layers(r: Reader, n_layers: int, period: int) -> tuple[int, ...]:
    """The layers that ``layer_types`` gives a window; where it is missing, all but every ``period``-th (0: none)."""
    if r.config.get("layer_types") is None:
        return tuple(i for i in range(n_layers) if period and (i + 1) % period)
    return r.layers_of_kind("layer_types", "sliding_attention", n_layers, ("sliding_attention", "full_attention"))


def other_layers(n_layers: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Those of all that are not among ``layers``."""
    listed = frozenset(layers)
    return tuple(i for i in range(n_layers) if i not in listed)


QWEN_DEFAULTS = Defaults(max_positions=32_768, n_kv_heads=32)


def parse_qwen2(config: dict[str, Any]) -> ModelSpec:
    """Qwen 2 and 2.5: Llama with biases of query, key and value, in some releases windows in upper layers."""
    return llama_like("qwen2", config, QWEN_DEFAULTS, qkv_bias=True, **qwen_window(config))


def parse_qwen3(config: dict[str, Any]) -> ModelSpec:
    """Llama with QK-norm by head."""
    bias = Reader(config).flag("attention_bias", False)
    config = {"head_dim": 128} | config  # transformers' Qwen3Config default, not hidden_size / heads
    return llama_like("qwen3", config, QWEN_DEFAULTS, qkv_bias=bias, attn_out_bias=bias, qk_norm=True, **qwen_window(config))


_SCALING_KEYS = {
    "linear": ("factor",),
    "proportional": ("factor", "turned_share"),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
    "yarn": ("factor", "original_max_positions", "beta_fast", "beta_slow", "truncate", "magnitude"),
    "longrope": ("original_max_positions", "short_factors", "long_factors", "magnitude"),
}
_SPELLED = {
    "original_max_positions": "original_max_position_embeddings",
    "turned_share": "partial_rotary_factor",
    "magnitude": "attention_factor",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}


def _scaling(rope: RopeSpec) -> dict[str, Any] | None:
    """``rope_scaling`` of a config.json; None without a scaling."""
    if rope.scaling == "none":
        return None
    values = {_SPELLED.get(key, key): getattr(rope, key) for key in _SCALING_KEYS[rope.scaling]}
    return {"rope_type": rope.scaling} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def rope_parameters(rope: RopeSpec) -> dict[str, Any]:
    """``rope_parameters`` of a config.json."""
    return {"rope_type": "default", "rope_theta": rope.theta} | (_scaling(rope) or {})


def write_llama_like(spec: ModelSpec) -> dict[str, Any]:
    share = {"partial_rotary_factor": spec.rotary_dim / spec.head_dim} if spec.departures.rotary_dim is not None else {}
    return {
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": spec.n_layers,
        "hidden_size": spec.d_model,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.d_ff,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": ACTIVATION_NAMES[spec.activation],
        # Both spellings: readers of transformers 4's layout (vLLM, llama.cpp's converter) and of transformers 5's.
        "rope_theta": spec.rope.theta,
        "rope_scaling": _scaling(spec.rope),
        "rope_parameters": rope_parameters(spec.rope) | share,
        "tie_word_embeddings": spec.tied_embeddings,
        "attention_dropout": spec.dropout,
        **share,
    }


def kinds_of_layers(spec: ModelSpec) -> list[str]:
    """``layer_types`` of a config.json."""
    windows = (spec.window_of_layer(i) for i in range(spec.n_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def write_windows(spec: ModelSpec) -> dict[str, Any]:
    """Windows by layer, and rotary positions of both kinds of layer."""
    own = spec.departures.windowed_rope or spec.rope
    return {
        "sliding_window": spec.sliding_window,
        "layer_types": kinds_of_layers(spec),
        "rope_parameters": {"full_attention": rope_parameters(spec.rope), "sliding_attention": rope_parameters(own)},
    }


NO_PADDING = {"pad_token_id": None}
"""For families whose padding token in transformers is beyond a small vocabulary, which it refuses."""


def write_llama(spec: ModelSpec) -> dict[str, Any]:
    if spec.d_model % spec.n_heads:  # transformers' LlamaConfig insists, although head_dim is given
        raise ConfigError(f"n_heads={spec.n_heads} must divide d_model={spec.d_model} in family='llama'.")
    return write_llama_like(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def write_mistral(spec: ModelSpec) -> dict[str, Any]:
    return write_llama_like(spec) | {"sliding_window": spec.sliding_window}


def write_qwen(spec: ModelSpec) -> dict[str, Any]:
    windowed = [spec.window_of_layer(i) is not None for i in range(spec.n_layers)]
    config = write_llama_like(spec) | {
        "use_sliding_window": any(windowed),
        "sliding_window": spec.sliding_window,
        "max_window_layers": windowed.index(True) if any(windowed) else spec.n_layers,
        "layer_types": kinds_of_layers(spec),
    }
    if spec.family == "qwen3":
        config["attention_bias"] = spec.qkv_bias
    return config
