"""The process in which chat templates run, because they come with a model and are untrusted code.

``python -m twostroke.data.template_sandbox`` reads frames from the socket that is its standard input: first the template's
source, then a JSON object of variables for each text to render. ``data.chat.ChatTemplate`` is the other end. Jinja's immutable
sandbox keeps a template from files and from attributes that begin with an underscore. It does not bound memory and time: a
short expression can make gigabytes in a dozen ways (``+``, ``ljust``, ``format``, ``indent``, lists, powers). So the process
limits its address space, and an alarm ends it. It imports no torch.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

MAX_RENDERED_CHARACTERS = 16 * 2**20
MEMORY_BYTES = 256 * 2**20
"""Memory for compiling and rendering, beside the interpreter's. A template of Qwen3's size and 2 MB of messages take 20 MB."""
RENDER_S = 2.0
COMPILE_S = 5.0
"""Wall-clock limits. A template of Qwen3's size takes 16 ms to compile, once, and 0.03 ms to render."""
MAX_SENTENCE = 300

HEADER = struct.Struct("!cI")
"""Header of an answer: its kind, and the number of bytes of UTF-8 that follow (lone surrogates included)."""
TEXT, REFUSED, OUT_OF_MEMORY = b"t", b"r", b"m"
LENGTH = struct.Struct("!I")


def compile_template(source: str) -> Callable[[Mapping[str, Any]], str]:
    """Compile ``source`` to a function of its variables, in the dialect of transformers' ``apply_chat_template``.

    This function and the one that it returns raise whatever the template causes: MemoryError, RecursionError,
    jinja2.TemplateError, LookupError and others.
    """
    # Imported here, because the rest of this room runs with a bare PyTorch.
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %} … {% endgeneration %}`` marks answers for transformers. Its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    compiled = environment.from_string(source)

    def render(variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in compiled.generate(variables):
            length += len(piece)
            if length > MAX_RENDERED_CHARACTERS:
                raise OverflowError(f"it made more than {MAX_RENDERED_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)

    return render


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own tojson escapes HTML, and models were not trained on escaped text.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _answer(work: Callable[[], str], limit_s: float) -> tuple[bytes, str]:
    # The signal's default action ends the process inside any code of the template, even if the calling process has ended.
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return TEXT, work()
    except MemoryError:
        return OUT_OF_MEMORY, ""
    except Exception as error:  # a template can raise any exception
        message = str(getattr(error, "message", None) or error or type(error).__name__).rstrip(".")
        return REFUSED, message if len(message) <= MAX_SENTENCE else f"{message[:MAX_SENTENCE]}…"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory() -> None:
    """Limit the address space to ``MEMORY_BYTES`` above what the interpreter has mapped by now. On some systems locale files
    alone are 200 MB of that."""
    import jinja2.sandbox  # noqa: F401 - its memory must not count

    try:
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        mapped = 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def main() -> int:
    connection = socket.socket(fileno=0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    _limit_memory()
    with connection, connection.makefile("rb") as frames:

        def frame() -> bytes | None:
            head = frames.read(LENGTH.size)
            return frames.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else None

        def send(kind: bytes, text: str) -> None:
            raw = text.encode("utf-8", "surrogatepass")
            connection.sendall(HEADER.pack(kind, len(raw)) + raw)

        source = frame()
        if source is None:
            return 0
        found: list[Callable[[Mapping[str, Any]], str]] = []

        def compile_it() -> str:
            found.append(compile_template(source.decode("utf-8", "surrogatepass")))
            return ""

        kind, text = _answer(compile_it, COMPILE_S)
        send(kind, text)
        # The stream also ends when the calling process is killed.
        while kind == TEXT and (asked := frame()) is not None:
            send(*_answer(partial(found[0], json.loads(asked)), RENDER_S))
    return 0


if __name__ == "__main__":
    sys.exit(main())
