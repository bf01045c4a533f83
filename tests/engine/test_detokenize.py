from __future__ import annotations

import itertools
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.scheduling.sampling_params import SamplingParams


def byte_level() -> Tokenizer:
    """One token a byte, two merges, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    vocab |= {"he": 300, "ll": 301}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def sentence_piece_like() -> Tokenizer:
    """Byte fallback and ▁ for a space, whose first one the decoder strips: the decoder of Llama 2's tokenizer.json."""
    vocab = {"<s>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)} | {"▁": 257, "▁Once": 258, "▁upon": 259, "a": 260}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


BYTES = byte_level()
PIECES = sentence_piece_like()
BYTE_ID = {b: BYTES.token_to_id(c) for b, c in zip(
    [*range(33, 127), *range(161, 173), *range(174, 256)],
    [*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 256))],
    strict=True,
)}  # fmt: skip
_rest = [b for b in range(256) if b not in BYTE_ID]
BYTE_ID |= {b: BYTES.token_to_id(chr(256 + i)) for i, b in enumerate(_rest)}


def ids_of(raw: bytes) -> list[int]:
    return [BYTE_ID[b] for b in raw]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(raw=st.one_of(st.text(max_size=30).map(str.encode), st.binary(max_size=80), st.binary(min_size=60, max_size=90).map(
    lambda b: bytes(0x80 | x for x in b))))  # fmt: skip
def test_pieces_joined_are_the_whole_text(raw: bytes) -> None:
    ids = ids_of(raw)
    detokenizer = IncrementalDetokenizer(BYTES)
    pieces = [detokenizer.add([i]) for i in ids]
    assert "".join(pieces) + detokenizer.finish() == BYTES.decode(ids) == raw.decode(errors="replace")


@pytest.mark.parametrize("text", ["héllo", "日本語です", "👩‍👩‍👧 ok", "a👍b"])
def test_no_piece_ever_holds_half_a_character(text: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    for i in ids_of(text.encode()):
        assert "\ufffd" not in detokenizer.add([i])
    assert detokenizer.finish() == ""


def test_a_character_that_stays_incomplete_is_shown_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert detokenizer.add(ids_of(b"ab\xe2\x82")) == "ab"
    assert detokenizer.finish() == "\ufffd"


def test_byte_fallback_tokens_join_into_characters() -> None:
    detokenizer = IncrementalDetokenizer(PIECES)
    euro = [1 + b for b in "€".encode()]
    assert [detokenizer.add([i]) for i in [258, *euro, 260]] == ["Once", "", "", "€", "a"]


def test_a_space_after_the_prompt_is_kept_where_the_decoder_strips_leading_ones() -> None:
    assert IncrementalDetokenizer(PIECES).add([259]) == "upon"
    assert IncrementalDetokenizer(PIECES, prompt_ids=[0, 258]).add([259]) == " upon"


def test_special_and_hidden_tokens_have_no_text() -> None:
    assert IncrementalDetokenizer(BYTES).add([*ids_of(b"a"), 0]) == "a"
    assert IncrementalDetokenizer(BYTES, hidden_ids={BYTE_ID[ord("b")]}).add(ids_of(b"abc")) == "ac"


def test_text_ends_before_a_stop_string_that_spans_tokens() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["END"])
    pieces = [detokenizer.add([i]) for i in ids_of(b"say EN, then END and more")]
    assert "".join(pieces) == "say EN, then "
    assert detokenizer.stopped
    assert detokenizer.stop_string == "END"
    assert detokenizer.n_tokens == len("say EN, then END")
    assert detokenizer.finish() == ""


def test_no_piece_shows_what_may_be_the_beginning_of_a_stop_string() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["\n\nUser:"])
    assert detokenizer.add(ids_of(b"hi\n\nUse")) == "hi"
    assert detokenizer.add(ids_of(b"ful")) == "\n\nUseful"


def test_held_text_is_given_back_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["END"])
    assert detokenizer.add(ids_of(b"the EN")) == "the "
    assert detokenizer.finish() == "EN"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["cd", "bc"])
    assert detokenizer.add(ids_of(b"abcd")) == "a"
    assert detokenizer.stop_string == "bc"


def test_stop_strings_wait_for_min_tokens() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["x"], min_tokens=3)
    assert detokenizer.add(ids_of(b"xxxaxb")) == "xxxa"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(alphabet="abé€", max_size=25), stop=st.lists(st.text(alphabet="abé€", min_size=1, max_size=4), max_size=3))
def test_stopping_is_the_same_as_cutting_the_whole_text(text: str, stop: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=stop)
    found = "".join(detokenizer.add([i]) for i in ids_of(text.encode())) + detokenizer.finish()
    # The first moment any stop string is complete; of those complete then, the earliest beginning.
    expected = text
    for end in range(1, len(text) + 1):
        starts = [text[:end].find(s) for s in stop if s in text[:end]]
        if starts:
            expected = text[: min(starts)]
            break
    assert found == expected


def test_the_module_imports_no_torch() -> None:
    code = "import sys, twostroke.engine.detokenize; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_stop_string_and_special_tokens_are_kept_where_that_is_asked_for() -> None:
    end, ids = BYTES.token_to_id("<end>"), ids_of(b"one stop two")
    for params, text in (
        (SamplingParams(stop=("stop",)), "one "),
        (SamplingParams(stop=("stop",), include_stop_str_in_output=True), "one stop"),
        (SamplingParams(), "one stop two"),
        (SamplingParams(skip_special_tokens=False), "one stop two"),  # what ended it is no part of it
        (SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True), "one stop two<end>"),
        (SamplingParams(skip_special_tokens=False, ignore_eos=True), "one stop two<end>"),
    ):
        detokenizer = IncrementalDetokenizer.of(BYTES, params, (end,), ())
        pieces = [detokenizer.add([i]) for i in (*ids, end)]
        assert "".join(pieces) + detokenizer.finish() == text


