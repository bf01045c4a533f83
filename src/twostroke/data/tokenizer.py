"""Trains byte-level BPE tokenizers, and loads any ``tokenizer.json``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from twostroke.core.aside import write_text
from twostroke.core.data_recipe import MAX_VOCAB_SIZE, check_vocab_size
from twostroke.core.documents import read_bytes, read_object
from twostroke.core.errors import CorruptFileError, DataError, InputError
from twostroke.core.families import read_config
from twostroke.data.fewest_tokens import steps_of

END_OF_TEXT = "<|endoftext|>"
"""The token that ends every document. It has id 0 in tokenizers that were trained here."""

MAX_GROWTH = 64
MAX_TOKEN_CHARACTERS = 4096
"""Tokens in use have a few hundred characters at most. An answer of thousands of tokens may repeat the longest."""
MAX_TOKENIZER_BYTES = 128 * 2**20
MAX_OBJECTS, MAX_LISTS, MAX_ENTRIES = 100_000, 2_000_000, 4_000_000
"""Limits for a tokenizer.json, counted by ``{``, ``[`` and ``,``. The largest file in use, Gemma's of 33 MB, has 6 thousand
added tokens, half a million merges and 1.3 million entries."""
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")


def train_tokenizer(texts: Iterator[str], vocab_size: int, path: Path | str) -> Tokenizer:
    """Train byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) on ``texts``, with GPT-2's word pattern (Radford et al.
    2019).

    All 256 bytes are in the vocabulary, so any text encodes and decodes back exactly. The vocabulary has ``vocab_size``
    entries, or fewer if ``texts`` hold fewer merges that occur twice. The tokenizer is saved at ``path``, atomically. Raises
    ConfigError for a vocabulary below 257 or above 2²², DataError if ``texts`` are empty.
    """
    check_vocab_size(vocab_size)
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
        raise DataError("the sources hold no text to train a tokenizer on. Name others.")
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
    """``path`` itself or, if it is a directory, the ``tokenizer.json`` in it. Raises DataError if the file is missing."""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise DataError(f"tokenizer {file} does not exist. Give a tokenizer.json or a directory that holds one.")
    return file


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json`` or in a directory that holds one, without truncation and padding.

    A file may turn both on, and truncation would lose text silently. Raises DataError if the file is missing, and
    CorruptFileError if the ``tokenizers`` library cannot read or use it or if it names ids beyond its model's vocabulary.
    """
    file = tokenizer_file(path)
    data = _read(file)
    try:
        tokenizer = Tokenizer.from_buffer(data)
        del data
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except BaseException as error:
        raise CorruptFileError(
            f"{file} is not a tokenizer.json that the tokenizers library reads: {library_error(error)}. Download it again."
        ) from None
    try:
        _check_growth(tokenizer, file)
        # The library reads a post-processor that names a missing token, and fails at the first text.
        tokenizer.decode(tokenizer.encode("a").ids)
    except CorruptFileError:
        raise
    except BaseException as error:
        raise CorruptFileError(f"{file} can be read, but it cannot tokenise {'a'!r}: {library_error(error)}.") from None
    _check_vocabulary(tokenizer, file)
    return tokenizer


def library_error(error: BaseException) -> str:
    """The message of the tokenizers library on one line. The library raises bare Exception, and a BaseException of its own for
    Rust's panics; both are errors of its input. Any other BaseException, and MemoryError, is raised again."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    if isinstance(error, MemoryError):
        raise error
    return " ".join(str(error).split()).rstrip(".")[:200]


def _read(file: Path) -> bytes:
    """Read the file and check its counts. The library takes up to 1,250 bytes an object, 100 a list and 300 an entry, so a
    prepared file could fill the memory."""
    data = read_bytes(file, MAX_TOKENIZER_BYTES)
    for mark, most, what in ((b"{", MAX_OBJECTS, "objects"), (b"[", MAX_LISTS, "lists"), (b",", MAX_ENTRIES, "entries")):
        n = data.count(mark)
        if n > most:
            raise CorruptFileError(
                f"{file} is not a tokenizer.json that is read here: it has {n} {what}, and at most {most} are."
            )
    return data


def _check_growth(tokenizer: Tokenizer, file: Path) -> None:
    """Refuse a tokenizer that makes texts very long. Replacing each character of a text of 2 MB by 100,000 others makes 200
    GB."""
    for component, name in ((tokenizer.normalizer, "normalizers"), (tokenizer.decoder, "decoders")):
        growth = 1.0
        for step in steps_of(component, name):
            if step["type"] == "Replace":
                # A regular expression or an empty text may match between any two characters.
                found = len(step["pattern"].get("String", ""))
                growth *= max(1.0, len(step["content"]) / found if found else 1 + len(step["content"]))
            elif step["type"] == "Prepend":
                growth *= max(1.0, len(step["prepend"]) / 8)
        if growth > MAX_GROWTH:
            raise CorruptFileError(
                f"{file} makes texts {growth:.0f} times as long by its {name}; at most {MAX_GROWTH} times is read."
            )


def _check_vocabulary(tokenizer: Tokenizer, file: Path) -> None:
    """Refuse ids beyond the model's embedding rows, because they would fail requests. To save a tokenizer the library lists
    every id below the largest, which takes 8 GB for an id of 2**31. Added tokens beyond the embedding rows, as for padding, are
    accepted: they do no harm until a text holds one."""
    size = None
    with contextlib.suppress(InputError):
        size = read_config(file.parent).get("vocab_size")
    rows = size if isinstance(size, int) and not isinstance(size, bool) and 0 < size < MAX_VOCAB_SIZE else MAX_VOCAB_SIZE
    for added, most in ((False, rows), (True, MAX_VOCAB_SIZE)):
        vocabulary = tokenizer.get_vocab(with_added_tokens=added)
        longest = max(map(len, vocabulary), default=0)
        if longest > MAX_TOKEN_CHARACTERS:
            raise CorruptFileError(f"{file} has a token of {longest} characters; at most {MAX_TOKEN_CHARACTERS} are read.")
        if vocabulary and max(vocabulary.values()) >= most:
            token = max(vocabulary, key=vocabulary.__getitem__)
            whose = "the model's vocabulary" if most < MAX_VOCAB_SIZE else "the largest vocabulary"
            raise CorruptFileError(
                f"{file} gives token {token[:40]!r} the id {vocabulary[token]}; {whose} has {most}. "
                "Give the tokenizer that the model was trained with."
            )


def eos_id_of(tokenizer: Tokenizer, path: Path | str | None = None) -> int:
    """Id of the token that ends a document.

    It is the ``eos_token`` of a ``tokenizer_config.json`` beside ``path`` if there is one, else the first of the usual names
    that the vocabulary has. Raises DataError if it has none of them.
    """
    names = list(_END_TOKENS)
    if path is not None:
        file = Path(path)
        config = (file if file.is_dir() else file.parent) / "tokenizer_config.json"
        if config.is_file():
            named = read_object(config).get("eos_token")
            named = named.get("content") if isinstance(named, dict) else named
            if isinstance(named, str):
                names.insert(0, named)
    for name in names:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return int(token_id)
    raise DataError(f"the tokenizer has no end-of-text token. It must hold one of {', '.join(_END_TOKENS)}.")
