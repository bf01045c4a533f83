"""GGUF files for tests, written with llama.cpp's own ``gguf`` package from transformers models."""

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
TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
}


def reference_model(model_type: str = "llama", **changes: Any) -> Any:
    """A small random transformers model whose every parameter matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**(SIZES | {"model_type": model_type} | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def pairs_from_halves(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """``permute`` of llama.cpp's convert_hf_to_gguf.py."""
    return weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(stored: str) -> str:
    if stored in OUTER_NAMES:
        return OUTER_NAMES[stored]
    _, _, layer, inner = stored.split(".", 3)
    base, suffix = inner.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[base]}.{suffix}"


def new_writer(path: Path, architecture: str, config: Any, skip: tuple[str, ...] = ()) -> gguf.GGUFWriter:
    """A writer with the metadata that llama.cpp's converter writes for ``config``."""
    writer = gguf.GGUFWriter(path, architecture)
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
    }
    for key, value in fields.items():
        if key not in skip:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: gguf.GGUFWriter, model: Any, architecture: str, type_name: str = "F32") -> None:
    """Matrices as ``type_name``, vectors as F32, queries and keys permuted where the architecture is llama."""
    config = model.config
    for stored, tensor in model.state_dict().items():
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture == "llama" and ("q_proj" in stored or "k_proj" in stored):
            heads = config.num_attention_heads if "q_proj" in stored else config.num_key_value_heads
            array = pairs_from_halves(array, heads)
        if array.ndim == 1 or type_name == "F32":
            writer.add_tensor(gguf_name(stored), np.ascontiguousarray(array))
        elif type_name == "F16":
            writer.add_tensor(gguf_name(stored), array.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(stored), gguf.quants.quantize(array, TYPES[type_name]), raw_dtype=TYPES[type_name])
