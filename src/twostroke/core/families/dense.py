"""Dense relatives of Llama with a part of their own: norms elsewhere, layers without positions, multipliers."""

from __future__ import annotations

from typing import Any

from twostroke.core.documents import is_integer
from twostroke.core.errors import ConfigError
from twostroke.core.families.llama import (
    NO_PADDING,
    Defaults,
    kinds_of_layers,
    llama_like,
    other_layers,
    windowed_layers,
    write_llama_like,
    write_windows,
)
from twostroke.core.families.reader import Reader
from twostroke.core.spec import Departures, ModelSpec

# -- StarCoder2 -----------------------------------------------------------------------------------------------------------


def parse_starcoder2(config: dict[str, Any]) -> ModelSpec:
    """LayerNorm, a plain MLP, biases, grouped-query attention with a window."""
    r = Reader(config)
    bias = r.flag("use_bias", True)
    return llama_like(
        "starcoder2", config | {"hidden_act": config.get("hidden_act", "gelu_pytorch_tanh")},
        Defaults(max_positions=4096, n_kv_heads=2, bos=50256, eos=50256), norm="layernorm",
        norm_eps=r.number("norm_epsilon", 1e-5), mlp="gelu", qkv_bias=bias, attn_out_bias=bias, mlp_bias=bias,
        tied_embeddings=r.flag("tie_word_embeddings", True), sliding_window=r.optional_integer("sliding_window"),
    )  # fmt: skip


def write_starcoder2(spec: ModelSpec) -> dict[str, Any]:
    return write_llama_like(spec) | {
        "norm_epsilon": spec.norm_eps,
        "use_bias": spec.qkv_bias,
        "sliding_window": spec.sliding_window,
    }


# -- OLMo 2 and 3 ---------------------------------------------------------------------------------------------------------


def parse_olmo2(config: dict[str, Any]) -> ModelSpec:
    """Norms after each branch instead of before, QK-norm over all heads together."""
    return _olmo("olmo2", config)


def _olmo(family: str, config: dict[str, Any], **extra: Any) -> ModelSpec:
    r = Reader(config)
    bias = r.flag("attention_bias", False)
    away = extra.pop("away", {})
    return llama_like(
        family, config, Defaults(max_positions=2048, eos=50279), norm_eps=r.number("rms_norm_eps", 1e-5), qk_norm=True,
        qkv_bias=bias, attn_out_bias=bias,
        departures=Departures(qk_norm_over_heads=True, norms_after=True, **away), **extra,
    )  # fmt: skip


def write_olmo2(spec: ModelSpec) -> dict[str, Any]:
    return write_llama_like(spec) | {"attention_bias": spec.qkv_bias}


def parse_olmo3(config: dict[str, Any]) -> ModelSpec:
    """OLMo 2 with windows in three of four layers, whose rotary positions are never scaled."""
    r = Reader(config)
    n_layers = r.layer_count("num_hidden_layers")
    windowed = windowed_layers(r, n_layers, 4)
    rope, own = (
        r.rope(500_000.0, "full_attention"),
        Reader(config | {"rope_scaling": None}).rope(500_000.0, "sliding_attention"),
    )
    return _olmo(
        "olmo3", config, rope=rope, sliding_window=r.integer("sliding_window", 4096), sliding_window_layers=windowed,
        away={"windowed_rope": None if own == rope else own},
    )  # fmt: skip


def write_olmo3(spec: ModelSpec) -> dict[str, Any]:
    return write_olmo2(spec) | write_windows(spec)


# -- Granite --------------------------------------------------------------------------------------------------------------


def parse_granite(config: dict[str, Any]) -> ModelSpec:
    """Llama with constant multipliers on embedding, attention, residuals and logits."""
    return granite_like("granite", config, mlp_bias=Reader(config).flag("mlp_bias", False))


def granite_like(family: str, config: dict[str, Any], **extra: Any) -> ModelSpec:
    """The keys that all of IBM's families share; ``extra`` replaces or adds fields."""
    r = Reader(config)
    bias = r.flag("attention_bias", False)
    divided = r.number("logits_scaling", 1.0)
    if not divided > 0:
        raise ConfigError(f"config.json: logits_scaling={divided!r} must be positive.")
    return llama_like(
        family, config, Defaults(max_positions=2048, bos=1, eos=2), qkv_bias=bias, attn_out_bias=bias,
        departures=Departures(
            embedding_scale=r.number("embedding_multiplier", 1.0), attention_scale=r.number("attention_multiplier", 1.0),
            residual_scale=r.number("residual_multiplier", 1.0), logit_scale=1.0 / divided,
        ),
        **extra,
    )  # fmt: skip


def write_granite(spec: ModelSpec) -> dict[str, Any]:
    away = spec.departures
    return write_llama_like(spec) | {
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "embedding_multiplier": away.embedding_scale,
        "attention_multiplier": spec.attention_scale,
        "residual_multiplier": away.residual_scale,
        "logits_scaling": 1.0 / away.logit_scale,
    }


