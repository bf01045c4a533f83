"""Byte-level BPE: training one, loading any ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from twostroke.core.aside import write_text
from twostroke.core.errors import ConfigError, CorruptFileError, DataError

END_OF_TEXT = "<|endoftext|>"
"""Ends every document. Id 0 in tokenizers trained here."""

LEAST_VOCAB_SIZE = 257
MAX_TOKENIZER_BYTES = 256 * 2**20
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")


def train_tokenizer(texts: Iterator[str], vocab_size: int, path: Path | str) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) over ``texts``, with GPT-2's word pattern (Radford et al. 2019).

    All 256 bytes are in the vocabulary, so any text encodes and decodes back exactly. The vocabulary is ``vocab_size``
    entries, fewer where ``texts`` do not hold that many merges that occur twice. Saved at ``path``, atomically.
    Raises ConfigError for a vocabulary below 257, DataError when there is no text.
    """
    if vocab_size < LEAST_VOCAB_SIZE:
        raise ConfigError(f"vocab_size={vocab_size} must be at least {LEAST_VOCAB_SIZE}: 256 bytes and one end-of-text.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    counted = _Counted(texts)
    tokenizer.train_from_iterator(counted, trainer)
    if counted.n_texts == 0:
        raise DataError("there is no text to train a tokenizer on.")
    write_text(Path(path), tokenizer.to_str())
    return tokenizer


class _Counted:
    def __init__(self, texts: Iterator[str]) -> None:
        self.texts = texts
        self.n_texts = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.n_texts += 1
            yield text


def tokenizer_file(path: Path | str) -> Path:
    """``path`` itself, or the ``tokenizer.json`` in it where it is a directory. Raises DataError."""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise DataError(f"tokenizer {file} does not exist. Give a tokenizer.json or a directory that holds one.")
    return file


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json`` or in a directory that holds one, without truncation and padding.

    A file may order both; they would lose text without a word. Raises DataError when it is missing and CorruptFileError
    when the ``tokenizers`` library cannot read it.
    """
    file = tokenizer_file(path)
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise CorruptFileError(f"{file} is {file.stat().st_size} bytes; a tokenizer.json is at most {MAX_TOKENIZER_BYTES}.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:
        # The library reports bad files as bare Exception, and some as a Rust panic, which is a BaseException.
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
            raise
        raise CorruptFileError(f"{file} is not a tokenizer.json that the tokenizers library reads: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def eos_id_of(tokenizer: Tokenizer, path: Path | str | None = None) -> int:
    """Id of the token that ends a document.

    The ``eos_token`` of a ``tokenizer_config.json`` beside ``path`` where there is one, else the first that is known of
    the usual names. Raises DataError when the vocabulary has none of them.
    """
    names = list(_END_TOKENS)
    if path is not None:
        file = Path(path)
        config = (file if file.is_dir() else file.parent) / "tokenizer_config.json"
        if config.is_file():
            try:
                named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError, RecursionError) as error:
                raise CorruptFileError(f"{config} is not a JSON object: {error}.") from None
            named = named.get("content") if isinstance(named, dict) else named
            if isinstance(named, str):
                names.insert(0, named)
    for name in names:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return int(token_id)
    raise DataError(f"the tokenizer has no end-of-text token. It must hold one of {', '.join(_END_TOKENS)}.")
