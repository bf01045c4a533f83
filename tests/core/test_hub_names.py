"""Names on the Hub: the table of published models, the cache, and sentences for what neither has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from assets_folder import ASSETS
from twostroke.core.errors import ConfigError, InputError
from twostroke.core.families import named_model, read_spec, spec_from_config
from twostroke.core.families.hub import cached_directory, known_name, published_rows
from twostroke.core.families.quantised import published_cache, published_scheme
from twostroke.planner.work.params import count_parameters

ROWS = {row["names"][0]: row for row in published_rows().values()}
CONFIGS = {
    file.stem.removesuffix("_config").replace("--", "/"): file for file in sorted((ASSETS / "configs" / "hf").glob("*.json"))
}
IN_BOTH = {name: file for name, file in CONFIGS.items() if known_name(name, published_rows())}


@pytest.fixture(autouse=True)
def an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def cache(tmp_path: Path, name: str, revision: str, config: dict[str, Any]) -> Path:
    folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_table_has_the_models_that_people_name() -> None:
    assert len(ROWS) >= 30
    assert len(published_rows()) == sum(len(row["names"]) for row in ROWS.values())  # a name stands once


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "parameters" in row])
def test_a_row_has_exactly_the_published_number_of_parameters(name: str) -> None:
    assert count_parameters(named_model(name).spec).total == ROWS[name]["parameters"]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "about" in row])
def test_a_row_has_the_rounded_number_that_its_authors_print(name: str) -> None:
    """1%: authors round, and count prediction layers or not (GLM-4.5: 355 billion with 2.3 of them)."""
    assert count_parameters(named_model(name).spec).total / 1e9 == pytest.approx(ROWS[name]["about"], rel=0.01)


@pytest.mark.parametrize(("name", "file"), IN_BOTH.items())
def test_a_row_describes_the_model_of_the_published_config(assets: Path, name: str, file: Path) -> None:
    ours, theirs = named_model(name), read_spec(file)
    assert dataclasses.asdict(ours.spec) | {"notes": ()} == dataclasses.asdict(theirs) | {"notes": ()}
    assert ours.scheme == published_scheme(json.loads(file.read_text()))


def test_most_of_the_published_configs_are_in_the_table(assets: Path) -> None:
    assert len(IN_BOTH) >= 20


def test_kimi_k2_has_a_trillion_parameters_of_which_a_token_passes_32_billion() -> None:
    """The Hub counts 1.03T elements; arXiv 2507.20534, table 2: 32.6B are active."""
    kimi = named_model("moonshotai/Kimi-K2-Instruct")
    counted = count_parameters(kimi.spec)
    assert (kimi.spec.family, kimi.scheme) == ("kimi_k2", "fp8")
    assert counted.total / 1e12 == pytest.approx(1.03, rel=0.005)
    assert counted.active / 1e9 == pytest.approx(32.6, rel=0.02)


@pytest.mark.parametrize("text", ["meta-llama/Llama-3.1-8B", "llama-3.1-8b", "META-LLAMA/llama-3.1-8B"])
def test_a_name_is_known_in_any_case_and_without_its_owner(text: str) -> None:
    assert named_model(text).name == "meta-llama/Llama-3.1-8B"


def test_a_name_of_two_owners_needs_its_owner() -> None:
    assert known_name("model", ["one/model", "two/model"]) is None
    assert known_name("two/model", ["one/model", "two/model"]) == "two/model"


def test_the_cache_comes_before_the_table_and_its_main_revision_first(tmp_path: Path) -> None:
    row = published_rows()["Qwen/Qwen3-0.6B"]["config"]
    main = cache(tmp_path, "Qwen/Qwen3-0.6B", "aaa", row | {"num_hidden_layers": 3})
    cache(tmp_path, "Qwen/Qwen3-0.6B", "bbb", row | {"num_hidden_layers": 4})
    refs = main.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("aaa")
    assert named_model("qwen3-0.6b").spec.n_layers == 3
    assert cached_directory("Qwen/Qwen3-0.6B") == main


def test_a_model_that_only_the_cache_knows_is_planned(tmp_path: Path) -> None:
    row = published_rows()["Qwen/Qwen3-0.6B"]["config"]
    cache(tmp_path, "someone/tune-of-qwen", "aaa", row)
    assert named_model("someone/Tune-of-Qwen").spec == spec_from_config(row)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("meta-llama/Llama-3.1-8", "Did you mean meta-llama/Llama-3.1-8B"),
        ("someone/unknown-thing", "`hf download someone/unknown-thing config.json`"),
        ("./nowhere", "./nowhere does not exist. Give a recipe"),
        ("nowhere.json", "nowhere.json does not exist. Give a recipe"),
    ],
)
def test_an_unknown_name_gets_near_ones_and_the_way_to_a_config(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        named_model(text)
    assert words in str(caught.value)


def compressed(weights: dict[str, Any], activations: Any = None, targets: Sequence[str] = ("Linear",)) -> dict[str, Any]:
    groups = {"group_0": {"targets": [*targets], "weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


ROUNDED = {"num_bits": 8, "dynamic": True}
EXPERTS_ONLY = {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}


@pytest.mark.parametrize(
    ("quantised", "scheme"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}, "c": {"quant_algo": "NVFP4"}},
            },
            "nvfp4",
        ),
        (compressed({"num_bits": 8, "type": "float"}, ROUNDED), "fp8-channel"),
        (compressed({"num_bits": 8, "type": "int"}, ROUNDED), "w8a8"),
        (compressed({"num_bits": 8, "type": "int"}), "int8"),
        (compressed({"num_bits": 4, "type": "int", "group_size": 128}), "int4"),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}), "nvfp4"),
        (compressed({"num_bits": 4, "type": "float", "group_size": 32}), "mxfp4"),
        (compressed({"num_bits": 4, "type": "int", "group_size": 32}) | EXPERTS_ONLY, "int4-experts"),
        (compressed({"num_bits": 4, "type": "int", "group_size": 32}) | {"ignore": ["lm_head", 7]}, "Q4_0"),
        (compressed({"num_bits": 4, "type": "int", "group_size": 32}, targets=["re:.*experts.*"]), "int4-experts"),
    ],
)
def test_a_checkpoints_own_quantisation_is_read(quantised: dict[str, Any], scheme: str) -> None:
    assert published_scheme(published_rows()["Qwen/Qwen3-0.6B"]["config"] | {"quantization_config": quantised}) == scheme


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3"),
        ({"quant_method": "modelopt", "quant_algo": "W1"}, "quant_algo='W1'"),
        (compressed({"num_bits": 3, "type": "int"}), "3-bit"),
    ],
)
def test_a_quantisation_without_a_scheme_is_refused_by_its_name(quantised: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        published_scheme(published_rows()["Qwen/Qwen3-0.6B"]["config"] | {"quantization_config": quantised})
    assert words in str(caught.value)


def test_nvidias_own_file_says_how_a_checkpoint_is_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_rows()["Qwen/Qwen3-0.6B"]["config"]))
    algorithms = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithms}))
    found = named_model(str(tmp_path))
    assert (found.scheme, found.cache) == ("nvfp4", "fp8")


@pytest.mark.parametrize(
    ("stated", "cache"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        (compressed({"num_bits": 8, "type": "float"}, ROUNDED) | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        (compressed({"num_bits": 8, "type": "float"}, ROUNDED) | {"kv_cache_scheme": None}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
    ],
)
def test_the_cache_that_a_checkpoint_has_scales_for_is_read(stated: dict[str, Any], cache: str | None) -> None:
    assert published_cache({"quantization_config": stated}) == cache
