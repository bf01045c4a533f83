"""Configurations in llm-analysis' short keys: ``num_layers``, ``n_head``, ``hidden_dim``, ``ffn_embed_dim``, ``max_seq_len``.

They hold sizes and a family, so what else a model is follows from the family alone. Two models that need more are completed
from their published configurations, by name; a Llama must say that its MLP is gated, because without that the keys hold the
width of a plain MLP of the same cost, which no Llama checkpoint has.
"""

from __future__ import annotations

from typing import Any

from twostroke.core.errors import ConfigError
from twostroke.core.families.reader import Reader

SHORT_KEYS = ("num_layers", "n_head", "hidden_dim", "vocab_size", "ffn_embed_dim")

_GPT2_KEYS = {
    "num_layers": "n_layer",
    "n_head": "n_head",
    "hidden_dim": "n_embd",
    "ffn_embed_dim": "n_inner",
    "max_seq_len": "n_positions",
}
_USUAL_KEYS = {
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "hidden_dim": "hidden_size",
    "ffn_embed_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
FAMILY_KEYS: dict[str, dict[str, str]] = {
    "gpt2": _GPT2_KEYS,
    "gpt_bigcode": _GPT2_KEYS,
    "gptj": _GPT2_KEYS,
    "gpt_neo": _USUAL_KEYS | {"num_layers": "num_layers", "n_head": "num_heads"},
    "bloom": _USUAL_KEYS | {"num_layers": "n_layer", "n_head": "n_head", "max_seq_len": "seq_length"},
    "opt": _USUAL_KEYS | {"ffn_embed_dim": "ffn_dim"},
    "llama": _USUAL_KEYS,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "facebook_opt-350m": {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "bigcode_santacoder": {"model_type": "gpt_bigcode", "multi_query": True},
}
"""What the short keys cannot hold of these models, from the ``config.json`` beside their weights on the Hugging Face Hub."""


def has_short_keys(config: dict[str, Any]) -> bool:
    """Whether ``config`` is written in short keys."""
    return "hidden_dim" in config and "num_layers" in config


def with_family_keys(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The same model in its family's own keys, and notes on what was added. Raises ConfigError naming what is missing."""
    name, family = config.get("name"), config["model_type"]
    added = PUBLISHED.get(name, {}) if isinstance(name, str) else {}
    family = added.get("model_type", family)
    missing = [key for key in SHORT_KEYS if config.get(key) is None]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(map(repr, missing))}, which its short keys need.")
    if family not in FAMILY_KEYS:
        raise ConfigError(f"short keys of model_type={family!r} are not read. Give the model's own config.json.")
    if family == "llama" and config.get("mlp_gated_linear_units") is not True:
        raise ConfigError(
            f"config.json of {name!r:.80} gives ffn_embed_dim={config['ffn_embed_dim']!r:.20} without mlp_gated_linear_units: "
            "the width of a plain MLP, where a Llama has a gated one of another width. Give the model's own config.json."
        )
    r = Reader(config)
    if family == "bloom" and r.integer("ffn_embed_dim") != 4 * r.integer("hidden_dim"):
        raise ConfigError(f"config.json: ffn_embed_dim={config['ffn_embed_dim']} must be 4 · hidden_dim for bloom.")
    renamed = {FAMILY_KEYS[family].get(key, key): value for key, value in config.items()}
    notes = ["short keys: what they do not say follows from the family"]
    if added:
        notes.append("added from the published configuration: " + ", ".join(f"{k}={v!r}" for k, v in added.items()))
    return renamed | added, tuple(notes)
