"""What is fuzzed: for each kind of file a sound one, how it is damaged, and everything that reads it."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from assets_folder import ASSETS, REPOSITORY
from damage import damaged_bytes, damaged_json, damaged_toml
from gguf_files import small_file
from published_layouts import LAYOUTS, publish
from small_models import saved
from twostroke.core.described import plain
from twostroke.core.families import all_families, read_spec
from twostroke.core.recipe import read_recipe
from twostroke.data.chat import read_chat_template
from twostroke.data.tokenizer import eos_id_of, load_tokenizer, train_tokenizer
from twostroke.interop.export_model import export_model
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_model import read_gguf
from twostroke.interop.gguf_parts import names_of_parts
from twostroke.interop.import_model import import_model
from twostroke.interop.llama2c import read_llama2c, read_tokenizer_bin
from twostroke.interop.source import SourceTokenizer
from twostroke.model.adapters import PEFT_PREFIX
from twostroke.model.load import open_weights
from twostroke.model.safetensors_file import WeightFiles
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.load import load_any_state
from twostroke.training.checkpoint import MANIFEST, STATE, Checkpoint, load_checkpoint, save_checkpoint
from twostroke.training.retention import Retention
from twostroke.training.run_directory import RunDirectory

Damage = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Subject:
    """``make`` fills a folder and returns the file in it that ``damage`` changes; ``read`` is given the folder."""

    make: Callable[[Path], Path]
    damage: Damage
    read: Callable[[Path], None]
    needs_assets: bool = False


def header_first(n_bytes: int) -> Damage:
    return lambda content, rng: damaged_bytes(content, rng, n_bytes)


def as_json(content: bytes, rng: random.Random) -> bytes:
    return damaged_json(json.loads(content), rng)


def as_toml(content: bytes, rng: random.Random) -> bytes:
    return damaged_toml(content.decode(), rng)


def safetensors_header(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return damaged_bytes(content, rng, 8 + int.from_bytes(content[:8], "little"))
    end = 8 + int.from_bytes(content[:8], "little")
    header = damaged_json(json.loads(content[8:end]), rng)
    return struct.pack("<Q", len(header)) + header + content[end:]


def take_all(state: Mapping[str, Any]) -> None:
    for name in state:
        assert isinstance(state[name], torch.Tensor)


def encode(source: SourceTokenizer | None) -> None:
    if source is not None:
        source.tokenizer.encode("Once upon a time ☃ 123")
        source.tokenizer.to_str()


def asset(name: str) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copyfile(ASSETS / "weights" / "stories260K" / name, folder / name))


def quantised_gguf(architecture: str) -> Callable[[Path], Path]:
    return lambda folder: small_file(folder / "quantised.gguf", architecture)


def part_of_gguf(number: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        first = small_file(folder / "parts.gguf", "phi3", in_each=5)
        return first.with_name(names_of_parts(first.name)[number - 1])

    return make


def experts_gguf(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        export_model(saved(name, folder / "source")[1], folder / "experts.gguf", to="gguf", precision="BF16")
        shutil.rmtree(folder / "source")
        return folder / "experts.gguf"

    return make


def kept_gguf(file: str) -> Callable[[Path], Path]:
    """A directory of the matrices of a GGUF file as they are."""

    def make(folder: Path) -> Path:
        import_model(small_file(folder / "source.gguf", "gemma3"), folder / "model")
        return folder / "model" / file

    return make


def read_gguf_model(folder: Path) -> None:
    model = read_gguf(min(folder.glob("*.gguf")))
    take_all(model.state)
    if model.codes is not None:
        for name in model.codes.kinds:
            model.codes.read(name)
    encode(model.tokenizer if isinstance(model.tokenizer, SourceTokenizer) else None)


def read_gguf_tensors(folder: Path) -> None:
    file = GgufFile(folder / "stories260K.gguf")
    for name in file.tensors:
        file.read(name)


def read_checkpoint(folder: Path) -> None:
    take_all(read_llama2c(folder / "stories260K.bin", None).state)


def read_tokenizer_table(folder: Path) -> None:
    encode(read_tokenizer_bin(folder / "tok512.bin", 512))


def model_directory(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        saved("llama-scaled", folder / "model")
        (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 2], "bos_token_id": 0}')
        return folder / "model" / file

    return make


def indexed(folder: Path) -> Path:
    directory = model_directory("model.safetensors")(folder).parent
    names = list(WeightFiles(directory))
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {"total_size": 5}, "weight_map": dict.fromkeys(names, "a.safetensors")}))
    return file


def quantised(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        source = model_directory(file)(folder).parent
        quantize_model(source, folder / "int4", "int4-g32")
        return folder / "int4" / file

    return make


def read_model(folder: Path) -> None:
    directory = next(path for name in ("int4", "model") if (path := folder / name).is_dir())
    _, state = load_any_state(directory)
    take_all(state)


def published(layout: str, file: str) -> Callable[[Path], Path]:
    return lambda folder: publish("llama", folder, LAYOUTS[layout])[1].rename(folder / "model") / file


def quantisation(content: bytes, rng: random.Random) -> bytes:
    """A config.json whose ``quantization_config`` is damaged."""
    config = json.loads(content)
    damaged, mark = damaged_json(config["quantization_config"], rng), "\x01"
    return json.dumps(config | {"quantization_config": mark}).encode().replace(json.dumps(mark).encode(), damaged)


def anywhere(content: bytes, rng: random.Random) -> bytes:
    """The header of a safetensors file damaged, or its numbers."""
    if rng.random() < 0.5:
        return safetensors_header(content, rng)
    damaged, begin = bytearray(content), 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.randrange(1, 20)):
        at, length = rng.randrange(begin, len(content)), rng.choice((1, 4, 100, 5_000))
        damaged[at : at + length] = rng.choice((b"\xff", b"\x00", rng.randbytes(1))) * min(length, len(content) - at)
    return bytes(damaged)


PUBLISHED = (
    "gptq-4-64-v2-asym", "gptq-4-act-order", "awq-32", "ct-w4-64-asym", "ct-int8-asym", "ct-nvfp4", "ct-fp8-block", "fp8-block",
    "fp8-tensor", "mxfp4", "bnb-nf4-nested", "bnb-int8",
)  # fmt: skip


def with_tokenizer(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        text = "the quick brown fox jumps over the lazy dog. " * 20
        train_tokenizer(iter([text]), 300, folder / "tokenizer.json")
        config = {
            "eos_token": {"content": "<|endoftext|>", "lstrip": False}, "bos_token": None, "model_max_length": 10**30,
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
        }  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder / file

    return make


def read_tokenizer_files(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    eos_id_of(tokenizer, folder)
    read_chat_template(folder)


def encode_with_tokenizer(folder: Path) -> None:
    load_tokenizer(folder).encode("the quick brown ☃ fox")


def adapters(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        base = model_directory("config.json")(folder).parent
        spec = read_spec(base)
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 4.0,
            "bias": "none", "target_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}, "alpha_pattern": {},
            "use_rslora": False, "init_lora_weights": True, "modules_to_save": None,
        }  # fmt: skip
        directory = folder / "adapters"
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(config))
        nf4 = {"block": 64, "double_quantization": True}
        (directory / "twostroke_adapter.json").write_text(json.dumps({"format": 1, "base_fingerprint": None, "nf4": nf4}))
        stem = f"{PEFT_PREFIX}model.layers.0.self_attn.q_proj"
        rows = spec.n_heads * spec.head_dim
        weights = {f"{stem}.lora_A.weight": torch.ones(2, spec.d_model), f"{stem}.lora_B.weight": torch.ones(rows, 2)}
        save_file(weights, directory / "adapter_model.safetensors", {"format": "pt"})
        return directory / file

    return make


def read_adapters(folder: Path) -> None:
    spec, get = open_weights(folder / "adapters")
    assert spec.d_model
    for name in (*(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"), "model.norm.weight"):
        get(name)


def recipe(folder: Path) -> Path:
    return Path(shutil.copyfile(REPOSITORY / "recipes" / "lora.toml", folder / "recipe.toml"))


def run_record(folder: Path) -> Path:
    shutil.copyfile(REPOSITORY / "recipes" / "demo.toml", folder / "recipe.toml")
    record = plain(read_recipe(folder / "recipe.toml"))
    spec = {"family": "llama", "vocab_size": 9, "n_layers": 1, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4}
    spec |= {"d_ff": 8, "max_positions": 16, "rope": {"theta": 1e4}, "eos_token_ids": [1]}
    resolved = {"spec": spec, "steps": 5, "data_directory": "x", "data_key": "k", "run_id": "r", "environment": {}, "format": 1}
    (folder / "run").mkdir()
    (folder / "run" / "recipe.json").write_text(json.dumps(json.loads(json.dumps(record | {"resolved": resolved}))))
    return folder / "run" / "recipe.json"


def read_run(folder: Path) -> None:
    RunDirectory(folder / "run").open(read_recipe(folder / "recipe.toml"), resume=True)


def checkpoint(folder: Path) -> Path:
    state = {"step": 3, "loader": {"next_window": 6, "epoch": 0}, "random": [1, 2, 3], "losses": [3.5, 3.25]}
    weights = {"embed.weight": torch.ones(4, 3)}
    return save_checkpoint(folder, Checkpoint(weights, {"embed.weight::step": torch.ones(1)}, state), Retention(1)) / STATE


def read_checkpoint_directory(folder: Path) -> None:
    """As one whose every hash is right: a stranger can compute them."""
    directory = folder / "step-00000003"
    manifest = json.loads((directory / MANIFEST).read_text())
    content = (directory / STATE).read_bytes()
    manifest["files"][STATE] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / MANIFEST).write_text(json.dumps(manifest))
    load_checkpoint(directory)


ANY_CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": [2, 3], "n_embd": 64,
    "n_head": 4, "n_layer": 4, "n_positions": 64, "num_layers": 4, "num_heads": 4, "ffn_dim": 96, "seq_length": 64,
    "partial_rotary_factor": 1.0, "sliding_window": 8, "use_sliding_window": True, "num_experts": 4, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 32,
    "attention_types": [[["global", "local"], 2]], "mlp_only_layers": [0], "layer_types": ["sliding_attention"] * 4,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
    "quantization_config": {"quant_method": "gptq", "bits": 4},
}  # fmt: skip
"""Keys of every family; each reads its own."""


def any_config(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(ANY_CONFIG))
    return folder / "config.json"


def any_family(content: bytes, rng: random.Random) -> bytes:
    """A config of any family with four fifths of the keys, then damaged."""
    family = {"model_type": rng.choice(sorted(all_families()))}
    return damaged_json(family | {k: v for k, v in ANY_CONFIG.items() if k != "model_type" and rng.random() < 0.8}, rng)


SUBJECTS: dict[str, Subject] = {
    "gguf": Subject(asset("stories260K.gguf"), header_first(20_000), read_gguf_tensors, True),
    "gguf_model": Subject(asset("stories260K.gguf"), header_first(20_000), read_gguf_model, True),
    "gguf_gemma3": Subject(quantised_gguf("gemma3"), header_first(4_000), read_gguf_model),
    "gguf_phi3": Subject(quantised_gguf("phi3"), header_first(3_000), read_gguf_model),
    "gguf_first_part": Subject(part_of_gguf(1), header_first(2_000), read_gguf_model),
    "gguf_second_part": Subject(part_of_gguf(2), header_first(600), read_gguf_model),
    "gguf_gpt_oss": Subject(experts_gguf("gpt_oss"), header_first(4_000), read_gguf_model),
    "gguf_deepseek": Subject(experts_gguf("deepseek_v3"), header_first(4_000), read_gguf_model),
    "kept_gguf_config": Subject(kept_gguf("config.json"), quantisation, read_model),
    "kept_gguf_weights": Subject(kept_gguf("model.safetensors"), anywhere, read_model),
    "safetensors": Subject(model_directory("model.safetensors"), safetensors_header, read_model),
    "index": Subject(indexed, as_json, read_model),
    "llama2c": Subject(asset("stories260K.bin"), header_first(64), read_checkpoint, True),
    "tok512": Subject(
        asset("tok512.bin"), header_first(6_000), lambda f: encode(read_tokenizer_bin(f / "tok512.bin", 512)), True
    ),
    "tokenizer_config": Subject(with_tokenizer("tokenizer_config.json"), as_json, read_tokenizer_files),
    "tokenizer": Subject(with_tokenizer("tokenizer.json"), as_json, encode_with_tokenizer),
    "config": Subject(any_config, any_family, lambda folder: (read_spec(folder / "config.json"), None)[1]),
    "model_config": Subject(model_directory("config.json"), as_json, read_model),
    "generation_config": Subject(model_directory("generation_config.json"), as_json, read_model),
    "int4_config": Subject(quantised("config.json"), as_json, read_model),
    "int4_weights": Subject(quantised("model.safetensors"), safetensors_header, read_model),
    **{f"{name}_config": Subject(published(name, "config.json"), quantisation, read_model) for name in PUBLISHED},
    **{f"{name}_weights": Subject(published(name, "model.safetensors"), anywhere, read_model) for name in PUBLISHED},
    "adapter_config": Subject(adapters("adapter_config.json"), as_json, read_adapters),
    "adapter_own": Subject(adapters("twostroke_adapter.json"), as_json, read_adapters),
    "adapter_weights": Subject(adapters("adapter_model.safetensors"), safetensors_header, read_adapters),
    "recipe": Subject(recipe, as_toml, lambda folder: (read_recipe(folder / "recipe.toml"), None)[1]),
    "checkpoint": Subject(checkpoint, as_json, read_checkpoint_directory),
    "run": Subject(run_record, as_json, read_run),
}
