"""``config.json`` ↔ ``ModelSpec``, held against what transformers makes of the same dictionary."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import EVERY
from twostroke.core.errors import ConfigError, CorruptFileError, InputError, UnsupportedFamilyError
from twostroke.core.families import FAMILIES, all_families, config_from_spec, read_config, read_spec, spec_from_config
from twostroke.core.spec import Departures, ModelSpec, RopeSpec

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "intermediate_size": 128,
}
GPT2_SIZES = {"vocab_size": 300, "n_embd": 64, "n_layer": 3, "n_head": 4}


NEEDED: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": True},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local", "local"], 1]]},
    "stablelm": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gpt_neox": {"num_attention_heads": 4},
    "glm4_moe": {"num_attention_heads": 8},
    "kimi_k2": {
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131_072,
        "bos_token_id": 163_584,
        "eos_token_id": 163_585,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""What a family's defaults do not give for these sizes."""


def small_config(family: str, **changes: Any) -> dict[str, Any]:
    sizes = GPT2_SIZES if family in ("gpt2", "gpt_bigcode") else SIZES
    return {"model_type": family, **sizes, **NEEDED.get(family, {}), **changes}


def reference(config: dict[str, Any]) -> Any:
    """transformers' reading of ``config``."""
    from transformers import AutoConfig

    known = {"kimi_k2": "deepseek_v3"}  # whose class its checkpoints name
    return AutoConfig.for_model(**config | {"model_type": known.get(config["model_type"], config["model_type"])})


def assert_agree(spec: ModelSpec, theirs: Any) -> None:
    assert spec.vocab_size == theirs.vocab_size
    assert spec.n_layers == theirs.num_hidden_layers
    assert spec.d_model == theirs.hidden_size
    assert spec.n_heads == theirs.num_attention_heads
    assert spec.max_positions == theirs.max_position_embeddings
    assert spec.tied_embeddings == theirs.tie_word_embeddings
    assert spec.bos_token_id == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert spec.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    named = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    assert spec.norm_eps == next(getattr(theirs, name) for name in named if hasattr(theirs, name))
    if spec.positions == "learned":
        rates = [getattr(theirs, name) for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop") if hasattr(theirs, name)]
        assert all(rate == spec.dropout for rate in rates)
        return
    if spec.mla is not None:
        assert spec.moe is not None
        ours = (spec.mla.q_lora_rank, spec.mla.kv_lora_rank, spec.mla.qk_nope_dim, spec.mla.qk_rope_dim, spec.mla.v_dim)
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        assert ours == tuple(getattr(theirs, name) for name in names)
        assert (spec.moe.n_experts, spec.moe.d_expert) == (theirs.n_routed_experts, theirs.moe_intermediate_size)
        assert spec.moe.normalised == theirs.norm_topk_prob
        assert spec.moe.n_groups == (theirs.n_group or 1)
        return
    kv_heads = theirs.num_kv_heads if spec.family == "falcon" else getattr(theirs, "num_key_value_heads", spec.n_heads)
    assert spec.n_kv_heads == kv_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert spec.head_dim == head_dim
    assert spec.d_ff == (theirs.ffn_hidden_size if spec.family == "falcon" else theirs.intermediate_size)
    ropes = theirs.rope_parameters
    by_kind = [ropes.get(kind, ropes) for kind in getattr(theirs, "layer_types", None) or ["full_attention"] * spec.n_layers]
    kinds = {"none": "default"}
    for ours, parameters in zip((spec.rope_of_layer(i) for i in range(spec.n_layers)), by_kind, strict=True):
        if ours is not None:
            assert ours.theta == parameters["rope_theta"]
            assert kinds.get(ours.scaling, ours.scaling) == parameters["rope_type"]
    turned = int(head_dim * by_kind[0].get("partial_rotary_factor", 1.0))
    assert spec.rotary_dim == turned
    if getattr(theirs, "layer_types", None) is not None:
        windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert [spec.window_of_layer(i) for i in range(spec.n_layers)] == windows
    else:
        assert spec.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_mean_what_they_mean_in_transformers(family: str) -> None:
    config = small_config(family)
    assert_agree(spec_from_config(config), reference(config))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_key_value_heads": 8, "eos_token_id": [5, 6], "bos_token_id": None, "tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": None, "rope_theta": 5e5, "max_position_embeddings": 77}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e6}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}),
        (
            "llama",
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
        ),
        ("llama", {"head_dim": 16}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 12, "num_key_value_heads": 4, "head_dim": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 30}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "num_key_value_heads": None}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        ("qwen3", {"head_dim": 24, "attention_bias": True}),
        ("gpt2", {"n_inner": 100, "n_positions": 50, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": False}),
        ("gpt2", {"attn_pdrop": 0, "resid_pdrop": 0.0, "embd_pdrop": 0, "eos_token_id": None}),
    ],
)
def test_parse_agrees_with_transformers(family: str, changes: dict[str, Any]) -> None:
    config = small_config(family, **changes)
    assert_agree(spec_from_config(config), reference(config))


