"""The text side of a served model: tokenizer, chat template, and what one token looks like. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from twostroke.core.errors import InputError
from twostroke.data.chat import ChatTemplate, read_chat_template
from twostroke.data.fewest_tokens import FewestTokens
from twostroke.data.tokenizer import library_error, load_tokenizer
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.turns import Turns

SHORT_TEXT = 1_000
"""Characters up to which texts are tokenised on the event loop: it takes 0.4 ms, a thread's turn 0.1 ms and more."""
LONG_TEXT = 20_000
"""Characters above which texts are tokenised one at a time, by clients' turns, so that the others do not wait for them."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ModelText:
    """Raises DataError, InputError or CorruptFileError where a file of the model directory is missing or unreadable."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = load_tokenizer(directory)
        self.fewest_tokens = FewestTokens(self.tokenizer)
        source, self._template_variables = read_chat_template(directory)
        self._has_template = source is not None
        self._template = ChatTemplate(source)
        self._template.start()
        decoder = self.tokenizer.decoder
        # Not by the tokenizer's to_str(), which writes out the vocabulary to say it.
        self._byte_level = decoder is not None and '"ByteLevel"' in json.dumps(json.loads(decoder.__getstate__()))
        self.lengths: dict[bool, dict[int, int]] = {}
        """Shared by the detokenizers of all answers."""
        self._bytes_of: dict[int, bytes] = {}
        self._special = {id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self._rendering = Turns("chat-template")
        self._tokenising, self._tokenising_long = Turns("tokenise"), Turns("tokenise-long")

    async def encode(self, texts: Sequence[str], param: str, special: bool, client: str = "") -> list[list[int]]:
        """Token ids of each text, with what the tokenizer itself puts in front and behind where ``special``.

        The tokenizers library lets go of the interpreter meanwhile. Raises ApiError 400."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise bad_request(f"{param} holds half of a surrogate pair, which is not a character.", param) from None
        size = sum(map(len, texts))
        if size <= SHORT_TEXT:
            found = self._encode(texts, special)
        else:
            turns = self._tokenising_long if size > LONG_TEXT else self._tokenising
            found = await turns.run(client, lambda: self._encode(texts, special))
        if not all(found):
            raise bad_request(f"{param} is empty: it has no token to continue from.", param)
        return found

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Not by ``encode``, which keeps every other thread of the process waiting until it is done."""
        try:
            # One at a time: the library would spread a batch over all cores, which are the engine's.
            return [self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids for text in texts]
        except BaseException as error:
            raise tokenizer_failed(error) from None

    async def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None, client: str = ""
    ) -> str:
        """Messages through the model's template, which also reads ``variables``. Raises ApiError 400."""
        known = self._template_variables | dict(variables or {})
        try:
            return await self._rendering.run(client, lambda: self._template.render(messages, **known))
        except InputError as error:
            raise bad_request(str(error), "messages") from None

    def adds_special(self, wanted: bool | None) -> bool:
        """Whether the tokenizer's own tokens surround a chat: a template writes its special tokens itself."""
        return not self._has_template if wanted is None else wanted

    async def echo(self, prompt: str | list[int], ids: Sequence[int], special: bool, client: str = "") -> tuple[str, list[int]]:
        """The text of ``ids``, which ``prompt`` or its end became, and where in it each of them begins, in characters.

        A prompt of text is repeated as it was written, which its tokens need not give back."""
        return await self._tokenising_long.run(client, lambda: self._echo(prompt, ids, special))

    def _echo(self, prompt: str | list[int], ids: Sequence[int], special: bool) -> tuple[str, list[int]]:
        try:
            return self._offsets(prompt, ids, special)
        except BaseException as error:
            raise tokenizer_failed(error) from None

    def _offsets(self, prompt: str | list[int], ids: Sequence[int], special: bool) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            begins = [begin for begin, _ in self.tokenizer.encode_batch([prompt], add_special_tokens=special)[0].offsets]
            # A special token that the tokenizer added stands at (0, 0), wherever it is.
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
        """The token alone as text, U+FFFD where it is no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for in a text; a special token stands for its own name."""
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


def tokenizer_failed(error: BaseException) -> ApiError:
    """What the tokenizers library raised, its panics included, as an answer. Any other error is raised again."""
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