# -- SmolLM3 --------------------------------------------------------------------------------------------------------------


def parse_smollm3(config: dict[str, Any]) -> ModelSpec:
    """Llama with every fourth layer without positions."""
    r = Reader(config)
    r.must_be("use_sliding_window", False)
    n_layers, period = r.layer_count("num_hidden_layers"), r.integer("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")  # 1 where positions turn a layer's heads
    if rotated is None:
        if period < 1:
            raise ConfigError(f"config.json: no_rope_layer_interval={period} must be at least 1.")
        rotated = [int((i + 1) % period != 0) for i in range(n_layers)]
    if not isinstance(rotated, list) or len(rotated) < n_layers or not all(is_integer(v) and v in (0, 1) for v in rotated):
        raise ConfigError(f"config.json: no_rope_layers must list 0 or 1 for each of {n_layers} layers.")
    bias = r.flag("attention_bias", False)
    return llama_like(
        "smollm3", config, Defaults(max_positions=32_768, n_kv_heads=4, bos=128_000, eos=128_001), r.rope(2e6),
        qkv_bias=bias, attn_out_bias=bias, mlp_bias=r.flag("mlp_bias", False),
        tied_embeddings=r.flag("tie_word_embeddings", True),
        departures=Departures(unrotated_layers=tuple(i for i in range(n_layers) if not rotated[i])),
    )  # fmt: skip


def write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(spec)
        | NO_PADDING
        | {
            "attention_bias": spec.qkv_bias,
            "mlp_bias": spec.mlp_bias,
            "use_sliding_window": False,
            "no_rope_layers": [int(i not in spec.departures.unrotated_layers) for i in range(spec.n_layers)],
        }
    )


# -- Command R and Command R7B --------------------------------------------------------------------------------------------


def _cohere(family: str, config: dict[str, Any], away: dict[str, Any], **extra: Any) -> ModelSpec:
    """Attention and MLP side by side under one LayerNorm without bias; neighbours are turned; logits are scaled."""
    r = Reader(config)
    r.must_be("use_qk_norm", False)
    bias = r.flag("attention_bias", False)
    return llama_like(
        family, config, Defaults(max_positions=8192, bos=5, eos=255_001), norm="layernorm",
        norm_eps=r.number("layer_norm_eps", 1e-5), qkv_bias=bias, attn_out_bias=bias,
        tied_embeddings=r.flag("tie_word_embeddings", True),
        departures=Departures(
            parallel_block=True, norms_per_block=1, norm_bias=False, neighbours_turn=True,
            logit_scale=r.number("logit_scale", 0.0625), **away,
        ),
        **extra,
    )  # fmt: skip


def parse_cohere(config: dict[str, Any]) -> ModelSpec:
    """Command R."""
    return _cohere("cohere", config, {}, rope=Reader(config).rope(500_000.0))


def parse_cohere2(config: dict[str, Any]) -> ModelSpec:
    """Command R7B: a window in three of four layers; the others have no positions."""
    r = Reader(config)
    n_layers = r.layer_count("num_hidden_layers")
    windowed = windowed_layers(r, n_layers, r.integer("sliding_window_pattern", 4))
    unrotated = other_layers(n_layers, windowed)
    return _cohere(
        "cohere2", config, {"unrotated_layers": unrotated}, sliding_window=r.integer("sliding_window", 4096),
        sliding_window_layers=windowed,
    )  # fmt: skip


def write_cohere(spec: ModelSpec) -> dict[str, Any]:
    common: dict[str, Any] = {
        "layer_norm_eps": spec.norm_eps,
        "attention_bias": spec.qkv_bias,
        "logit_scale": spec.departures.logit_scale,
    }
    if spec.family == "cohere2":
        common |= {"sliding_window": spec.sliding_window, "layer_types": kinds_of_layers(spec)}
    return write_llama_like(spec) | common


# -- StableLM, GLM-4, EXAONE 4, ERNIE 4.5, Seed-OSS -----------------------------------------------------------------------


