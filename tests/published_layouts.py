"""Quantised checkpoints written from the definitions of their formats, in numpy and by loops: nothing here is the package's."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from small_models import EVERY, decoder_of
from twostroke.core.families import layout, read_spec
from twostroke.model.decoder import Decoder
from twostroke.model.families import read_entry
from twostroke.model.save import save_model

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, np.ndarray]
"""Tensors by what follows the layer's name, and the (n, k) numbers that they stand for."""


class Layout(NamedTuple):
    """``config`` is the ``quantization_config``, ``write`` makes the tensors of one matrix."""

    config: dict[str, Any]
    write: Callable[[np.ndarray, np.random.Generator], Written]
    scheme: str | None
    """What our engine holds the matrices in."""


SIZES: dict[str, Any] = {"d_model": 128, "head_dim": 16, "d_ff": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2}
OF_FAMILY: dict[str, dict[str, Any]] = {
    **{family: {"n_kv_heads": 8} for family in ("gpt2", "gpt_neox")},
    **{family: {"n_layers": 3} for family in ("qwen2", "cohere2")},
    "gpt_oss": {"n_layers": 3, "moe": dataclasses.replace(EVERY["gpt_oss"].moe, d_expert=64), "d_ff": 64},
    "mixtral": {"d_ff": 80},
}


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis, the first in the lowest bits of an int32."""
    per_word = 32 // bits
    packed = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word)), np.uint32)
    for i in range(codes.shape[-1]):
        packed[..., i // per_word] |= codes[..., i].astype(np.uint32) << np.uint32(bits * (i % per_word))
    return packed


def rounded(weight: np.ndarray, bits: int, group_of: np.ndarray, symmetric: bool, least_zero: int = 0, dtype: Any = np.float16):
    """(codes (n, k), scales (n, G), zero points (n, G), values) by round-to-nearest."""
    n, n_groups, top = len(weight), group_of.max() + 1, 2**bits - 1
    scales, zeros = np.zeros((n, n_groups), np.float32), np.zeros((n, n_groups), np.int64)
    for g in range(n_groups):
        part = weight[:, group_of == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale = 2 * np.abs(part).max(1) / top if symmetric else (high - low) / top
        scales[:, g] = scale.astype(dtype).astype(np.float32)
        zeros[:, g] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / scales[:, g]), least_zero, top)
    codes = np.clip(np.round(weight / scales[:, group_of]) + zeros[:, group_of], 0, top).astype(np.int64)
    return codes, scales, zeros, ((codes - zeros[:, group_of]) * scales[:, group_of]).astype(np.float32)


def groups_of(k: int, group: int) -> np.ndarray:
    return np.zeros(k, np.int64) if group == -1 else np.arange(k) // group


def tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    if array.dtype == np.uint32:
        array = array.view(np.int32)
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made if dtype is None else made.to(dtype)


def gptq(bits: int, group: int, symmetric: bool = True, order: bool = False, v2: bool = False) -> Callable[..., Written]:
    def write(weight: np.ndarray, generator: np.random.Generator) -> Written:
        group_of = groups_of(weight.shape[1], group)
        if order:
            group_of = generator.permutation(group_of)
        codes, scales, zeros, values = rounded(weight, bits, group_of, symmetric, 0 if v2 else 1)
        stored = zeros.T if v2 else zeros.T - 1
        return {
            ".qweight": tensor(words(codes, bits).T),
            ".qzeros": tensor(words(stored, bits)),
            ".scales": tensor(scales.T, torch.float16),
            ".g_idx": tensor(group_of, torch.int32),
        }, values

    return write


def awq(group: int) -> Callable[..., Written]:
    def write(weight: np.ndarray, generator: np.random.Generator) -> Written:
        codes, scales, zeros, values = rounded(weight, 4, groups_of(weight.shape[1], group), False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def packed(numbers: np.ndarray) -> torch.Tensor:
            out = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
            for column in range(out.shape[1]):
                for i in range(8):
                    out[:, column] |= numbers[:, 8 * column + order[i]].astype(np.uint32) << np.uint32(4 * i)
            return tensor(out)

        return {".qweight": packed(codes.T), ".qzeros": packed(zeros.T), ".scales": tensor(scales.T, torch.float16)}, values

    return write


def packed_integers(bits: int, group: int, symmetric: bool = True, order: bool = False) -> Callable[..., Written]:
    def write(weight: np.ndarray, generator: np.random.Generator) -> Written:
        group_of = groups_of(weight.shape[1], group)
        if order:
            group_of = generator.permutation(group_of)
        codes, scales, zeros, values = rounded(weight, bits, group_of, symmetric)
        made = {
            ".weight_packed": tensor(words(codes, bits)),
            ".weight_scale": tensor(scales, torch.float16),
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            made[".weight_zero_point"] = tensor(words(zeros.T, bits).T)
        if order:
            made[".weight_g_idx"] = tensor(group_of, torch.int32)
        return made, values

    return write


def int8(strategy: str, group: int = -1, symmetric: bool = True) -> Callable[..., Written]:
    def write(weight: np.ndarray, generator: np.random.Generator) -> Written:
        if strategy == "tensor":
            scale = np.float32(np.abs(weight).max() / 127)
            codes = np.clip(np.round(weight / scale), -128, 127)
            return {".weight": tensor(codes, torch.int8), ".weight_scale": torch.tensor([float(scale)])}, (codes * scale)
        codes, scales, zeros, values = rounded(weight, 8, groups_of(weight.shape[1], group), symmetric, dtype=np.float32)
        made = {".weight": tensor(codes - 128, torch.int8), ".weight_scale": tensor(scales)}
        if not symmetric:
            made[".weight_zero_point"] = tensor(zeros - 128, torch.int8)
        return made, values

    return write


def fp8(rows: int, columns: int, suffix: str = ".weight_scale", flat: bool = False) -> Callable[..., Written]:
    """A scale for every block of rows × columns; 0 for all of them."""

    def write(weight: np.ndarray, generator: np.random.Generator) -> Written:
        n, k = weight.shape
        a, b = rows or n, columns or k
        scales, codes, values = np.zeros((-(-n // a), -(-k // b)), np.float32), torch.zeros(n, k), np.zeros_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * a, (i + 1) * a), slice(j * b, (j + 1) * b))
                scales[i, j] = np.abs(weight[place]).max() / 448
                codes[place] = torch.from_numpy(weight[place] / scales[i, j]).to(torch.float8_e4m3fn).float()
                values[place] = codes[place].numpy() * scales[i, j]
        scale = tensor(scales)
        return {".weight": codes.to(torch.float8_e4m3fn), suffix: scale.flatten() if flat else scale}, values

    return write


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp4_codes(values: np.ndarray) -> np.ndarray:
    return np.abs(values[..., None] - FP4).argmin(-1)


def pairs(codes: np.ndarray) -> np.ndarray:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def mxfp4(as_blocks: bool) -> Callable[..., Written]:
    def write(weight: np.ndarray, generator: np.random.Generator) -> Written:
        n, k = weight.shape
        groups = weight.reshape(n, k // 32, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
        scales = 2.0**exponents
        codes = fp4_codes(groups / scales[..., None])
        values = (FP4[codes] * scales[..., None]).reshape(n, k).astype(np.float32)
        packed, stored = pairs(codes), (exponents + 127).astype(np.uint8)
        if as_blocks:
            return {"_blocks": tensor(packed), "_scales": tensor(stored)}, values
        return {".weight_packed": tensor(packed.reshape(n, k // 2)), ".weight_scale": tensor(stored)}, values

    return write


def nvfp4(weight: np.ndarray, generator: np.random.Generator) -> Written:
    n, k = weight.shape
    groups = weight.reshape(n, k // 16, 16)
    whole = np.float32(448 * 6 / np.abs(weight).max())
    scales = torch.from_numpy(np.abs(groups).max(-1) / 6 * whole).to(torch.float8_e4m3fn)
    each = scales.float().numpy() / whole
    codes = fp4_codes(groups / np.maximum(each, 1e-30)[..., None])
    values = (FP4[codes] * each[..., None]).reshape(n, k).astype(np.float32)
    made = {".weight_packed": tensor(pairs(codes).reshape(n, k // 2)), ".weight_scale": scales}
    return made | {".weight_global_scale": torch.tensor([float(whole)]), ".input_global_scale": torch.ones(1)}, values


NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ], np.float32,
)  # fmt: skip


def nf4(nested: bool) -> Callable[..., Written]:
    def write(weight: np.ndarray, generator: np.random.Generator) -> Written:
        blocks = weight.reshape(-1, 64)
        largest = np.abs(blocks).max(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        made: Tensors = {}
        factors = largest
        if nested:
            table = np.sort(generator.uniform(-1, 1, 256)).astype(np.float32)
            offset = np.float32(largest.mean())
            padded = np.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
            outer = np.abs(padded).max(1)
            chosen = np.abs((padded / outer[:, None])[..., None] - table).argmin(-1)
            factors = (table[chosen] * outer[:, None]).reshape(-1)[: len(largest)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": float(offset), "nested_dtype": "float32"}
            made |= {
                ".weight.absmax": tensor(chosen.reshape(-1)[: len(largest)], torch.uint8),
                ".weight.nested_absmax": tensor(outer),
                ".weight.nested_quant_map": tensor(table.copy()),
            }
        else:
            made[".weight.absmax"] = tensor(largest)
        codes = np.abs((blocks / factors[:, None])[..., None] - NF4).argmin(-1)
        values = (NF4[codes] * factors[:, None]).reshape(weight.shape).astype(np.float32)
        flat = codes.reshape(-1)
        made[".weight"] = tensor((flat[0::2] << 4 | flat[1::2]).astype(np.uint8)[:, None])
        made[".weight.quant_map"] = tensor(NF4.copy())
        made[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return made, values

    return write


def llm_int8(weight: np.ndarray, generator: np.random.Generator) -> Written:
    largest = np.abs(weight).max(1)
    codes = np.round(weight / largest[:, None] * 127)
    made = {".weight": tensor(codes, torch.int8), ".SCB": tensor(largest), ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return made, (codes * (largest[:, None] / np.float32(127))).astype(np.float32)


def compressed(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "observer": "minmax", "actorder": None, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, **more,
    }  # fmt: skip


def integers(bits: int, strategy: str, group: int | None = None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric, **more}


def floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


LAYOUTS: dict[str, Layout] = {
    "gptq-4-128": Layout(gptq_config(4, 128, checkpoint_format="gptq"), gptq(4, 128), "int4-g128"),
    "gptq-4-32-asym": Layout(gptq_config(4, 32, sym=False), gptq(4, 32, False), "int4-g32"),
    "gptq-4-64-v2-asym": Layout(
        gptq_config(4, 64, sym=False, checkpoint_format="gptq_v2"), gptq(4, 64, False, v2=True), "int4-g64"
    ),
    "gptq-4-v2-unlabelled": Layout(gptq_config(4, 64, sym=False), gptq(4, 64, False, v2=True), "int4-g64"),
    "gptq-4-v2-mislabelled": Layout(gptq_config(4, 64, checkpoint_format="gptq"), gptq(4, 64, v2=True), "int4-g64"),
    "gptq-4-channel": Layout(gptq_config(4, -1), gptq(4, -1), "int4-g128"),
    "gptq-4-act-order": Layout(gptq_config(4, 32, desc_act=True, sym=False), gptq(4, 32, False, order=True), None),
    "gptq-8-channel": Layout(gptq_config(8, -1), gptq(8, -1), "int8"),
    "gptq-8-64": Layout(gptq_config(8, 64, sym=False), gptq(8, 64, False), None),
    "awq-128": Layout({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, awq(128), "int4-g128"),
    "awq-32": Layout({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32), "int4-g32"),
    "ct-w4-128": Layout(
        compressed("pack-quantized", integers(4, "group", 128)), packed_integers(4, 128), "int4-g128"
    ),
    "ct-w4-64-asym": Layout(
        compressed("pack-quantized", integers(4, "group", 64, False)), packed_integers(4, 64, False), "int4-g64"
    ),
    "ct-w4-channel-asym": Layout(
        compressed("pack-quantized", integers(4, "channel", None, False)), packed_integers(4, -1, False), "int4-g128"
    ),
    "ct-w4-act-order": Layout(
        compressed("pack-quantized", integers(4, "group", 32, actorder="group")), packed_integers(4, 32, order=True), None
    ),
    "ct-w8-channel": Layout(compressed("pack-quantized", integers(8, "channel")), packed_integers(8, -1), "int8"),
    "ct-w8-group": Layout(compressed("pack-quantized", integers(8, "group", 32)), packed_integers(8, 32), None),
    "ct-int8-channel": Layout(compressed("int-quantized", integers(8, "channel")), int8("channel"), "int8"),
    "ct-int8-tensor": Layout(compressed("int-quantized", integers(8, "tensor")), int8("tensor"), "int8"),
    "ct-int8-asym": Layout(
        compressed("int-quantized", integers(8, "channel", None, False)), int8("channel", symmetric=False), None
    ),
    "ct-int8-group": Layout(compressed("naive-quantized", integers(8, "group", 32)), int8("group", 32), None),
    "ct-fp8-channel": Layout(compressed("float-quantized", floats(8, "channel")), fp8(1, 0), "fp8-channel"),
    "ct-fp8-tensor": Layout(compressed("float-quantized", floats(8, "tensor")), fp8(0, 0, flat=True), "fp8-channel"),
    "ct-fp8-block": Layout(
        compressed("float-quantized", floats(8, "block", block_structure=[64, 48])), fp8(64, 48), None
    ),
    "ct-nvfp4": Layout(compressed("nvfp4-pack-quantized", floats(4, "tensor_group", group_size=16)), nvfp4, None),
    "ct-mxfp4": Layout(compressed("mxfp4-pack-quantized", floats(4, "group", group_size=32)), mxfp4(False), None),
    "fp8-block": Layout(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8(128, 128, ".weight_scale_inv"), None,
    ),
    "fp8-tensor": Layout({"quant_method": "fp8", "activation_scheme": "static"}, fp8(0, 0, flat=True), "fp8-channel"),
    "fbgemm-fp8": Layout({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8(1, 0), "fp8-channel"),
    "mxfp4": Layout({"quant_method": "mxfp4"}, mxfp4(True), None),
    "bnb-nf4": Layout({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4(False), None),
    "bnb-nf4-nested": Layout(
        {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        }, nf4(True), None,
    ),
    "bnb-int8": Layout({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, "int8"),
}  # fmt: skip


def publish(
    family: str,
    directory: Path,
    made: Layout,
    only: Callable[[str], bool] = lambda module: True,
    also: dict[str, Layout] | None = None,
    shards: int = 1,
) -> tuple[Decoder, Path]:
    """A small model of ``family`` written below ``directory`` as ``rewrite`` does: the decoder of the numbers that it stands
    for, and its directory."""
    has_heads_apart = EVERY[family].mla is not None  # whose sizes belong together
    decoder = decoder_of(family, **{} if has_heads_apart else SIZES | OF_FAMILY.get(family, {}))
    source, target = save_model(decoder, decoder.spec, directory / "plain", dtype="fp32"), directory / "published"
    values = rewrite(source, target, made, only, also, shards)
    plain = load_file(source / "model.safetensors")
    with torch.no_grad():
        for entry in layout(decoder.spec):
            if any(part.name in values for part in entry.parts):
                whole = read_entry(entry, lambda name: values[name] if name in values else plain[name])
                decoder.get_parameter(entry.canonical).copy_(whole)
    return decoder, target


def rewrite(
    source: Path,
    target: Path,
    made: Layout,
    only: Callable[[str], bool] = lambda module: True,
    also: dict[str, Layout] | None = None,
    shards: int = 1,
) -> Tensors:
    """Write the plain model ``source`` to ``target`` as ``made`` says, the layers that ``only`` refuses plainly and those that
    a key of ``also`` ends as that says. Returns the numbers that quantised weights stand for."""
    tensors, values = load_file(source / "model.safetensors"), {}
    generator = np.random.default_rng(0)
    for entry in layout(read_spec(source)):
        for part in entry.parts if entry.matrix is not None else ():
            module = part.name.removesuffix(".weight")
            if not only(module):
                continue
            way = next((way for end, way in (also or {}).items() if module.endswith(end)), made)
            weight = tensors.pop(part.name)
            if entry.copies > 1:  # experts in one tensor, each (inputs, outputs)
                of_each = [way.write(np.ascontiguousarray(expert.mT.numpy()), generator) for expert in weight]
                stored = {suffix: torch.stack([each[suffix] for each, _ in of_each]) for suffix in of_each[0][0]}
                values[part.name] = torch.from_numpy(np.stack([value.T for _, value in of_each]))
                tensors |= {f"{module}{suffix}": each for suffix, each in stored.items()}
                continue
            stored, value = way.write((weight.T if entry.transposed else weight).numpy(), generator)
            values[part.name] = torch.from_numpy(np.ascontiguousarray(value.T if entry.transposed else value)).float()
            for suffix, each in stored.items():
                lies_as_plain = suffix == ".weight" and each.shape == weight.T.shape and entry.transposed
                tensors[f"{module}{suffix}"] = each.T.contiguous() if lies_as_plain else each
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": made.config}
    (target / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return values
    places = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file_name in set(places.values()):
        held = {name: tensors[name] for name in names if places[name] == file_name}
        save_file(held, target / file_name, metadata={"format": "pt"})
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return values
