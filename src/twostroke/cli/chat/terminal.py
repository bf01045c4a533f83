"""Reads messages and commands, and prints answers: at a terminal, or from a pipe one message a line."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from twostroke.cli.chat.conversation import DEFAULT, SETTABLE, Answer, Conversation, Message, harmless
from twostroke.cli.console import log
from twostroke.core.errors import CapacityError, InputError, TwostrokeError, did_you_mean
from twostroke.core.units import format_count, format_seconds

MAX_MESSAGE_CHARACTERS = 2**20
COMMANDS = {
    "/reset": "Forget what was said. The system prompt and the settings stay.",
    "/system TEXT": "Set the system prompt; without TEXT, remove it.",
    "/set NAME VALUE": f"Change a setting; {DEFAULT!r} as VALUE unsets it. Without a name, show all.",
    "/save FILE": "Write the conversation to a new file, as one line of JSON.",
    "/help": "Show this list.",
    "/quit": "End. So does Ctrl-D.",
}
TYPING = 'A line that ends with \\ goes on in the next. "//" begins a message with "/". Ctrl-C stops an answer.'
FULL = "Type /reset to begin anew, or /save FILE before that."


class Model(Protocol):
    """What answers. ``pieces`` may be closed, which stops the answer; an exception inside does so too if ``stops_at_once``."""

    @property
    def stops_at_once(self) -> bool: ...

    def pieces(
        self, messages: Sequence[Message], settings: Mapping[str, int | float], into: Answer
    ) -> Generator[str, None, None]: ...


class Chat:
    """Takes lines, each a command or a message. ``prints``: answers are written to stdout as they come. ``at_terminal``: Ctrl-C
    stops an answer, and no more than that."""

    def __init__(self, model: Model, conversation: Conversation, prints: bool, at_terminal: bool) -> None:
        self._model = model
        self._prints = prints
        self._at_terminal = at_terminal
        self.conversation = conversation
        self.answers: list[Answer] = []

    def take(self, line: str) -> Answer | None:
        """Obey ``line``, or answer it. None for a command. Raises EOFError for ``/quit``, and TwostrokeError, after which the
        conversation is as it was before."""
        if line.startswith("/") and not line.startswith("//"):
            self._obey(line)
            return None
        text = line[1:] if line.startswith("//") else line
        if len(text) > MAX_MESSAGE_CHARACTERS:
            raise InputError(f"a message may have {MAX_MESSAGE_CHARACTERS} characters.")
        return self._ask(text)

    def _ask(self, text: str) -> Answer:
        answer = Answer()
        pieces = self._model.pieces(self.conversation.with_message(text), self.conversation.settings, answer)
        stopping: contextlib.AbstractContextManager[Callable[[], bool]] = contextlib.nullcontext(lambda: False)
        if self._at_terminal:
            stopping = _ctrl_c(self._model.stops_at_once)
        shown = _Shown(self._prints)
        try:
            with contextlib.closing(pieces), stopping as pressed:
                for piece in pieces:
                    shown.write(piece)
                    if pressed():
                        break
        except _Stopped:
            pass
        except CapacityError as error:
            raise CapacityError(f"{error} {FULL}") from None
        finally:
            shown.end()
        if answer.finish_reason == "error":
            raise TwostrokeError("the model's output was not finite. Its weights may be damaged.")
        if answer.text or answer.finish_reason is not None:
            self.conversation.add(text, answer.text)
        self.answers.append(answer)
        return answer

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word:
            case "/help":
                listed = [f"{name:<16} {what}" for name, what in COMMANDS.items()]
                log("\n".join([*listed, f"Settings: {', '.join(SETTABLE)}.", TYPING]))
            case "/reset":
                self.conversation.messages.clear()
                log("The conversation is forgotten.")
            case "/system":
                self.conversation.system = rest
                log("The system prompt is set." if rest else "There is no system prompt.")
            case "/set":
                self._set(rest)
            case "/save":
                if not rest:
                    raise InputError("/save needs the name of a file.")
                self.conversation.save(Path(rest))
                log(f"Saved to {rest}.")
            case "/quit":
                raise EOFError
            case other:
                known = [name.partition(" ")[0] for name in COMMANDS]
                raise InputError(f"there is no command {other!r:.60}. {did_you_mean(other[:60], known)}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name and not value.strip():
            raise InputError(f"/set {name:.60} needs a value, or {DEFAULT!r}.")
        if name:
            self.conversation.set(name, value.strip())
        settings = self.conversation.settings
        log("\n".join(f"{each} = {settings.get(each, DEFAULT)}" for each in ([name] if name else SETTABLE)))


def at_terminal(chat: Chat) -> None:
    """Converse until Ctrl-D or ``/quit``. Errors are printed, and the conversation goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() a history and editing)
    while True:
        try:
            line = _typed()
            if not line.strip():
                log("The message is empty. /help lists the commands.")
            elif (answer := chat.take(line)) is not None:
                log(_told(answer))
        except EOFError:
            return
        except KeyboardInterrupt:
            log("\nCtrl-D or /quit ends.")
        except UnicodeDecodeError:
            log("error: this line is not UTF-8.")
        except TwostrokeError as error:
            log(f"error: {error}")


