"""Models in GGUF files compute what the transformers models they were written from compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gguf_files import add_tensors, finish, new_writer, reference_model
from twostroke.core.errors import ConfigError, CorruptFileError, UnsupportedFamilyError
from twostroke.core.families import read_spec
from twostroke.interop.gguf_model import read_gguf
from twostroke.interop.import_model import import_model
from twostroke.model.load import load_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(
    path: Path, model: Any, architecture: str, type_name: str = "F32", add: Callable[[Any], None] = lambda w: None
) -> Path:
    writer = new_writer(path, architecture, model.config)
    add(writer)
    add_tensors(writer, model, architecture, type_name)
    finish(writer)
    return path


def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same_logits(source: Path, model: Any, tmp_path: Path) -> None:
    import_model(source, tmp_path / "imported")
    ours, theirs = load_model(tmp_path / "imported")(tokens()), model(tokens()).logits
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-4  # as in the tests of the decoder


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True, "rms_norm_eps": 1e-5}),
        ("qwen2", {"head_dim": 16}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
    ids=["llama", "llama-tied", "llama-biases", "qwen2", "qwen3"],
)
def test_logits_are_those_of_the_model_it_was_written_from(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = reference_model(architecture, **changes)
    assert_same_logits(write(tmp_path / "m.gguf", model, architecture), model, tmp_path)


def test_a_windowed_llama_is_a_mistral(tmp_path: Path) -> None:
    model = reference_model("mistral", sliding_window=5)
    source = write(tmp_path / "m.gguf", model, "llama", add=lambda w: w.add_uint32("llama.attention.sliding_window", 5))
    assert_same_logits(source, model, tmp_path)
    assert read_spec(tmp_path / "imported").family == "mistral"


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    model = reference_model("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0})

    def scaling(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    assert_same_logits(write(tmp_path / "m.gguf", model, "llama", add=scaling), model, tmp_path)


def test_llama3_rope_is_recognised_in_its_table_and_other_tables_are_refused(tmp_path: Path) -> None:
    model = reference_model("llama", rope_parameters=LLAMA3_ROPE)
    plain = 1.0 / (500_000.0 ** (torch.arange(0, 32, 2).float() / 32))
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert divisors.max() == pytest.approx(8.0)
    source = write(tmp_path / "m.gguf", model, "llama", add=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    assert_same_logits(source, model, tmp_path)
    other = write(tmp_path / "o.gguf", model, "llama", add=lambda w: w.add_tensor("rope_freqs.weight", divisors * 1.5))
    with pytest.raises(ConfigError, match="not Llama 3"):
        read_gguf(other)


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", "fp32"), ("F16", "fp16"), ("BF16", "bf16"), ("Q8_0", "Q8_0"), ("Q4_1", "bf16")]
)
def test_weights_keep_their_values_and_quantised_ones_that_no_scheme_holds_are_stored_in_bf16(
    type_name: str, dtype: str, tmp_path: Path
) -> None:
    model = reference_model("llama")
    source = write(tmp_path / "m.gguf", model, "llama", type_name)
    report = import_model(source, tmp_path / "imported")
    assert report.dtype == dtype
    exact = model.lm_head.weight.detach()
    assert torch.equal(
        load_model(tmp_path / "imported").head.weight, exact.bfloat16().float() if type_name[0] in "BQ" else exact
    )
    for given in ("bf16", "fp32"):
        assert import_model(source, tmp_path / given, dtype=given).dtype == given
    assert torch.equal(load_model(tmp_path / "fp32").head.weight, exact)
    if type_name == "Q8_0":
        # 98,304 numbers of the matrices of two layers, the embedding and the head, in blocks of 34 bytes for 32
        assert report.notes[0].startswith("16 of 21 tensors were quantised (16 Q8_0): 102 KiB in the file, 192 KiB in bf16.")
        assert "The blocks' matrices, 89.2 KiB, are kept as they are, which other programs do not read" in report.notes[0]
        assert "embedding and head, where they were quantised, were rounded to bf16" in report.notes[1]
    elif type_name == "Q4_1":
        assert "They were converted to the numbers that they stand for." in report.notes[0]
        assert "rounded from fp32 to bf16. --dtype fp32 keeps them exactly" in report.notes[1]


def test_tensors_that_are_missing_misshapen_or_left_over_are_named(tmp_path: Path) -> None:
    model = reference_model("llama")
    shape = {"llama.feed_forward_length": 128}
    writer = new_writer(tmp_path / "a.gguf", "llama", model.config, skip=("feed_forward_length",))
    writer.add_uint32("llama.feed_forward_length", shape["llama.feed_forward_length"])
    add_tensors(writer, model, "llama")
    finish(writer)
    with pytest.raises(CorruptFileError, match=r"'blk.0.ffn_gate.weight' has shape \[96, 64\].*asks for \[128, 64\]"):
        read_gguf(tmp_path / "a.gguf")
    extra = write(tmp_path / "b.gguf", model, "llama", add=lambda w: w.add_tensor("blk.7.odd", np.zeros(3, np.float32)))
    with pytest.raises(CorruptFileError, match=r"1 tensor\(s\).*'blk.7.odd'"):
        read_gguf(extra)
    writer = new_writer(tmp_path / "c.gguf", "llama", model.config, skip=("block_count",))
    writer.add_uint32("llama.block_count", 3)
    add_tensors(writer, model, "llama")
    finish(writer)
    with pytest.raises(CorruptFileError, match=r"no tensor 'blk.2.attn_norm.weight'"):
        read_gguf(tmp_path / "c.gguf")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("attention.head_count", 0, "head_count=0 must be at least 1"),
        ("attention.head_count_kv", 3, "n_kv_heads=3 must divide n_heads=4"),
        ("block_count", 0, "n_layers=0 must be"),
        ("block_count", 2**32 - 1, "n_layers=4294967295 must be at most"),
        ("context_length", None, "no metadata 'llama.context_length'"),
        ("context_length", "long", "must be a whole number"),
    ],
)
def test_impossible_metadata_is_a_sentence(key: str, value: Any, sentence: str, tmp_path: Path) -> None:
    model = reference_model("llama")
    writer = new_writer(tmp_path / "m.gguf", "llama", model.config, skip=(key,))
    if isinstance(value, int):
        writer.add_uint32(f"llama.{key}", value)
    elif isinstance(value, str):
        writer.add_string(f"llama.{key}", value)
    add_tensors(writer, model, "llama")
    finish(writer)
    with pytest.raises((ConfigError, CorruptFileError)) as caught:
        read_gguf(tmp_path / "m.gguf")
    assert sentence in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_other_architectures_and_partial_rotation_are_refused_by_name(tmp_path: Path) -> None:
    model = reference_model("llama")
    with pytest.raises(UnsupportedFamilyError, match=r"'internlm2'.*Read are llama, qwen2, qwen3"):
        read_gguf(write(tmp_path / "a.gguf", model, "internlm2"))
    with pytest.raises(UnsupportedFamilyError, match=r"'phimoe'.*mixture of experts"):
        read_gguf(write(tmp_path / "a.gguf", model, "phimoe"))
    with pytest.raises(UnsupportedFamilyError, match="mixture of experts"):
        read_gguf(write(tmp_path / "b.gguf", model, "qwen2", add=lambda w: w.add_uint32("qwen2.expert_count", 8)))
    with pytest.raises(ConfigError, match="partial rotary positions in this family"):
        read_gguf(write(tmp_path / "c.gguf", model, "llama", add=lambda w: w.add_uint32("llama.rope.dimension_count", 16)))
    with pytest.raises(ConfigError, match="rope scaling 'dynamic'"):
        read_gguf(write(tmp_path / "d.gguf", model, "llama", add=lambda w: w.add_string("llama.rope.scaling.type", "dynamic")))


def test_a_vocabulary_without_weights_is_a_sentence(assets: Path) -> None:
    with pytest.raises(CorruptFileError, match="only a vocabulary"):
        read_gguf(assets / "tokenizers" / "ggml-vocab-starcoder.gguf")


# --- embedded tokenizers -----------------------------------------------------------------------------------------------------


def test_a_byte_level_tokenizer_comes_along_with_its_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = reference_model("llama")

    def embedded(writer: gguf.GGUFWriter) -> None:
        pieces = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ġt", "Ġth", "Ġthe", "<|user|>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(pieces)
        writer.add_token_types([3] + [1] * 30 + [4])
        writer.add_token_merges(["Ġ t", "Ġt h", "Ġth e"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_chat_template("{{ messages }}")

    source = write(tmp_path / "m.gguf", model, "llama", add=embedded)
    report = import_model(source, tmp_path / "m")
    assert report.tokenizer == "the tables of the GGUF model"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.convert_ids_to_tokens(tokenizer("cat the<|user|>hat").input_ids) == [*"cat", "Ġthe", "<|user|>", *"hat"]
    assert tokenizer.eos_token == "<|endoftext|>"
    assert json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert read_spec(tmp_path / "m").eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.add_token_list(["a"] * 200), "has 200 tokens, but embeddings for 96"),
        (lambda w: w.add_token_list(["a", "a"]), "'a' occurs twice"),
        (lambda w: (w.add_token_list(["a", "b", "ab"]), w.add_token_types([1])), "one for each token of the tokenizer"),
        (lambda w: (w.add_token_list(["a", "b"]), w.add_token_merges(["a c"])), "merge 'a c'"),
        (lambda w: (w.add_token_list(["a", "b", "ab"]), w.add_tokenizer_pre("martian")), "'martian' is not supported"),
        (lambda w: (w.add_token_list(["a", "b"]), w.add_bos_token_id(500)), "is outside the vocabulary of 96 tokens"),
    ],
)
def test_a_wrong_tokenizer_is_a_sentence(change: Callable[[Any], Any], sentence: str, tmp_path: Path) -> None:
    def embedded(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        change(writer)
        if "tokenizer.ggml.merges" not in writer.kv_data[0]:
            writer.add_array("tokenizer.ggml.merges", ["a b"])

    source = write(tmp_path / "m.gguf", reference_model("llama"), "llama", add=embedded)
    with pytest.raises((CorruptFileError, ConfigError)) as caught:
        read_gguf(source)
    assert sentence in str(caught.value)
