"""What a GGUF file says of a model: the metadata and small tensors of which ``gguf_families`` makes the same spec again."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.errors import ConfigError
from twostroke.core.families import config_from_spec
from twostroke.core.spec import Departures, ModelSpec, RopeSpec
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_families import ROPE_DIVISORS, ROPE_FACTORS, GgufFamily, rope_divisors, row_of, spec_of
from twostroke.interop.gguf_metadata import Metadata
from twostroke.interop.gguf_write import Value

_ID_NAMES = ("eos", "eot", "eom")


def metadata_of(row: GgufFamily, spec: ModelSpec) -> dict[str, Value]:
    """The metadata of a model of ``spec`` in the architecture of ``row``, the ids of its tokens included."""
    eps = "layer_norm_rms_epsilon" if row.eps == "rms_norm_eps" else "layer_norm_epsilon"
    found: dict[str, Value] = {
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_positions,
        "embedding_length": spec.d_model,
        "block_count": spec.n_layers,
        "feed_forward_length": spec.d_ff,
        "attention.head_count": spec.n_heads,
        "attention.head_count_kv": spec.n_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        f"attention.{eps}": spec.norm_eps,
    }
    config = config_from_spec(spec)
    for key, (name, _) in row.numbers.items():
        value = config.get(row.renamed.get(key, key))
        if value is not None:
            found[name] = float(value)
    if spec.moe is not None:
        found |= {name: config[key] for key, name in row.counts.items()}
    found |= _windows(row, spec)
    if spec.positions == "rope":
        found |= _rope(row, spec)
    found |= row.fields(spec) if row.fields else {}
    return {"general.architecture": row.architecture} | {f"{row.architecture}.{key}": value for key, value in found.items()}


def token_ids(spec: ModelSpec) -> dict[str, Value]:
    """Of begin and ends. An end of turn is always named, so that no reader looks for one by its text."""
    ids: dict[str, Value] = {} if spec.bos_token_id is None else {"bos": spec.bos_token_id}
    ends = spec.eos_token_ids
    ids |= dict(zip(_ID_NAMES, (*ends, ends[0]) if len(ends) == 1 else ends, strict=False))
    return {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}


def _windows(row: GgufFamily, spec: ModelSpec) -> dict[str, Value]:
    if row.architecture == "exaone4" and spec.sliding_window and spec.n_layers != 64:
        raise ConfigError(
            f"an exaone4 model of {spec.n_layers} layers with windows is not written as GGUF: llama.cpp has windows for 64 "
            "layers alone, and would turn every layer's positions in others."
        )
    if row.window_period is None or (spec.sliding_window is None and row.architecture == "llama"):
        return {}
    found: dict[str, Value] = {"attention.sliding_window": spec.sliding_window or 0}
    usual = [row.window_period > 1 and (i + 1) % row.window_period != 0 for i in range(spec.n_layers)]
    windowed = [spec.window_of_layer(i) is not None for i in range(spec.n_layers)]
    if spec.sliding_window and row.window_period > 1 and windowed != usual:
        found["attention.sliding_window_pattern"] = torch.tensor(windowed).numpy()
    return found


def _rope(row: GgufFamily, spec: ModelSpec) -> dict[str, Value]:
    rope, own = spec.rope, spec.departures.windowed_rope
    found: dict[str, Value] = {"rope.dimension_count": spec.rotary_dim, "rope.freq_base": rope.theta}
    if row.windowed_theta is not None and spec.sliding_window:
        theta = (own or rope).theta
        if theta != (row.windowed_theta or rope.theta):
            found["rope.freq_base_swa"] = theta
    if rope.scaling in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": rope.factor}
    if rope.scaling in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope.original_max_positions
    if rope.scaling == "yarn":
        usual = RopeSpec()
        stretched = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
        # llama.cpp multiplies its own magnitude, the usual one, by attn_factor; yarn_attn_factor is the converters' name.
        if row.scores_stretched:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * config_from_spec(spec)["rope_parameters"].get(
                "mscale_all_dim", 0.0
            )
        elif not math.isclose(rope.magnitude, stretched, rel_tol=1e-6):
            found |= {"rope.scaling.yarn_attn_factor": rope.magnitude, "rope.scaling.attn_factor": rope.magnitude / stretched}
        for name in ("beta_fast", "beta_slow"):
            if getattr(rope, name) != getattr(usual, name):
                found[f"rope.scaling.yarn_{name}"] = getattr(rope, name)
    if rope.scaling == "longrope":
        found["rope.scaling.attn_factor"] = rope.magnitude
    return found


def rope_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """The small tensors of rotary scaling, (angles,) each; nothing where metadata say all."""
    if spec.positions != "rope":
        return {}
    if spec.rope.scaling == "llama3":
        return {ROPE_DIVISORS: rope_divisors(spec.rope, spec.rotary_dim)}
    if spec.rope.scaling == "longrope":
        both = (spec.rope.short_factors, spec.rope.long_factors)
        return {name: torch.tensor(factors) for name, factors in zip(ROPE_FACTORS, both, strict=True)}
    return {}


def require_same(path: Path, spec: ModelSpec) -> None:
    """Raise ConfigError unless the file at ``path``, whose tensors may not be written yet, is read as ``spec``: a file that
    means another model is worse than none. Names of Llama's relatives that compute the same are one family; dropout and ends
    of text beyond three are not in GGUF."""
    metadata = Metadata(GgufFile(path))
    row = row_of(metadata)
    found = spec_of(row, metadata)
    for field in fields(ModelSpec):
        if not field.compare or field.name in _ELSEWHERE or (field.name == "rope" and spec.positions != "rope"):
            continue
        asked, kept = getattr(spec, field.name), getattr(found, field.name)
        if not _same(asked, kept):
            detail = _first_difference(asked, kept) if isinstance(asked, (RopeSpec, Departures)) else f"={asked!r:.80}"
            raise ConfigError(
                f"{field.name}{detail} of a {spec.family} model cannot be written as GGUF's {row.architecture!r}, "
                "which has no place for it."
            )
    for layer in range(spec.n_layers):
        asked, kept = spec.window_of_layer(layer), found.window_of_layer(layer)
        if asked != kept:
            raise ConfigError(
                f"sliding_window={asked} of layer {layer} cannot be written as GGUF's {row.architecture!r}, which means {kept}."
            )


_ELSEWHERE = ("family", "dropout", "bos_token_id", "eos_token_ids", "sliding_window", "sliding_window_layers")


def _same(asked: object, kept: object) -> bool:
    """Equal, numbers to the precision of fp32."""
    if isinstance(asked, float) and isinstance(kept, float):
        return math.isclose(asked, kept, rel_tol=1e-6)
    if isinstance(asked, tuple) and isinstance(kept, tuple):
        return len(asked) == len(kept) and all(map(_same, asked, kept))
    if type(asked) is type(kept) and isinstance(asked, (RopeSpec, Departures)):
        return all(_same(getattr(asked, field.name), getattr(kept, field.name)) for field in fields(asked))
    return asked == kept


def _first_difference(asked: RopeSpec | Departures, kept: RopeSpec | Departures) -> str:
    if type(asked) is not type(kept):
        return f"={asked!r:.80}"
    name = next(f.name for f in fields(asked) if not _same(getattr(asked, f.name), getattr(kept, f.name)))
    return f".{name}={getattr(asked, name)!r:.80}"
