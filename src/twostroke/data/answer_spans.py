"""Which tokens of a rendered conversation are the assistant's: those alone are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Encoding

from twostroke.core.errors import InputError
from twostroke.data.chat import render_chat
from twostroke.data.conversation_layouts import Conversation


@dataclass(frozen=True)
class Rendered:
    """``text`` of a whole conversation and the [begin, end) of what the assistant wrote in it, its end of turn included.

    ``n_unlearned`` answers are in the text but not in the spans, see ``ConversationTemplate.render``.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    n_unlearned: int = 0


@dataclass(frozen=True)
class ConversationTemplate:
    """A model's chat template, as Jinja source (None: the plain default) with the variables it may name."""

    source: str | None
    variables: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: tuple[str, ...] = ()

    def render(self, conversation: Conversation) -> Rendered:
        """Where an answer is, follows from rendering twice: the messages before it with the generation prompt, which is what
        the model will be given when it is asked, and the same with the answer.

        A template that renders an earlier answer otherwise than the last one (as those of reasoning models, which drop
        earlier thoughts) shows no such spans for it: then it is left unlearned and counted. Raises InputError where the
        template refuses the messages or its generation prompt leads up to no answer.
        """
        messages = conversation.messages
        whole = self._text(messages, conversation.tools, prompt=False)
        spans, n_unlearned = [], 0
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        for i in answers:
            before = self._text(messages[:i], conversation.tools, prompt=True)
            through = whole if i == len(messages) - 1 else self._text(messages[: i + 1], conversation.tools, prompt=False)
            if not whole.startswith(through) or not through.startswith(before):
                n_unlearned += 1
                continue
            spans.append((len(before), len(before) + self._turn_length(through[len(before) :])))
        if answers and not spans:
            raise InputError(
                "the chat template's generation prompt is not what stands before an answer, so the assistant's tokens cannot "
                "be told apart. Give another template as data.chat_template."
            )
        return Rendered(whole, tuple(spans), n_unlearned)

    def _turn_length(self, turn: str) -> int:
        """Without white space behind the turn's last special token: the model stops at that token and never writes it."""
        stripped = turn.rstrip()
        return len(stripped) if stripped.endswith(self.special_tokens) else len(turn)

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: tuple[Any, ...], prompt: bool) -> str:
        more = {"tools": list(tools)} if tools else {}
        return render_chat(self.source, messages, add_generation_prompt=prompt, **self.variables, **more)


def learned_tokens(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """For each token of a whole text, tokenised at once as a server does, whether any of it is the assistant's.

    Byte-level tokenizers leave leading white space out of a token's offsets, so a token is taken to begin where the one
    before it ended. One that begins in the generation prompt is learned, or the answer's first word never would be.
    """
    learned, ended, waiting = [], 0, list(spans)
    for begin, end in encoding.offsets:
        start = min(begin, ended)
        ended = max(ended, end)
        while waiting and start >= waiting[0][1]:
            waiting.pop(0)
        # What a post-processor adds has the empty offsets (0, 0); a prompt is never empty, so it is in no span.
        learned.append(bool(waiting) and end > waiting[0][0])
    return learned
