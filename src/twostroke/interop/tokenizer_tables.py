"""Builds tokenizers from the tables of GGUF and llama2.c files: SentencePiece-like BPE, and byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Words:
    """How a text is cut into words before byte-level BPE: by each of ``patterns`` in turn, what lies between matches staying a
    word. ``whole``: a word that is a token is not merged (``ignore_merges``). ``begins``: a text begins with a begin-of-text
    token where the file does not say."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False


_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(ending: str, digits: str, upper: str = _UPPER, lower: str = _LOWER, after: str = "/") -> str:
    """Words that change case at most once, from capitals to small letters (OpenAI's o200k, Mistral's Tekken). ``after``: what
    may follow other signs beside ends of lines."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{after}]*|{_LINES_AND_SPACES}"


_NOT_HAN = r"&&[^\p{Han}]]"


_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_NOT_DEEPSEEK = (
    "\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c8a\u2d00-\u2d2f\ua790-\ua7ff\uab30-\uab6f\U00010570-\U000105bf\U00016e40-\U00016e7f"
    + ("\U0001d400-\U0001d7ff\U0001df00-\U0001dfff")
)
"""Letters with a case that its expression leaves out: small Armenian and Georgian ones, mathematical ones, later scripts."""
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"
_WORDS = (
    Words(("gpt-2", "olmo", "mpt", "phi-2", "jina-v2-code", "exaone4", "jais", "trillion", "granite-docling"), (GPT2_PATTERN,)),
    Words(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", GPT2_PATTERN),
    ),
    Words(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), (_LLAMA3,), whole=True, begins=True),
    Words(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    Words(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"), (_QWEN2,)),
    Words(
        ("seed-coder",),
        (rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}",),
    ),
    Words(("gpt-4o", "llama4", "kanana2"), (_by_case(f"{_ENGLISH}?", r"\p{N}{1,3}"),)),
    Words(
        ("kimi-k2",),
        (r"[\p{Han}]+|" + _by_case(f"{_ENGLISH}?", r"\p{N}{1,3}", _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, ""),),
    ),
    Words(("tekken",), (_by_case("", r"\p{N}"),), whole=True, begins=True),
    Words(
        ("deepseek-llm",),
        (r"[\r\n]", rf"\s?(?:(?![{_NOT_DEEPSEEK}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+",
         "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", _HAN, r"\p{N}+"),
    ),
    Words(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    Words(
        ("deepseek-v3", "hunyuan-dense"),
        (
            r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
            + _LINES_AND_SPACES,
        ),
    ),
    Words(("falcon",), (r"[\p{P}$+<=>^~|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]")),
    Words(("default",), (_PUNCTUATION, GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
)  # fmt: skip
"""By the names in ``tokenizer.ggml.pre`` (llama.cpp's ``llama-vocab.cpp``); ``default`` also for files without a name."""

WORDS: dict[str, Words] = {name: words for words in _WORDS for name in words.names}


def words_of(name: str) -> Words:
    """The row of ``name``. Raises ConfigError for an unknown one, because wrong words give plausible but wrong tokens."""
    if name not in WORDS:
        raise ConfigError(f"tokenizer.ggml.pre={name!r:.50} is not supported. {did_you_mean(name, WORDS)}")
    return WORDS[name]


def byte_level_words(words: Words) -> PreTokenizer:
    """The pre-tokenizer of ``words``, which also writes bytes as byte-level BPE does."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in words.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


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
    pieces: Sequence[str], merges: Sequence[str], kinds: Sequence[int], words: Words, bos_id: int | None, allowance: Allowance
) -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen. ``merges`` are "left right" in order.

    Raises CorruptFileError for a merge of unknown tokens and if the tables need more memory than ``allowance`` has.
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
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=words.whole))
    tokenizer.pre_tokenizer = byte_level_words(words)
    tokenizer.decoder = decoders.ByteLevel()
    _add_marked_tokens(tokenizer, pieces, kinds)
    if bos_id is not None:
        _begin_with(tokenizer, pieces, bos_id)
    return tokenizer
