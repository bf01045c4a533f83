"""Tells the reasoning of an answer from the rest, in the forms in which models write it, as its text comes."""

from __future__ import annotations

from dataclasses import dataclass

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning stands at the beginning of an answer, between ``begin`` and ``end``. ``opened``: the prompt has ``begin``."""

    begin: str
    end: str
    opened: bool = False


FORMATS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))
"""Qwen, DeepSeek, SmolLM and most others; Mistral."""


def reasoning_of(template: str | None) -> ReasoningFormat | None:
    """The format that a chat template teaches its model, if any."""
    return next((row for row in FORMATS if row.begin in (template or "") and row.end in (template or "")), None)


class ReasoningReader:
    """``add`` takes text and returns what is certain by now of the reasoning and of the rest; ``finish`` returns what was held.
    However the text is cut into pieces, the results make up the same. White space around the reasoning belongs to neither. An
    answer that ends within its reasoning is reasoning alone."""

    def __init__(self, form: ReasoningFormat) -> None:
        self._form = form
        self._held = ""
        self._begun = False  # some reasoning has been returned
        self._state = "inside" if form.opened else "before"

    def add(self, text: str) -> tuple[str, str]:
        if self._state == "rest":
            return "", text
        self._held += text
        if self._state == "before":
            written, begin = self._held.lstrip(_SPACE), self._form.begin
            if written.startswith(begin):
                self._state, self._held = "inside", written[len(begin) :]
            elif begin.startswith(written):
                return "", ""
            else:
                self._state = "rest"
                return "", self._take(len(self._held))
        reasoning = self._inside() if self._state == "inside" else ""
        if self._state == "behind":
            self._held = self._held.lstrip(_SPACE)
            if self._held:
                self._state = "rest"
                return reasoning, self._take(len(self._held))
        return reasoning, ""

    def finish(self) -> tuple[str, str]:
        held = self._take(len(self._held))
        return (held.rstrip(_SPACE), "") if self._state == "inside" else ("", held)

    def _inside(self) -> str:
        """The reasoning that is certain: not white space at its end, nor what may be the beginning of its end."""
        end = self._form.end
        if not self._begun:
            self._held = self._held.lstrip(_SPACE)
        at = self._held.find(end)
        if at >= 0:
            self._state = "behind"
            reasoning = self._take(at + len(end))[:at].rstrip(_SPACE)
        else:
            n = next(n for n in range(min(len(end) - 1, len(self._held)), -1, -1) if self._held.endswith(end[:n]))
            reasoning = self._take(len(self._held[: len(self._held) - n].rstrip(_SPACE)))
        self._begun = self._begun or bool(reasoning)
        return reasoning

    def _take(self, n: int) -> str:
        taken, self._held = self._held[:n], self._held[n:]
        return taken
