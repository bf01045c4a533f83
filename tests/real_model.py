"""A small model with random weights and a tokenizer of its own, saved as a person would have it on disk."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.data.tokenizer import train_tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "d_ff": 128},
    # About six million parameters: the size that the five-second start is promised for.
    "6M": {"n_layers": 8, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "d_ff": 512},
    "experts": {
        "n_layers": 4, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 256, "family": "qwen3_moe",
        "qk_norm": True, "moe": MoeSpec(8, 2, 64),
    },
}  # fmt: skip


def make_model(directory: Path, size: str = "tiny", vocab_size: int = 512, seed: int = 0) -> Path:
    from twostroke.model.decoder import Decoder
    from twostroke.model.initialise import initialise
    from twostroke.model.save import save_model

    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
    tokenizer_file = directory.with_suffix(".tokenizer.json")
    tokenizer = train_tokenizer(iter([text]), vocab_size, tokenizer_file)
    sizes = {"family": "llama", "max_positions": 512, "tied_embeddings": True, "eos_token_ids": (0,)} | SIZES[size]
    spec = ModelSpec(vocab_size=tokenizer.get_vocab_size(), **sizes)
    decoder = Decoder(spec)
    initialise(decoder, seed)
    save_model(decoder, spec, directory, "fp32", tokenizer_file)
    return directory


def spread_model(directory: Path, size: str, seed: int = 0) -> Path:
    """The same with matrices four times as large as at the start of training: tokens differ in likelihood."""
    from safetensors.torch import load_file, save_file

    file = make_model(directory, size, seed=seed) / "model.safetensors"
    weights = {k: v * 4 if v.ndim == 2 and "embed" not in k else v for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def greedy_reference(directory: Path, prompt_ids: list[int], n_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy continuation and its log-probabilities by the training decoder, without a cache: slow and obvious."""
    import torch

    from twostroke.model.load import load_model

    decoder = load_model(directory).eval()
    ids, logprobs = list(prompt_ids), []
    with torch.no_grad():
        for _ in range(n_tokens):
            row = torch.log_softmax(decoder(torch.tensor([ids]))[0, -1].float(), dim=-1)
            best = int(row.argmax())
            ids.append(best)
            logprobs.append(float(row[best]))
    return ids[len(prompt_ids) :], logprobs
