"""Tokenizers in GGUF files: ``tokenizer.ggml.*`` of the models ``llama`` (SentencePiece) and ``gpt2`` (byte-level BPE)."""

from __future__ import annotations

from typing import Any

import numpy as np

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.spec import ModelSpec
from twostroke.interop.gguf_metadata import Metadata
from twostroke.interop.source import SourceTokenizer
from twostroke.interop.tokenizer_tables import NORMAL, byte_level_bpe, sentencepiece_bpe, words_of


def read_tokenizer(metadata: Metadata, spec: ModelSpec) -> SourceTokenizer | None:
    """The tokenizer of a file whose model is ``spec``, None where it has none.

    Raises CorruptFileError for tables that do not fit each other, ConfigError for a kind that is not read.
    """
    model = metadata.text("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in ("llama", "gpt2"):
        raise ConfigError(f"{metadata.file.path}: tokenizer.ggml.model={model!r:.50} is not read. Read: llama, gpt2.")
    pieces = metadata.texts("tokenizer.ggml.tokens")
    if len(pieces) > spec.vocab_size:
        raise CorruptFileError(f"{metadata.file.path} has {len(pieces)} tokens, but embeddings for {spec.vocab_size}.")
    kinds = metadata.numbers("tokenizer.ggml.token_type", len(pieces), "token of the tokenizer", np.full(len(pieces), NORMAL))
    words = words_of(metadata.text("tokenizer.ggml.pre", "default")) if model == "gpt2" else None
    # llama.cpp's own defaults for files that do not say
    begins = metadata.flag("tokenizer.ggml.add_bos_token", words is None or words.begins)
    bos = spec.bos_token_id if begins else None
    if bos is not None and bos >= len(pieces):
        raise CorruptFileError(
            f"{metadata.file.path}: the begin-of-text token {bos} is outside its vocabulary of {len(pieces)} tokens."
        )
    config: dict[str, Any] = {}
    template = metadata.text("tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    allowance = metadata.file.allowance
    if words is None:
        scores = metadata.numbers("tokenizer.ggml.scores", len(pieces), "token of the tokenizer")
        prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
        return SourceTokenizer(sentencepiece_bpe(pieces, scores, kinds, bos, allowance, prefix), config)
    return SourceTokenizer(
        byte_level_bpe(pieces, metadata.texts("tokenizer.ggml.merges"), kinds, words, bos, allowance), config
    )
