"""Every ``config.json`` among the assets either plans with the exact number of parameters, or is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assets_folder import ASSETS
from twostroke.core.errors import ConfigError
from twostroke.core.families import read_spec
from twostroke.core.matrices import layer_kinds
from twostroke.core.spec import ModelSpec
from twostroke.planner.work.flops import decode_flops, prefill_flops, training_flops_per_token
from twostroke.planner.work.params import count_parameters
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes

FILES = sorted((ASSETS / "configs").rglob("*.json"))

REFUSED = {
    "BERT": "is an encoder",
    "no model_type": "has no 'model_type': nothing says how its positions",
    "no gated MLP": "without mlp_gated_linear_units",
}
REFUSALS: dict[str, str] = {
    **dict.fromkeys(
        (
            "allenai_scibert_scivocab_uncased", "bert-base-cased", "bert-base-multilingual-cased", "bert-base-uncased",
            "dslim_bert-base-NER", "sentence-transformers_all-MiniLM-L6-v2",
        ),
        "BERT",
    ),
    **dict.fromkeys(
        (
            "bert-large", "bloom-175b", "facebook_opt-175b", "megatron-lm-175b", "megatron-lm-530b", "mt-nlg-530b", "test-13b",
        ),
        "no model_type",
    ),
    **dict.fromkeys(
        (
            "NousResearch_Llama-2-7b-hf", "decapoda-research_llama-13b-hf", "decapoda-research_llama-30b-hf",
            "decapoda-research_llama-65b-hf", "decapoda-research_llama-7b-hf", "fxmarty_tiny-llama-fast-tokenizer",
            "lmsys_vicuna-7b-delta-v0",
        ),
        "no gated MLP",
    ),
}  # fmt: skip
PLANNED = [file for file in FILES if file.stem not in REFUSALS]

# Elements of all tensors in the safetensors headers on the Hugging Face Hub or in the model's paper; multi-token-prediction
# layers and vision towers left out, as the notes of the specifications say.
PUBLISHED = {
    "mistralai--Mixtral-8x7B-v0.1_config": 46_702_792_704,
    "Qwen--Qwen3-30B-A3B_config": 30_532_122_624,
    "Qwen--Qwen3-235B-A22B_config": 235_093_634_560,
    "deepseek-ai--DeepSeek-V3_config": 671_026_419_200,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "phi-2": 2_779_683_840,
    "EleutherAI_gpt-j-6b": 6_050_882_784,
    "EleutherAI_gpt-neo-2.7B": 2_651_307_520,
    "bigscience_bloom-560m": 559_214_592,
    "bigscience_bloom-7b1": 7_069_016_064,
    "facebook_opt-125m": 125_239_296,
    "facebook_opt-350m": 331_196_416,
    "facebook_opt-66b": 65_719_701_504,
    "gpt2-xl": 1_557_611_200,
    "bigcode_santacoder": 1_124_886_528,
}

# As their authors print them, in billions, to that many digits; gpt-oss leaves the input embedding out, the others do not say.
ACTIVE = {
    "mistralai--Mixtral-8x7B-v0.1_config": ("active", 12.9),
    "Qwen--Qwen3-30B-A3B_config": ("active", 3.3),
    "Qwen--Qwen3-235B-A22B_config": ("active", 22.0),
    "deepseek-ai--DeepSeek-V3_config": ("in_products", 37.0),
    "openai--gpt-oss-20b_config": ("in_products", 3.61),
    "openai--gpt-oss-120b_config": ("in_products", 5.13),
    "google--gemma-4-26B-A4B_config": ("active", 3.8),
    "zai-org--GLM-5_config": ("in_products", 40.0),
}


def test_the_assets_hold_the_configurations_that_are_tested_here(assets: Path) -> None:
    assert assets == ASSETS
    assert len(FILES) == 70
    assert set(REFUSALS) <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", [f for f in FILES if f.stem in REFUSALS], ids=lambda f: f.stem)
def test_what_cannot_be_planned_is_refused_with_its_reason(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(file)
    reason = REFUSALS[file.stem]
    assert REFUSED[reason] in str(caught.value)
    if reason != "BERT":
        assert repr(file.stem) in str(caught.value)


SHORT_KEYS_IN_TRANSFORMERS: dict[str, dict[str, str]] = {
    "gpt2": {"num_layers": "n_layer", "hidden_dim": "n_embd", "max_seq_len": "n_positions", "ffn_embed_dim": "n_inner"},
    "gptj": {"num_layers": "n_layer", "hidden_dim": "n_embd", "max_seq_len": "n_positions", "ffn_embed_dim": "n_inner"},
    "gpt_neo": {"n_head": "num_heads", "hidden_dim": "hidden_size", "max_seq_len": "max_position_embeddings"},
    "bloom": {"num_layers": "n_layer", "hidden_dim": "hidden_size"},
    "opt": {
        "num_layers": "num_hidden_layers", "n_head": "num_attention_heads", "hidden_dim": "hidden_size",
        "max_seq_len": "max_position_embeddings", "ffn_embed_dim": "ffn_dim",
    },
    "llama": {
        "num_layers": "num_hidden_layers", "n_head": "num_attention_heads", "hidden_dim": "hidden_size",
        "max_seq_len": "max_position_embeddings", "ffn_embed_dim": "intermediate_size",
    },
}  # fmt: skip


def reference_config(file: Path) -> Any:
    """transformers' configuration of the language model in ``file``."""
    from transformers import AutoConfig

    config = json.loads(file.read_text())
    for key in ("quantization_config", "auto_map", "model_size"):
        config.pop(key, None)
    if "hidden_dim" in config:
        names = SHORT_KEYS_IN_TRANSFORMERS[config["model_type"]]
        config = {names.get(key, key): value for key, value in config.items() if value is not None and key != "name"}
        if config["model_type"] == "gpt_neo":
            config["attention_types"] = [[["global", "local"], config["num_layers"] // 2]]
        if file.stem == "facebook_opt-350m":
            config |= {"word_embed_proj_dim": 512, "do_layer_norm_before": False}
        if file.stem == "bigcode_santacoder":
            config["model_type"] = "gpt_bigcode"
    theirs = AutoConfig.for_model(**config)
    return theirs.text_config if config["model_type"] == "gemma4" else theirs


@pytest.mark.parametrize("file", PLANNED, ids=lambda f: f.stem)
@pytest.mark.filterwarnings("ignore")  # transformers' own, about ids and old keys
def test_counts_are_those_of_the_tensors_that_transformers_makes(file: Path) -> None:
    """Every tensor of a checkpoint, on the meta device: parameters, and the buffers that are stored (correction biases)."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference_config(file))
    tensors = {id(t): t.numel() for t in model.state_dict(keep_vars=True).values()}
    assert count_parameters(read_spec(file)).total == sum(tensors.values())


@pytest.mark.parametrize(("stem", "total"), PUBLISHED.items())
def test_counts_are_the_published_ones(assets: Path, stem: str, total: int) -> None:
    assert count_parameters(spec_of(assets, stem)).total == total


@pytest.mark.parametrize(("stem", "count", "billions"), [(stem, *published) for stem, published in ACTIVE.items()])
def test_active_parameters_are_the_published_ones(assets: Path, stem: str, count: str, billions: float) -> None:
    """Authors round, some downwards (Qwen3-30B-A3B: 3.35 is printed as 3.3, GLM-5: 40.8 as 40): 2.5%."""
    assert getattr(count_parameters(spec_of(assets, stem)), count) / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize("file", PLANNED, ids=lambda f: f.stem)
def test_every_part_of_a_plan_answers_for_every_model(file: Path) -> None:
    spec = read_spec(file)
    parameters, kinds = count_parameters(spec), layer_kinds(spec)
    assert sum(count for _, count in kinds) == spec.n_layers
    assert 0 < parameters.active <= parameters.total
    assert parameters.active_matrices <= parameters.block_matrices <= parameters.total
    assert (parameters.active == parameters.total) == (spec.moe is None)
    context = min(512, spec.max_positions)
    assert training_flops_per_token(spec, context) > 6 * parameters.active_matrices
    assert prefill_flops(spec, context) > context * 2 * parameters.active_matrices
    assert decode_flops(spec, context) > 2 * parameters.active_matrices
    assert weights_bytes(spec, spec.checkpoint_scheme or "bf16") > 0
    assert 0 < kv_bytes_per_token(spec) <= 1e7


def spec_of(assets: Path, stem: str) -> ModelSpec:
    return read_spec(next((assets / "configs").rglob(f"{stem}.json")))
