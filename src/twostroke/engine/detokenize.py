"""Turns token ids into text as they come, without half characters and without parts of stop strings. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import Any

from twostroke.scheduling.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not UTF-8, or not yet."""

CONTEXT_TOKENS = 6
"""The answer is decoded behind so many tokens of the prompt: some decoders drop the space before a text's first word."""

_LONG_PENDING = 32  # ids; a window this long with no whole text in it is shortened
_ENDS = (1, 2, 3, 4, 16)
"""So many ids may stay as context. A character has at most 4 bytes, each perhaps a token; 16 for last ids without text."""
_MOST_LENGTHS = 2**14  # then all are forgotten, so that a server that runs for weeks keeps no table of its vocabulary


class IncrementalDetokenizer:
    """``add`` takes ids and returns the text that is certain by now; ``finish`` returns the rest. The pieces make up the text.

    Text is certain once no later token can change it: its last character is complete, and its end cannot become a stop string.
    At a stop string ``stopped`` is set, the text ends before it (behind it with ``keep_stop``), and further ids are ignored.
    The first ``min_tokens`` tokens are not searched. ``hidden_ids`` have no text; special tokens have none either, unless
    ``keep_special``.

    For each new id a window of ids is decoded again. It starts where the text was last whole (the method of TGI and vLLM), so a
    token of a long answer costs no more than one of a short answer. Ids that come together are decoded together if there are no
    stop strings and their text is whole. ``lengths`` remembers how long the texts of single tokens are. Answers of one
    tokenizer and one ``keep_special`` may share it, and then decode once a token instead of twice.
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
        self._read = len(self._ids)  # the ids before this one were whole text at the last look
        self._sent = len(self._decode(self._ids).rstrip(REPLACEMENT))  # characters of the window that have left it
        self._whole = False  # all of the window's text has left it, so its beginning is no longer needed
        self._held = ""  # text that has left the window, but may be the beginning of a stop string
        self._begun = [0] * len(self._stop)  # how many of the held characters begin each stop string
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
        """A detokenizer as ``params`` ask for. Tokens that end the answer have no text, unless ``include_stop_str_in_output``.
        ``lengths`` has one table for each value of ``skip_special_tokens``."""
        keep_stop = params.include_stop_str_in_output
        hidden = () if keep_stop else (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        skip, shared = params.skip_special_tokens, None
        if lengths is not None:
            shared = lengths.setdefault(skip, {})
        return cls(tokenizer, params.stop, hidden, params.min_tokens, prompt_ids, not skip, keep_stop, shared)

    def fork(self) -> IncrementalDetokenizer:
        """One that goes on from the same ids by itself."""
        made = copy(self)
        made._ids = self._ids.copy()
        return made

    def add(self, token_ids: Iterable[int]) -> str:
        """Take ``token_ids``, and return the text that has become certain."""
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
        """The rest of the text. No more tokens come, so an incomplete character becomes U+FFFD."""
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
        """The new part of ``text``, which is that of ``ids``, the window from now on."""
        new = text[self._sent :]
        self._ids, self._read, self._sent, self._whole = ids, len(ids), len(text), True
        return new

    def _keep_end(self) -> None:
        """Once all of the window's text has left it, keep only the last ids that have a whole text, as context of the next."""
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
        if len(self._ids) > _LONG_PENDING:  # only tokens without text: keep the last 16
            self._ids, self._read = self._ids[-n:], n
            self._sent = len(self._decode(self._ids))

    def _length(self, ids: list[int]) -> int:
        """How many characters ``ids`` have as a text of their own; 0 if that is not whole."""
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
        """The text that the last id added, as far as later bytes cannot change it."""
        text = self._decode(self._ids)
        pending = len(self._ids) - self._read
        if not text.endswith(REPLACEMENT):
            return self._pass_on(self._ids, text)
        # A character has at most 4 bytes, so at most 3 bytes wait for its last one, and what stands before them is final. For
        # them some decoders write one U+FFFD a byte and others a single one. A short wait costs nothing and is the usual case.
        if pending <= 4:
            return ""
        stable = text[:-1].rstrip(REPLACEMENT) if text[-4:] != 4 * REPLACEMENT else text[:-3]
        new = stable[self._sent :]
        self._sent = max(self._sent, len(stable))
        if pending > _LONG_PENDING:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Drop a beginning of the window that decodes to the same text alone. Without this, n broken bytes would cost n²."""
        if not self._decode(self._ids[-1:]) and self._decode(self._ids[:-1]) == text:
            self._ids.pop()  # it has no text, alone or here; any number of such tokens may follow half a character
            return
        for kept in range(4, 9):
            head, tail = self._ids[:-kept], self._ids[-kept:]
            start = self._decode(head)
            if start + self._decode(tail) == text and len(start) <= self._sent:
                self._ids, self._read, self._sent = tail, 0, self._sent - len(start)
                return

    def _release(self, text: str) -> str:
        """The part of ``text`` before what may be the beginning of a stop string. Ends the answer at a whole stop string."""
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
    """Length of the longest end of ``text`` that is a beginning of ``stop``. The search starts at ``at``, where the last such
    end began: nothing before it is searched again, so a long stop string costs a token no more than a short one."""
    at = max(at, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
