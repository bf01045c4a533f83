"""The architectures of GGUF files as families: one row each, of which a file's metadata becomes a ``config.json``.

The family's own reader then makes the ``ModelSpec``, so every default and every check of a config holds for GGUF too. What a
row says was read from llama.cpp's converter and loader (ggml-org/llama.cpp, ``conversion/*.py`` and ``src/models/*.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from twostroke.core.errors import ConfigError, CorruptFileError, UnsupportedFamilyError
from twostroke.core.families import spec_from_config
from twostroke.core.families.reader import Reader
from twostroke.core.families.weights import ExpertNames, WeightNames
from twostroke.core.spec import ModelSpec, RopeSpec
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_metadata import Metadata
from twostroke.interop.gguf_write import Value
from twostroke.model.rope import inverse_frequencies

GGUF_WEIGHTS = WeightNames(
    base="",
    layer="blk",
    embed="token_embd",
    positions="position_embd",
    final_norm="output_norm",
    head="output",
    block={
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "out": "attn_output",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "attn_norm": "attn_norm",
        "mlp_norm": "ffn_norm",
        "attn_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
        "sinks": "attn_sinks.weight",
        "q_a": "attn_q_a",
        "q_a_norm": "attn_q_a_norm",
        "q_b": "attn_q_b",
        "kv_a": "attn_kv_a_mqa",
        "kv_a_norm": "attn_kv_a_norm",
        "kv_b": "attn_kv_b",
        "k_b": "attn_k_b",
        "v_b": "attn_v_b",
    },
    experts=ExpertNames(
        router="ffn_gate_inp",
        gate="ffn_gate_exps",
        up="ffn_up_exps",
        down="ffn_down_exps",
        shared="ffn_{}_shexp",
        shared_gate="ffn_gate_inp_shexp",
        correction_bias="exp_probs_b.bias",
        stacked=True,
    ),
)
"""How most architectures name their tensors."""

ROPE_DIVISORS = "rope_freqs.weight"
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def _with_names(**block: str) -> WeightNames:
    return replace(GGUF_WEIGHTS, block={**GGUF_WEIGHTS.block, **block})


@dataclass(frozen=True)
class GgufFamily:
    """One row. Keys of metadata are written without the architecture that they begin with.

    ``family`` is a ``model_type``; ``windowed_family`` another one for files with a sliding window, ``expert_family`` for files
    with experts; ``other_families`` those that ``computed`` may name. ``counts`` are config keys of experts and the metadata
    key of each, ``constants`` config keys that metadata do not say. ``eps`` is the config's key of the norms' ε. ``numbers``:
    config keys, the metadata key of each and what stands for a missing one (None: the family's own default). ``present``:
    config flags that are true where the first layer has a tensor. ``renamed``: the family's spelling of usual keys.
    ``computed`` makes the remaining keys, from metadata that ``fields`` makes of a spec when a file is written.

    ``window_period`` n: all but each n-th layer have the window, 1: all have; None: no layer has one. ``window`` stands for a
    missing size. ``windowed_theta``: windowed layers turn by angles of this base, unscaled, where metadata name no other.
    ``scores_stretched``: YaRN stretches the scores alone, and a tenth of its factor's weight is in the metadata. ``truncates``:
    the bounds of YaRN's blend are whole dimensions. ``paired``: rows of queries and keys are stored in pairs of neighbours, as
    the reordered weights of Llama are.
    """

    architecture: str
    family: str
    windowed_family: str = ""
    expert_family: str = ""
    other_families: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    weights: WeightNames = GGUF_WEIGHTS
    eps: str = "rms_norm_eps"
    numbers: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[Metadata, dict[str, Any]], dict[str, Any]] | None = None
    fields: Callable[[ModelSpec], dict[str, Value]] | None = None
    window_period: int | None = None
    window: int = 0
    windowed_theta: float | None = None
    scores_stretched: bool = False
    truncates: bool = True
    paired: bool = False

    @property
    def families(self) -> tuple[str, ...]:
        """Every ``model_type`` that a file may become."""
        named = (self.family, self.windowed_family, self.expert_family, *self.other_families)
        return tuple(name for name in named if name)

    def heads(self, spec: ModelSpec) -> dict[str, int]:
        """Names of tensors whose rows are stored in pairs, and how many heads each has."""
        return {self.weights.block["q"]: spec.n_heads, self.weights.block["k"]: spec.n_kv_heads} if self.paired else {}


def _gemma_scalar(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 2 and 3 of 27 billion parameters divide scores by the root of width / heads, the others by that of a head's width
    (``gemma_pytorch``'s ``config.py``). GGUF does not say which; llama.cpp tells them by their layers."""
    largest = {"gemma2": 46, "gemma3": 62}[config["model_type"].removesuffix("_text")]
    wide = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": wide if config["num_hidden_layers"] == largest else config["head_dim"]}


def _granite_scale(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    scale = metadata.number(f"{metadata.text('general.architecture')}.attention.scale", 0.0)
    return {"attention_multiplier": scale or max(1, config["head_dim"]) ** -0.5}


def _one_key_head(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    if config["num_key_value_heads"] != 1:
        raise ConfigError("starcoder with more than one key head is not read from GGUF.")
    return {"multi_query": True}


def _neox_branches(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": metadata.flag("gptneox.use_parallel_residual", True)}


def _stablelm_branches(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Branches side by side share one norm."""
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in metadata.file.tensors}


_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that make shares of a router's scores."""


def _routing(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """What the routers of DeepSeek and GLM do beside counts; without groups where a file names none, as in llama.cpp."""
    a = metadata.text("general.architecture")
    if not metadata.integer(f"{a}.expert_count", 0):
        raise ConfigError(f"{a} without experts is not read from GGUF.")
    return {
        "routed_scaling_factor": metadata.number(f"{a}.expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": metadata.flag(f"{a}.expert_weights_norm", False),
        "n_group": metadata.integer(f"{a}.expert_group_count", 1) or 1,
        "topk_group": metadata.integer(f"{a}.expert_group_used_count", 1) or 1,
    }


def _glm_routing(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    function = metadata.integer("glm4moe.expert_gating_func", _SIGMOID)
    if function not in (0, _SIGMOID):
        raise ConfigError(f"glm4moe.expert_gating_func={function} is not read from GGUF; it must be {_SIGMOID}, sigmoid.")
    return _routing(metadata, config)


def _routing_fields(spec: ModelSpec) -> dict[str, Value]:
    assert spec.moe is not None
    moe = spec.moe
    groups: dict[str, Value] = {"expert_group_count": moe.n_groups, "expert_group_used_count": moe.top_groups}
    return (groups if moe.n_groups > 1 else {}) | {
        "expert_weights_scale": moe.share_scale,
        "expert_weights_norm": moe.normalised,
        "expert_gating_func": _SIGMOID if moe.scores == "sigmoid" else _SOFTMAX,
    }


def _deepseek(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3 by its sigmoid, and Kimi K2 by its tokenizer's words besides; else V2. Files whose keys are one head name a
    head's sizes under keys of their own."""
    prefix = "deepseek2.attention."
    for name in ("temperature_length", "temperature_scale"):
        if f"{prefix}{name}" in metadata:
            raise ConfigError(f"{prefix}{name} is not read from GGUF.")
    function = metadata.integer("deepseek2.expert_gating_func", _SOFTMAX) or _SOFTMAX
    if function not in (_SOFTMAX, _SIGMOID):
        raise ConfigError(
            f"deepseek2.expert_gating_func={function} is not read from GGUF; it must be 1 (softmax) or 2 (sigmoid)."
        )
    ending = "_mla" if f"{prefix}key_length_mla" in metadata else ""
    turned, keys = metadata.integer("deepseek2.rope.dimension_count"), metadata.integer(f"{prefix}key_length{ending}")
    if not 0 < turned < keys:
        raise CorruptFileError(
            f"{metadata.file.path}: metadata deepseek2.rope.dimension_count={turned} must be at least 1 and below the {keys} "
            "numbers of a key."
        )
    routing = _routing(metadata, config)
    third = "kimi_k2" if metadata.text("tokenizer.ggml.pre", "") == "kimi-k2" else "deepseek_v3"
    return routing | {
        "model_type": "deepseek_v2" if function == _SOFTMAX else third,
        "topk_method": "group_limited_greedy" if routing["n_group"] > 1 else "greedy",
        "q_lora_rank": metadata.integer(f"{prefix}q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.integer(f"{prefix}kv_lora_rank"),
        "qk_nope_head_dim": keys - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": metadata.integer(f"{prefix}value_length{ending}"),
    }


def _deepseek_fields(spec: ModelSpec) -> dict[str, Value]:
    """As llama.cpp's converter writes them: keys and values of one head, the latent's, and a head's own sizes beside them."""
    assert spec.mla is not None
    mla = spec.mla
    queries: dict[str, Value] = {} if mla.q_lora_rank is None else {"attention.q_lora_rank": mla.q_lora_rank}
    return (
        _routing_fields(spec)
        | queries
        | {
            "attention.kv_lora_rank": mla.kv_lora_rank,
            "attention.head_count_kv": 1,
            "attention.key_length": mla.kv_lora_rank + mla.qk_rope_dim,
            "attention.value_length": mla.kv_lora_rank,
            "attention.key_length_mla": mla.qk_nope_dim + mla.qk_rope_dim,
            "attention.value_length_mla": mla.v_dim,
        }
    )


_BIASES = {"attention_bias": "attn_q.bias"}
_LLAMA_BIASES = _BIASES | {"mlp_bias": "ffn_down.bias"}
_LOGIT_CAP = {"final_logit_softcapping": ("final_logit_softcapping", None)}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
_EXPERTS_OF_A_TOKEN = {"num_experts_per_tok": "expert_used_count"}
_LOCAL_EXPERTS = _EXPERTS_OF_A_TOKEN | {"num_local_experts": "expert_count"}
_QWEN_EXPERTS = _EXPERTS_OF_A_TOKEN | {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
_ROUTED_EXPERTS = _EXPERTS_OF_A_TOKEN | {
    "n_routed_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count",
}  # fmt: skip
_GRANITE: dict[str, tuple[str, float | None]] = {
    "logits_scaling": ("logit_scale", 1.0), "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
}  # fmt: skip
_NORMS_AFTER = _with_names(attn_norm="post_attention_norm", mlp_norm="post_ffw_norm")
_PACKED = _with_names(qkv="attn_qkv", gate_up="ffn_up")

GGUF_FAMILIES: dict[str, GgufFamily] = {
    f.architecture: f
    for f in (
        GgufFamily(
            "llama", "llama", "mistral", "mixtral", counts=_LOCAL_EXPERTS, paired=True, window_period=1, present=_LLAMA_BIASES,
        ),
        GgufFamily("qwen2", "qwen2"),
        GgufFamily("qwen3", "qwen3", present=_BIASES),
        GgufFamily("gemma", "gemma"),
        GgufFamily(
            "gemma2", "gemma2", window_period=2, window=4096, present=_BIASES, computed=_gemma_scalar,
            numbers=_LOGIT_CAP | {"attn_logit_softcapping": ("attn_logit_softcapping", None)},
        ),
        GgufFamily(
            "gemma3", "gemma3_text", window_period=6, windowed_theta=1e4, present=_BIASES, computed=_gemma_scalar,
            numbers=_LOGIT_CAP,
        ),
        GgufFamily("phi3", "phi3", weights=_PACKED, window_period=1),
        GgufFamily("smollm3", "smollm3", paired=True, present=_LLAMA_BIASES),
        GgufFamily(
            "granite", "granite", paired=True, present=_LLAMA_BIASES, computed=_granite_scale, numbers=_GRANITE,
            fields=lambda spec: {"attention.scale": spec.attention_scale},
        ),
        GgufFamily(
            "granitemoe", "granitemoe", paired=True, present=_BIASES, computed=_granite_scale, numbers=_GRANITE,
            fields=lambda spec: {"attention.scale": spec.attention_scale}, counts=_LOCAL_EXPERTS,
        ),
        GgufFamily(
            "qwen2moe", "qwen2_moe", counts=_QWEN_EXPERTS | {
                "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            }, constants={"norm_topk_prob": False},
        ),
        GgufFamily("qwen3moe", "qwen3_moe", present=_BIASES, counts=_QWEN_EXPERTS, constants={"norm_topk_prob": True}),
        GgufFamily(
            "olmoe", "olmoe", present=_BIASES, counts=_EXPERTS_OF_A_TOKEN | {"num_experts": "expert_count"},
            constants={"norm_topk_prob": False},
        ),
        GgufFamily(
            "glm4moe", "glm4_moe", weights=_with_names(mlp_norm="post_attention_norm"), counts=_ROUTED_EXPERTS,
            present=_BIASES | {"use_qk_norm": "attn_q_norm.weight"}, computed=_glm_routing, fields=_routing_fields,
        ),
        GgufFamily(
            "deepseek2", "deepseek_v2", other_families=("deepseek_v3", "kimi_k2"), counts=_ROUTED_EXPERTS, computed=_deepseek,
            fields=_deepseek_fields, scores_stretched=True,
        ),
        GgufFamily(
            "gpt-oss", "gpt_oss", weights=_with_names(mlp_norm="post_attention_norm"), window_period=2, window=128,
            present=_BIASES, counts=_LOCAL_EXPERTS | {"intermediate_size": "expert_feed_forward_length"}, truncates=False,
        ),
        GgufFamily(
            "command-r", "cohere", eps="layer_norm_eps", numbers={"logit_scale": ("logit_scale", 0.0625)},
            present=_BIASES | {"use_qk_norm": "attn_q_norm.weight"},
        ),
        GgufFamily(
            "cohere2", "cohere2", eps="layer_norm_eps", window_period=4, window=4096, present=_BIASES,
            numbers={"logit_scale": ("logit_scale", 0.0625)},
        ),
        GgufFamily("olmo2", "olmo2", "olmo3", weights=_NORMS_AFTER, window_period=4, windowed_theta=0.0, present=_BIASES),
        GgufFamily("exaone4", "exaone4", weights=_NORMS_AFTER, window_period=4),
        GgufFamily("glm4", "glm4", weights=_with_names(gate_up="ffn_up"), present=_BIASES),
        GgufFamily("ernie4_5", "ernie4_5", present={"use_bias": "attn_q.bias"}),
        GgufFamily(
            "seed_oss", "seed_oss", weights=_with_names(mlp_norm="post_attention_norm"),
            present=_LLAMA_BIASES | {"attention_out_bias": "attn_output.bias"},
        ),
        GgufFamily(
            "stablelm", "stablelm", eps="layer_norm_eps", computed=_stablelm_branches,
            present={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        ),
        GgufFamily(
            "starcoder2", "starcoder2", eps="layer_norm_eps", renamed={"layer_norm_eps": "norm_epsilon"}, window_period=1,
            present={"use_bias": "attn_q.bias"},
        ),
        GgufFamily(
            "gptneox", "gpt_neox", eps="layer_norm_eps", weights=_with_names(qkv="attn_qkv"), computed=_neox_branches,
            present={"attention_bias": "attn_qkv.bias"},
            fields=lambda spec: {"use_parallel_residual": spec.departures.parallel_block},
        ),
        GgufFamily(
            "falcon", "falcon", eps="layer_norm_eps",
            weights=_with_names(qkv="attn_qkv", attn_norm="attn_norm_2", mlp_norm="attn_norm"),
            present={"new_decoder_architecture": "attn_norm_2.weight", "bias": "attn_qkv.bias"},
            renamed={
                "layer_norm_eps": "layer_norm_epsilon", "num_key_value_heads": "num_kv_heads",
                "intermediate_size": "ffn_hidden_size",
            },
        ),
        GgufFamily("gpt2", "gpt2", eps="layer_norm_eps", weights=_with_names(qkv="attn_qkv"), renamed=_GPT2_KEYS),
        GgufFamily(
            "starcoder", "gpt_bigcode", eps="layer_norm_eps", weights=_with_names(qkv="attn_qkv"), renamed=_GPT2_KEYS,
            computed=_one_key_head,
        ),
    )
}  # fmt: skip
"""Architectures that are read, by GGUF's own names. GGUF calls Mistral models ``llama``."""

_EXPERTS = "a mixture of experts, which is not read from GGUF"
_RECURRENT = "recurrent layers, which are not built here"
REFUSED_ARCHITECTURES: dict[str, str] = {
    **dict.fromkeys(
        ("deepseek", "phimoe", "dbrx", "grok",
         "ernie4_5-moe", "minimax-m2", "bailingmoe", "bailingmoe2", "llama4", "hunyuan-moe", "exaone-moe", "arctic"), _EXPERTS,
    ),
    **dict.fromkeys(("mamba", "mamba2", "rwkv6", "rwkv7", "jamba", "qwen3next", "granitehybrid", "falcon-h1", "nemotron_h",
                     "lfm2", "plamo2"), _RECURRENT),
    **dict.fromkeys(("bert", "nomic-bert", "jina-bert-v2", "modern-bert", "t5encoder", "gemma-embedding"), "an encoder"),
    "t5": "an encoder with a decoder",
}  # fmt: skip
"""Architectures that have a reason of their own not to be read."""


def row_of(metadata: Metadata) -> GgufFamily:
    """The row of a file. Raises UnsupportedFamilyError, with the reason, if no row fits."""
    path, architecture = metadata.file.path, metadata.text("general.architecture")
    row = GGUF_FAMILIES.get(architecture)
    if metadata.integer(f"{architecture}.expert_count", 0) and (row is None or not row.counts):
        raise UnsupportedFamilyError(f"{path} is {_EXPERTS}. Give the model as a Hugging Face directory.")
    if row is not None:
        return row
    reason = f"it is or has {REFUSED_ARCHITECTURES[architecture]}" if architecture in REFUSED_ARCHITECTURES else ""
    raise UnsupportedFamilyError(
        f"{path} has the architecture {architecture!r:.50}, which is not read from GGUF{': ' if reason else ''}{reason}. "
        f"Read are {', '.join(GGUF_FAMILIES)}."
    )


def names_in(row: GgufFamily, file: GgufFile) -> WeightNames:
    """How ``file`` names its tensors: older files hold the matrices of ``k_b`` and ``v_b`` as one."""
    joined = "k_b" in row.weights.block and f"blk.0.{row.weights.block['kv_b']}.weight" in file.tensors
    block = {part: name for part, name in row.weights.block.items() if not joined or part not in ("k_b", "v_b")}
    return replace(row.weights, block=block)


def spec_of(row: GgufFamily, metadata: Metadata) -> ModelSpec:
    """The model that ``metadata`` describes. Raises CorruptFileError for what is missing or impossible, ConfigError for what is
    not supported."""
    path, tensors = metadata.file.path, metadata.file.tensors
    if "token_embd.weight" not in tensors:
        raise CorruptFileError(
            f"{path} has no tensor 'token_embd.weight', so it holds only a vocabulary or a part of a model. "
            "Give the file of a whole model."
        )
    try:
        config = _config(row, metadata)
        spec = spec_from_config({row.renamed.get(key, key): value for key, value in config.items()})
    except ConfigError as error:
        raise type(error)(f"{path}, read as a config.json: {str(error).removeprefix('config.json: ')}") from None
    turned = metadata.integer(f"{row.architecture}.rope.dimension_count", spec.rotary_dim)
    if spec.positions == "rope" and turned != spec.rotary_dim:
        raise ConfigError(
            f"{path}: {row.architecture}.rope.dimension_count={turned} is not supported; it must equal the head dimension "
            f"{spec.rotary_dim}."
        )
    return spec


def _config(row: GgufFamily, metadata: Metadata) -> dict[str, Any]:
    """The ``config.json`` that the metadata of a file of ``row`` stand for, in usual keys."""
    path, tensors, a = metadata.file.path, metadata.file.tensors, row.architecture
    width, heads = metadata.integer(f"{a}.embedding_length"), metadata.integer(f"{a}.attention.head_count")
    if heads < 1:
        raise CorruptFileError(f"{path}: metadata {a}.attention.head_count={heads} must be at least 1.")
    head_dim = metadata.integer(f"{a}.attention.key_length", max(1, width // heads))
    if metadata.integer(f"{a}.attention.value_length", head_dim) != head_dim and row.computed is not _deepseek:
        raise ConfigError(f"{a}.attention.value_length is not supported unless it equals the head dimension {head_dim}.")
    vocab_size = tensors["token_embd.weight"].shape[0]
    eps_key = "layer_norm_rms_epsilon" if row.eps == "rms_norm_eps" else "layer_norm_epsilon"
    ids = [metadata.token_id(f"tokenizer.ggml.{name}_token_id", vocab_size) for name in ("bos", "eos", "eot", "eom")]
    ids[2] = _end_of_turn(metadata, vocab_size) if ids[2] is None else ids[2]
    config: dict[str, Any] = {
        "model_type": row.family,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": metadata.integer(f"{a}.block_count") - metadata.integer(f"{a}.nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{a}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.integer(
            f"{a}.feed_forward_length", metadata.integer(f"{a}.expert_feed_forward_length", 0) or None
        ),
        "max_position_embeddings": metadata.integer(f"{a}.context_length"),
        row.eps: metadata.number(f"{a}.attention.{eps_key}"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": ids[0],
        "eos_token_id": list(dict.fromkeys(i for i in ids[1:] if i is not None)),
        "rotary_dim": metadata.integer(f"{a}.rope.dimension_count", head_dim),
        **{key: f"blk.0.{tensor}" in tensors for key, tensor in row.present.items()},
        **row.constants,
    }
    if metadata.integer(f"{a}.expert_count", 0):
        config |= {key: metadata.integer(f"{a}.{name}") for key, name in row.counts.items()}
    if row.counts is not _ROUTED_EXPERTS and metadata.number(f"{a}.expert_weights_scale", 1.0) not in (0, 1):
        raise ConfigError(f"{a}.expert_weights_scale is not read from GGUF unless it is 1.")
    for key, (name, missing) in row.numbers.items():
        if missing is not None or f"{a}.{name}" in metadata:
            config[key] = metadata.number(f"{a}.{name}", missing)
    config |= _windows(row, metadata, config)
    if row.expert_family and metadata.integer(f"{a}.expert_count", 0):
        config["model_type"] = row.expert_family
    config |= row.computed(metadata, config) if row.computed else {}
    return config | {"rope_parameters": _ropes(row, metadata, config)}


ENDS_OF_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")
"""Texts of tokens that end an answer in chat models. Most converters leave it to the reader to find them."""


def _end_of_turn(metadata: Metadata, vocab_size: int) -> int | None:
    tokens = metadata.file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return None
    return next((tokens.index(text) for text in ENDS_OF_TURNS if text in tokens[:vocab_size]), None)


def _windows(row: GgufFamily, metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Family, window and kinds of layers by the window's size and pattern."""
    key = f"{row.architecture}.attention.sliding_window"
    window = metadata.integer(key, row.window)
    if row.window_period is None:
        if window:
            raise ConfigError(f"{key}={window} is not read for the architecture {row.architecture!r}.")
        return {}
    found: dict[str, Any] = {"sliding_window": window or None}
    if row.windowed_family and window:
        found["model_type"] = row.windowed_family
    if row.window_period == 1:
        return found
    n_layers = Reader(config).layer_count("num_hidden_layers")
    pattern = metadata.file.metadata.get(f"{key}_pattern", row.window_period)
    if isinstance(pattern, int):
        windowed = [pattern < 1 or (i + 1) % pattern != 0 for i in range(n_layers)]
    else:
        windowed = [bool(value) for value in metadata.numbers(f"{key}_pattern", n_layers, "layer")]
    kinds = ["sliding_attention" if window and in_window else "full_attention" for in_window in windowed]
    return found | {"layer_types": kinds}


def _ropes(row: GgufFamily, metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of a config.json; of both kinds of layers where windowed ones have their own."""
    everywhere = _rope(row, metadata, config)
    if row.windowed_theta is None or not config.get("sliding_window"):
        return everywhere
    base = metadata.number(f"{row.architecture}.rope.freq_base_swa", row.windowed_theta or everywhere["rope_theta"])
    own = {"rope_type": "default", "rope_theta": base}
    return {"full_attention": everywhere, "sliding_attention": own}


def _rope(row: GgufFamily, metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Linear and YaRN scaling are metadata, longrope's factors two tensors. Llama 3's is a tensor of divisors, which is
    recognised by comparing it with those of the published scalings."""
    prefix, tensors = f"{row.architecture}.rope", metadata.file.tensors
    theta = {"rope_theta": metadata.number(f"{prefix}.freq_base", 10_000.0)}
    kind = metadata.text(f"{prefix}.scaling.type", "linear")
    factor = metadata.number(f"{prefix}.scaling.factor", 0.0) or metadata.number(f"{prefix}.scale_linear", 1.0)
    original = metadata.integer(f"{prefix}.scaling.original_context_length", config["max_position_embeddings"])
    for name in (f"{prefix}.dimension_sections", f"{prefix}.scaling.alpha"):
        if name in metadata:
            raise ConfigError(f"{name} is not read from GGUF.")
    if not metadata.flag(f"{prefix}.scaling.finetuned", True) and row.architecture == "granite":
        raise ConfigError(f"{prefix}.scaling.finetuned=false means no rotary positions, which {row.family} always has here.")
    if ROPE_FACTORS[0] in tensors or ROPE_FACTORS[1] in tensors:
        short, long = (_factors(metadata, name) for name in ROPE_FACTORS)
        return theta | {
            "rope_type": "longrope", "short_factor": short, "long_factor": long, "original_max_position_embeddings": original,
            "attention_factor": metadata.number(f"{prefix}.scaling.attn_factor", 1.0),
        }  # fmt: skip
    if kind == "yarn":
        stretched = {"factor": factor, "original_max_position_embeddings": original, "truncate": row.truncates}
        return theta | stretched | _yarn(row, metadata, prefix)
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"rope scaling {kind!r:.50} is not read from GGUF. Read are none, linear, yarn, longrope and Llama 3's."
        )
    if ROPE_DIVISORS in tensors:
        return theta | _divided(_factors(metadata, ROPE_DIVISORS), theta["rope_theta"])
    if kind == "none" or factor == 1:
        return theta | {"rope_type": "default"}
    return theta | {"rope_type": "linear", "factor": factor}


def _yarn(row: GgufFamily, metadata: Metadata, prefix: str) -> dict[str, Any]:
    if ROPE_DIVISORS in metadata.file.tensors:
        raise ConfigError(f"{ROPE_DIVISORS} is not read from GGUF beside yarn scaling.")
    if metadata.number(f"{prefix}.scaling.yarn_ext_factor", 1.0) != 1:
        raise ConfigError(f"{prefix}.scaling.yarn_ext_factor is not read from GGUF unless it is 1.")
    given = {
        key: metadata.number(f"{prefix}.scaling.{name}")
        for key, name in (
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("mscale_all_dim", "yarn_log_multiplier"),
        )
        if f"{prefix}.scaling.{name}" in metadata
    }
    if row.scores_stretched:
        weight = float(f"{10 * given.get('mscale_all_dim', 0.0):.7g}")  # a tenth of it is stored
        if not weight > 0:
            raise ConfigError(f"{prefix}.scaling.yarn_log_multiplier must be above 0 beside yarn scaling.")
        return {"rope_type": "yarn"} | given | {"mscale": weight, "mscale_all_dim": weight}
    return {"rope_type": "yarn"} | given | ({"mscale": 1.0} if given.get("mscale_all_dim") else {})


MAX_ANGLES = 4096
"""Of a head: no tensor of rotary factors that is read is longer."""


def _factors(metadata: Metadata, name: str) -> list[float]:
    """The positive numbers of a small tensor."""
    info = metadata.file.tensors.get(name)
    if info is None or len(info.shape) != 1 or info.shape[0] > MAX_ANGLES or info.kind.name not in ("F32", "F16"):
        raise CorruptFileError(f"{metadata.file.path}: {name} must be a tensor of at most {MAX_ANGLES} numbers in F32 or F16.")
    values = metadata.file.read(name).float()
    if not (torch.isfinite(values) & (values > 0)).all():
        raise CorruptFileError(f"{metadata.file.path}: {name} must hold positive numbers.")
    return [float(str(value)) for value in values.numpy()]


def _divided(divisors: list[float], theta: float) -> dict[str, Any]:
    """Llama 3's scaling of these ``divisors``: the largest is its factor, the other constants are the published ones."""
    factor = max(divisors)
    if factor == 1 == min(divisors):
        return {"rope_type": "default"}
    scaled = RopeSpec(theta, "llama3", factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    if not torch.allclose(torch.tensor(divisors), rope_divisors(scaled, 2 * len(divisors)), rtol=1e-4):
        raise ConfigError(f"{ROPE_DIVISORS} holds a scaling that is not Llama 3's; it is not read from GGUF.")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def rope_divisors(rope: RopeSpec, dim: int) -> Tensor:
    """(dim / 2,): what Llama 3's scaling divides each frequency by, the tensor ``ROPE_DIVISORS`` of a file."""
    return inverse_frequencies(replace(rope, scaling="none"), dim) / inverse_frequencies(rope, dim)


def family_row(spec: ModelSpec) -> GgufFamily:
    """The row by which a model of ``spec`` is written. Raises UnsupportedFamilyError if no row fits."""
    for row in GGUF_FAMILIES.values():
        if spec.family in row.families:
            return row
    known = dict.fromkeys(name for row in GGUF_FAMILIES.values() for name in row.families)
    raise UnsupportedFamilyError(
        f"a model of family={spec.family!r} is not written as GGUF: no architecture of it is read here. Written are "
        f"{', '.join(known)}."
    )
