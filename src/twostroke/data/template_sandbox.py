"""The process in which chat templates run, because they come with a model and are untrusted code.

The first frame that it reads (``data.sandbox``) is the template's source, every other one a JSON object of variables for a text
to render. ``data.chat.ChatTemplate`` is the other end. Jinja's immutable sandbox keeps a template from files and from
attributes that begin with an underscore. It does not bound memory and time: a short expression can make gigabytes in a dozen
ways (``+``, ``ljust``, ``format``, ``indent``, lists, powers). So the process limits both. It imports no torch.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from twostroke.data.sandbox import Work, serve

MAX_RENDERED_CHARACTERS = 16 * 2**20
RENDER_S = 2.0
COMPILE_S = 5.0
"""Wall-clock limits. A template of Qwen3's size takes 16 ms to compile, once, and 0.03 ms to render."""


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


def main() -> int:
    import jinja2.sandbox  # noqa: F401 - its memory must not count

    found: list[Callable[[Mapping[str, Any]], str]] = []

    def compile_it(source: bytes) -> Work:
        def work() -> str:
            found.append(compile_template(source.decode("utf-8", "surrogatepass")))
            return ""

        return work, COMPILE_S

    def render(asked: bytes) -> Work:
        return lambda: found[0](json.loads(asked)), RENDER_S

    serve(compile_it, render)
    return 0


if __name__ == "__main__":
    sys.exit(main())
