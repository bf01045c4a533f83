"""The text side of a served model: its tokenizer, its chat template, and the text of one token. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from twostroke.core.errors import InputError
from twostroke.data.chat import ChatTemplate, read_chat_template
from twostroke.data.fewest_tokens import FewestTokens
from twostroke.data.pairs import PairEncoder
from twostroke.data.tokenizer import library_error, load_tokenizer
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.reasoning import ReasoningFormat, reasoning_of
from twostroke.server.tool_calls import format_of
from twostroke.server.turns import Turns

R = TypeVar("R")

SHORT_TEXT = 1_000
"""Texts of at most so many characters are tokenised on the event loop: that takes 0.4 ms, and a thread's turn 0.1 or more."""
LONG_TEXT = 20_000
"""Texts of more characters are tokenised one at a time in a thread of their own, so that shorter texts do not wait for them."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ModelText:
    """Encodes, renders and decodes text for one model directory.

    Raises DataError, InputError or CorruptFileError if a file of the directory is missing or unreadable."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = load_tokenizer(directory)
        self.fewest_tokens = FewestTokens(self.tokenizer)
        source, self._template_variables = read_chat_template(directory)
        self.has_template = source is not None
        self.call_format = format_of(source)
        self._reasoning = reasoning_of(source)
        self._template = ChatTemplate(source)
        self._template.start()
        decoder = self.tokenizer.decoder
        # Not from the tokenizer's to_str(), which writes out the whole vocabulary as well.
        self._byte_level = decoder is not None and '"ByteLevel"' in json.dumps(json.loads(decoder.__getstate__()))
        self.lengths: dict[bool, dict[int, int]] = {}
        """Shared by the detokenizers of all answers, which fill it."""
        self._bytes_of: dict[int, bytes] = {}
        self._special = {id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self._rendering = Turns("chat-template")
        self._tokenising, self._tokenising_long = Turns("tokenise"), Turns("tokenise-long")

    async def encode(
        self, texts: Sequence[str], param: str, special: bool, client: str = "", may_be_empty: bool = False
    ) -> list[list[int]]:
        """Token ids of each text. If ``special``, with the tokens that the tokenizer itself puts in front and behind.

        A thread helps, because the tokenizers library releases the interpreter. Raises ApiError 400."""
        _require_characters(texts, param)
        found = await self._tokenise(texts, lambda: self._encode(texts, special), client)
        if not (may_be_empty or all(found)):
            raise bad_request(f"{param} is empty: it has no token to continue from.", param)
        return found

    async def split(
        self, encoder: PairEncoder, pairs: Sequence[tuple[str, str]], client: str = ""
    ) -> list[tuple[list[int], int]]:
        """``encoder.split`` of each (prompt, text). Raises ApiError 400 and 500."""

        def all_of_them() -> list[tuple[list[int], int]]:
            try:
                return [encoder.split(*pair) for pair in pairs]
            except BaseException as error:
                raise tokenizer_failed(error) from None

        for name, texts in zip(("prompt", "text"), zip(*pairs, strict=True), strict=True):
            _require_characters(texts, name)
        return await self._tokenise([text for pair in pairs for text in pair], all_of_them, client)

    async def _tokenise(self, texts: Sequence[str], work: Callable[[], R], client: str) -> R:
        """The outcome of ``work``, which tokenises ``texts``: at once, or if they are long in a thread."""
        size = sum(map(len, texts))
        if size <= SHORT_TEXT:
            return work()
        return await (self._tokenising_long if size > LONG_TEXT else self._tokenising).run(client, work)

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """By ``encode_batch_fast``, because ``encode`` holds the interpreter, for which every other thread waits."""
        try:
            # One text at a time: the library spreads a batch over all cores, which the engine needs.
            return [self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids for text in texts]
        except BaseException as error:
            raise tokenizer_failed(error) from None

    async def decode(self, ids: Sequence[int], client: str = "") -> str:
        """The text of ``ids``, special tokens by their names. Raises ApiError 500."""

        def work() -> str:
            try:
                return str(self.tokenizer.decode(ids, skip_special_tokens=False))
            except BaseException as error:
                raise tokenizer_failed(error) from None

        return work() if len(ids) <= SHORT_TEXT else await self._tokenising_long.run(client, work)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None, client: str = ""
    ) -> str:
        """The text that the model's template makes of ``messages`` and ``variables``. Raises ApiError 400."""
        known = self._template_variables | dict(variables or {})
        try:
            return await self._rendering.run(client, lambda: self._template.render(messages, **known))
        except InputError as error:
            raise bad_request(str(error), "messages") from None

    @property
    def reasons(self) -> bool:
        """Whether the chat template knows of reasoning."""
        return self._reasoning is not None

    def reasoning_after(self, prompt: str) -> ReasoningFormat | None:
        """How the model writes its reasoning behind ``prompt``, a rendered conversation; None for one that writes none."""
        form = self._reasoning
        return form and replace(form, opened=prompt.rstrip().endswith(form.begin))

    def special_id(self, text: str) -> int | None:
        """The id of the special token that ``text`` is, if it is one."""
        found = self.tokenizer.token_to_id(text)
        return int(found) if found in self._special else None

    def adds_special(self, wanted: bool | None) -> bool:
        """Whether the tokenizer adds its special tokens to a chat. A template writes its special tokens itself."""
        return not self.has_template if wanted is None else wanted

    async def echo(self, prompt: str | list[int], ids: Sequence[int], special: bool, client: str = "") -> tuple[str, list[int]]:
        """The text of ``ids``, and the character at which each of them begins. They are the tokens of ``prompt`` or of its end.

        A prompt of text is repeated as it was written, because decoding its tokens may give another text."""
        return await self._tokenising_long.run(client, lambda: self._echo(prompt, ids, special))

    def _echo(self, prompt: str | list[int], ids: Sequence[int], special: bool) -> tuple[str, list[int]]:
        try:
            return self._offsets(prompt, ids, special)
        except BaseException as error:
            raise tokenizer_failed(error) from None

    def _offsets(self, prompt: str | list[int], ids: Sequence[int], special: bool) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            begins = [begin for begin, _ in self.tokenizer.encode_batch([prompt], add_special_tokens=special)[0].offsets]
            # The tokenizer gives the special tokens that it adds the place (0, 0): each takes that of the token before.
            begins = list(accumulate(begins, max))
            first = begins[-len(ids)] if len(ids) < len(begins) else 0
            return prompt[first:], [begin - first for begin in begins[-len(ids) :]]
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        pieces: list[str] = []
        offsets, length = [], 0
        for token in ids:
            offsets.append(length)
            pieces.append(detokenizer.add((token,)))
            length += len(pieces[-1])
        return "".join(pieces) + detokenizer.finish(), offsets

    def token_text(self, token_id: int) -> str:
        """The token alone as text, with U+FFFD for bytes that are not a whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of this token in a text. A special token stands for its own name."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._token_bytes(token_id)
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return str(token).encode()
        if self._byte_level:
            return bytes(_BYTE_OF_CHARACTER[c] for c in token if c in _BYTE_OF_CHARACTER)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace("▁", " ").encode()


def _require_characters(texts: Iterable[str], param: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad_request(f"{param} holds half of a surrogate pair, which is not a character.", param) from None


def tokenizer_failed(error: BaseException) -> ApiError:
    """The HTTP answer to an error of the tokenizers library, its panics included. Raises any other error again."""
    if isinstance(error, ApiError):
        return error
    return ApiError(500, f"the model's tokenizer failed on this text: {library_error(error)}.", code="tokenizer_error")


def _byte_of_character() -> dict[str, int]:
    """Inverse of GPT-2's printable alphabet for bytes (``bytes_to_unicode`` in openai/gpt-2's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