@pytest.mark.parametrize(
    "name",
    [
        "Meta-Llama-3-8B.json",
        "Mistral-7B-Instruct-v0.3.json",
        "Qwen2-72B-Instruct.json",
        "Qwen--Qwen3-0.6B_config.json",
        "Qwen--Qwen3-32B_config.json",
        "meta-llama--Meta-Llama-3.1-405B_config.json",
        "meta-llama--Meta-Llama-3.1-8B_config.json",
    ],
)
def test_published_configurations_agree_with_transformers(assets: Path, name: str) -> None:
    config = json.loads((assets / "configs" / "hf" / name).read_text())
    assert_agree(spec_from_config(config), reference(config))


def test_an_unknown_family_names_the_near_and_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedFamilyError,
        match=r"Did you mean 'mixtral' or 'mistral'\?.*llama.*olmo2, olmo3.*seed_oss.*gpt_oss.*; to plan only",
    ):
        spec_from_config(small_config("mixtrl"))


@pytest.mark.parametrize(
    ("family", "reason"), [("bert", "an encoder"), ("t5", "with a decoder"), ("mamba", "recurrent"), ("jamba", "mixes")]
)
def test_a_model_that_is_no_decoder_is_refused_with_the_reason(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedFamilyError, match=f"model_type='{family}' is not supported: it is .*{reason}"):
        spec_from_config(small_config("llama") | {"model_type": family})


