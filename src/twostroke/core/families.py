"""``config.json`` ↔ ``ModelSpec`` for each supported family.

Standard library only, so that the planner reads any supported configuration without torch. How a family names its
weights is in ``twostroke.model.families``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.errors import ConfigError, CorruptFileError, InputError, UnsupportedFamilyError
from twostroke.core.spec import MAX_LAYERS, ModelSpec, RopeSpec

MAX_CONFIG_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Family:
    """One row of the registry: ``parse`` reads a Hugging Face config, ``write`` makes one that transformers accepts."""

    name: str
    architecture: str
    parse: Callable[[dict[str, Any]], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]]


class _Reader:
    """Typed access to a config dictionary; each miss is a sentence."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"config.json has no {key!r}, which model_type={self.config.get('model_type')!r} needs.")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"config.json: {key}={value!r} must be a whole number.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"config.json: {key}={value!r} must be a number.")
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"config.json: {key} is out of range.") from None

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key}={value!r} must be true or false.")
        return value

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """An explicit null means that there is none; a missing key means ``default``, as in transformers."""
        value = self.config.get(key, default)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"config.json: {key}={value!r} must be a token id or a list of them.")
        return tuple(ids)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        ids = self.token_ids(key, default)
        return ids[0] if ids else None

    def rope(self) -> RopeSpec:
        """Both spellings: ``rope_theta`` + ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5)."""
        parameters = self.config.get("rope_parameters") or {}
        scaling = self.config.get("rope_scaling") or parameters
        if not isinstance(scaling, dict) or not isinstance(parameters, dict):
            raise ConfigError("config.json: rope_scaling and rope_parameters must be objects.")
        theta = _Reader(parameters).number("rope_theta", self.number("rope_theta", 10_000.0))
        for table in (self.config, parameters, scaling):
            if table.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise ConfigError(f"partial_rotary_factor={table['partial_rotary_factor']!r} is not supported. Supported: 1.0.")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return RopeSpec(theta=theta)
        if kind == "linear":
            return RopeSpec(theta=theta, scaling="linear", factor=_positive(scaling, "factor"))
        if kind == "llama3":
            return RopeSpec(
                theta=theta,
                scaling="llama3",
                factor=_positive(scaling, "factor"),
                low_freq_factor=_positive(scaling, "low_freq_factor"),
                high_freq_factor=_positive(scaling, "high_freq_factor"),
                original_max_positions=int(_positive(scaling, "original_max_position_embeddings")),
            )
        raise ConfigError(f"rope_type={kind!r} is not supported. Supported: default, linear, llama3.")


def _positive(scaling: dict[str, Any], key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"config.json: rope scaling {key}={value!r} must be a positive, finite number.")
    return float(value)


def _activation(name: Any) -> Any:
    known = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"activation {name!r} is not supported. Supported: {', '.join(known)}.")
    return known[name]


_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}


@dataclass(frozen=True)
class _Defaults:
    """What transformers assumes where a family's config.json lacks a key. ``n_kv_heads`` None: as many as query heads."""

    max_positions: int
    n_kv_heads: int | None = None
    bos: int | None = None
    eos: int | None = None


def _llama_like(family: str, config: dict[str, Any], defaults: _Defaults, **extra: Any) -> ModelSpec:
    r = _Reader(config)
    heads = r.integer("num_attention_heads")
    width = r.integer("hidden_size")
    # An explicit null means one KV head for each query head, in every family.
    kv_heads = heads if "num_key_value_heads" in config or defaults.n_kv_heads is None else defaults.n_kv_heads
    if config.get("head_dim") is None and heads > 0 and width % heads:
        raise ConfigError(f"config.json: num_attention_heads={heads} must divide hidden_size={width}, or head_dim be given.")
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": r.integer("vocab_size"),
        "n_layers": r.integer("num_hidden_layers"),
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": r.integer("num_key_value_heads", kv_heads),
        "head_dim": r.integer("head_dim", width // heads if heads > 0 else 1),
        "d_ff": r.integer("intermediate_size"),
        "max_positions": r.integer("max_position_embeddings", defaults.max_positions),
        "norm_eps": r.number("rms_norm_eps", 1e-6),
        "rope": r.rope(),
        "activation": _activation(config.get("hidden_act", "silu")),
        "tied_embeddings": r.flag("tie_word_embeddings", False),
        "dropout": r.number("attention_dropout", 0.0),
        "bos_token_id": r.token_id("bos_token_id", defaults.bos),
        "eos_token_ids": r.token_ids("eos_token_id", defaults.eos),
    }
    return ModelSpec(**(values | extra))


