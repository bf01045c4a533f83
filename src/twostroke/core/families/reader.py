"""Typed access to a ``config.json``: each key that is missing or impossible is a sentence."""

from __future__ import annotations

import math
from typing import Any

from twostroke.core.documents import MAX_INTEGER, MAX_NUMBER, is_integer, is_number
from twostroke.core.errors import ConfigError
from twostroke.core.spec import MAX_LAYERS, RopeSpec

MAX_FACTORS = 4096
"""Of longrope: one for each angle of a head."""

MAX_TOKEN_IDS = 1024
"""Of one key. Models in use end their answers with up to ten; each request keeps a set of them."""


class Reader:
    """Typed access to a config dictionary; each miss is a sentence. Every number passes ``is_integer`` or ``is_number``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"config.json has no {key!r}, which model_type={self.config.get('model_type')!r} needs.")
            return default
        if not is_integer(value):
            raise ConfigError(f"config.json: {key}={value!r:.100} must be a whole number of at most {MAX_INTEGER}.")
        return value

    def first_integer(self, *keys: str, default: int | None = None) -> int:
        """The value under the first of ``keys``, spellings of one number, that is there."""
        present = next((key for key in keys if self.config.get(key) is not None), keys[0])
        return self.integer(present, default)

    def optional_integer(self, key: str) -> int | None:
        """None where the key is missing or null."""
        return None if self.config.get(key) is None else self.integer(key)

    def layer_count(self, *keys: str) -> int:
        """A number of layers that may be counted through: from 1 to ``MAX_LAYERS``."""
        count = self.first_integer(*keys)
        if not 0 < count <= MAX_LAYERS:
            raise ConfigError(f"n_layers={count} must be a whole number from 1 to {MAX_LAYERS}.")
        return count

    def layers_of_kind(self, key: str, kind: str, n_layers: int, known: tuple[str, ...]) -> tuple[int, ...]:
        """The layers that the list under ``key``, one name a layer, calls ``kind``."""
        kinds = self.config.get(key)
        if not isinstance(kinds, list) or len(kinds) != n_layers or not all(k in known for k in kinds):
            raise ConfigError(f"config.json: {key} must list one of {', '.join(known)} for each of {n_layers} layers.")
        return tuple(i for i, name in enumerate(kinds) if name == kind)

    def must_be(self, key: str, value: Any) -> None:
        """ConfigError where ``key`` is present with another value than the one that is counted here."""
        found = self.config.get(key)
        if found is not None and found != value:
            family = self.config.get("model_type")
            raise ConfigError(
                f"config.json: {key}={found!r:.100} is not supported for model_type={family!r}. Supported: {value!r}."
            )

    def object(self, key: str) -> dict[str, Any]:
        """The object under ``key``; an empty one where it is missing or null."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"config.json: {key}={value!r:.100} must be an object.")
        return value or {}

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        if value is None:
            return default
        if not is_number(value):
            raise ConfigError(f"config.json: {key}={value!r:.100} must be a number, finite and at most {MAX_NUMBER:g}.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key}={value!r:.100} must be true or false.")
        return value

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """An explicit null means that there is none; a missing key means ``default``, as in transformers."""
        value = self.config.get(key, default)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(is_integer(i) for i in ids):
            raise ConfigError(f"config.json: {key}={value!r:.100} must be a token id or a list of them.")
        if len(ids) > MAX_TOKEN_IDS:
            raise ConfigError(f"config.json: {key} lists {len(ids)} tokens; at most {MAX_TOKEN_IDS} are read.")
        return tuple(ids)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        ids = self.token_ids(key, default)
        return ids[0] if ids else None

    def rope(self, default_theta: float = 10_000.0, layers: str | None = None) -> RopeSpec:
        """Both spellings: ``rope_theta`` + ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5), there of
        the kind of ``layers`` where it names kinds."""
        parameters = self._rope_parameters(layers)
        scaling = self.object("rope_scaling") or parameters
        if layers is not None and parameters:
            scaling = parameters
        theta = Reader(parameters).number("rope_theta", self.number("rope_theta", default_theta))
        kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
        read = Reader(scaling)
        if kind == "default":
            return RopeSpec(theta=theta)
        if kind in ("linear", "dynamic"):
            return RopeSpec(theta=theta, scaling=kind, factor=positive_scaling(scaling, "factor"))
        if kind == "proportional":
            return RopeSpec(
                theta=theta, scaling=kind, factor=positive_scaling({"factor": 1.0} | scaling, "factor"),
                turned_share=read.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0)),
            )  # fmt: skip
        if kind == "yarn":
            original = self._original_positions(scaling)
            factor = read.number("factor", self.integer("max_position_embeddings", original) / original)
            return RopeSpec(
                theta=theta, scaling="yarn", factor=factor, original_max_positions=original,
                beta_fast=read.number("beta_fast", 32.0) or 32.0, beta_slow=read.number("beta_slow", 1.0) or 1.0,
                truncate=read.flag("truncate", True), magnitude=_yarn_magnitude(read, factor),
            )  # fmt: skip
        if kind in ("longrope", "su"):
            original = self._original_positions(scaling)
            factor = read.number("factor", self.integer("max_position_embeddings", original) / original)
            stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
            short, long = (read.positive_numbers(key) for key in ("short_factor", "long_factor"))
            return RopeSpec(
                theta=theta, scaling="longrope", original_max_positions=original, short_factors=short, long_factors=long,
                magnitude=read.number("attention_factor", stretched),
            )  # fmt: skip
        if kind == "llama3":
            return RopeSpec(
                theta=theta,
                scaling="llama3",
                factor=positive_scaling(scaling, "factor"),
                low_freq_factor=positive_scaling(scaling, "low_freq_factor"),
                high_freq_factor=positive_scaling(scaling, "high_freq_factor"),
                original_max_positions=int(positive_scaling(scaling, "original_max_position_embeddings")),
            )
        raise ConfigError(
            f"rope_type={kind!r:.100} is not supported. Supported: default, linear, proportional, dynamic, yarn, longrope "
            "and llama3."
        )

    def _rope_parameters(self, layers: str | None) -> dict[str, Any]:
        parameters = self.object("rope_parameters")
        return Reader(parameters).object(layers) if layers in parameters else parameters

    def _original_positions(self, scaling: dict[str, Any]) -> int:
        """Tokens before scaling: of the scaling, else of the model, else all that it has."""
        found = Reader(scaling).optional_integer("original_max_position_embeddings")
        if found is None:
            found = self.first_integer("original_max_position_embeddings", "max_position_embeddings")
        if found < 1:
            raise ConfigError(f"config.json: original_max_position_embeddings={found} must be at least 1.")
        return found

    def positive_numbers(self, key: str) -> tuple[float, ...]:
        """The list of positive numbers under ``key``."""
        values = self.config.get(key)
        if not isinstance(values, list) or len(values) > MAX_FACTORS or not all(is_number(v) and v > 0 for v in values):
            raise ConfigError(f"config.json: rope scaling {key} must be a list of positive numbers, at most {MAX_FACTORS}.")
        return tuple(float(value) for value in values)

    def rotary_dim(self, head_dim: int, default_share: float = 1.0) -> int | None:
        """Leading dimensions of a head that positions turn, None for all: ``rotary_dim`` or ``partial_rotary_factor``, which
        of proportional positions is a share of the angles (``rope``)."""
        share = self.number("partial_rotary_factor", default_share)
        for table in (self.object("rope_scaling"), self.object("rope_parameters")):
            if "proportional" in (table.get("rope_type"), table.get("type")):
                return None
            share = Reader(table).number("partial_rotary_factor", share)
        if not 0 < share <= 1:
            raise ConfigError(f"config.json: partial_rotary_factor={share!r} must be above 0 and at most 1.")
        turned = self.integer("rotary_dim", int(head_dim * share))
        return None if turned == head_dim else turned


def _yarn_magnitude(scaling: Reader, factor: float) -> float:
    """What sines and cosines are multiplied with: stated, or 0.1·ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, all_dimensions = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    usual = of(mscale) / of(all_dimensions) if mscale and all_dimensions else of(1.0)
    return scaling.number("attention_factor", usual)


def positive_scaling(scaling: dict[str, Any], key: str) -> float:
    value = scaling.get(key)
    if not is_number(value) or not value > 0:
        raise ConfigError(
            f"config.json: rope scaling {key}={value!r:.100} must be a positive number of at most {MAX_NUMBER:g}."
        )
    return float(value)


def activation(name: Any) -> Any:
    known = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    known |= {"relu": "relu"}
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"activation {name!r:.100} is not supported. Supported: {', '.join(known)}.")
    return known[name]


ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "clamped_swish": "silu", "relu": "relu"}
"""transformers' name for each activation of ours."""
