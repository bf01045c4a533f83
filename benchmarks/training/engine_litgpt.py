"""litgpt: its model and its chunked cross-entropy under bf16 autocast, as ``litgpt pretrain --precision bf16-mixed`` computes.

litgpt has no padding mask: padded positions are computed and their targets ignored, which changes nothing behind a causal mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from peer_batches import IGNORED, PeerBatches, adamw, update
from safetensors.torch import load_file

PARTS = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attn.proj": "self_attn.o_proj",
    "mlp.fc_1": "mlp.gate_proj", "mlp.fc_2": "mlp.up_proj", "mlp.proj": "mlp.down_proj",
}  # fmt: skip


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        self._batches = PeerBatches(job["batches"])
        size = job["size"]
        config = Config(
            block_size=size["sequence_length"],
            vocab_size=size["vocab_size"],
            padded_vocab_size=size["vocab_size"],
            n_layer=size["n_layers"],
            n_head=size["n_heads"],
            n_embd=64 * size["n_heads"],
            head_size=64,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=1e-5,
            mlp_class_name="LLaMAMLP",
            intermediate_size=size["feed_forward"],
        )
        model = GPT(config)
        stored = load_file(Path(job["weights"]) / "model.safetensors")
        own = {
            "transformer.wte.weight": stored["model.embed_tokens.weight"],
            "transformer.ln_f.weight": stored["model.norm.weight"],
        }
        for layer in range(config.n_layer):
            theirs = f"model.layers.{layer}"
            rows = [stored[f"{theirs}.self_attn.{part}_proj.weight"] for part in "qkv"]
            own[f"transformer.h.{layer}.attn.qkv.weight"] = torch.cat(rows)
            own |= {f"transformer.h.{layer}.{a}.weight": stored[f"{theirs}.{b}.weight"] for a, b in PARTS.items()}
        model.lm_head.weight = model.transformer.wte.weight
        own["lm_head.weight"] = own["transformer.wte.weight"]
        model.load_state_dict(own)
        model.train()
        self._parameters = list(model.parameters())
        self._optimizer = adamw(model.named_parameters(), job["learning_rate"])
        self._model = torch.compile(model) if job["options"].get("compile") else model

    def step(self, index: int) -> float:
        ids, _, labels = self._batches[index]
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self._model(ids)
            loss = chunked_cross_entropy(logits, targets, chunk_size=0, ignore_index=IGNORED)
        loss.backward()
        update(self._parameters, self._optimizer)
        return float(loss.detach())

    def n_tokens(self, index: int) -> int:
        return self._batches.n_tokens(index)
