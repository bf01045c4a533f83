"""Model directories: what is written opens in transformers, what is read is checked first."""

from __future__ import annotations

import errno
import json
import os
import struct
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_models import CASES, SAVED_AS, TOLERANCE, V, random_tokens, reference_model, relative_error, save_reference
from twostroke.core.errors import ConfigError, CorruptFileError, DataError, InputError
from twostroke.core.families import layout
from twostroke.core.schemes import SCHEMES
from twostroke.core.spec import ModelSpec
from twostroke.model.decoder import Decoder
from twostroke.model.families import to_canonical, write_entry
from twostroke.model.lazy_state import LazyState
from twostroke.model.load import load_model, load_state
from twostroke.model.safetensors_file import WeightFiles, read_header
from twostroke.model.save import save_model
from twostroke.quantization.directory import Quantisation

SPEC = ModelSpec("llama", V, 2, 48, 4, 2, 12, 80, 64, bos_token_id=1, eos_token_ids=(0,))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small model directory."""
    return save_model(Decoder(SPEC), SPEC, tmp_path / "model")


def reload_in_transformers(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("case", [case for case in CASES if case not in SAVED_AS])
@torch.no_grad()
def test_saved_directories_reload_in_transformers_and_here_with_the_same_logits(case: str, tmp_path: Path) -> None:
    theirs = save_reference(case, tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    save_model(ours, ours.spec, tmp_path / "ours")
    tokens = random_tokens()
    assert torch.equal(load_model(tmp_path / "ours")(tokens), ours(tokens))
    again = reload_in_transformers(tmp_path / "ours")
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name]), name
    assert relative_error(again(tokens).logits, ours(tokens)) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "gpt2-untied"])
def test_canonical_and_stored_tensors_are_the_same_numbers(case: str) -> None:
    state = reference_model(case).state_dict()
    from twostroke.core.families import spec_from_config

    spec = spec_from_config(reference_model(case).config.to_dict())
    canonical = dict(to_canonical(spec, state.__getitem__))
    assert {name: tuple(t.shape) for name, t in canonical.items()} == {e.canonical: e.shape for e in layout(spec)}
    assert set(canonical) == set(Decoder(spec, device="meta").state_dict())
    for entry in layout(spec):
        for name, tensor in write_entry(entry, canonical[entry.canonical]):
            assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_dtype_is_kept_on_disk_and_named_in_the_configuration(dtype: str, tmp_path: Path) -> None:
    model = Decoder(SPEC)
    save_model(model, SPEC, tmp_path / "m", dtype=dtype)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    tag = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[dtype]
    assert {info.dtype for info in read_header(tmp_path / "m" / "model.safetensors").values()} == {tag}
    assert getattr(torch, config["torch_dtype"]) == load_state(tmp_path / "m")[1]["embed.weight"].dtype
    loaded = load_model(tmp_path / "m", dtype="fp32")
    assert loaded.embed.weight.dtype == torch.float32
    assert torch.equal(loaded.embed.weight, model.embed.weight.to(getattr(torch, config["torch_dtype"])).float())
    assert load_model(tmp_path / "m", dtype="bf16").blocks[0].attn.qkv.weight.dtype == torch.bfloat16


def test_shards_hold_each_tensor_once_and_load_back(tmp_path: Path) -> None:
    model = Decoder(SPEC)
    limit = 50_000
    save_model(model, SPEC, tmp_path / "m", max_shard_bytes=limit)
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 3
    assert [s.name for s in shards] == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for shard in shards:
        assert sum(info.n_bytes for info in read_header(shard).values()) <= limit
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for name, parameter in load_model(tmp_path / "m").state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name])
    reload_in_transformers(tmp_path / "m")


def test_tensors_are_written_one_at_a_time(tmp_path: Path) -> None:
    tensors = Decoder(SPEC).tensors
    alive: list[weakref.ref[torch.Tensor]] = []

    def made(name: str) -> torch.Tensor:
        assert sum(ref() is not None for ref in alive) <= 1
        tensor = tensors[name].detach().clone()
        alive.append(weakref.ref(tensor))
        return tensor

    save_model(LazyState({name: partial(made, name) for name in tensors}), SPEC, tmp_path / "m")
    assert len(alive) == len(tensors)
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name, tensor in load_state(tmp_path / "m")[1].items():
        assert torch.equal(tensor, tensors[name])


def test_what_the_disk_does_not_take_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a thread is told so while later tensors are made."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("twostroke.model.save._FLUSH_BYTES", 1)
    monkeypatch.setattr("twostroke.model.save.os.fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_model(Decoder(SPEC), SPEC, tmp_path / "m")
    assert caught.value.filename == str(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_state_saves_as_its_decoder_does(tmp_path: Path, directory: Path) -> None:
    spec, state = load_state(directory)
    assert spec == SPEC
    save_model(state, spec, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


def test_a_directory_that_holds_something_is_not_overwritten_unasked(directory: Path) -> None:
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    with pytest.raises(InputError, match="is not empty"):
        save_model(Decoder(SPEC), SPEC, directory)
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    smaller = SPEC.with_(n_layers=1)
    save_model(Decoder(smaller), smaller, directory, replace=True)
    assert load_model(directory).spec.n_layers == 1
    assert [p.name for p in directory.parent.iterdir()] == [directory.name]  # nothing is left beside it


def test_a_save_that_fails_leaves_the_old_model_and_no_debris(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    monkeypatch.setattr("twostroke.model.save._write_flushing", fail)
    with pytest.raises(OSError, match="No space"):
        save_model(Decoder(SPEC), SPEC, directory, replace=True)
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    assert [p.name for p in directory.parent.iterdir()] == [directory.name]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.pop("final_norm.weight"), "no tensor 'final_norm.weight'"),
        (lambda s: s.update({"embed.weight": torch.zeros(3, 3)}), r"'embed.weight' to save has shape \[3, 3\]"),
        (lambda s: s.update({"extra": torch.zeros(1)}), "holds 'extra'"),
    ],
)
def test_a_state_that_is_not_its_specs_is_not_saved(
    change: Callable[[dict[str, Any]], Any], sentence: str, tmp_path: Path
) -> None:
    state = dict(Decoder(SPEC).state_dict())
    change(state)
    with pytest.raises(CorruptFileError, match=sentence):
        save_model(state, SPEC, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_impossible_targets_and_dtypes_are_sentences(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        save_model(Decoder(SPEC), SPEC, tmp_path / "file")
    with pytest.raises(ConfigError, match="dtype='int3' is not a format to save"):
        save_model(Decoder(SPEC), SPEC, tmp_path / "m", dtype="int3")
    with pytest.raises(ConfigError, match="dtype='int8' is not a format to compute"):
        load_model(directory, dtype="int8")


# --- tokenizers --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat. " * 50], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_bare_tokenizer_opens_in_transformers(tokenizer_file: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = SPEC.with_(vocab_size=300, bos_token_id=None)
    save_model(Decoder(spec), spec, tmp_path / "m", tokenizer_path=tokenizer_file)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length == 64
    assert tokenizer.decode(tokenizer("the cat, the  hät").input_ids) == "the cat, the  hät"


def test_tokenizer_files_of_a_directory_are_copied_as_they_are(tokenizer_file: Path, tmp_path: Path) -> None:
    source = tokenizer_file.parent
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    save_model(Decoder(SPEC), SPEC, tmp_path / "m", tokenizer_path=source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "m" / name).read_bytes() == (source / name).read_bytes()


def test_tokenizers_that_are_missing_broken_or_too_small_are_sentences(tokenizer_file: Path, tmp_path: Path) -> None:
    def save(path: Path, spec: ModelSpec = SPEC) -> None:
        save_model(Decoder(spec), spec, tmp_path / "m", tokenizer_path=path)

    with pytest.raises(DataError, match="does not exist"):
        save(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match="has no token 999"):
        save(tokenizer_file, SPEC.with_(vocab_size=1000, eos_token_ids=(999,)))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"broken\.json is not a tokenizer"):
        save(tmp_path / "broken.json")
    assert not (tmp_path / "m").exists()


# --- what is corrupt ---------------------------------------------------------------------------------------------------------


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_unexpected_and_misshapen_tensors_are_named(directory: Path) -> None:
    norm = "model.norm.weight"
    rewrite(directory, lambda t: t.update({"model.layers.7.mlp.down_proj.weight": torch.zeros(2)}))
    with pytest.raises(CorruptFileError, match=r"holds 1 tensor\(s\).*'model.layers.7.mlp.down_proj.weight'"):
        load_model(directory)
    rewrite(directory, lambda t: t.pop("model.layers.7.mlp.down_proj.weight"))
    load_model(directory)
    rewrite(directory, lambda t: t.update({norm: torch.zeros(3)}))
    with pytest.raises(CorruptFileError, match=rf"'{norm}' has shape \[3\].*asks for \[48\]"):
        load_model(directory)
    rewrite(directory, lambda t: t.update({norm: torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(CorruptFileError, match=f"'{norm}' is I8"):
        load_model(directory)
    rewrite(directory, lambda t: t.pop(norm))
    with pytest.raises(CorruptFileError, match=f"no tensor '{norm}'"):
        load_model(directory)


def test_recomputed_buffers_and_tied_copies_are_passed_over(tmp_path: Path) -> None:
    save_reference("gpt2", tmp_path / "a")
    reference = load_model(tmp_path / "a")
    rewrite(tmp_path / "a", lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}))
    rewrite(tmp_path / "a", lambda t: t.update({"lm_head.weight": torch.ones(V, 48)}))
    assert torch.equal(load_model(tmp_path / "a")(random_tokens()), reference(random_tokens()))


def test_checkpoints_of_the_bare_model_have_no_prefix_and_load(tmp_path: Path) -> None:
    for case, prefix in (("gpt2", "transformer."), ("llama-multi-head", "model.")):
        save_reference(case, tmp_path / case)
        reference = load_model(tmp_path / case)
        file = tmp_path / case / "model.safetensors"
        save_file({name.removeprefix(prefix): t for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
        assert torch.equal(load_model(tmp_path / case)(random_tokens()), reference(random_tokens()))


def test_a_directory_that_says_it_is_quantised_must_be(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = Quantisation(SCHEMES["int8"]).config()
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match=r"proj\.weight' is F32 .*; I8 .* is due"):
        load_model(directory)


def test_a_directory_without_weights_says_what_is_missing(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin may be a pickle"):
        load_model(directory)


def with_header(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is 0 bytes"),
        (b"\x01\x02", "is 2 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "declares a header of 9223372036854775808 bytes"),
        (struct.pack("<Q", 50) + b"{}", "declares a header of 50 bytes"),
        (with_header(b"{]"), "not valid JSON"),
        (with_header(b"\xff\xff"), "not valid JSON"),
        (with_header(b"[" * 100_000), "not valid JSON"),
        (with_header([1]), "must be a JSON object"),
        (with_header(b'{"a": {}, "a": {}}'), "key 'a' occurs twice"),
        pytest.param(with_header(b'{"a": [' + b"[]," * 400_000 + b"[]]}"), "bytes of memory", id="empty lists"),
        (with_header({"a": TENSOR | {"shape": [1] * 17}}, bytes(24)), "needs a shape"),
        (with_header({"a": TENSOR | {"shape": [10**200]}}, bytes(24)), "needs a shape"),
        (with_header({"a": 5}), "needs a shape"),
        (with_header({"a": TENSOR | {"shape": [-2, -3]}}, bytes(24)), "needs a shape"),
        (with_header({"a": TENSOR | {"shape": [2.0, 3]}}, bytes(24)), "needs a shape"),
        (with_header({"a": TENSOR | {"dtype": "F99"}}, bytes(24)), "dtype 'F99'"),
        (with_header({"a": TENSOR | {"dtype": ["F32"]}}, bytes(24)), "dtype"),
        (with_header({"a": TENSOR | {"shape": [2**31, 2**31]}}, bytes(24)), "needs 18446744073709551616 bytes"),
        (with_header({"a": TENSOR | {"data_offsets": [24, 0]}}, bytes(24)), "impossible data_offsets"),
        (with_header({"a": TENSOR | {"data_offsets": [0]}}, bytes(24)), "two data_offsets"),
        (with_header({"a": TENSOR}, bytes(23)), "its header describes"),
        (with_header({"a": TENSOR}, bytes(25)), "its header describes"),
        (with_header({"a": TENSOR, "b": TENSOR}, bytes(24)), "a hole or an overlap"),
        (with_header({"a": TENSOR | {"data_offsets": [8, 32]}}, bytes(32)), "a hole or an overlap"),
    ],
)
def test_headers_that_lie_are_found_before_anything_is_read(content: bytes, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"x\.safetensors") as caught:
        read_header(file)
    assert sentence in str(caught.value)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_header_is_a_sentence_or_still_true(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(with_header({"a": TENSOR, "bb": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}, bytes(32)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    file.write_bytes(content[: data.draw(st.integers(len(content) - 40, len(content)))])
    try:
        infos = read_header(file)
    except CorruptFileError:
        return
    assert sum(info.n_bytes for info in infos.values()) <= file.stat().st_size


def test_a_truncated_weight_file_is_found(directory: Path) -> None:
    file = directory / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 100)
    with pytest.raises(CorruptFileError, match="truncated or padded"):
        load_model(directory)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', "key 'a' occurs twice"),
        ('{"weight_map": [1]}', "must be JSON"),
        ('{"weight_map": {"a": ["b"]}}', "must be JSON"),
        ('{"weight_map": {"a": "../../other.safetensors"}}', "only a .safetensors file beside the index"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "only a .safetensors file beside the index"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "only a .safetensors file beside the index"),
        ('{"weight_map": {"a": 1}}', "must be JSON"),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "which is not there"),
    ],
)
def test_a_wrong_index_is_a_sentence(index: str, sentence: str, directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CorruptFileError) as caught:
        load_model(directory)
    assert sentence in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_model(Decoder(SPEC), SPEC, tmp_path / "m", max_shard_bytes=50_000)
    first, second = sorted((tmp_path / "m").glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(CorruptFileError, match="is in both"):
        WeightFiles(tmp_path / "m")


def test_sizes_are_refused_before_a_model_of_that_size_is_made(directory: Path) -> None:
    """A config.json that asks for petabytes fails on the first tensor's shape."""
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": 2**31 - 1, "num_hidden_layers": 10_000}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match=r"has shape \[211, 48\].*asks for \[2147483647, 48\]"):
        load_model(directory)