def _parse_llama(config: dict[str, Any]) -> ModelSpec:
    r = _Reader(config)
    bias = r.flag("attention_bias", False)
    defaults = _Defaults(max_positions=2048, bos=1, eos=2)
    return _llama_like("llama", config, defaults, qkv_bias=bias, attn_out_bias=bias, mlp_bias=r.flag("mlp_bias", False))


def _parse_mistral(config: dict[str, Any]) -> ModelSpec:
    # A missing key means transformers' default of 4096; an explicit null means no window.
    windowless = "sliding_window" in config and config["sliding_window"] is None
    window = None if windowless else _Reader(config).integer("sliding_window", 4096)
    defaults = _Defaults(max_positions=131_072, n_kv_heads=8, bos=1, eos=2)
    return _llama_like("mistral", config, defaults, sliding_window=window)


def _qwen_window(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen windows only some layers, and only when ``use_sliding_window`` says so."""
    r = _Reader(config)
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


_QWEN_DEFAULTS = _Defaults(max_positions=32_768, n_kv_heads=32)


def _parse_qwen2(config: dict[str, Any]) -> ModelSpec:
    return _llama_like("qwen2", config, _QWEN_DEFAULTS, qkv_bias=True, **_qwen_window(config))


def _parse_qwen3(config: dict[str, Any]) -> ModelSpec:
    bias = _Reader(config).flag("attention_bias", False)
    config = {"head_dim": 128} | config  # transformers' Qwen3Config default, not hidden_size / heads
    return _llama_like("qwen3", config, _QWEN_DEFAULTS, qkv_bias=bias, attn_out_bias=bias, qk_norm=True, **_qwen_window(config))


def _parse_gpt2(config: dict[str, Any]) -> ModelSpec:
    r = _Reader(config)
    width, heads = r.integer("n_embd"), r.integer("n_head")
    if heads < 1 or width % heads:
        raise ConfigError(f"config.json: n_head={heads} must divide n_embd={width}.")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if config.get(key):
            raise ConfigError(f"config.json: {key}=true is not supported for gpt2.")
    if not r.flag("scale_attn_weights", True):
        raise ConfigError("config.json: scale_attn_weights=false is not supported for gpt2.")
    rates = {r.number(key, 0.1) for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")}
    if len(rates) > 1:
        raise ConfigError(f"config.json: attn_pdrop, resid_pdrop and embd_pdrop must be equal here, found {sorted(rates)}.")
    return ModelSpec(
        family="gpt2",
        vocab_size=r.integer("vocab_size"),
        n_layers=r.integer("n_layer"),
        d_model=width,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=width // heads,
        d_ff=r.integer("n_inner", 4 * width),
        max_positions=r.integer("n_positions", 1024),
        norm="layernorm",
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        mlp="gelu",
        activation=_activation(config.get("activation_function", "gelu_new")),
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
        tied_embeddings=r.flag("tie_word_embeddings", True),
        dropout=rates.pop(),
        bos_token_id=r.token_id("bos_token_id", 50256),
        eos_token_ids=r.token_ids("eos_token_id", 50256),
    )


def _write_llama_like(spec: ModelSpec) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope.theta}
    scaling: dict[str, Any] | None = None
    if spec.rope.scaling == "linear":
        scaling = {"rope_type": "linear", "factor": spec.rope.factor}
    elif spec.rope.scaling == "llama3":
        scaling = {
            "rope_type": "llama3",
            "factor": spec.rope.factor,
            "low_freq_factor": spec.rope.low_freq_factor,
            "high_freq_factor": spec.rope.high_freq_factor,
            "original_max_position_embeddings": spec.rope.original_max_positions,
        }
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
        "hidden_act": _ACTIVATION_NAMES[spec.activation],
        # Both spellings: readers of transformers 4's layout (vLLM, llama.cpp's converter) and of transformers 5's.
        "rope_theta": spec.rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": rope | (scaling or {}),
        "tie_word_embeddings": spec.tied_embeddings,
        "attention_dropout": spec.dropout,
    }


def _write_llama(spec: ModelSpec) -> dict[str, Any]:
    if spec.d_model % spec.n_heads:  # transformers' LlamaConfig insists, although head_dim is given
        raise ConfigError(f"n_heads={spec.n_heads} must divide d_model={spec.d_model} in family='llama'.")
    return _write_llama_like(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def _write_mistral(spec: ModelSpec) -> dict[str, Any]:
    return _write_llama_like(spec) | {"sliding_window": spec.sliding_window}


def _write_qwen(spec: ModelSpec) -> dict[str, Any]:
    windowed = [spec.window_of_layer(i) is not None for i in range(spec.n_layers)]
    config = _write_llama_like(spec) | {
        "use_sliding_window": any(windowed),
        "sliding_window": spec.sliding_window,
        "max_window_layers": windowed.index(True) if any(windowed) else spec.n_layers,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
    }
    if spec.family == "qwen3":
        config["attention_bias"] = spec.qkv_bias
    return config


def _write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "n_layer": spec.n_layers,
        "n_embd": spec.d_model,
        "n_head": spec.n_heads,
        "n_inner": spec.d_ff,
        "n_positions": spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": _ACTIVATION_NAMES[spec.activation],
        "attn_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "tie_word_embeddings": spec.tied_embeddings,
    }


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("llama", "LlamaForCausalLM", _parse_llama, _write_llama),
        Family("mistral", "MistralForCausalLM", _parse_mistral, _write_mistral),
        Family("qwen2", "Qwen2ForCausalLM", _parse_qwen2, _write_qwen),
        Family("qwen3", "Qwen3ForCausalLM", _parse_qwen3, _write_qwen),
        Family("gpt2", "GPT2LMHeadModel", _parse_gpt2, _write_gpt2),
    )
}


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """``ModelSpec`` of a Hugging Face ``config.json`` already parsed to a dictionary.

    Raises UnsupportedFamilyError, naming the supported families, and ConfigError for a key that is missing or impossible.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedFamilyError(f"model_type={family!r} is not supported. Supported families: {', '.join(FAMILIES)}.")
    quantised = config.get("quantization_config")
    if quantised and not isinstance(quantised, dict):
        raise ConfigError(f"config.json: quantization_config={quantised!r:.100} must be an object.")
    if quantised and quantised.get("quant_method") != "twostroke":
        raise ConfigError(
            f"quantization_config of method {quantised.get('quant_method')!r} is not supported. "
            "Start from the unquantised model and run `twostroke quantize`."
        )
    return FAMILIES[family].parse(config)


def config_from_spec(spec: ModelSpec, dtype: str = "float32") -> dict[str, Any]:
    """A ``config.json`` dictionary that transformers, vLLM and llama.cpp's converter read. ``dtype`` is torch's spelling."""
    if spec.family not in FAMILIES:
        raise UnsupportedFamilyError(f"family={spec.family!r} is not supported. Supported families: {', '.join(FAMILIES)}.")
    family = FAMILIES[spec.family]
    eos: int | list[int] | None = None
    if spec.eos_token_ids:
        eos = spec.eos_token_ids[0] if len(spec.eos_token_ids) == 1 else list(spec.eos_token_ids)
    config = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **family.write(spec),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }
    _refuse_loss(spec, family.parse(config))
    return config


