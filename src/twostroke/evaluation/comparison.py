"""Two models on the same text: the difference in bits per byte with its standard error, and their sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import InputError
from twostroke.data.tokenizer import eos_id_of, load_tokenizer
from twostroke.evaluation.bits import Progress, check_context, default_context, default_stride, token_nats
from twostroke.evaluation.held_out import HeldOutText, tokenize_with_ends
from twostroke.model.adapter_directory import base_directory, is_adapter_directory
from twostroke.quantization.load import load_decoder

BLOCK_BYTES = 4096
"""Stretch of text over which the two models are paired: long enough to be nearly independent of its neighbours."""


def model_directory(path: Path | str) -> Path:
    """The model directory at ``path``, or in the run directory at ``path``. Raises InputError."""
    directory = Path(path)
    for candidate in (directory, directory / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    raise InputError(f"{directory} is neither a model directory (with config.json) nor a run that holds one under model/.")


def model_bytes(directory: Path | str) -> int:
    """Size on disk of all files of a model directory; of adapters with those of the base that they need."""
    own = sum(f.stat().st_size for f in Path(directory).rglob("*") if f.is_file())
    return own + model_bytes(base_directory(directory)) if is_adapter_directory(directory) else own


def block_nats(ends: npt.NDArray[np.int64], nats: npt.NDArray[np.float32], n_bytes: int) -> npt.NDArray[np.float64]:
    """Σ −ln p of the tokens that end in each stretch of ``BLOCK_BYTES`` bytes of text, whichever tokenizer cut it."""
    n_blocks = math.ceil(n_bytes / BLOCK_BYTES)
    blocks = np.clip((ends - 1) // BLOCK_BYTES, 0, n_blocks - 1)
    return np.bincount(blocks, weights=nats, minlength=n_blocks).astype(np.float64, copy=False)


def paired_difference(
    nats_a: npt.NDArray[np.float64], nats_b: npt.NDArray[np.float64], block_bytes: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """Difference b − a in bits per byte and its standard error, over blocks of text that both models scored.

    r = Σdᵢ / Σwᵢ with dᵢ the difference in bits and wᵢ the bytes of block i; the standard error is the ratio estimator's,
    √(n/(n−1) · Σ(dᵢ − r·wᵢ)²) / Σwᵢ (Cochran 1977, ch. 6), infinite for one block. It says how far another text of the
    same kind would move the difference; blocks are taken as independent.
    """
    difference = (nats_b - nats_a) / math.log(2)
    total = float(block_bytes.sum())
    ratio = float(difference.sum()) / total
    n = len(difference)
    if n < 2:
        return ratio, math.inf
    spread = float(np.square(difference - ratio * block_bytes).sum())
    return ratio, math.sqrt(n / (n - 1) * spread) / total


def compare_models(
    a: Path | str,
    b: Path | str,
    text: HeldOutText,
    context: int | None = None,
    stride: int | None = None,
    dtype: str = "fp32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Both models scored on ``text``, each with its own tokenizer, within the shorter of their contexts.

    ``difference_bits_per_byte`` is b − a (below 0: b is better), ``perplexity_ratio`` exp of the difference in nats per
    token of a. The verdict is "same" within two standard errors.
    """
    directories = model_directory(a), model_directory(b)
    models = [load_decoder(d, dtype, device) for d in directories]
    if context is None:
        context = min(default_context(m) for m in models)
    for model in models:
        check_context(model, context)
    stride = default_stride(context) if stride is None else stride
    sides: list[dict[str, Any]] = []
    sums: list[npt.NDArray[np.float64]] = []
    n_bytes = 0
    for i, (directory, model) in enumerate(zip(directories, models, strict=True)):
        tokenizer = load_tokenizer(directory)
        tokens, ends = tokenize_with_ends(text, tokenizer, eos_id_of(tokenizer, directory))

        def advance(done: float, note: str, side: int = i) -> None:
            if progress is not None:
                progress((side + done) / 2, note)

        nats = token_nats(model, tokens.ids, tokens.eos_id, context, stride, device, advance)
        n_bytes = tokens.n_bytes
        sums.append(block_nats(ends, nats, n_bytes))
        total = float(nats.sum(dtype=np.float64))
        sides.append(
            {
                "model": str(directory),
                "bits_per_byte": total / math.log(2) / n_bytes,
                "nats_per_token": total / len(nats),
                "n_tokens": len(nats),
                "parameters": sum(p.numel() for p in model.parameters()),
                "model_bytes": model_bytes(directory),
            }
        )
    widths = np.full(len(sums[0]), float(BLOCK_BYTES))
    widths[-1] = n_bytes - BLOCK_BYTES * (len(widths) - 1)
    difference, error = paired_difference(sums[0], sums[1], widths)
    verdict = "same" if abs(difference) <= 2 * error else "better" if difference < 0 else "worse"
    return {
        "text": text.name,
        "n_bytes": n_bytes,
        "context": context,
        "stride": stride,
        "dtype": dtype,
        "a": sides[0],
        "b": sides[1],
        "difference_bits_per_byte": difference,
        "standard_error_bits_per_byte": error,
        "n_blocks": len(widths),
        "perplexity_ratio": math.exp((float(sums[1].sum()) - float(sums[0].sum())) / sides[0]["n_tokens"]),
        "size_ratio": sides[1]["model_bytes"] / sides[0]["model_bytes"],
        "b_is": verdict,
    }
