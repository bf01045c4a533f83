"""Every architecture that is read from GGUF: quantised files compute what transformers computes with the same numbers."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from damage import damaged_bytes
from gguf_files import add_tensors, finish, new_writer, reference_model, small_file
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.engine.core import EngineCore
from twostroke.engine.scoring import token_scores
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_families import GGUF_FAMILIES, row_of, spec_of
from twostroke.interop.gguf_metadata import Metadata
from twostroke.interop.gguf_model import read_gguf
from twostroke.interop.import_model import import_model
from twostroke.kernels.native_library import library
from twostroke.model.load import load_model
from twostroke.model.published.gguf_blocks import BLOCKS
from twostroke.planner.serving.native_products import native_weights_bytes
from twostroke.planner.serving.shape import ServingShape
from twostroke.quantization.held import held
from twostroke.quantization.load import expanded, load_any_state

Extra = Callable[[gguf.GGUFWriter, Any], None]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
PADDED = {"pad_token_id": 0}
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.05 * i for i in range(24)], "long_factor": [1.0 + 0.3 * i for i in range(24)],
}  # fmt: skip
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 512}


def gemma(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_value_length(c.head_dim)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(c, name, None):
            w.add_float32(f"{w.arch}.{name}", getattr(c, name))
    if getattr(c, "sliding_window", None):
        w.add_sliding_window(c.sliding_window)


def gemma3(w: gguf.GGUFWriter, c: Any) -> None:
    gemma(w, c)
    if c.rope_parameters["full_attention"]["rope_type"] == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(c.rope_parameters["full_attention"]["factor"])


def yarn(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(YARN["factor"])
    w.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])


def windows_by_list(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_sliding_window(c.sliding_window)
    w.add_array(f"{w.arch}.attention.sliding_window_pattern", [kind == "sliding_attention" for kind in c.layer_types])


def longrope(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_rope_dimension_count(48)
    w.add_sliding_window(0)
    w.add_rope_scaling_orig_ctx_len(16)
    w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(64 / 16) / math.log(16)))
    for length in ("long", "short"):
        w.add_tensor(f"rope_factors_{length}.weight", np.array(LONGROPE[f"{length}_factor"], np.float32))


def granite(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_attention_scale(c.attention_multiplier)
    w.add_embedding_scale(c.embedding_multiplier)
    w.add_residual_scale(c.residual_multiplier)
    w.add_logit_scale(c.logits_scaling)


def cohere(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_logit_scale(c.logit_scale)
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if w.arch == "cohere2":
        w.add_sliding_window(c.sliding_window)
        w.add_rope_dimension_count(c.head_dim)


def nothing(w: gguf.GGUFWriter, c: Any) -> None:
    pass


def turned(share: float) -> Extra:
    return lambda w, c: w.add_rope_dimension_count(int(share * (getattr(c, "head_dim", None) or 64)))


def neox(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_rope_dimension_count(16)
    w.add_parallel_residual(c.use_parallel_residual)


def experts(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_expert_count(getattr(c, "num_experts", None) or c.num_local_experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    if w.arch == "granitemoe":
        granite(w, c)
    elif w.arch == "gpt-oss":
        w.add_expert_feed_forward_length(c.intermediate_size)
        w.add_sliding_window(c.sliding_window)
        yarn(w, c)
    elif getattr(c, "moe_intermediate_size", None):
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    if getattr(c, "shared_expert_intermediate_size", None):
        w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)


def routed(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_expert_count(c.n_routed_experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_shared_count(c.n_shared_experts)
    w.add_leading_dense_block_count(c.first_k_dense_replace)
    w.add_expert_weights_scale(c.routed_scaling_factor)
    w.add_expert_weights_norm(c.norm_topk_prob)
    w.add_expert_group_count(c.n_group)
    w.add_expert_group_used_count(c.topk_group)


def glm4moe(w: gguf.GGUFWriter, c: Any) -> None:
    routed(w, c)
    w.add_rope_dimension_count(32)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def joined(w: gguf.GGUFWriter, c: Any) -> None:
    routed(w, c)
    w.add_rope_dimension_count(c.qk_rope_head_dim)
    w.add_kv_lora_rank(c.kv_lora_rank)
    w.add_key_length(c.qk_nope_head_dim + c.qk_rope_head_dim)
    w.add_value_length(c.v_head_dim)
    if c.q_lora_rank:
        w.add_q_lora_rank(c.q_lora_rank)


def by_head(w: gguf.GGUFWriter, c: Any) -> None:
    joined(w, c)
    w.add_head_count_kv(1)
    w.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    w.add_value_length(c.kv_lora_rank)
    w.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    w.add_value_length_mla(c.v_head_dim)
    if c.model_type == "deepseek_v3":
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        yarn(w, c)
        w.add_rope_scaling_yarn_log_mul(0.1 * c.rope_parameters["mscale_all_dim"])


ROUTED = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "n_shared_experts": 2,
}  # fmt: skip
LATENT = ROUTED | {
    "head_dim": 16, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 64,
}  # fmt: skip
V2 = {"norm_topk_prob": False, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256}

CASES: dict[str, tuple[str, str, str, dict[str, Any], Extra]] = {
    "llama": ("llama", "llama", "Q4_K", {"attention_bias": True, "mlp_bias": True}, nothing),
    "llama-yarn": ("llama", "llama", "Q5_K", {"rope_parameters": YARN}, yarn),
    "mistral": ("llama", "mistral", "Q6_K", {"sliding_window": 7}, lambda w, c: w.add_sliding_window(7)),
    "qwen2": ("qwen2", "qwen2", "Q3_K", {}, nothing),
    "qwen2-yarn": ("qwen2", "qwen2", "Q8_0", {"rope_parameters": YARN | {"attention_factor": 1.3}},
                   lambda w, c: (yarn(w, c), w.add_rope_scaling_yarn_attn_factor(1.3))[0]),
    "qwen3": ("qwen3", "qwen3", "Q2_K", {"tie_word_embeddings": True}, nothing),
    "gemma": ("gemma", "gemma", "Q4_0", {}, gemma),
    "gemma2": ("gemma2", "gemma2", "Q5_0", {
        "num_hidden_layers": 4, "sliding_window": 7, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0}, gemma),
    "gemma3": ("gemma3", "gemma3_text", "Q4_1", {
        "num_hidden_layers": 7, "sliding_window": 7, "query_pre_attn_scalar": 64, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, gemma3),
    "phi3": ("phi3", "phi3", "Q4_K", PADDED | {"sliding_window": 6}, lambda w, c: w.add_sliding_window(6)),
    "phi3-longrope": ("phi3", "phi3", "Q6_K", PADDED | {
        "rope_parameters": LONGROPE, "original_max_position_embeddings": 16}, longrope),
    "granite": ("granite", "granite", "Q5_1", {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 4.0}, granite),
    "smollm3": ("smollm3", "smollm3", "IQ4_XS", PADDED | {"num_hidden_layers": 5}, nothing),
    "command-r": ("command-r", "cohere", "IQ4_NL", {"logit_scale": 0.5}, cohere),
    "cohere2": ("cohere2", "cohere2", "MXFP4", {"num_hidden_layers": 5, "sliding_window": 6, "logit_scale": 0.25}, cohere),
    "olmo2": ("olmo2", "olmo2", "Q4_K", {}, nothing),
    "olmo3": ("olmo2", "olmo3", "Q5_K", {
        "num_hidden_layers": 4, "sliding_window": 6, "layer_types": WINDOWED, "rope_parameters": {
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        lambda w, c: (windows_by_list(w, c), yarn(w, c))[0]),
    "exaone4": ("exaone4", "exaone4", "Q3_K", {"num_hidden_layers": 4, "sliding_window": 6, "layer_types": WINDOWED},
                windows_by_list),
    "exaone4-small": ("exaone4", "exaone4", "F16", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, nothing),
    "glm4": ("glm4", "glm4", "Q4_K", PADDED | {"partial_rotary_factor": 0.5}, turned(0.5)),
    "ernie4_5": ("ernie4_5", "ernie4_5", "Q6_K", {}, nothing),
    "seed_oss": ("seed_oss", "seed_oss", "Q2_K", {"attention_out_bias": False}, nothing),
    "stablelm": ("stablelm", "stablelm", "Q5_K", {"use_qkv_bias": True}, turned(0.25)),
    "stablelm-parallel": ("stablelm", "stablelm", "Q4_0", {"use_parallel_residual": True}, turned(0.25)),
    "starcoder2": ("starcoder2", "starcoder2", "Q8_0", {"sliding_window": None}, nothing),
    "gptneox": ("gptneox", "gpt_neox", "BF16", {}, neox),
    "gptneox-in-turn": ("gptneox", "gpt_neox", "Q4_K", {"use_parallel_residual": False}, neox),
    "falcon": ("falcon", "falcon", "Q6_K", {
        "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 512}, nothing),
    "gpt2": ("gpt2", "gpt2", "Q4_K", GPT2, nothing),
    "mixtral": ("llama", "mixtral", "Q4_K", {"num_local_experts": 8, "num_experts_per_tok": 2}, experts),
    "qwen2moe": ("qwen2moe", "qwen2_moe", "Q5_K", QWEN_EXPERTS | {"shared_expert_intermediate_size": 512}, experts),
    "qwen3moe": ("qwen3moe", "qwen3_moe", "Q6_K", QWEN_EXPERTS | {"norm_topk_prob": True}, experts),
    "olmoe": ("olmoe", "olmoe", "Q8_0", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}, experts),
    "granitemoe": ("granitemoe", "granitemoe", "Q4_0", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.22, "logits_scaling": 4.0}, experts),
    "gpt-oss": ("gpt-oss", "gpt_oss", "MXFP4", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "rope_parameters": YARN | {"truncate": False}},
        experts),
    "glm4moe": ("glm4moe", "glm4_moe", "Q4_K", ROUTED | {"use_qk_norm": True, "attention_bias": True}, glm4moe),
    "deepseek_v2": ("deepseek2", "deepseek_v2", "Q8_0", LATENT | V2, by_head),
    "deepseek_v2-groups": ("deepseek2", "deepseek_v2", "Q4_0", LATENT | V2 | {
        "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "q_lora_rank": 256}, by_head),
    "deepseek_v2-joined": ("deepseek2", "deepseek_v2", "Q5_K", LATENT | V2, joined),
    "deepseek_v3": ("deepseek2", "deepseek_v3", "Q5_0", LATENT | {
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}, by_head),
    "starcoder": ("starcoder", "gpt_bigcode", "Q5_K", GPT2 | {"num_key_value_heads": 1}, nothing),
}  # fmt: skip
"""(architecture, model_type, type of the matrices, config, further metadata)."""


def write(path: Path, case: str, add: Callable[[gguf.GGUFWriter], object] = lambda w: None, skip: tuple[str, ...] = ()) -> Any:
    """The file of ``case``; the model whose numbers it holds."""
    architecture, model_type, type_name, changes, extra = CASES[case]
    model = reference_model(model_type, **(SIZES | changes))
    writer = new_writer(path, architecture, model.config, skip)
    extra(writer, model.config)
    add(writer)
    add_tensors(writer, model, architecture, type_name, extra is joined)
    finish(writer)
    return model


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_the_dequantised_weights(case: str, tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", case)
    report = import_model(tmp_path / "m.gguf", tmp_path / "m", dtype="fp32")
    assert report.family == CASES[case][1]
    tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    ours, theirs = load_model(tmp_path / "m")(tokens), model(tokens).logits
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-4  # as in the tests of the decoder
    assert float(theirs.std()) > 0.01 * float(theirs.abs().max())
    kept_as_they_are(tmp_path, CASES[case][2])


def kept_as_they_are(folder: Path, type_name: str) -> None:
    """Codes that are not decoded stand for the same numbers, in the engine as well."""
    report = import_model(folder / "m.gguf", folder / "kept")
    exact = load_model(folder / "m")
    block = BLOCKS.get(type_name)
    if block is None or block.scheme is None:
        assert report.dtype == ({"F16": "fp16"}.get(type_name, "bf16"))
        return
    assert report.dtype == type_name
    assert report.n_bytes < 0.75 * sum(file.stat().st_size for file in (folder / "m").iterdir())
    spec, state = load_any_state(folder / "kept")
    coded = [name for name in state if f"{name.removesuffix('.weight')}.scale" in state]
    absorbed = [name for name in exact.tensors if name.endswith("kv_b.weight")]  # stored with inputs before outputs: decoded
    assert len(coded) + (0 if spec.moe is None else len(absorbed)) >= 4 * spec.n_layers
    for name in coded:
        assert torch.equal(expanded(state, name), exact.tensors[name].float()), name
    assert held(folder / "kept", spec).scheme == block.scheme
    if library() is not None:
        core = EngineCore(folder / "kept", EngineSettings(n_threads=1, runner="native", kv_cache_bytes=2**20))
        shape = ServingShape(**held(folder / "kept", spec)._asdict(), prompt_tokens=32, output_tokens=8)
        assert native_weights_bytes(spec, shape.scheme, shape.head, shape.others) == core.weights_bytes
        ids = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(1))
        wanted = -exact(ids)[0].log_softmax(dim=-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        ((nats, _),) = token_scores(core, [(ids[0].tolist(), 1)])
        # Activations in 8 bits, embedding and head in bf16; routers may choose other experts, which moves some tokens far.
        error = float((torch.tensor(nats) - wanted).abs().median() / wanted.std())
        assert error < (0.15 if spec.moe else 0.08)


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, *_ in CASES.values()} == set(GGUF_FAMILIES)


@pytest.mark.skipif(library() is None, reason="the native library was not built")
@torch.inference_mode()
def test_matrices_of_many_types_are_held_each_in_its_own_way(tmp_path: Path) -> None:
    """Beside blocks of 256 groups of 16, the rest and what has parts of several types in plain numbers, and planned so."""
    small_file(tmp_path / "m.gguf", "gemma3", {"ffn_gate": "Q4_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K", "attn_v": "Q6_K"})
    import_model(tmp_path / "m.gguf", tmp_path / "kept")
    import_model(tmp_path / "m.gguf", tmp_path / "m", dtype="fp32")
    spec, state = load_any_state(tmp_path / "kept")
    exact = load_model(tmp_path / "m").tensors
    for name in exact:
        if f"{name.removesuffix('.weight')}.scale" in state:
            assert torch.equal(expanded(state, name), exact[name]), name
    found = held(tmp_path / "kept", spec)
    assert found.scheme == "int4-k"
    assert set(found.in_int8) >= {"0.down", "1.down"}
    assert set(found.in_bf16) >= {"0.qkv", "1.qkv"}
    core = EngineCore(tmp_path / "kept", EngineSettings(runner="native", kv_cache_bytes=2**20))
    shape = ServingShape(**found._asdict(), prompt_tokens=32, output_tokens=8)
    assert native_weights_bytes(spec, shape.scheme, shape.head, shape.others) == core.weights_bytes


def test_a_directory_of_blocks_that_lies_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama")
    import_model(tmp_path / "m.gguf", tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    types = config["quantization_config"]["types"]
    layer = "model.layers.0.mlp.up_proj"
    others = [name for name in types["Q4_K"] if name != layer]
    for lie, said in (
        ({"Q9_K": types["Q4_K"]}, "type 'Q9_K' is not read"),
        ({"Q4_K": types["Q4_K"], "Q6_K": [layer]}, f"names '{layer}' twice"),
        ({"Q4_K": others, "Q6_K": [layer]}, r"up_proj.qweight' is U8 \[512, 144\]; U8 \[512, 210\] is due"),
        ({"Q4_K": others}, "no tensor 'model.layers.0.mlp.up_proj.weight'"),
        ({"Q4_K": 7}, "must be a list"),
    ):
        config["quantization_config"]["types"] = lie
        (tmp_path / "m/config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=said):
            load_any_state(tmp_path / "m")


def test_a_scale_that_is_not_finite_is_found_in_the_file_and_in_the_directory(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama")
    import_model(tmp_path / "m.gguf", tmp_path / "m")
    info = GgufFile(tmp_path / "m.gguf").tensors["blk.0.ffn_down.weight"]
    block = (tmp_path / "m.gguf").read_bytes()[info.start + 144 : info.start + 288]
    broken = np.float16(np.inf).tobytes() + block[2:]
    for file in (tmp_path / "m.gguf", tmp_path / "m/model.safetensors"):
        content = file.read_bytes()
        assert block in content
        file.write_bytes(content.replace(block, broken))  # random matrices of one size are the same
    with pytest.raises(CorruptFileError, match=r"'blk\.0\.ffn_.*' .* scales that are not finite"):
        import_model(tmp_path / "m.gguf", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(CorruptFileError, match=r"scales must be finite in 'model\.layers\.0\.mlp"):
        dict(load_any_state(tmp_path / "m")[1])


@pytest.mark.parametrize("architecture", ["gemma3", "phi3"])
def test_a_damaged_file_gives_a_sentence_and_nothing_is_written(architecture: str, tmp_path: Path) -> None:
    """Thousands of such files are read by ``make soak``; here that nothing is left beside them."""
    content = small_file(tmp_path / "m.gguf", architecture).read_bytes()
    rng, sentences = random.Random(0), 0
    for _ in range(100):
        (tmp_path / "m.gguf").unlink()
        (tmp_path / "m.gguf").write_bytes(damaged_bytes(content, rng, 3_000))
        said = ""
        try:
            import_model(tmp_path / "m.gguf", tmp_path / "m", replace=True)
        except InputError as error:
            said = str(error)
        assert (tmp_path / "m").exists() == (not said)
        assert not said or 10 < len(said) < 2000
        sentences += bool(said)
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
    assert 30 < sentences < 100


def sentence(tmp_path: Path, case: str, add: Callable[[gguf.GGUFWriter], object], skip: tuple[str, ...] = ()) -> str:
    write(tmp_path / "m.gguf", case, add, skip)
    with pytest.raises((ConfigError, CorruptFileError), match=r"m\.gguf") as caught:
        read_gguf(tmp_path / "m.gguf")
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "add", "said"),
    [
        ("llama", lambda w: w.add_array("llama.rope.dimension_sections", [8, 8, 0, 0]), "dimension_sections is not read"),
        ("llama-yarn", lambda w: w.add_rope_scaling_yarn_ext_factor(0.5), "yarn_ext_factor is not read"),
        ("qwen2", lambda w: w.add_sliding_window(9), "sliding_window=9 is not read for the architecture 'qwen2'"),
        ("granite", lambda w: w.add_bool("granite.rope.scaling.finetuned", False), "no rotary positions"),
        (
            "phi3",
            lambda w: w.add_tensor("rope_factors_long.weight", np.ones(32, np.float32)),
            "rope_factors_short.weight must be",
        ),
        (
            "olmo2",
            lambda w: (w.add_sliding_window(3), w.add_array("olmo2.attention.sliding_window_pattern", [1])),
            "one for each layer",
        ),
        ("falcon", lambda w: w.add_rope_dimension_count(16), "rope.dimension_count=16 is not supported"),
        ("glm4", lambda w: w.add_value_length(32), "value_length is not supported"),
        ("stablelm", lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(64, np.float32)), "qk_layernorm=True"),
        ("llama", lambda w: w.add_tensor("rope_freqs.weight", np.full(32, -1, np.float32)), "must hold positive numbers"),
    ],
)
def test_what_is_not_read_is_named(case: str, add: Callable[[gguf.GGUFWriter], object], said: str, tmp_path: Path) -> None:
    assert said in sentence(tmp_path, case, add)


@pytest.mark.parametrize(
    ("case", "add", "said"),
    [
        ("glm4moe", lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX), "expert_gating_func=1 is not read"),
        ("deepseek_v3", lambda w: w.add_uint32("deepseek2.expert_gating_func", 4), "expert_gating_func=4 is not read"),
        ("deepseek_v3", lambda w: w.add_expert_count(0), "without experts"),
        ("deepseek_v3", lambda w: w.add_rope_dimension_count(48), "rope.dimension_count=48 must be"),
        ("deepseek_v3", lambda w: w.add_float32("deepseek2.attention.temperature_scale", 0.1), "temperature_scale is not read"),
        ("deepseek_v3", lambda w: w.add_rope_scaling_yarn_log_mul(0.0), "yarn_log_multiplier must be above 0"),
        ("deepseek_v3", lambda w: w.add_nextn_predict_layers(3), "n_layers=0 must be"),
    ],
)
def test_what_of_routers_and_latents_is_not_read_is_named(
    case: str, add: Callable[[gguf.GGUFWriter], object], said: str, tmp_path: Path
) -> None:
    assert said in sentence(tmp_path, case, add)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    def further(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((256, 512), np.float32))

    write(tmp_path / "m.gguf", "glm4moe", further)
    source = read_gguf(tmp_path / "m.gguf")
    assert source.spec.n_layers == 3
    assert "1 multi-token-prediction layer(s) are left out" in source.notes


def test_falcons_with_one_norm_and_starcoders_with_many_key_heads_are_refused(tmp_path: Path) -> None:
    model = reference_model("falcon", **SIZES, num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=512)
    writer = new_writer(tmp_path / "m.gguf", "falcon", model.config)
    writer.add_tensor("token_embd.weight", np.zeros((96, 256), np.float32))
    finish(writer)
    with pytest.raises(ConfigError, match="new_decoder_architecture=False is not supported"):
        read_gguf(tmp_path / "m.gguf")
    assert "more than one key head" in sentence(
        tmp_path, "starcoder", lambda w: w.add_head_count_kv(2), ("attention.head_count_kv",)
    )


def test_the_largest_gemmas_divide_scores_by_another_width(tmp_path: Path) -> None:
    """27 billion parameters, told by 46 layers: 4608 / 32 where heads are 128 wide (gemma_pytorch's config.py)."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    for add, value in (
        (writer.add_context_length, 8192), (writer.add_embedding_length, 4608), (writer.add_block_count, 46),
        (writer.add_feed_forward_length, 36_864), (writer.add_head_count, 32), (writer.add_head_count_kv, 16),
        (writer.add_key_length, 128),
    ):  # fmt: skip
        add(value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((1, 4608), np.float32))
    finish(writer)
    metadata = Metadata(GgufFile(tmp_path / "m.gguf"))
    spec = spec_of(row_of(metadata), metadata)
    assert spec.attention_scale == 144**-0.5
    assert (spec.sliding_window, spec.departures.attention_cap, spec.departures.logit_cap) == (4096, 50.0, 30.0)


def test_ends_of_turns_and_of_messages_end_an_answer_too(tmp_path: Path) -> None:
    def ids(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(5)
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(5)

    write(tmp_path / "m.gguf", "qwen3", ids)
    assert read_gguf(tmp_path / "m.gguf").spec.eos_token_ids == (5, 7)


def test_an_end_of_turn_is_found_by_its_text_and_a_file_may_have_no_tokenizer(tmp_path: Path) -> None:
    def texts(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("none")
        writer.add_token_list(["a", "<eos>", "<end_of_turn>"])
        writer.add_eos_token_id(1)

    write(tmp_path / "m.gguf", "gemma2", texts)
    source = read_gguf(tmp_path / "m.gguf")
    assert source.spec.eos_token_ids == (1, 2)
    assert source.tokenizer is None