def parse_stablelm(config: dict[str, Any]) -> ModelSpec:
    """LayerNorm, a quarter of each head turned, in some releases attention and MLP side by side."""
    r = Reader(config)
    r.must_be("qk_layernorm", False)
    width, heads = r.integer("hidden_size"), r.integer("num_attention_heads")
    parallel = r.flag("use_parallel_residual", False)
    turned = r.rotary_dim(width // max(1, heads), 0.25)
    return llama_like(
        "stablelm", config, Defaults(max_positions=4096, n_kv_heads=32, bos=0, eos=0), norm="layernorm",
        norm_eps=r.number("layer_norm_eps", 1e-5), qkv_bias=r.flag("use_qkv_bias", False),
        departures=Departures(parallel_block=parallel, norms_per_block=1 if parallel else 2, rotary_dim=turned),
    )  # fmt: skip


def write_stablelm(spec: ModelSpec) -> dict[str, Any]:
    return write_llama_like(spec) | {
        "layer_norm_eps": spec.norm_eps,
        "use_qkv_bias": spec.qkv_bias,
        "use_parallel_residual": spec.departures.parallel_block,
        "partial_rotary_factor": spec.rotary_dim / spec.head_dim,
    }


def parse_glm4(config: dict[str, Any]) -> ModelSpec:
    """Norms before and after each branch, half of each head turned, two neighbours by an angle."""
    r = Reader(config)
    head_dim = r.integer("head_dim", 128)
    return llama_like(
        "glm4", config | {"head_dim": head_dim}, Defaults(max_positions=131_072, n_kv_heads=2),
        norm_eps=r.number("rms_norm_eps", 1.5625e-7), qkv_bias=r.flag("attention_bias", True),
        eos_token_ids=r.token_ids("eos_token_id") or (151_329, 151_336, 151_338),
        departures=Departures(norms_per_block=4, neighbours_turn=True, rotary_dim=r.rotary_dim(head_dim, 0.5)),
    )  # fmt: skip


def write_glm4(spec: ModelSpec) -> dict[str, Any]:
    share = spec.rotary_dim / spec.head_dim
    return write_llama_like(spec) | NO_PADDING | {"attention_bias": spec.qkv_bias, "partial_rotary_factor": share}


def parse_exaone4(config: dict[str, Any]) -> ModelSpec:
    """OLMo 2's norms with QK-norm by head; where some layers have windows, only those have positions."""
    r = Reader(config)
    n_layers, window = r.layer_count("num_hidden_layers"), 4096
    windowless = "sliding_window" in config and config["sliding_window"] is None
    if not windowless:
        window = r.integer("sliding_window", 4096)
    pattern = config.get("sliding_window_pattern", 4)
    period = len(pattern) if isinstance(pattern, str) else 0 if pattern is None else r.integer("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern != "L" * (period - 1) + "G":
        raise ConfigError(f"config.json: sliding_window_pattern={pattern!r:.100} is not supported. Supported: LLLG, or 4.")
    windowed = () if windowless else windowed_layers(r, n_layers, period)
    unrotated = () if windowless else other_layers(n_layers, windowed)
    return llama_like(
        "exaone4", config, Defaults(max_positions=2048, n_kv_heads=32, bos=0, eos=2),
        norm_eps=r.number("rms_norm_eps", 1e-5), qk_norm=True,
        sliding_window=window if windowed else None, sliding_window_layers=windowed or None,
        departures=Departures(norms_after=True, unrotated_layers=unrotated),
    )  # fmt: skip


def write_exaone4(spec: ModelSpec) -> dict[str, Any]:
    kinds: dict[str, Any] = {"sliding_window": spec.sliding_window, "layer_types": kinds_of_layers(spec)}
    if spec.sliding_window is None and spec.departures.unrotated_layers:
        kinds["sliding_window"] = spec.max_positions  # a null would turn every layer
    return write_llama_like(spec) | kinds


def parse_ernie4_5(config: dict[str, Any]) -> ModelSpec:
    """Llama with neighbours turned and one flag for all biases."""
    r = Reader(config)
    bias = r.flag("use_bias", False)
    return llama_like(
        "ernie4_5", {"head_dim": 128} | config, Defaults(max_positions=131_072, n_kv_heads=2, bos=1, eos=2), r.rope(500_000.0),
        norm_eps=r.number("rms_norm_eps", 1e-5), qkv_bias=bias, attn_out_bias=bias, mlp_bias=bias,
        tied_embeddings=r.flag("tie_word_embeddings", True), departures=Departures(neighbours_turn=True),
    )  # fmt: skip


def write_ernie4_5(spec: ModelSpec) -> dict[str, Any]:
    return write_llama_like(spec) | {"use_bias": spec.qkv_bias}


def parse_seed_oss(config: dict[str, Any]) -> ModelSpec:
    """Llama with biases of its own in attention. The 0.1 of dropout in its config is not applied in training here."""
    r = Reader(config)
    return llama_like(
        "seed_oss", {"head_dim": 128} | config, Defaults(max_positions=524_288, n_kv_heads=8, bos=0, eos=2),
        qkv_bias=r.flag("attention_bias", True), attn_out_bias=r.flag("attention_out_bias", False),
        mlp_bias=r.flag("mlp_bias", False), dropout=0.0,
    )  # fmt: skip


def write_seed_oss(spec: ModelSpec) -> dict[str, Any]:
    return write_llama_like(spec) | {
        "attention_bias": spec.qkv_bias,
        "attention_out_bias": spec.attn_out_bias,
        "mlp_bias": spec.mlp_bias,
        "residual_dropout": 0.0,
    }
