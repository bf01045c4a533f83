"""A Llama, Mixtral or OLMoE directory into GGUF with every matrix in one type and no tokenizer: for timing alone."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

TYPES = {"f16": GGMLQuantizationType.F16, "q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
EXPERTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "olmoe": "olmoe"}


def tensors(directory: Path) -> list[tuple[str, np.ndarray]]:
    """(name, bf16 as 16-bit patterns, mapped from the file) of a directory's tensors, read without other libraries."""
    found = []
    for file in sorted(directory.glob("*.safetensors")):
        raw = np.memmap(file, dtype=np.uint8, mode="r")
        n = int.from_bytes(bytes(raw[:8]), "little")
        header = json.loads(bytes(raw[8 : 8 + n]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{name} is {entry['dtype']}, not BF16")
            found.append((name, raw[8 + n + begin : 8 + n + end].view(np.uint16).reshape(entry["shape"])))
    return found


def widened(bits: np.ndarray) -> np.ndarray:
    """fp32 of bf16: only one tensor at a time, because 7 billion numbers in fp32 are 29 GB."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def renamed(found: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """By GGUF's names: a layer's experts are one tensor (experts, outputs, inputs)."""
    tensors, experts = [], {}
    for name, bits in found:
        match = EXPERT.fullmatch(name)
        if match is None:
            tensors.append((gguf_name(name), bits))
        else:
            experts.setdefault(f"blk.{match[1]}.ffn_{EXPERTS[match[3]]}_exps.weight", {})[int(match[2])] = bits
    return tensors + [(name, np.stack([each[i] for i in range(len(each))])) for name, each in experts.items()]


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def main() -> None:
    source, target, variant = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = GGUFWriter(target, ARCHITECTURES[config["model_type"]])
    n_experts = config.get("num_local_experts", config.get("num_experts", 0))
    if n_experts:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, bits in renamed(tensors(source)):
        values = widened(bits)
        if values.ndim == 1 or name.endswith("ffn_gate_inp.weight"):  # llama.cpp leaves routers in fp32
            writer.add_tensor(name, values)
        else:
            data = gguf.quants.quantize(values, TYPES[variant])
            writer.add_tensor(name, data, raw_dtype=TYPES[variant])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
