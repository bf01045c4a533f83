"""Seconds of `twostroke data prepare`: reading text, training a tokenizer on it, tokenising."""

from __future__ import annotations

from twostroke.core.data_recipe import DataRecipe
from twostroke.core.errors import ConfigError
from twostroke.core.named import letter, named
from twostroke.core.rates import TextRates
from twostroke.planner.hardware.device import Hardware


def recipe_s(recipe: DataRecipe, n_bytes: float, hardware: Hardware) -> float:
    """Seconds of preparing ``n_bytes`` of text anew as ``recipe`` says. Conversations are few, and their templates are not
    priced. Raises ConfigError where such text was not measured."""
    if hardware.text is None or recipe.layout != "text":
        raise ConfigError("preparing such text was not measured on this machine. Run `twostroke calibrate`.")
    vocab_size = recipe.vocab_size if recipe.tokenizer is None else None
    held_out = 0.0 if recipe.held_out else recipe.held_out_fraction
    return prepare_s(hardware.text, n_bytes, vocab_size, held_out)


def prepare_s(rates: TextRates, n_bytes: float, vocab_size: int | None, held_out_share: float = 0.0) -> float:
    """bytes·(read + train + encode), as calibration measured each stage a byte. A tokenizer of ``vocab_size`` is trained on
    what is not held out; None: it is there already. Filters and looking for near-duplicates are not priced."""
    stages = letter("read", rates.read_byte_s) + letter("encode", rates.encode_byte_s)
    if vocab_size is not None:
        training = letter("train", rates.train_byte_s) + letter("V", vocab_size) * letter("merge", rates.merge_byte_s)
        stages = stages + (1.0 - held_out_share) * training
    return named("prepare_s", letter("text", n_bytes) * stages, "s", "stages of preparing, a byte each", "measured")
