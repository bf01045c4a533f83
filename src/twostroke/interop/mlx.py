"""Writes model directories of mlx-lm: the layout of Hugging Face, with matrices in groups of codes where that is asked for.

A matrix (n, k) becomes ``weight``, codes of ``bits`` bits packed into uint32 words with the first in the lowest bits (n,
k·bits/32), and ``scales`` and ``biases`` (n, k/64): a number is scale·code + bias. ``config.json`` says ``quantization:
{group_size, bits}``; mlx-lm takes each matrix that has scales as codes. Source: the documentation of ``mlx.core.quantize``.
Nothing here needs the mlx package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import ConfigError
from twostroke.core.families import config_from_spec, layout
from twostroke.core.spec import ModelSpec
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.moved import Held, Made, cast, new_memory, words_of
from twostroke.model.save import (
    bytes_of_files,
    bytes_of_weights,
    generation_config,
    stored_tensors,
    write_json,
    write_tensors,
    write_tokenizer,
)

GROUP = 64
BITS = {"int8": 8, "int4": 4}
_WORD = 32
_KEPT = ("norm", "router", "position_embed", "shared_gate")
"""Parts of names of what stays in plain numbers: it is small, and routers decide by small differences."""

READ = frozenset((
    "llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gpt2", "gpt_bigcode", "gemma", "gemma2", "gemma3_text", "phi3",
    "smollm3", "granite", "cohere", "cohere2", "stablelm", "starcoder2", "gpt_neox", "glm4", "ernie4_5", "seed_oss", "mixtral",
    "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "deepseek_v3", "kimi_k2",
))  # fmt: skip
"""Families whose logits mlx-lm 0.32 was seen to compute as we do."""
_WINDOWED = frozenset(("cohere2", "gemma3_text", "olmo3"))
"""Those whose windows it computes; in the others each token sees all before it."""


def write_mlx(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` with a model directory that mlx-lm opens. With codes everything else is bf16. Memory: one tensor.

    Raises ConfigError for a model that mlx-lm does not compute as we do, or whose matrices it cannot take as codes.
    """
    spec, bits = source.spec, BITS.get(precision)
    _require_read(spec)
    dtype = _dtype(precision)
    write_json(out / "config.json", _config(spec, precision))
    write_json(out / "generation_config.json", generation_config(spec))
    write_tensors(_due(spec, dtype, bits), _tensors(source, dtype, bits), out, made_by="mlx")
    if source.tokenizer is not None:
        write_tokenizer(source.tokenizer, spec, out)
    if spec.sliding_window is None or spec.family in _WINDOWED:
        return ()
    return (f"mlx-lm computes no sliding window in {spec.family}: beyond {spec.sliding_window} tokens it differs from us.",)


def expect_mlx(source: ExportSource, held: Held, precision: str) -> Made:
    """What ``write_mlx`` will write. Raises ConfigError as it does."""
    spec, bits, dtype = source.spec, BITS.get(precision), _dtype(precision)
    _require_read(spec)
    documents = (_config(spec, precision), generation_config(spec))
    n_bytes = bytes_of_weights(_due(spec, dtype, bits), made_by="mlx") + bytes_of_files(documents, source.tokenizer)
    changed, words = cast(held, dtype), words_of(source.tokenizer, spec)
    most = max(changed, default=0.0)
    if bits is None:
        return Made(n_bytes, words, new_bytes=new_memory(changed), held_bytes=most)
    in_codes = set(_matrices(spec))
    sizes = [math.prod(e.stored_shape(part)) for e in layout(spec) for part in e.parts if part.name in in_codes]
    new_bytes = new_memory(changed) + new_memory((4 * n for n in sizes), _ROUNDED_BYTES / 4)
    held_bytes = most + _ROUNDED_BYTES * max(sizes, default=0)
    return Made(n_bytes, {f"mlx {precision}": sum(sizes), **words}, len(sizes), new_bytes, held_bytes)


_ROUNDED_BYTES = 24
"""Of memory a number while ``in_groups`` has it in fp32, its code in fp32, and that as a whole number of 8 bytes before and
after it is shifted."""


def _dtype(precision: str) -> str:
    """Of what is not in codes."""
    return "bf16" if precision in BITS else precision