class Counting:
    """A tokenizer that counts the ids it is given to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.n_decoded = tokenizer, 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.n_decoded += len(ids)
        return str(self.tokenizer.decode(ids, **options))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pool=st.lists(st.sampled_from([0, 0x81, 0xA0, 0xC0, 0xE3, 0xF0, 257, 258, 260]), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_token_costs_no_more_at_the_end_of_a_long_answer(pool: list[int], seed: int) -> None:
    """Half characters, tokens without text and spaces, in any order; BYTES does not know the highest ids."""
    ids = random.Random(seed).choices(pool, k=2000)
    for tokenizer in (BYTES, PIECES):
        counting = Counting(tokenizer)
        detokenizer = IncrementalDetokenizer(counting)
        pieces = [detokenizer.add([i]) for i in ids]
        text = "".join(pieces) + detokenizer.finish()
        # A run of PIECES' byte tokens that is no UTF-8 is U+FFFD throughout, also what was whole before: that is passed on.
        assert tokenizer is PIECES or text == tokenizer.decode(ids)
        assert counting.n_decoded < 100 * len(ids), "a thousand for each, where the window grows with the answer"


def added(detokenizer: IncrementalDetokenizer, pieces: list[list[int]]) -> str:
    return "".join(detokenizer.add(piece) for piece in pieces) + detokenizer.finish()


SOUP = st.lists(st.sampled_from([0, 0x62, 0x81, 0xA0, 0xC4, 0xE3, 0xF0, 257, 258, 259, 260, 999]), max_size=60)
LENGTHS: dict[int, dict[int, int]] = {0: {}, 1: {}}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=SOUP, cuts=st.lists(st.integers(0, 60), max_size=8), keep_special=st.booleans())
def test_ids_that_come_together_have_the_text_of_one_after_another(ids: list[int], cuts: list[int], keep_special: bool) -> None:
    """So a stream and a whole answer are the same; half characters, special and unknown tokens in any order."""
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    together = [ids[begin:end] for begin, end in itertools.pairwise(edges)]
    for tokenizer in (BYTES, PIECES):
        shared = LENGTHS[tokenizer is PIECES] if not keep_special else {}
        found = added(IncrementalDetokenizer(tokenizer, keep_special=keep_special, lengths=shared), together)
        alone = added(IncrementalDetokenizer(tokenizer, keep_special=keep_special), [[i] for i in ids])
        assert found == alone
        whole = tokenizer.decode(ids, skip_special_tokens=not keep_special)
        assert "\ufffd" in whole or found == whole


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(alphabet="ab é€👍\n", max_size=30), cuts=st.lists(st.integers(0, 90), max_size=6))
def test_characters_of_several_tokens_come_whole_however_their_tokens_come(text: str, cuts: list[int]) -> None:
    ids = ids_of(text.encode())
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    detokenizer = IncrementalDetokenizer(BYTES)
    pieces = [detokenizer.add(ids[begin:end]) for begin, end in itertools.pairwise(edges)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.finish() == text


def test_a_space_behind_a_token_without_text_is_kept() -> None:
    ids = [258, 0, 999, 0, 259]
    assert added(IncrementalDetokenizer(PIECES), [[i] for i in ids]) == PIECES.decode(ids) == "Once upon"


def test_a_token_is_decoded_once_and_a_whole_answer_in_two_calls() -> None:
    class Calls:
        n = 0

        def decode(self, ids: list[int], **options: bool) -> str:
            self.n += 1
            return str(BYTES.decode(ids, **options))

    ids, lengths = ids_of(b"hello there, who is it"), dict[int, int]()
    for tokenizer in (Calls(), Calls()):
        added(IncrementalDetokenizer(tokenizer, lengths=lengths), [[i] for i in ids])
    assert tokenizer.n == len(ids)
    tokenizer = Calls()
    assert added(IncrementalDetokenizer(tokenizer, lengths=lengths), [ids[:1], ids[1:]]) == "hello there, who is it"
    assert tokenizer.n == 2


def test_a_stop_strings_beginning_is_compared_once_for_each_character_it_holds_back() -> None:
    compared = 0

    class Stop(str):
        __slots__ = ()

        def startswith(self, *arguments: object) -> bool:
            nonlocal compared
            compared += 1
            return super().startswith(*arguments)  # type: ignore[arg-type]

        def __getitem__(self, part: Any) -> str:
            nonlocal compared
            compared += isinstance(part, slice)
            return super().__getitem__(part)

    text = "a" * 990 + "b" + "a" * 2000
    # The first holds a thousand characters back, of which the second's beginning is never more than half.
    detokenizer = IncrementalDetokenizer(BYTES, stop=[Stop("a" * 1000 + "c"), Stop("a" * 500 + "b" * 2), Stop("b" + "c" * 999)])
    found = "".join(detokenizer.add([i]) for i in ids_of(text.encode())) + detokenizer.finish()
    assert found == text
    # Each length of what is held was compared with each stop string at each token: a million in all.
    assert compared <= 2 * 3 * len(text)
