"""The text side of a served model: tokenizer, chat template, and what one token looks like. No torch."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from twostroke.core.errors import InputError
from twostroke.data.chat import read_chat_template, render_chat
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.server.errors import bad_request

LONG_TEXT = 20_000
"""Characters above which a text is tokenised in a thread (the tokenizers library lets go of the interpreter meanwhile)."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ModelText:
    """Raises DataError, InputError or CorruptFileError where a file of the model directory is missing or unreadable."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = load_tokenizer(directory)
        self.vocab_size: int = self.tokenizer.get_vocab_size()
        self._template, self._template_variables = read_chat_template(directory)
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(self.tokenizer.to_str()).get("decoder"))
        self._bytes_of: dict[int, bytes] = {}
        self._special = {id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}

    async def encode(self, text: str, param: str, special: bool) -> list[int]:
        """Token ids, with what the tokenizer itself puts in front and behind where ``special``. Raises ApiError 400."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad_request(f"{param} holds half of a surrogate pair, which is no character.", param) from None
        if len(text) > LONG_TEXT:
            ids = await asyncio.to_thread(self._encode, text, special)
        else:
            ids = self._encode(text, special)
        if not ids:
            raise bad_request(f"{param} is empty: it has no token to continue from.", param)
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], special: bool | None = None) -> list[int]:
        """Messages through the model's template, which writes its own special tokens (``special`` None: so the tokenizer's come
        only where there is no template). Raises ApiError 400."""
        try:
            text = render_chat(self._template, messages, add_generation_prompt=True, **self._template_variables)
        except InputError as error:
            raise bad_request(str(error), "messages") from None
        return await self.encode(text, "messages", special=self._template is None if special is None else special)

    async def echo(self, prompt: str | list[int], ids: Sequence[int], special: bool) -> tuple[str, list[int]]:
        """The text of ``ids``, which ``prompt`` or its end became, and where in it each of them begins, in characters.

        A prompt of text is repeated as it was written, which its tokens need not give back."""
        return await asyncio.to_thread(self._echo, prompt, ids, special)

    def _echo(self, prompt: str | list[int], ids: Sequence[int], special: bool) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            begins = [begin for begin, _ in self.tokenizer.encode(prompt, add_special_tokens=special).offsets]
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


def _byte_of_character() -> dict[str, int]:
    """Inverse of GPT-2's printable alphabet for bytes (``bytes_to_unicode`` in openai/gpt-2's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
