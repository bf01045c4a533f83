"""Families that are planned and not built: read from config.json, refused where a model would have to be made."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import ConfigError, UnsupportedFamilyError
from twostroke.core.families import FAMILIES, PLANNED_FAMILIES, all_families, config_from_spec, spec_from_config
from twostroke.core.spec import ModelSpec
from twostroke.planner.work.flops import decode_flops
from twostroke.planner.work.params import count_parameters
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes

HF = {
    "mixtral": "mistralai--Mixtral-8x7B-v0.1_config.json",
    "qwen3_moe": "Qwen--Qwen3-30B-A3B_config.json",
    "gpt_oss": "openai--gpt-oss-20b_config.json",
    "minimax_m2": "MiniMaxAI--MiniMax-M2.5_config.json",
    "deepseek_v3": "deepseek-ai--DeepSeek-V3_config.json",
    "glm_moe_dsa": "zai-org--GLM-5_config.json",
    "gemma4": "google--gemma-4-26B-A4B_config.json",
    "phi": "phi-2.json",
    "phi3": "Phi-3-mini-4k-instruct.json",
}
SHORT = {"num_layers": 4, "n_head": 4, "hidden_dim": 32, "vocab_size": 100, "max_seq_len": 64, "ffn_embed_dim": 128}


def published(assets: Path, family: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((assets / "configs" / "hf" / HF[family]).read_text())
    return config


def test_every_family_is_in_one_registry_and_says_whether_it_is_built() -> None:
    assert not set(FAMILIES) & set(PLANNED_FAMILIES)
    assert {name for name, family in all_families().items() if family.write is not None} == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "features"),
    [
        ("glm_moe_dsa", ["sparse attention by an indexer"]),
        ("gemma4", ["global attention of another shape", "a scale per layer"]),
        ("phi", ["a bias on the output head"]),
    ],
)
def test_what_keeps_a_model_from_being_built_is_named(assets: Path, family: str, features: list[str]) -> None:
    spec = spec_from_config(published(assets, family))
    assert set(features) <= set(spec.unbuilt_features)
    with pytest.raises(ConfigError, match=f"model_type='{family}' can be planned but not built yet: ") as caught:
        spec.require_buildable()
    assert all(feature in str(caught.value) for feature in features)
    with pytest.raises(UnsupportedFamilyError, match="can be planned but not written"):
        config_from_spec(spec)


def test_decoder_lowering_and_weight_names_refuse_what_is_not_built(assets: Path) -> None:
    from twostroke.core.families import layout
    from twostroke.engine.lowering import lower
    from twostroke.model.decoder import Decoder

    spec = spec_from_config(published(assets, "glm_moe_dsa") | {"quantization_config": None})
    for make in (lambda: Decoder(spec, device="meta"), lambda: lower(spec, {}), lambda: list(layout(spec))):
        with pytest.raises(
            ConfigError, match=r"'glm_moe_dsa' can be planned but not built yet: sparse attention by an indexer\."
        ):
            make()


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"partial_rotary_factor": 0.5}, "partial rotary positions in this family"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial rotary positions in this family"),
        ({"hidden_act": "relu"}, "the ReLU activation"),
    ],
)
def test_a_built_family_with_a_part_that_is_not_built_is_planned(assets: Path, changes: dict[str, Any], feature: str) -> None:
    plain: dict[str, Any] = json.loads((assets / "configs" / "hf" / "Qwen--Qwen3-8B_config.json").read_text())
    spec = spec_from_config(plain | changes)
    assert spec.unbuilt_features == (feature,)
    for make in (lambda: spec.require_buildable(), lambda: config_from_spec(spec)):
        with pytest.raises(ConfigError, match="'qwen3' can be planned but not built yet"):
            make()
    assert count_parameters(spec) == count_parameters(spec_from_config(plain))


def test_a_directory_of_a_planned_model_is_refused_before_its_weights_are_looked_for(assets: Path, tmp_path: Path) -> None:
    from twostroke.engine.core import EngineCore
    from twostroke.model.load import load_model

    (tmp_path / "config.json").write_text(json.dumps(published(assets, "glm_moe_dsa")))
    for load in (lambda: load_model(tmp_path), lambda: EngineCore(tmp_path)):
        with pytest.raises(ConfigError, match=r"can be planned but not built yet: sparse attention by an indexer"):
            load()


def test_a_specification_survives_a_journey_through_json(assets: Path) -> None:
    for family in HF:
        spec = spec_from_config(published(assets, family))
        assert ModelSpec.from_dict(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


def test_notes_say_what_a_plan_leaves_out(assets: Path) -> None:
    assert "vision tower" in spec_from_config(published(assets, "gemma4")).notes[0]
    assert "multi-token-prediction" in spec_from_config(published(assets, "deepseek_v3")).notes[0]


def test_the_format_of_a_quantised_checkpoint_is_read(assets: Path) -> None:
    schemes = {family: spec_from_config(published(assets, family)).checkpoint_scheme for family in HF}
    assert {k: v for k, v in schemes.items() if v} == {"gpt_oss": "mxfp4", "minimax_m2": "fp8", "deepseek_v3": "fp8"}


def test_windows_follow_the_layer_types(assets: Path) -> None:
    gemma, oss = (spec_from_config(published(assets, family)) for family in ("gemma4", "gpt_oss"))
    assert [gemma.window_of_layer(i) for i in range(7)] == [1024] * 5 + [None, 1024]
    assert [oss.window_of_layer(i) for i in range(4)] == [128, None, 128, None]
    neo = spec_from_config({"model_type": "gpt_neo", **SHORT})
    assert [neo.window_of_layer(i) for i in range(4)] == [None, 256, None, 256]
    for types in ([[["global"] * 3, 10**9]], [[["global", "local"], 1]], [[["left"], 4]], [[["local"], -4]]):
        with pytest.raises(ConfigError, match="attention_types must name global or local for each of 4 layers"):
            spec_from_config({"model_type": "gpt_neo", **SHORT, "attention_types": types})


def test_short_keys_without_what_the_family_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match="without mlp_gated_linear_units"):
        spec_from_config({"model_type": "llama", "name": "a", **SHORT})
    gated = {"mlp_gated_linear_units": True, "num_key_value_heads": 2}
    assert spec_from_config({"model_type": "llama", **SHORT, **gated}).n_kv_heads == 2
    with pytest.raises(ConfigError, match="no 'vocab_size', 'ffn_embed_dim'"):
        spec_from_config({"model_type": "opt", "num_layers": 2, "n_head": 2, "hidden_dim": 8})
    with pytest.raises(ConfigError, match="4 · hidden_dim for bloom"):
        spec_from_config({"model_type": "bloom", **SHORT, "ffn_embed_dim": 100})
    with pytest.raises(UnsupportedFamilyError, match="of 'megatron' has no 'model_type': nothing says how its positions"):
        spec_from_config({"name": "megatron", **SHORT})


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("mixtral", {"num_local_experts": 0}, "n_experts=0 must be"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k=9 must be at most n_experts=8"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "d_expert=-1"),
        ("qwen3_moe", {"num_hidden_layers": 10**9}, "n_layers=1000000000"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must list"),
        ("gpt_oss", {"num_key_value_heads": 7}, "n_kv_heads=7 must divide n_heads=64"),
        ("deepseek_v3", {"qk_rope_head_dim": 63}, "qk_rope_dim=63 must be even"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "quip"}}, "'quip' is not supported"),
        ("glm_moe_dsa", {"q_lora_rank": None}, "an indexer needs latent attention with q_lora_rank"),
        ("gemma4", {"text_config": None}, "no 'text_config'"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm=True is not supported"),
        ("phi", {"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ("phi3", {"rope_scaling": {"type": "ntk"}}, "rope_type='ntk' is not supported"),
        ("minimax_m2", {"rotary_dim": 4096}, "rotary_dim=4096 must be"),
    ],
)
def test_an_impossible_configuration_gets_a_sentence(assets: Path, family: str, changes: dict[str, Any], sentence: str) -> None:
    config = {k: v for k, v in (published(assets, family) | changes).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        spec_from_config(config)
    assert sentence in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_json_in_any_key_is_a_model_or_a_sentence(assets: Path, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([*HF, "gptj", "gpt_neo", "bloom", "opt"]))
    config = published(assets, family) if family in HF else {"model_type": family, **SHORT}
    changed = config.get("text_config", config)
    extra = ["attention_types", "rope_parameters", "layer_types", "mlp_only_layers", "quantization_config", "rotary_dim"]
    changed |= data.draw(st.dictionaries(st.sampled_from([*changed, *extra]), json_values, max_size=4))
    with contextlib.suppress(ConfigError):  # any other exception fails
        spec = spec_from_config(config)
        assert 0 < count_parameters(spec).active <= count_parameters(spec).total
        assert weights_bytes(spec, "int4") > 0
        assert decode_flops(spec, 100) > 0
        assert kv_bytes_per_token(spec) > 0
