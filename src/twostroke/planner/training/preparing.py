"""Seconds of `twostroke data prepare`: reading text, training a tokenizer on it, tokenising."""

from __future__ import annotations

from twostroke.core.named import letter, named
from twostroke.core.rates import TextRates


def prepare_s(rates: TextRates, n_bytes: float, vocab_size: int | None, held_out_share: float = 0.0) -> float:
    """bytes·(read + train + encode), as calibration measured each stage a byte. A tokenizer of ``vocab_size`` is trained on
    what is not held out; None: it is there already. Filters and looking for near-duplicates are not priced."""
    stages = letter("read", rates.read_byte_s) + letter("encode", rates.encode_byte_s)
    if vocab_size is not None:
        training = letter("train", rates.train_byte_s) + letter("V", vocab_size) * letter("merge", rates.merge_byte_s)
        stages = stages + (1.0 - held_out_share) * training
    return named("prepare_s", letter("text", n_bytes) * stages, "s", "stages of preparing, a byte each", "measured")
