"""transformers: the model's own loss under bf16 autocast with fp32 weights, as its Trainer computes with ``bf16=True``; with
``peft`` for adapters, and ``bitsandbytes`` for a base in NF4."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from peer_batches import PeerBatches, adamw, update
from transformers import AutoModelForCausalLM


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        self._device = job["device"]
        self._batches = PeerBatches(job["batches"])
        options = job["options"]
        self._pure = options.get("dtype") == "bf16"
        method = options.get("method")
        dtype = torch.bfloat16 if self._pure or method else torch.float32
        quantised: dict[str, Any] = {}
        if method == "qlora":
            from transformers import BitsAndBytesConfig

            quantised["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
            quantised["device_map"] = self._device
        model = AutoModelForCausalLM.from_pretrained(job["weights"], dtype=dtype, **quantised).to(self._device)
        if method:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(
                model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
            )
        model.train()
        model.config.use_cache = False
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = adamw(model.named_parameters(), job["learning_rate"])
        self._model = torch.compile(model) if options.get("compile") else model

    def step(self, index: int) -> float:
        ids, mask, labels = (None if t is None else t.to(self._device) for t in self._batches[index])
        context = contextlib.nullcontext() if self._pure else torch.autocast(self._device, torch.bfloat16)
        with context:
            loss = self._model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        update(self._parameters, self._optimizer)
        return float(loss.detach())

    def n_tokens(self, index: int) -> int:
        return self._batches.n_tokens(index)