def _refuse_loss(spec: ModelSpec, written: ModelSpec) -> None:
    """ConfigError where ``written``, read back from the config.json made of ``spec``, describes another model."""
    for field in dataclasses.fields(spec):
        if field.name in ("sliding_window", "sliding_window_layers"):
            continue  # one window is spelled in several ways: compared by layer below
        if field.name == "rope" and spec.positions != "rope":
            continue
        asked, kept = getattr(spec, field.name), getattr(written, field.name)
        if asked != kept:
            raise ConfigError(
                f"{field.name}={asked!r} cannot be written as family={spec.family!r}, whose config.json means {kept!r}."
            )
    for layer in range(spec.n_layers):
        asked, kept = spec.window_of_layer(layer), written.window_of_layer(layer)
        if asked != kept:
            raise ConfigError(
                f"sliding_window={asked} of layer {layer} cannot be written as family={spec.family!r}, which means {kept}."
            )


def read_config(path: Path | str) -> dict[str, Any]:
    """The dictionary in ``path``, a ``config.json`` or a directory that holds one. Raises InputError or CorruptFileError."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file} does not exist. Give a model directory with a config.json, or the file itself.")
    return _read_object(file)


def _read_object(file: Path) -> dict[str, Any]:
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise CorruptFileError(f"{file} is {file.stat().st_size} bytes; such a file is at most {MAX_CONFIG_BYTES}.")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CorruptFileError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(document, dict):
        raise CorruptFileError(f"{file} must hold a JSON object.")
    return document


def read_spec(path: Path | str) -> ModelSpec:
    """``ModelSpec`` of a ``config.json`` or of a model directory.

    From a directory, ids that only its ``generation_config.json`` lists as end of text (chat models end a turn and a
    text differently) are added to the config's own.
    """
    spec = spec_from_config(read_config(path))
    generation = Path(path) / "generation_config.json"
    if not generation.is_file():
        return spec
    more = _Reader(_read_object(generation)).token_ids("eos_token_id")
    return spec.with_(eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more)))