ROPES = (
    RopeSpec(),
    RopeSpec(theta=1e6, scaling="linear", factor=4.0),
    RopeSpec(theta=5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64),
)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Every specification that the first families can write."""
    family = draw(st.sampled_from(("llama", "mistral", "qwen2", "qwen3", "olmo2", "gpt2")))
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = kv_heads * group
    common: dict[str, Any] = {
        "family": family,
        "vocab_size": draw(st.integers(1, 500)),
        "n_layers": draw(st.integers(1, 5)),
        "d_ff": draw(st.integers(1, 99)),
        "max_positions": draw(st.integers(1, 99)),
        "norm_eps": draw(st.sampled_from((1e-6, 1e-5))),
        "tied_embeddings": draw(st.booleans()),
        "bos_token_id": draw(st.none() | st.integers(0, 9)),
        "eos_token_ids": tuple(draw(st.lists(st.integers(0, 9), max_size=3, unique=True))),
        "dropout": draw(st.sampled_from((0.0, 0.1))),
        "n_heads": heads,
    }
    if family == "gpt2":
        return ModelSpec(
            **common, n_kv_heads=heads, d_model=heads * 8, head_dim=8, norm="layernorm", positions="learned", mlp="gelu",
            activation=draw(st.sampled_from(("gelu", "gelu_tanh"))), qkv_bias=True, attn_out_bias=True, mlp_bias=True,
        )  # fmt: skip
    bias = draw(st.booleans()) if family in ("llama", "qwen3", "olmo2") else False
    windowed: dict[str, Any] = {}
    if family not in ("llama", "olmo2") and draw(st.booleans()):
        windowed["sliding_window"] = draw(st.integers(1, 50))
        if family != "mistral" and draw(st.booleans()):
            layers = st.lists(st.integers(0, common["n_layers"] - 1), min_size=1, unique=True)
            windowed["sliding_window_layers"] = tuple(sorted(draw(layers)))
    return ModelSpec(
        **common, **windowed, n_kv_heads=kv_heads,
        d_model=heads * draw(st.integers(1, 9)), head_dim=draw(st.sampled_from((2, 8, 16))),
        rope=draw(st.sampled_from(ROPES)), activation=draw(st.sampled_from(("silu", "gelu"))),
        qk_norm=family in ("qwen3", "olmo2"),
        qkv_bias=bias or family == "qwen2", attn_out_bias=bias, mlp_bias=draw(st.booleans()) if family == "llama" else False,
        departures=Departures(qk_norm_over_heads=True, norms_after=True) if family == "olmo2" else Departures(),
    )  # fmt: skip


@given(specs())
@settings(max_examples=150, deadline=None)
def test_written_configuration_reads_back_as_the_same_model_here_and_in_transformers(spec: ModelSpec) -> None:
    config = config_from_spec(spec)
    again = spec_from_config(json.loads(json.dumps(config)))
    windows = [spec.window_of_layer(i) for i in range(spec.n_layers)]
    assert [again.window_of_layer(i) for i in range(spec.n_layers)] == windows
    plain = {"sliding_window": None, "sliding_window_layers": None}
    assert again.with_(**plain) == spec.with_(**plain)
    theirs = reference({k: v for k, v in config.items() if k != "architectures"})
    assert_agree(again, theirs)


@pytest.mark.parametrize("name", EVERY)
def test_a_model_of_every_family_is_written_as_it_is_read(name: str) -> None:
    config = config_from_spec(EVERY[name])
    again = spec_from_config(json.loads(json.dumps(config)))
    assert again == EVERY[name]
    assert_agree(again, reference({k: v for k, v in config.items() if k != "architectures"}))


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("mistral", {"sliding_window": 8, "sliding_window_layers": (1,)}, "sliding_window"),
        ("llama", {"qk_norm": True}, "qk_norm"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias"),
        ("llama", {"norm": "layernorm"}, "norm"),
        ("llama", {"qkv_bias": True}, "attn_out_bias"),
        ("llama", {"d_model": 65, "head_dim": 16}, "n_heads"),
    ],
)
def test_a_model_that_a_family_cannot_describe_is_refused(family: str, changes: dict[str, Any], field: str) -> None:
    spec = ModelSpec(family, 100, 2, 64, 4, 2, 16, 128, 64).with_(**changes)
    with pytest.raises(ConfigError, match=field):
        config_from_spec(spec)


YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LONGROPE = {"type": "longrope", "original_max_position_embeddings": 32, "short_factor": [1.0], "long_factor": [2, 3]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"vocab_size": "many"}, "vocab_size='many' must be a whole number"),
        ({"vocab_size": True}, "vocab_size=True must be a whole number"),
        ({"num_hidden_layers": 10**12}, "n_layers=1000000000000 must be at most"),
        ({"num_hidden_layers": -1}, "n_layers=-1 must be"),
        ({"num_attention_heads": 0}, "n_heads=0 must be"),
        ({"num_attention_heads": 7}, "num_attention_heads=7 must divide hidden_size=64"),
        ({"num_key_value_heads": 5}, "n_kv_heads=5 must divide n_heads=32"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number, finite"),
        ({"rms_norm_eps": 0}, "norm_eps=0.0 must be positive"),
        ({"rope_theta": "big"}, "rope_theta='big' must be a number"),
        ({"rope_theta": -1.0}, "theta=-1.0 must be positive"),
        ({"rope_parameters": [1]}, "must be an object"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type='ntk' is not supported. Supported: default, linear, proportional"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None must be a positive"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor=inf must be a positive"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "theta=1.0 must be above 1 for yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary_dim=2 must be above 2 for dynamic"),
        ({"rope_scaling": LONGROPE}, "must be 1 numbers each"),
        ({"rope_scaling": {"type": "proportional", "partial_rotary_factor": 0.0}}, "turned_share=0.0 must be above 0"),
        ({"rope_scaling": {"type": "proportional", "factor": 0}}, "factor=0 must be a positive"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be above 0 and at most 1"),
        ({"hidden_act": "relu6"}, "activation 'relu6' is not supported"),
        ({"hidden_act": ["silu"]}, "is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>' must be a token id"),
        ({"eos_token_id": [*range(1025)]}, "eos_token_id lists 1025 tokens; at most 1024 are read"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "'gptq' with bits=3 is not supported. Supported: 4, 8"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "'bitnet' is not supported"),
        ({"quantization_config": "int4"}, "must be an object"),
        ({"model_type": "mamba"}, "model_type='mamba' is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
    ],
)
def test_an_impossible_configuration_gets_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    config = {k: v for k, v in (small_config("llama") | changes).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        spec_from_config(config)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights=false is not supported"),
        ({"resid_pdrop": 0.3}, "must be equal"),
        ({"n_head": 7}, "n_head=7 must divide n_embd=64"),
    ],
)
def test_gpt2_variants_that_are_not_computed_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        spec_from_config(small_config("gpt2", **changes))


def test_qwen_layer_types_must_name_every_layer() -> None:
    with pytest.raises(ConfigError, match="layer_types must list num_hidden_layers=3"):
        spec_from_config(small_config("qwen3", use_sliding_window=True, layer_types=["full_attention"]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data(), st.sampled_from(list(FAMILIES)))
@settings(max_examples=300, deadline=None)
def test_any_json_in_any_key_is_a_model_or_a_sentence(data: st.DataObject, family: str) -> None:
    keys = [*config_from_spec(spec_from_config(small_config(family))), "rope_scaling", "layer_types", "quantization_config"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), json_values, max_size=4))
    with contextlib.suppress(ConfigError):  # any other exception fails
        spec_from_config(small_config(family) | {"use_sliding_window": True} | changes)


def test_end_of_turn_ids_of_the_generation_config_count_as_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config("llama", eos_token_id=7)))
    assert read_spec(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert read_spec(tmp_path).eos_token_ids == (7, 9)
    assert read_spec(tmp_path / "config.json").eos_token_ids == (7,)


def test_unreadable_configuration_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for content in (b"{", b"\xff\xfe", b"[1, 2]", b"[" * 100_000, b"1" * 5000):
        file.write_bytes(content)
        with pytest.raises(CorruptFileError, match=r"config\.json"):
            read_config(tmp_path)
    with file.open("wb") as stream:
        stream.truncate(5 * 2**20)
    with pytest.raises(CorruptFileError, match="at most"):
        read_config(file)


HUGE = (10**400, -(10**400), 2**63, float("nan"), float("inf"), float("-inf"), 1e31)
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("value", HUGE, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("model_type", sorted(all_families()))
def test_a_number_that_nothing_can_compute_with_is_a_sentence_wherever_it_stands(model_type: str, value: float) -> None:
    """Also where a quotient or a product is made of it: an integer of four hundred digits has no float."""
    base: dict[str, Any] = {
        "model_type": model_type, "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 64,
    }  # fmt: skip
    keys = [
        *base,
        "rope_theta",
        "partial_rotary_factor",
        "rotary_dim",
        "rms_norm_eps",
        "attention_dropout",
        "eos_token_id",
        "n_embd",
    ]
    keys += ["n_head", "n_layer", "n_positions", "n_inner", "num_layers", "num_heads", "window_size", "ffn_dim", "seq_length"]
    keys += ["sliding_window", "layer_norm_epsilon", "num_experts", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank"]
    documents = [base | {key: value} for key in keys if key != "model_type"]
    documents += [base | {"rope_scaling": LLAMA3_ROPE | {key: value}} for key in LLAMA3_ROPE]
    documents += [base | {"rope_parameters": {"rope_theta": value}}, base | {"attention_types": [[[], value]]}]
    documents += [base | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": value}}]
    refused = 0
    for document in documents:
        try:
            spec_from_config(document)
        except ConfigError as error:
            refused += len(str(error)) < 1000
    assert refused >= len(base) - 1