def _config(spec: ModelSpec, precision: str) -> dict[str, Any]:
    config = config_from_spec(spec, TORCH_NAMES[_dtype(precision)])
    if spec.family == "gpt2":
        config["n_ctx"] = spec.max_positions  # which transformers no longer writes
    if precision in BITS:
        config["quantization"] = {"group_size": GROUP, "bits": BITS[precision]}
    return config


def _require_read(spec: ModelSpec) -> None:
    if spec.family not in READ:
        raise ConfigError(
            f"mlx-lm does not open model_type={spec.family!r} as we write it. It opens {', '.join(sorted(READ))}."
        )
    if spec.family == "qwen2_moe" and not all(spec.has_experts(layer) for layer in range(spec.n_layers)):
        raise ConfigError("mlx-lm opens qwen2_moe only if every layer has experts, and this model has layers without them.")


def _tensors(source: ExportSource, dtype: str, bits: int | None) -> Iterator[tuple[str, Tensor]]:
    """What the files hold."""
    in_codes = set(_matrices(source.spec)) if bits is not None else set()
    for name, tensor in stored_tensors(source.spec, source.state, dtype):
        if bits is None or name not in in_codes:
            yield _bare(source.spec, name), tensor
            continue
        yield from zip(_parts(name), in_groups(tensor.contiguous(), bits), strict=True)


def _due(spec: ModelSpec, dtype: str, bits: int | None) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each of ``_tensors``."""
    in_codes = set(_matrices(spec)) if bits is not None else set()
    held: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    due: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry in layout(spec):
        for part in entry.parts:
            shape = entry.stored_shape(part)
            if bits is None or part.name not in in_codes:
                due[_bare(spec, part.name)] = held, shape
                continue
            *rows, k = shape
            codes, groups = (torch.uint32, (*rows, k * bits // _WORD)), (held, (*rows, k // GROUP))
            due |= zip(_parts(part.name), (codes, groups, groups), strict=True)
    return due


def _bare(spec: ModelSpec, name: str) -> str:
    """mlx-lm puts a prefix of its own before GPT-2's bare names."""
    return name.removeprefix("transformer." if spec.family == "gpt2" else "")


def _parts(name: str) -> tuple[str, str, str]:
    """What a matrix in codes is stored as."""
    stem = name.removesuffix(".weight")
    return f"{stem}.weight", f"{stem}.scales", f"{stem}.biases"


def _matrices(spec: ModelSpec) -> Iterator[str]:
    """Stored names of the matrices that become codes: of blocks, embedding and head, where groups divide the rows."""
    for entry in layout(spec):
        if entry.transposed:
            raise ConfigError(
                f"mlx-lm turns the matrices of {spec.family} around while it loads them, which codes do not allow. "
                "Use --precision bf16 or fp16."
            )
        if len(entry.shape) == 2 and not any(part in entry.canonical for part in _KEPT) and entry.shape[1] % GROUP == 0:
            yield from (part.name for part in entry.parts if part.name.endswith(".weight"))


def in_groups(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(words (n, k·bits/32) uint32, scales (n, k/64), biases (n, k/64)) of ``weight`` (n, k), scales and biases in its dtype.

    The number of a group that is farthest from zero is its bias, and so exact; codes are those of the rounded scale.
    """
    n, k = weight.shape
    groups = weight.float().view(n, k // GROUP, GROUP)
    least, most = groups.aminmax(dim=-1)
    downwards = most.abs() > least.abs()
    biases = torch.where(downwards, most, least).to(weight.dtype)
    scales = torch.where(downwards, least - most, most - least) / (2**bits - 1)
    scales = torch.where(scales == 0, 1.0, scales).to(weight.dtype)
    codes = ((groups - biases.float()[..., None]) / scales.float()[..., None]).round_().clamp_(0, 2**bits - 1)
    shifts = torch.arange(0, _WORD, bits)
    words = (codes.to(torch.int64).view(n, -1, _WORD // bits) << shifts).sum(dim=-1)
    return words.to(torch.uint32), scales, biases


def of_groups(words: Tensor, scales: Tensor, biases: Tensor, bits: int) -> Tensor:
    """The fp32 numbers (n, k) that ``in_groups`` stands for."""
    shifts = torch.arange(0, _WORD, bits)
    codes = (words.to(torch.int64)[..., None] >> shifts) & (2**bits - 1)
    groups = codes.view(*scales.shape, GROUP).float()
    return (groups * scales.float()[..., None] + biases.float()[..., None]).flatten(1)
