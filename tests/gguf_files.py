"""GGUF files for tests, written with llama.cpp's own ``gguf`` package from transformers models.

Names of tensors are that package's, metadata and the order of rows those of llama.cpp's converter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""The bytes of a block at which its fp16 scales are, by type."""
TYPES = ("F32", "F16", "BF16", *SCALES_AT)
PAIRED = ("llama", "granite", "granitemoe", "smollm3")


def random_blocks(type_name: str, n_blocks: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """(blocks, bytes): every bit random but the scales, which are finite and about ``scale``."""
    rng = np.random.default_rng(seed)
    _, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
    for at in SCALES_AT[type_name]:
        scales = (scale * rng.lognormal(0, 1, (n_blocks, 1)) * rng.choice([-1, 1], (n_blocks, 1))).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = 127 + round(np.log2(scale)) + rng.integers(-1, 2, n_blocks)
    return blocks


def quantised(array: np.ndarray, type_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ``array`` as bytes of the type, and the numbers that these stand for. Types that ``gguf`` does not write get
    random blocks of about the same spread."""
    kind = gguf.GGMLQuantizationType[type_name]
    try:
        raw = gguf.quants.quantize(array, kind)
    except NotImplementedError:
        n_values, _ = gguf.GGML_QUANT_SIZES[kind]
        unit = float(gguf.quants.dequantize(random_blocks(type_name, 64, scale=1.0), kind).std())
        raw = random_blocks(type_name, array.size // n_values, array.size, float(array.std()) / unit).reshape(len(array), -1)
    return raw, gguf.quants.dequantize(raw, kind).reshape(array.shape)


def reference_model(model_type: str = "llama", **changes: Any) -> Any:
    """A small random transformers model whose every parameter matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = SIZES | {"model_type": model_type} | changes
    if model_type == "falcon":
        del given["head_dim"]  # a property there
    config = AutoConfig.for_model(**given)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    spread = 1.6 / config.hidden_size**0.5
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.normal_(0.0, spread, generator=generator)
    return model


def row_order(architecture: str, config: Any, stored: str, n_rows: int) -> np.ndarray:
    """The rows of a stored tensor in the order in which the converter writes them."""
    rows = np.arange(n_rows)
    if architecture in PAIRED and ("q_proj" in stored or "k_proj" in stored):
        heads = config.num_attention_heads if "q_proj" in stored else config.num_key_value_heads
        return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    if architecture in ("falcon", "gptneox") and "query_key_value" in stored:
        groups = config.num_kv_heads if architecture == "falcon" else config.num_attention_heads
        grouped = rows.reshape(groups, config.num_attention_heads // groups + 2, -1)
        return np.concatenate([grouped[:, :-2].reshape(-1), grouped[:, -2].reshape(-1), grouped[:, -1].reshape(-1)])
    return rows


def new_writer(path: Path, architecture: str, config: Any, skip: tuple[str, ...] = ()) -> gguf.GGUFWriter:
    """A writer with the metadata that llama.cpp's converter writes for ``config`` of most architectures."""
    writer = gguf.GGUFWriter(path, architecture)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None)
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": inner or getattr(config, "n_inner", None) or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None),
        "attention.key_length": getattr(config, "head_dim", None),
    }
    for key, value in fields.items():
        if key not in skip and value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    eps = {key: getattr(config, key, None) for key in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")}
    if any(eps.values()):
        writer.add_float32(f"{architecture}.attention.layer_norm_epsilon", next(e for e in eps.values() if e))
    else:
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("full_attention", parameters).get("rope_theta")
    if theta is not None:
        writer.add_float32(f"{architecture}.rope.freq_base", theta)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def add_tensors(writer: gguf.GGUFWriter, model: Any, architecture: str, type_name: str = "F32", joined: bool = False) -> None:
    """Matrices as ``type_name``, vectors as F32; with ``joined`` keys and values of a latent in one tensor. The matrices of
    ``model`` become the numbers that the file holds."""
    config = model.config
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[type_name]
    written = set()
    for stored, parameter in model.state_dict().items():
        if any(part in stored for part in (".experts.gate_up_proj", ".experts.down_proj", "input_linear", "output_linear")):
            _add_experts(writer, stored, parameter, type_name)
            continue
        if stored.endswith("sinks"):
            writer.add_tensor(f"blk.{stored.split('.')[2]}.attn_sinks.weight", parameter.numpy())
            continue
        if stored.endswith("kv_b_proj.weight") and not joined:
            _add_keys_and_values(writer, stored, parameter, config, type_name)
            continue
        named = stored.replace("e_score_correction_bias", "e_score_correction.bias")
        named = named.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")  # as it is published
        name = names.get_name(named, try_suffixes=(".weight", ".bias"))
        if parameter.data_ptr() in written or name is None:  # a tied head; a buffer of angles
            continue
        written.add(parameter.data_ptr())
        transposed = architecture == "gpt2" and parameter.dim() == 2 and ".c_" in stored
        array = parameter.numpy().T if transposed else parameter.numpy()
        order = row_order(architecture, config, stored, len(array))
        if array.ndim == 1:
            shifted = 1.0 if architecture.startswith("gemma") and stored.endswith("norm.weight") else 0.0
            writer.add_tensor(name, np.ascontiguousarray(array[order] + np.float32(shifted)))
            continue
        if "ffn_gate_inp" in name:  # routers stay plain, and one row becomes a vector
            writer.add_tensor(name, np.ascontiguousarray(array.squeeze()))
            continue
        raw, values = quantised(np.ascontiguousarray(array), type_name)
        parameter.copy_(torch.from_numpy(values.T if transposed else values))
        writer.add_tensor(name, np.ascontiguousarray(raw[order]), raw_dtype=kind)


def _add_keys_and_values(writer: gguf.GGUFWriter, stored: str, parameter: torch.Tensor, config: Any, type_name: str) -> None:
    """Of a latent: two tensors of every head's matrices, those of the keys transposed."""
    heads = parameter.numpy().reshape(config.num_attention_heads, -1, config.kv_lora_rank)  # a view
    nope, kind = config.qk_nope_head_dim, gguf.GGMLQuantizationType[type_name]
    for name, part in (("k", heads[:, :nope].swapaxes(1, 2)), ("v", heads[:, nope:])):
        raw, values = quantised(np.ascontiguousarray(part).reshape(-1, part.shape[-1]), type_name)
        part[:] = values.reshape(part.shape)
        tensor = raw.reshape(*part.shape[:2], -1)
        writer.add_tensor(f"blk.{stored.split('.')[2]}.attn_{name}_b.weight", tensor, raw_dtype=kind)


def _add_experts(writer: gguf.GGUFWriter, stored: str, parameter: torch.Tensor, type_name: str) -> None:
    """Experts that transformers holds together, (X, 2F, E) and (X, E, F), or as gpt-oss does (X, E, 2F) with gate and up by
    turns, as a tensor each of gate, up and down."""
    layer, turned, bias = stored.split(".")[2], writer.arch == "gpt-oss", stored.endswith("bias")
    array = parameter.numpy().swapaxes(1, 2) if turned and not bias else parameter.numpy()
    both = "gate_up" in stored or "input_linear" in stored
    half = array.shape[1] // 2
    rows = [slice(0, None, 2), slice(1, None, 2)] if turned else [slice(0, half), slice(half, None)]
    for name, kept in zip(("gate", "up") if both else ("down",), rows if both else [slice(None)], strict=True):
        part = np.ascontiguousarray(array[:, kept])
        if bias:
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.bias", part)
            continue
        raw, values = quantised(part.reshape(-1, part.shape[-1]), type_name)
        array[:, kept] = values.reshape(part.shape)  # a view of the parameter
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", raw.reshape(*part.shape[:2], -1), raw_dtype=kind)


def small_file(path: Path, architecture: str, types: dict[str, str] | None = None, in_each: int = 0) -> Path:
    """A ``gemma3`` or ``phi3`` of two layers, written without transformers: matrices of every quantised type
    (``types``: of those by their names in a layer, Q4_K of the others), a tokenizer of the family's kind, windows and rotary
    scaling. With ``in_each`` in parts of so many tensors beside ``path``, of which the first is returned."""
    E, F, V, heads, head_dim = 256, 512, 64, 4, 64
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=in_each)
    sizes = {
        "context_length": 64, "embedding_length": E, "block_count": 2, "feed_forward_length": F, "attention.head_count": heads,
        "attention.head_count_kv": 2, "attention.sliding_window": 8,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    vectors: dict[str, int] = {"output_norm": E}
    matrices: dict[str, tuple[int, int]] = {"token_embd": (V, E)}
    for i in range(2):
        layer = {"attn_output": (E, E), "ffn_down": (E, F), "attn_norm": E, "ffn_norm": E}
        if architecture == "gemma3":
            layer |= {"attn_q": (E, E), "attn_k": (128, E), "attn_v": (128, E), "ffn_gate": (F, E), "ffn_up": (F, E)}
            layer |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim, "post_attention_norm": E, "post_ffw_norm": E}
        else:
            layer |= {"attn_qkv": (E + 256, E), "ffn_up": (2 * F, E)}
        vectors |= {f"blk.{i}.{name}": shape for name, shape in layer.items() if isinstance(shape, int)}
        matrices |= {f"blk.{i}.{name}": shape for name, shape in layer.items() if not isinstance(shape, int)}
    pieces = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "ab", "cd", "abcd"]
    writer.add_token_types([2, 3, 3] + [1] * 29)
    writer.add_token_list(pieces)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template("{{ messages }}")
    if architecture == "gemma3":
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(32)])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-4o")
        writer.add_token_merges(["a b", "c d", "ab cd"])
        writer.add_rope_dimension_count(48)
        writer.add_rope_scaling_orig_ctx_len(16)
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.linspace(1, 3, 24, dtype=np.float32))
    for name, n in vectors.items():
        writer.add_tensor(f"{name}.weight", np.linspace(0.5, 1.5, n, dtype=np.float32))
    for i, (name, (rows, columns)) in enumerate(matrices.items()):
        type_name = list(SCALES_AT)[i % len(SCALES_AT)]
        if types is not None:
            type_name = types.get(name.split(".")[-1], "Q4_K")
        n_values, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
        raw = random_blocks(type_name, rows * columns // n_values, i).reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[type_name])
    finish(writer)
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if in_each else path
