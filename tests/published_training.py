"""Training runs that others measured and published, as data that several tests compare with."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.spec import ModelSpec


def gpt(width: int, n_layers: int, n_heads: int, vocabulary: int = 51_200, length: int = 2048) -> ModelSpec:
    """The GPT-3 style models of Megatron-LM."""
    return ModelSpec(
        "gpt2", vocabulary, n_layers, width, n_heads, n_heads, width // n_heads, 4 * width, length, norm="layernorm",
        positions="learned", mlp="gelu", activation="gelu_tanh", qkv_bias=True, attn_out_bias=True, mlp_bias=True,
        tied_embeddings=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Megatron:
    """A row of table 3 and table 5 of arXiv 2205.05198, and of its figure 1: GiB of parameters and optimizer, of activations
    under tensor parallel alone, and under sequence parallel with selective recomputation."""

    name: str
    width: int
    n_layers: int
    n_heads: int
    pipeline: int
    interleave: int
    batch_size: int
    micro_batches: int
    full_s: float
    selective_s: float
    state_gib: float
    activations_gib: float
    selective_activations_gib: float

    @property
    def spec(self) -> ModelSpec:
        return gpt(self.width, self.n_layers, self.n_heads)


MEGATRON = (
    Megatron("22B", 6144, 48, 64, 1, 1, 4, 1, 1.42, 1.10, 45.5625, 59.25, 9.5625),
    Megatron("175B", 12288, 96, 96, 8, 3, 1, 64, 18.13, 13.75, 45.5625, 66.84375, 12.3515625),
    Megatron("530B", 20480, 105, 128, 35, 3, 1, 280, 49.05, 37.83, 31.640625, 114.0234375, 23.076171875),
    Megatron("1T", 25600, 128, 160, 64, 1, 1, 512, 94.42, 71.49, 32.958984375, 131.25, 26.5625),
)
