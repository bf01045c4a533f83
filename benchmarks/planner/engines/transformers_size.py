"""Bytes that transformers holds a model in (``get_memory_footprint``: parameters and buffers), beside our own count."""

from __future__ import annotations

import sys


def main(directory: str, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    print(int(model.get_memory_footprint()))


if __name__ == "__main__":
    main(*sys.argv[1:])
