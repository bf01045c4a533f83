"""What is measured of every engine: the model shapes and the cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REPEATS = 3
MAX_POSITIONS = 8192


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of ``family``, whose weights are random; of a mixture ``d_ff`` is an expert's width, and a token passes
    ``top_k`` of ``n_experts``. ``batches`` of requests that decode together."""

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int
    tied: bool
    batches: tuple[int, ...]
    family: str = "llama"
    n_experts: int = 0
    top_k: int = 0

    def config(self) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": self.d_model,
            "intermediate_size": self.d_ff,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.d_model // self.n_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
            **({"num_experts_per_tok": self.top_k, EXPERT_COUNTS[self.family]: self.n_experts} if self.n_experts else {}),
        }


ARCHITECTURES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "olmoe": "OlmoeForCausalLM"}
EXPERT_COUNTS = {"mixtral": "num_local_experts", "olmoe": "num_experts"}


SHAPES = {
    "smollm-135m": Shape("smollm-135m", 30, 576, 9, 3, 1536, 49152, True, (1, 16, 32)),
    "tinyllama-1.1b": Shape("tinyllama-1.1b", 22, 2048, 32, 4, 5632, 32000, False, (1, 16)),
    "mistral-7b": Shape("mistral-7b", 32, 4096, 32, 8, 14336, 32000, False, (1,)),
    "olmoe-2-layers": Shape("olmoe-2-layers", 2, 2048, 16, 16, 1024, 50304, False, (1, 16), "olmoe", 64, 8),
    "mixture-16x135m": Shape("mixture-16x135m", 30, 576, 9, 3, 1536, 32000, False, (1, 16), "mixtral", 16, 2),
}

LARGE = ("mistral-7b",)
"""Only measured where they are named: their weights take 15 GB of disk in bf16, and as much memory while they are converted."""
