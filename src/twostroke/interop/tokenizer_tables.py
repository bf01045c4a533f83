"""Builds tokenizers from the tables of GGUF and llama2.c files: SentencePiece-like BPE, and byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from twostroke.core.documents import Allowance
from twostroke.core.errors import ConfigError, CorruptFileError, did_you_mean

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types, with the numbers of ``llama.h`` and SentencePiece."""

MAX_PIECE_CHARACTERS = 256
"""Longest token that is read. SentencePiece's have at most 16 characters by default, and the longest in a known vocabulary, a
run of spaces, has 128."""

_TOKEN_BYTES, _MERGE_BYTES = 300, 320
_MARKED_TOKEN_BYTES, _MARKED_CHARACTER_BYTES = 900, 128
"""Memory of a token, a merge, a marked token and each of its characters, here and in the finished tokenizer. Measured with
tokenizers 0.22: 240, 290, 880 and 97 bytes."""

LLAMA3_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Names of Llama 3's pre-tokenizer. With it, whole words that are tokens are not merged (``ignore_merges``), and a text begins
with a begin-of-text token."""

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(pattern: str) -> PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2_words(lone_digits: bool) -> PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]) if lone_digits else words


def byte_level_words(name: str) -> PreTokenizer:
    """The pre-tokenizer of byte-level BPE, by the name in ``tokenizer.ggml.pre`` (llama.cpp's ``llama-vocab.cpp``).

    Raises ConfigError for an unknown name, because a wrong pre-tokenizer gives plausible but wrong tokens.
    """
    if name in ("gpt-2", "olmo", "mpt", "phi-2", "jina-v2-code"):
        return _gpt2_words(lone_digits=False)
    if name in ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"):
        return _gpt2_words(lone_digits=True)
    if name in LLAMA3_WORDS:
        return _words(_LLAMA3)
    if name in ("qwen2", "deepseek-r1-qwen", "stablelm2"):
        return _words(_QWEN2)
    known = ("gpt-2", "olmo", "starcoder", "refact", "command-r", "smollm", "llama-bpe", "qwen2", "stablelm2")
    raise ConfigError(f"tokenizer.ggml.pre={name!r:.50} is not supported. {did_you_mean(name, known)}")


def _vocabulary(pieces: Sequence[str]) -> dict[str, int]:
    longest = max(pieces, key=len, default="")
    if len(longest) > MAX_PIECE_CHARACTERS:
        raise CorruptFileError(
            f"the tokenizer's token {longest!r:.80} has {len(longest)} characters; at most {MAX_PIECE_CHARACTERS} are read."
        )
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        twice = next(piece for i, piece in enumerate(pieces) if vocabulary[piece] != i)
        raise CorruptFileError(f"the tokenizer's token {twice!r:.80} occurs twice; each must have one id.")
    return vocabulary


def _allow_tokens(allowance: Allowance, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    marked = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
    n_bytes = _MARKED_TOKEN_BYTES * len(marked) + _MARKED_CHARACTER_BYTES * sum(map(len, marked))
    allowance.take(_TOKEN_BYTES * len(pieces) + n_bytes, f"a tokenizer of {len(pieces)} tokens, {len(marked)} of them marked,")


def _add_marked_tokens(tokenizer: Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    control = [
        AddedToken(p, special=True, normalized=False)
        for p, kind in zip(pieces, kinds, strict=True)
        if kind in (CONTROL, UNKNOWN)
    ]
    user = [
        AddedToken(p, special=False, normalized=False) for p, kind in zip(pieces, kinds, strict=True) if kind == USER_DEFINED
    ]
    tokenizer.add_special_tokens([token for token in control if token.content])
    tokenizer.add_tokens([token for token in user if token.content])


def _begin_with(tokenizer: Tokenizer, pieces: Sequence[str], bos_id: int) -> None:
    """Make ``tokenizer`` put the begin-of-text token before every text."""
    bos = pieces[bos_id]
    template = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)])
    # A template names tokens and splits at spaces and colons. A token whose name holds one of those cannot be in a template.
    if " " not in bos and ":" not in bos and "$" not in bos:
        tokenizer.post_processor = template


def _splits(piece: str, vocabulary: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Every pair of tokens that join to ``piece``. ``MAX_PIECE_CHARACTERS`` bounds the pairs of a piece, so that the time for
    all pieces is proportional to the length of the file."""
    for cut in range(1, len(piece)):
        left = vocabulary.get(piece[:cut])
        if left is not None:
            right = vocabulary.get(piece[cut:])
            if right is not None:
                yield left, right


def sentencepiece_bpe(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    bos_id: int | None,
    allowance: Allowance,
    space_prefix: bool = True,
) -> Tokenizer:
    """SentencePiece BPE with byte fallback, as in Llama 1 and 2. The pair whose joined piece has the highest score merges
    first.

    ``pieces`` write a space as ▁ and bytes as <0x41>. The merges are all splits of a piece into two pieces, by falling score,
    as in transformers' ``SentencePieceExtractor``. With ``bos_id`` None, texts are encoded without a begin-of-text token.
    Raises CorruptFileError for tables that are not a vocabulary, and if they need more memory than ``allowance`` has.
    """
    _allow_tokens(allowance, pieces, kinds)
    vocabulary = _vocabulary(pieces)
    merges: list[tuple[float, int, int]] = []
    for piece, score, kind in zip(pieces, scores, kinds, strict=True):
        if kind in (NORMAL, USER_DEFINED):
            found = [(-score, left, right) for left, right in _splits(piece, vocabulary)]
            allowance.take(_MERGE_BYTES * len(found), "the merges of its tokenizer")
            merges += found
    merges.sort()
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == UNKNOWN), None)
    pairs = [(pieces[left], pieces[right]) for _, left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # Metaspace would be wrong: it adds no prefix to a text that begins with a space, so decoding would lose that space.
    marks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks]) if space_prefix else marks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    _add_marked_tokens(tokenizer, pieces, kinds)
    if bos_id is not None:
        _begin_with(tokenizer, pieces, bos_id)
    return tokenizer


def byte_level_bpe(
    pieces: Sequence[str], merges: Sequence[str], kinds: Sequence[int], words: str, bos_id: int | None, allowance: Allowance
) -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen. ``merges`` are "left right" in order; ``words`` names the pre-tokenizer.

    Raises CorruptFileError for a merge of unknown tokens and if the tables need more memory than ``allowance`` has, ConfigError
    for an unknown ``words``.
    """
    _allow_tokens(allowance, pieces, kinds)
    allowance.take(_MERGE_BYTES * len(merges), "the merges of its tokenizer")
    vocabulary = _vocabulary(pieces)
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, separator, right = merge.partition(" ")
        if not separator or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CorruptFileError(f"the tokenizer's merge {merge!r:.80} does not join two of its tokens to a third.")
        pairs.append((pieces[vocabulary[left]], pieces[vocabulary[right]]))  # texts that exist already, to save memory
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=words in LLAMA3_WORDS))
    tokenizer.pre_tokenizer = byte_level_words(words)
    tokenizer.decoder = decoders.ByteLevel()
    _add_marked_tokens(tokenizer, pieces, kinds)
    if bos_id is not None:
        _begin_with(tokenizer, pieces, bos_id)
    return tokenizer
