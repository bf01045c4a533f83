"""What is predicted and then run: training configurations and serving configurations of the real engines.

They differ from the shapes that calibration measures (widths 256 and 768, 2 to 6 layers, rows of 512 tokens), so that
none is predicted from itself: widths from 128 to 1,024, depths from 2 to 30, sequences from 64 to 2,048, five families, three
vocabularies, grouped queries, accumulation, both optimizers, both types, compiled and not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingCase:
    """One run: a model by its sizes and how it is trained. ``d_ff`` 0: 8/3 of the width, to a multiple of 64."""

    name: str
    family: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    batch_size: int
    sequence_length: int
    grad_accumulation: int = 1
    dtype: str = "bf16"
    optimizer: str = "adamw"
    compile: bool = True
    d_ff: int = 0

    @property
    def feed_forward(self) -> int:
        return self.d_ff or -(-8 * self.d_model // 3 // 64) * 64


TRAINING = (
    TrainingCase("tiny-short", "llama", 2, 128, 2, 2, 1024, 8, 128),
    TrainingCase("demo-muon", "qwen3", 4, 192, 3, 3, 4096, 8, 512, optimizer="muon"),
    TrainingCase("llama-256-t256", "llama", 4, 256, 4, 4, 4096, 16, 256),
    TrainingCase("llama-384", "llama", 6, 384, 6, 6, 4096, 16, 512),
    TrainingCase("llama-384-t1024", "llama", 6, 384, 6, 6, 4096, 4, 1024),
    TrainingCase("qwen3-256", "qwen3", 4, 256, 4, 4, 4096, 8, 512),
    TrainingCase("qwen3-320-muon", "qwen3", 6, 320, 5, 5, 4096, 8, 512, optimizer="muon"),
    TrainingCase("grouped-512", "llama", 8, 512, 8, 2, 4096, 4, 512),
    TrainingCase("grouped-576-v16k", "llama", 12, 576, 9, 3, 16384, 2, 512, d_ff=1536),
    TrainingCase("llama-768", "llama", 4, 768, 12, 12, 4096, 4, 256),
    TrainingCase("llama-1024", "llama", 2, 1024, 16, 16, 4096, 2, 512),
    TrainingCase("very-short", "llama", 8, 256, 4, 4, 4096, 32, 64),
    TrainingCase("one-long", "llama", 8, 256, 4, 4, 4096, 1, 2048),
    TrainingCase("accumulated", "llama", 4, 256, 4, 4, 4096, 4, 256, grad_accumulation=4),
    TrainingCase("gpt2-256", "gpt2", 4, 256, 4, 4, 4096, 8, 256, d_ff=1024),
    TrainingCase("gpt2-384", "gpt2", 6, 384, 6, 6, 4096, 8, 512, d_ff=1536),
    TrainingCase("fp32-256", "llama", 4, 256, 4, 4, 4096, 8, 256, dtype="fp32"),
    TrainingCase("fp32-384", "llama", 2, 384, 6, 6, 4096, 4, 512, dtype="fp32"),
    TrainingCase("eager-256", "llama", 4, 256, 4, 4, 4096, 8, 256, compile=False),
    TrainingCase("eager-fp32", "llama", 4, 256, 4, 4, 4096, 4, 256, dtype="fp32", compile=False),
    TrainingCase("eager-384", "llama", 6, 384, 6, 6, 4096, 4, 512, compile=False),
    TrainingCase("mistral-256", "mistral", 4, 256, 4, 2, 4096, 8, 256),
    TrainingCase("qwen2-320", "qwen2", 4, 320, 5, 5, 4096, 8, 256),
    TrainingCase("head-heavy", "llama", 2, 128, 2, 2, 16384, 8, 256),
    TrainingCase("deep-192", "llama", 16, 192, 3, 3, 4096, 8, 256),
)


@dataclass(frozen=True)
class ServedModel:
    """A model of random weights. ``d_ff`` as above."""

    name: str
    family: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    d_ff: int = 0
    max_positions: int = 2048

    @property
    def feed_forward(self) -> int:
        return self.d_ff or -(-8 * self.d_model // 3 // 64) * 64


@dataclass(frozen=True)
class ServingCase:
    """A model under one scheme, ``batch`` requests of one prompt length decoding together."""

    model: ServedModel
    scheme: str
    batch: int
    prompt_tokens: int
    output_tokens: int = 64

    @property
    def name(self) -> str:
        return f"{self.model.name}-{self.scheme}-b{self.batch}-p{self.prompt_tokens}"


_DEMO = ServedModel("demo-192", "qwen3", 4, 192, 3, 3, 4096)
_SMALL = ServedModel("llama-384", "llama", 6, 384, 6, 6, 4096)
_GROUPED = ServedModel("grouped-512", "llama", 8, 512, 8, 2, 4096)
_MIDDLE = ServedModel("grouped-576", "llama", 12, 576, 9, 3, 16384, 1536)
_WIDE = ServedModel("llama-1024", "llama", 4, 1024, 16, 16, 8192)
_SMOL = ServedModel("smollm-135m", "llama", 30, 576, 9, 3, 49152, 1536)
_GPT2 = ServedModel("gpt2-384", "gpt2", 6, 384, 6, 6, 8192, 1536)
_MISTRAL = ServedModel("mistral-320", "mistral", 6, 320, 5, 5, 8192)

SERVING = (
    ServingCase(_DEMO, "bf16", 1, 64),
    ServingCase(_DEMO, "int8", 4, 128),
    ServingCase(_DEMO, "fp32", 16, 64),
    ServingCase(_SMALL, "bf16", 1, 256),
    ServingCase(_SMALL, "bf16", 16, 128),
    ServingCase(_SMALL, "int8", 1, 512),
    ServingCase(_SMALL, "fp32", 4, 256),
    ServingCase(_GROUPED, "bf16", 1, 128),
    ServingCase(_GROUPED, "bf16", 8, 512),
    ServingCase(_GROUPED, "int8", 2, 1024),
    ServingCase(_MIDDLE, "bf16", 1, 512),
    ServingCase(_MIDDLE, "bf16", 4, 64),
    ServingCase(_MIDDLE, "int8", 1, 128),
    ServingCase(_MIDDLE, "int8", 16, 256),
    ServingCase(_WIDE, "bf16", 1, 128),
    ServingCase(_WIDE, "int8", 8, 128),
    ServingCase(_WIDE, "fp32", 1, 512),
    ServingCase(_SMOL, "bf16", 1, 128),
    ServingCase(_SMOL, "bf16", 4, 512),
    ServingCase(_SMOL, "int8", 1, 256),
    ServingCase(_SMOL, "int8", 8, 128),
    ServingCase(_GPT2, "bf16", 1, 128),
    ServingCase(_GPT2, "bf16", 8, 256),
    ServingCase(_GPT2, "int8", 2, 512),
    ServingCase(_MISTRAL, "bf16", 2, 256),
    ServingCase(_MISTRAL, "int8", 4, 64),
)
