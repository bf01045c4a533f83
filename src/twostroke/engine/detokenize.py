"""Token ids to text as they come: never half a character, never any part of a stop string. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from twostroke.scheduling.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no UTF-8 (yet)."""

CONTEXT_TOKENS = 6
"""Prompt tokens that the first text is decoded after: some decoders drop the space in front of a text's first word."""

_LONG_PENDING = 32
_ENDS = (1, 2, 3, 4, 16)
"""Ids that may stay as context: a character has at most 4 bytes, each perhaps a token; more where the last have no text."""
_MOST_LENGTHS = 2**14


class IncrementalDetokenizer:
    """``add`` ids, get the text that is certain by now; ``finish`` gives what is left. Pieces joined are the whole text.

    Text is certain once no later token can change it: its last character is complete and its end is no beginning of a stop
    string. At a stop string ``stopped`` is set, the text ends before it, and further ids are ignored; nothing of the first
    ``min_tokens`` tokens is searched. ``hidden_ids`` have no text, nor have special tokens unless ``keep_special``;
    ``keep_stop``: the text ends behind the stop string.

    The window of ids that is decoded again for each new one starts where the text was last whole (the method of TGI and vLLM),
    so a long answer costs no more a token than a short one. Ids that come together are decoded together where no stop string
    is looked for and their text is whole. ``lengths`` remembers how long single tokens' texts are: answers that share it, of
    one tokenizer and one ``keep_special``, decode once a token and not twice.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        hidden_ids: Collection[int] = (),
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        keep_special: bool = False,
        keep_stop: bool = False,
        lengths: dict[int, int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._lengths = {} if lengths is None else lengths
        self._skip_special = not keep_special
        self._keep_stop = keep_stop
        self._stop = tuple(stop)
        self._hidden = frozenset(hidden_ids)
        self._min_tokens = min_tokens
        self._ids: list[int] = list(prompt_ids[-CONTEXT_TOKENS:])
        self._read = len(self._ids)  # ids up to here were whole text when it was last looked at
        self._sent = len(self._decode(self._ids).rstrip(REPLACEMENT))  # characters of the window that were passed on
        self._whole = False  # all of the window's text was passed on, and its beginning is no longer needed
        self._held = ""  # passed on by the window, but perhaps the beginning of a stop string
        self._begun = [0] * len(self._stop)  # of each stop string: how many of the characters held are its beginning
        self.n_tokens = 0
        self.stopped = False
        self.stop_string: str | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        prompt_ids: Sequence[int],
        lengths: dict[bool, dict[int, int]] | None = None,
    ) -> IncrementalDetokenizer:
        """As ``params`` ask for: the tokens that end the answer have no text, unless ``include_stop_str_in_output``.
        ``lengths`` are those of each ``skip_special_tokens``."""
        keep_stop = params.include_stop_str_in_output
        hidden = () if keep_stop else (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        skip, shared = params.skip_special_tokens, None
        if lengths is not None:
            shared = lengths.setdefault(skip, {})
        return cls(tokenizer, params.stop, hidden, params.min_tokens, prompt_ids, not skip, keep_stop, shared)

    def add(self, token_ids: Iterable[int]) -> str:
        """Text that became certain with ``token_ids``."""
        ids = list(token_ids)
        if len(ids) > 1 and not self._stop:
            self._keep_end()
            grown = self._ids + [token for token in ids if token not in self._hidden]
            whole = self._decode(grown)
            if REPLACEMENT not in whole:
                self.n_tokens += len(ids)
                return self._pass_on(grown, whole)
        text = ""
        for token in ids:
            if self.stopped:
                break
            self.n_tokens += 1
            if token not in self._hidden:
                self._keep_end()
                self._ids.append(token)
                text += self._release(self._grown_text())
        return text

    def finish(self) -> str:
        """The rest: no token comes any more, so an incomplete character stands as U+FFFD."""
        if self.stopped:
            return ""
        rest = "" if self._whole else self._decode(self._ids)[self._sent :]
        self._sent += len(rest)
        text = self._release(rest) + self._held
        self._held = ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)) if ids else ""

    def _pass_on(self, ids: list[int], text: str) -> str:
        """What of ``text``, the window's, is new; ``ids`` are the window now."""
        new = text[self._sent :]
        self._ids, self._read, self._sent, self._whole = ids, len(ids), len(text), True
        return new

    def _keep_end(self) -> None:
        """Of a window whose text was passed on, keep only its last ids that have a whole text: the context of the next."""
        if not self._whole:
            return
        self._whole = False
        for n in _ENDS:
            if n >= len(self._ids):
                return
            length = self._length(self._ids[-n:])
            if length:
                self._ids, self._read, self._sent = self._ids[-n:], n, length
                return
        if len(self._ids) > _LONG_PENDING:  # nothing but tokens without text
            self._ids, self._read = self._ids[-n:], n
            self._sent = len(self._decode(self._ids))

    def _length(self, ids: list[int]) -> int:
        """Characters of their text alone; 0 where it is not whole."""
        known = self._lengths.get(ids[0]) if len(ids) == 1 else None
        if known is None:
            text = self._decode(ids)
            known = 0 if REPLACEMENT in text else len(text)
            if len(ids) == 1:
                if len(self._lengths) >= _MOST_LENGTHS:
                    self._lengths.clear()
                self._lengths[ids[0]] = known
        return known

    def _grown_text(self) -> str:
        """What the last id added, as far as later bytes cannot change it."""
        text = self._decode(self._ids)
        pending = len(self._ids) - self._read
        if not text.endswith(REPLACEMENT):
            return self._pass_on(self._ids, text)
        # A character has at most 4 bytes, so at most 3 may wait for their last; what stands before them is final. Decoders
        # that write one U+FFFD a byte show 3, others 1. Waiting is free while it is short, and is the usual case.
        if pending <= 4:
            return ""
        stable = text[:-1].rstrip(REPLACEMENT) if text[-4:] != 4 * REPLACEMENT else text[:-3]
        new = stable[self._sent :]
        self._sent = max(self._sent, len(stable))
        if pending > _LONG_PENDING:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Drop a beginning of the window that decodes the same alone: a stream of broken bytes must not cost its square."""
        if not self._decode(self._ids[-1:]) and self._decode(self._ids[:-1]) == text:
            self._ids.pop()  # no text of its own and none here: such tokens could follow half a character without end
            return
        for kept in range(4, 9):
            head, tail = self._ids[:-kept], self._ids[-kept:]
            start = self._decode(head)
            if start + self._decode(tail) == text and len(start) <= self._sent:
                self._ids, self._read, self._sent = tail, 0, self._sent - len(start)
                return

    def _release(self, text: str) -> str:
        """Pass ``text`` on up to what may be a stop string's beginning; end at a whole one."""
        if not self._stop or (self.n_tokens <= self._min_tokens and not self._held):
            return text
        held = len(self._held)
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0]
        if found:
            at, self.stop_string = min(found)
            self.stopped = True
            self._held = ""
            return text[: at + len(self.stop_string)] if self._keep_stop else text[:at]
        self._begun = [_overlap(text, stop, held - begun) for stop, begun in zip(self._stop, self._begun, strict=True)]
        n_held = max(self._begun)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def _overlap(text: str, stop: str, at: int) -> int:
    """Length of the longest end of ``text`` that begins ``stop``; it begins at ``at`` or later, where the last one began.

    So whatever is passed over is not looked at again, and a long stop string costs no more a token than a short one."""
    at = max(at, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
