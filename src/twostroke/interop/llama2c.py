"""Reads llama2.c checkpoints of version 0 (karpathy/llama2.c, ``run.c``, ``export.py``): seven int32, then fp32 weights by
kind."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.core.documents import Allowance
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.families import layout
from twostroke.core.spec import ModelSpec, RopeSpec
from twostroke.interop.moved import Held, HeldTensor
from twostroke.interop.source import SourceModel, SourceTokenizer, halves_from_pairs
from twostroke.interop.tokenizer_tables import (
    BYTE,
    CONTROL,
    MAX_PIECE_CHARACTERS,
    NORMAL,
    UNKNOWN,
    sentencepiece_bpe,
)
from twostroke.model.lazy_state import LazyState

HEADER_BYTES = 28
BOS, EOS = 1, 2
NORM_EPS = 1e-5  # a constant in run.c
_VERSIONED_MAGIC = 0x616B3432  # "ak42", before versions 1 and 2
_PIECE_BYTES = 120  # memory of a piece, its score and its kind in lists
MAX_PIECE_BYTES = 4 * MAX_PIECE_CHARACTERS  # in UTF-8


def read_llama2c(path: Path, tokenizer: Path | None) -> SourceModel:
    """The model in ``path`` and the tokenizer in ``tokenizer``, a llama2.c ``tokenizer.bin``.

    Raises CorruptFileError if the header does not explain every byte of the file.
    """
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise CorruptFileError(f"{path} is {size} bytes; a llama2.c checkpoint has a header of {HEADER_BYTES}.")
    with path.open("rb") as stream:
        header = struct.unpack("<7i", stream.read(HEADER_BYTES))
    if header[0] == _VERSIONED_MAGIC:
        raise ConfigError(f"{path} is a llama2.c checkpoint of version {header[1]}; only version 0 is read.")
    width, d_ff, n_layers, n_heads, n_kv_heads, signed_vocab, n_positions = header
    tied, vocab = signed_vocab > 0, abs(signed_vocab)  # as in run.c: a negative vocabulary stands for an untied head
    if min(width, d_ff, n_layers, n_heads, n_kv_heads, vocab, n_positions) < 1 or width % n_heads:
        raise CorruptFileError(f"{path} is not a llama2.c checkpoint: its header reads {header}.")
    try:
        spec = ModelSpec(
            "llama", vocab, n_layers, width, n_heads, n_kv_heads, width // n_heads, d_ff, n_positions, norm_eps=NORM_EPS,
            tied_embeddings=tied, bos_token_id=BOS, eos_token_ids=(EOS,),
        )  # fmt: skip
    except ConfigError as error:
        raise CorruptFileError(f"{path} is not a llama2.c checkpoint: {error}") from None
    sections, n_floats = _sections(spec)
    if size != HEADER_BYTES + 4 * n_floats:
        raise CorruptFileError(
            f"{path} is {size} bytes, but its header (width {width}, {n_layers} layers, {n_heads} and {n_kv_heads} heads, "
            f"vocabulary {vocab}, {n_positions} positions) describes {HEADER_BYTES + 4 * n_floats}. "
            "It is truncated, or no llama2.c file."
        )
    data = np.memmap(path, dtype="<f4", mode="r", offset=HEADER_BYTES)
    spec = spec.with_(rope=RopeSpec(theta=_theta(path, spec, data, sections["freq_cos"][0], sections["freq_sin"][0])))
    table = None if tokenizer is None else read_tokenizer_bin(tokenizer, spec.vocab_size, size)
    tensors = {entry.canonical: HeldTensor(math.prod(entry.shape), "fp32", is_new=True) for entry in layout(spec)}
    return SourceModel("llama2.c", spec, _state(spec, data, sections), "fp32", Held(size, size, tensors), table)


def _sections(spec: ModelSpec) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """{kind: (first float, shape)} in file order, and the number of floats. Each kind holds all layers."""
    L, E, F, V, D = spec.n_layers, spec.d_model, spec.d_ff, spec.vocab_size, spec.head_dim
    q_rows, kv_rows = spec.n_heads * D, spec.n_kv_heads * D
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (V, E), "attn_norm": (L, E), "wq": (L, q_rows, E), "wk": (L, kv_rows, E), "wv": (L, kv_rows, E),
        "wo": (L, E, q_rows), "mlp_norm": (L, E), "gate": (L, F, E), "down": (L, E, F), "up": (L, F, E), "final_norm": (E,),
        "freq_cos": (spec.max_positions, D // 2), "freq_sin": (spec.max_positions, D // 2),
    }  # fmt: skip
    if not spec.tied_embeddings:
        shapes["head"] = (V, E)
    sections, at = {}, 0
    for kind, shape in shapes.items():
        sections[kind] = (at, shape)
        at += math.prod(shape)
    return sections, at


def _theta(path: Path, spec: ModelSpec, data: np.ndarray, cos_at: int, sin_at: int) -> float:
    """θ of the rotary embedding, computed from the angles θ^(−2i/D) that the file stores for position 1."""
    half = spec.head_dim // 2
    if spec.max_positions < 2 or half < 2:
        return 10_000.0
    angles = np.arctan2(data[sin_at + half : sin_at + 2 * half], data[cos_at + half : cos_at + 2 * half]).astype(np.float64)
    if not np.isfinite(angles).all() or angles[1] <= 0:
        raise CorruptFileError(f"{path}: the stored rotary table does not hold angles.")
    theta = float(angles[1] ** (-spec.head_dim / 2))
    theta = float(f"{theta:.4g}")  # fp32 angles carry six digits
    expected = theta ** (-2 * np.arange(half) / spec.head_dim)
    if not np.allclose(angles, expected, rtol=1e-2, atol=1e-6):
        raise ConfigError(
            f"{path}: the stored rotary table is not θ^(−2i/D) for any θ, and scaled tables are not read from llama2.c."
        )
    return theta


def _state(spec: ModelSpec, data: np.ndarray, sections: dict[str, tuple[int, tuple[int, ...]]]) -> LazyState:
    def whole(kind: str) -> Callable[[], Tensor]:
        start, shape = sections[kind]
        return lambda: torch.from_numpy(np.array(data[start : start + math.prod(shape)])).view(shape)

    def layer(kind: str, i: int) -> Tensor:
        start, (_, *shape) = sections[kind]
        n = math.prod(shape)
        return torch.from_numpy(np.array(data[start + i * n : start + (i + 1) * n])).view(*shape)

    def of_layer(kind: str, i: int) -> Callable[[], Tensor]:
        return lambda: layer(kind, i)

    def packed_qkv(i: int) -> Callable[[], Tensor]:
        return lambda: torch.cat(
            (
                halves_from_pairs(layer("wq", i), spec.n_heads),
                halves_from_pairs(layer("wk", i), spec.n_kv_heads),
                layer("wv", i),
            )
        )

    def packed_gate_up(i: int) -> Callable[[], Tensor]:
        return lambda: torch.cat((layer("gate", i), layer("up", i)))

    readers: dict[str, Callable[[], Tensor]] = {"embed.weight": whole("embed"), "final_norm.weight": whole("final_norm")}
    for i in range(spec.n_layers):
        readers |= {
            f"blocks.{i}.attn_norm.weight": of_layer("attn_norm", i),
            f"blocks.{i}.attn.qkv.weight": packed_qkv(i),
            f"blocks.{i}.attn.out.weight": of_layer("wo", i),
            f"blocks.{i}.mlp_norm.weight": of_layer("mlp_norm", i),
            f"blocks.{i}.mlp.gate_up.weight": packed_gate_up(i),
            f"blocks.{i}.mlp.down.weight": of_layer("down", i),
        }
    if not spec.tied_embeddings:
        readers["head.weight"] = whole("head")
    return LazyState(readers)


def read_tokenizer_bin(path: Path, vocab_size: int, model_bytes: int = 0) -> SourceTokenizer:
    """The tokenizer in a llama2.c ``tokenizer.bin``: an int32 (longest piece), then of each token float32 score, int32 length,
    bytes.

    The file writes ▁ as a space and puts line ends around the names of control tokens; both are undone.
    Raises InputError if the file is missing, CorruptFileError if it does not hold ``vocab_size`` pieces and nothing else,
    and if they take more memory than twice this file, ``model_bytes`` and the spare that every file has.
    """
    if not path.is_file():
        raise InputError(f"tokenizer {path} does not exist. Give the tokenizer.bin that belongs to the model.")
    size = path.stat().st_size
    allowance = Allowance(path, size + model_bytes)
    content = path.read_bytes() if size <= vocab_size * (8 + MAX_PIECE_BYTES) + 4 else b""
    allowance.take(min(vocab_size, len(content) // 8) * _PIECE_BYTES + 4 * len(content), f"{vocab_size} tokens")
    at = 4
    pieces: list[str] = []
    scores: list[float] = []
    for token in range(vocab_size):
        if at + 8 > len(content):
            raise CorruptFileError(
                f"{path} ends at token {token} of the model's {vocab_size}. It belongs to another model or is truncated."
            )
        score, length = struct.unpack_from("<fi", content, at)
        at += 8
        if not 0 <= length <= min(MAX_PIECE_BYTES, len(content) - at) or not math.isfinite(score):
            raise CorruptFileError(
                f"{path}: token {token} claims {length} bytes and score {score}; it is not a llama2.c tokenizer."
            )
        try:
            pieces.append(content[at : at + length].decode("utf-8"))
        except UnicodeDecodeError:
            raise CorruptFileError(f"{path}: token {token} is not UTF-8.") from None
        scores.append(score)
        at += length
    if at != len(content):
        raise CorruptFileError(
            f"{path} has {len(content) - at} more bytes after the model's {vocab_size} tokens. It belongs to another model."
        )
    kinds = [NORMAL] * vocab_size
    for token, (piece, kind) in enumerate((("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL))[:vocab_size]):
        pieces[token], kinds[token] = piece, kind
    for token in range(3, vocab_size):
        piece = pieces[token]
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            kinds[token] = BYTE
        else:
            pieces[token] = piece.replace(" ", "▁")
    return SourceTokenizer(sentencepiece_bpe(pieces, scores, kinds, BOS, allowance))
