"""Reads models from GGUF files: maps metadata to ``ModelSpec`` and tensor names to canonical ones, and builds the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.core.errors import ConfigError, CorruptFileError, UnsupportedFamilyError
from twostroke.core.spec import ModelSpec, RopeSpec
from twostroke.interop.gguf import GgufFile
from twostroke.interop.source import SourceModel, SourceTokenizer, halves_from_pairs
from twostroke.interop.tokenizer_tables import LLAMA3_WORDS, NORMAL, byte_level_bpe, sentencepiece_bpe
from twostroke.model.lazy_state import LazyState
from twostroke.model.rope import inverse_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF's own names. GGUF calls Mistral models ``llama``."""

NO_TOKEN = 2**32 - 1  # an absent token id in some files


class _Metadata:
    """Typed access to a file's metadata. A missing or wrong value raises CorruptFileError."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def _get(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self.file.metadata.get(key)
        if value is None:
            if default is None:
                raise CorruptFileError(f"{self.file.path} has no metadata {key!r}.")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise CorruptFileError(f"{self.file.path}: metadata {key}={value!r:.60} must be {what}.")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._get(key, (int,), "a whole number", default)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, (int, float), "a number", default))

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._get(key, (str,), "text", default)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._get(key, (bool,), "true or false", default)
        return value

    def texts(self, key: str) -> list[str]:
        value: list[str] = self._get(key, (list,), "a list of texts", None)
        if not all(isinstance(item, str) for item in value):
            raise CorruptFileError(f"{self.file.path}: metadata {key} must be a list of texts.")
        return value

    def numbers(self, key: str, n: int, default: np.ndarray | None = None) -> list[Any]:
        """``n`` finite numbers, one a token."""
        value: np.ndarray = self._get(key, (np.ndarray,), "a list of numbers", default)
        if len(value) != n or not np.isfinite(value).all():
            raise CorruptFileError(
                f"{self.file.path}: metadata {key} must hold {n} finite numbers, one for each token of the tokenizer."
            )
        return list(value.tolist())

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self.file.metadata.get(key)
        if value is None or value == NO_TOKEN:
            return None
        if self.integer(key) not in range(vocab_size):
            raise CorruptFileError(
                f"{self.file.path}: metadata {key}={value} is outside the vocabulary of {vocab_size} tokens."
            )
        return self.integer(key)


def read_gguf(path: Path) -> SourceModel:
    """The model and tokenizer in ``path``.

    Raises CorruptFileError for a file that breaks the format or lacks something, UnsupportedFamilyError and ConfigError for
    what is not supported. All are raised before any weight is read.
    """
    file = GgufFile(path)
    metadata = _Metadata(file)
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedFamilyError(
            f"{path} has the architecture {architecture!r:.50}, which is not read from GGUF. Read are "
            f"{', '.join(ARCHITECTURES)}."
        )
    spec = _spec(file, metadata, architecture)
    state = LazyState(_readers(file, spec, paired=architecture == "llama"))
    tokenizer = _tokenizer(metadata, spec) if "tokenizer.ggml.model" in file.metadata else None
    types = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    notes: tuple[str, ...] = ()
    dtype = "fp32"
    if types == {"F16"} or types == {"BF16"}:
        dtype = "fp16" if types == {"F16"} else "bf16"
    quantised = types - {"F32", "F16", "BF16"}
    if quantised:
        notes = (f"{', '.join(sorted(quantised))} weights were converted to the exact fp32 numbers that they stand for.",)
    return SourceModel("GGUF", spec, state, dtype, tokenizer, notes)


def _spec(file: GgufFile, metadata: _Metadata, a: str) -> ModelSpec:
    if "token_embd.weight" not in file.tensors:
        raise CorruptFileError(
            f"{file.path} has no tensor 'token_embd.weight', so it holds only a vocabulary or a part of a model. "
            "Give the file of a whole model."
        )
    if metadata.integer(f"{a}.expert_count", 0):
        raise UnsupportedFamilyError(
            f"{file.path} is a mixture of experts, which is not read from GGUF. Give the model as a Hugging Face directory."
        )
    width, n_heads = metadata.integer(f"{a}.embedding_length"), metadata.integer(f"{a}.attention.head_count")
    if n_heads < 1:
        raise CorruptFileError(f"{file.path}: metadata {a}.attention.head_count={n_heads} must be at least 1.")
    head_dim = metadata.integer(f"{a}.attention.key_length", max(1, width // n_heads))
    for key in (f"{a}.attention.value_length", f"{a}.rope.dimension_count"):
        if metadata.integer(key, head_dim) != head_dim:
            raise ConfigError(
                f"{file.path}: {key}={metadata.integer(key)} is not supported; it must equal the head dimension {head_dim}."
            )
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    eos = metadata.token_id("tokenizer.ggml.eos_token_id", vocab_size)
    end_of_turn = metadata.token_id("tokenizer.ggml.eot_token_id", vocab_size)
    window = metadata.integer(f"{a}.attention.sliding_window", 0) or None
    try:
        spec = ModelSpec(
            family="mistral" if a == "llama" and window else a,
            vocab_size=vocab_size,
            n_layers=metadata.integer(f"{a}.block_count"),
            d_model=width,
            n_heads=n_heads,
            n_kv_heads=metadata.integer(f"{a}.attention.head_count_kv", n_heads),
            head_dim=head_dim,
            d_ff=metadata.integer(f"{a}.feed_forward_length"),
            max_positions=metadata.integer(f"{a}.context_length"),
            norm_eps=float(f"{metadata.number(f'{a}.attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-5 is stored in fp32
            rope=RopeSpec(theta=float(f"{metadata.number(f'{a}.rope.freq_base', 10_000.0):.7g}")),
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            attn_out_bias="blk.0.attn_output.bias" in file.tensors,
            qk_norm=a == "qwen3",
            tied_embeddings="output.weight" not in file.tensors,
            sliding_window=window,
            bos_token_id=metadata.token_id("tokenizer.ggml.bos_token_id", vocab_size),
            eos_token_ids=tuple(dict.fromkeys(i for i in (eos, end_of_turn) if i is not None)),
        )
        return spec.with_(rope=_rope(file, metadata, a, spec))
    except ConfigError as error:
        raise type(error)(f"{file.path}: {error}") from None


def _rope(file: GgufFile, metadata: _Metadata, a: str, spec: ModelSpec) -> RopeSpec:
    """The file's rope scaling. Linear scaling is metadata. Llama 3's is a tensor of divisors, which is recognised by comparing
    it with the divisors of the factors that Meta published."""
    kind = metadata.text(f"{a}.rope.scaling.type", "none")
    if kind == "linear":
        factor = metadata.number(f"{a}.rope.scaling.factor", 1.0)
        return RopeSpec(theta=spec.rope.theta, scaling="linear", factor=factor)
    if kind != "none":
        raise ConfigError(f"rope scaling {kind!r:.50} is not read from GGUF. Only linear scaling and Llama 3's rope_freqs are.")
    if "rope_freqs.weight" not in file.tensors:
        return spec.rope
    divisors = file.read("rope_freqs.weight").float()
    plain = inverse_frequencies(spec.rope, spec.head_dim)
    for factor in (8.0, 32.0):
        candidate = RopeSpec(
            spec.rope.theta, "llama3", factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
        )
        expected = plain / inverse_frequencies(candidate, spec.head_dim)
        if divisors.shape == expected.shape and torch.allclose(divisors, expected, rtol=1e-4):
            return candidate
    raise ConfigError("rope_freqs.weight holds a scaling that is not Llama 3.1's or 3.2's; it is not read from GGUF.")


def _readers(file: GgufFile, spec: ModelSpec, paired: bool) -> dict[str, Callable[[], Tensor]]:
    """A reader for each canonical tensor. Raises CorruptFileError for tensors that are missing, misshapen or unknown."""
    E, F, D, V = spec.d_model, spec.d_ff, spec.head_dim, spec.vocab_size
    q_rows, kv_rows = spec.n_heads * D, spec.n_kv_heads * D
    used: set[str] = set()

    def part(name: str, *shape: int) -> str:
        info = file.tensors.get(name)
        if info is None:
            raise CorruptFileError(
                f"{file.path} has no tensor {name!r}, which a model of its metadata needs. The file is incomplete; download it "
                "again."
            )
        if info.shape != shape:
            raise CorruptFileError(
                f"{file.path}: tensor {name!r} has shape {list(info.shape)}, but its metadata asks for {list(shape)}."
            )
        used.add(name)
        return name

    def whole(name: str, *shape: int) -> Callable[[], Tensor]:
        checked = part(name, *shape)
        return lambda: file.read(checked)

    def joined(*names: str) -> Callable[[], Tensor]:
        return lambda: torch.cat([file.read(name) for name in names])

    def qkv(q: str, k: str, v: str) -> Callable[[], Tensor]:
        if not paired:
            return joined(q, k, v)
        return lambda: torch.cat(
            (halves_from_pairs(file.read(q), spec.n_heads), halves_from_pairs(file.read(k), spec.n_kv_heads), file.read(v))
        )

    readers = {"embed.weight": whole("token_embd.weight", V, E), "final_norm.weight": whole("output_norm.weight", E)}
    for i in range(spec.n_layers):
        ours, theirs = f"blocks.{i}", f"blk.{i}"
        for suffix, columns in (("weight", (E,)), ("bias", ())) if spec.qkv_bias else (("weight", (E,)),):
            names = [
                part(f"{theirs}.attn_{x}.{suffix}", n, *columns) for x, n in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
            ]
            readers[f"{ours}.attn.qkv.{suffix}"] = qkv(*names)
        if spec.qk_norm:
            readers[f"{ours}.attn.q_norm.weight"] = whole(f"{theirs}.attn_q_norm.weight", D)
            readers[f"{ours}.attn.k_norm.weight"] = whole(f"{theirs}.attn_k_norm.weight", D)
        if spec.attn_out_bias:
            readers[f"{ours}.attn.out.bias"] = whole(f"{theirs}.attn_output.bias", E)
        readers |= {
            f"{ours}.attn_norm.weight": whole(f"{theirs}.attn_norm.weight", E),
            f"{ours}.attn.out.weight": whole(f"{theirs}.attn_output.weight", E, q_rows),
            f"{ours}.mlp_norm.weight": whole(f"{theirs}.ffn_norm.weight", E),
            f"{ours}.mlp.gate_up.weight": joined(
                part(f"{theirs}.ffn_gate.weight", F, E), part(f"{theirs}.ffn_up.weight", F, E)
            ),
            f"{ours}.mlp.down.weight": whole(f"{theirs}.ffn_down.weight", E, F),
        }
    if not spec.tied_embeddings:
        readers["head.weight"] = whole("output.weight", V, E)
    left_over = [name for name in file.tensors if name not in used and name != "rope_freqs.weight"]
    if left_over:
        raise CorruptFileError(
            f"{file.path} holds {len(left_over)} tensor(s) that its metadata does not explain, such as {left_over[0]!r:.80}. "
            "Leaving them out would change what the model computes."
        )
    return readers


def _tokenizer(metadata: _Metadata, spec: ModelSpec) -> SourceTokenizer:
    model = metadata.text("tokenizer.ggml.model")
    pieces = metadata.texts("tokenizer.ggml.tokens")
    if len(pieces) > spec.vocab_size:
        raise CorruptFileError(f"{metadata.file.path} has {len(pieces)} tokens, but embeddings for {spec.vocab_size}.")
    kinds = metadata.numbers("tokenizer.ggml.token_type", len(pieces), np.full(len(pieces), NORMAL))
    words = metadata.text("tokenizer.ggml.pre", "gpt-2")
    # llama.cpp's own defaults for files that do not say
    begins = metadata.flag("tokenizer.ggml.add_bos_token", model == "llama" or words in LLAMA3_WORDS)
    bos = spec.bos_token_id if begins else None
    config: dict[str, Any] = {}
    template = metadata.text("tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    if bos is not None and bos >= len(pieces):
        raise CorruptFileError(
            f"{metadata.file.path}: the begin-of-text token {bos} is outside its vocabulary of {len(pieces)} tokens."
        )
    if model == "llama":
        scores = metadata.numbers("tokenizer.ggml.scores", len(pieces))
        prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
        return SourceTokenizer(sentencepiece_bpe(pieces, scores, kinds, bos, metadata.file.allowance, prefix), config)
    if model == "gpt2":
        merges = metadata.texts("tokenizer.ggml.merges")
        return SourceTokenizer(byte_level_bpe(pieces, merges, kinds, words, bos, metadata.file.allowance), config)
    raise ConfigError(f"{metadata.file.path}: tokenizer.ggml.model={model!r:.50} is not read. Read: llama, gpt2.")