def from_pipe(chat: Chat) -> None:
    """Answer each line of stdin in one conversation. Raises TwostrokeError at the first line that cannot be answered, and
    InputError where stdin has no line."""
    is_empty = True
    try:
        while line := sys.stdin.readline(MAX_MESSAGE_CHARACTERS + 2):
            if line.strip():
                is_empty = False
                chat.take(line.rstrip("\r\n"))
    except UnicodeDecodeError:
        raise InputError("stdin is not UTF-8. Convert it.") from None
    except EOFError:
        return
    if is_empty:
        raise InputError("there is no message on stdin. Write one a line.")


def _typed() -> str:
    """The next message, of several lines if each but the last ends with a backslash."""
    line = _line("> ")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + _line(". ")
    return line


def _line(prompt: str) -> str:
    if not sys.stdout.isatty():  # input() would write its prompt among the answers
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    return input(prompt)


def _told(answer: Answer) -> str:
    parts = []
    if answer.output_tokens:
        parts.append(f"{answer.output_tokens} token{'' if answer.output_tokens == 1 else 's'}")
    if answer.ttft_s is not None:
        parts.append(f"first after {format_seconds(answer.ttft_s)}")
        if answer.output_tokens > 1 and answer.elapsed_s > answer.ttft_s:
            rate = (answer.output_tokens - 1) / (answer.elapsed_s - answer.ttft_s)
            parts.append(f"then {format_count(rate)} a second")
    if answer.is_full:
        parts.append(f"the context is full. {FULL}")
    else:
        ends = {None: "stopped", "length": "cut at max_tokens", "timeout": "out of time"}
        parts += [ends[answer.finish_reason]] if answer.finish_reason in ends else []
    return f"[{', '.join(parts)}]"


class _Shown:
    """Writes an answer to stdout, if ``prints``, and ends it with a line."""

    def __init__(self, prints: bool) -> None:
        self._prints = prints
        self._at_terminal = sys.stdout.isatty()
        self._any = False

    def write(self, piece: str) -> None:
        if self._prints and piece:
            print(harmless(piece) if self._at_terminal else piece, end="", flush=True)
            self._any = True

    def end(self) -> None:
        if self._any:
            print(flush=True)


class _Stopped(KeyboardInterrupt):
    """Ctrl-C, raised where the answer waits."""


@contextlib.contextmanager
def _ctrl_c(at_once: bool) -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C stops the answer: by an exception if ``at_once``, else through the function that the context gives,
    which is called after each piece. A second one before that raises KeyboardInterrupt."""
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if at_once:
            raise _Stopped
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
