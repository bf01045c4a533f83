"""The loss mask of a conversation: only the assistant's tokens are learned."""

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
    """``text`` of a whole conversation, and the [begin, end) characters of each answer in it, with the answer's end token.

    ``n_unlearned`` answers are in the text but not in the spans (``ConversationTemplate.render`` says why).
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    n_unlearned: int = 0


@dataclass(frozen=True)
class ConversationTemplate:
    """A model's chat template as Jinja source (None: the plain default), with the variables that it may use."""

    source: str | None
    variables: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: tuple[str, ...] = ()

    def render(self, conversation: Conversation) -> Rendered:
        """Render ``conversation`` and find its answers.

        Each answer is found by rendering twice: once the messages before it with the generation prompt, which is what the model
        gets when it is asked, and once the same messages with the answer. The difference is the answer.

        Templates of reasoning models render an earlier answer differently from the last one, because they drop its thoughts.
        Such an answer has no span: it is counted and not learned. Raises InputError if the template refuses the messages, or if
        no answer begins with its generation prompt.
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
            spans.append((len(before), len(before) + self._answer_length(through[len(before) :])))
        if answers and not spans:
            raise InputError(
                "the chat template's generation prompt is not what stands before an answer, so the assistant's tokens cannot "
                "be found. Give another template as data.chat_template."
            )
        return Rendered(whole, tuple(spans), n_unlearned)

    def _answer_length(self, turn: str) -> int:
        """Length of an answer without the white space after its last special token. The model stops at that token, so it would
        never generate the white space."""
        stripped = turn.rstrip()
        return len(stripped) if stripped.endswith(self.special_tokens) else len(turn)

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: tuple[Any, ...], prompt: bool) -> str:
        more = {"tools": list(tools)} if tools else {}
        return render_chat(self.source, messages, add_generation_prompt=prompt, **self.variables, **more)


def assistant_mask(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """True for each token of the text that overlaps an answer. The text is tokenised in one piece, as a server tokenises it.

    Byte-level tokenizers leave leading white space out of a token's offsets, so each token is taken to begin where the previous
    one ended. A token that begins in the generation prompt and ends in the answer is learned; otherwise the answer's first word
    would not be.
    """
    learned, ended, waiting = [], 0, list(spans)
    for begin, end in encoding.offsets:
        start = min(begin, ended)
        ended = max(ended, end)
        while waiting and start >= waiting[0][1]:
            waiting.pop(0)
        # Tokens that a post-processor adds have the empty offsets (0, 0). No answer begins at 0, so they are in no span.
        learned.append(bool(waiting) and end > waiting[0][0])
    return learned
