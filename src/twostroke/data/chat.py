"""Chat messages to the text a model was trained on, by the model's own Jinja template or a plain default."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twostroke.core.errors import CorruptFileError, InputError

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For models without a template, base models above all: ``User: …``, a line each, then ``Assistant:`` to be continued."""

MAX_RENDERED_CHARACTERS = 16 * 2**20
MAX_TEMPLATE_CHARACTERS = 2**20
MAX_CONFIG_BYTES = 16 * 2**20
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """``messages`` rendered by ``template`` (``DEFAULT_TEMPLATE`` for None), as transformers' ``apply_chat_template`` does.

    ``variables`` are what templates expect beside the messages: ``bos_token``, ``eos_token``, ``tools`` and the like. The
    template comes with a model, so it is foreign code: it runs in Jinja's immutable sandbox, without files or attributes
    that begin with an underscore, and what it builds is limited to 16 Mi characters. Its run time is not limited.
    Raises InputError where the template is broken or refuses the messages.
    """
    # Imported here: this room runs with a bare PyTorch, where nobody renders chats.
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    if template is not None and len(template) > MAX_TEMPLATE_CHARACTERS:
        raise InputError(f"chat template has {len(template)} characters; the most is {MAX_TEMPLATE_CHARACTERS}.")

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Refuse what makes gigabytes from a few characters: repetition, powers, formatting to a width."""
            plain = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "*" and not plain:
                sizes = [len(x) if hasattr(x, "__len__") else abs(int(x)) for x in (left, right)]
                if sizes[0] * sizes[1] > MAX_RENDERED_CHARACTERS:
                    raise jinja2.TemplateError("a repetition makes more than the limit")
            if (operator == "**" and (abs(left) > 2**31 or abs(right) > 64)) or (operator == "%" and not plain):
                raise jinja2.TemplateError(f"operator {operator} is not allowed on these values")
            return super().call_binop(context, operator, left, right)

    class Generation(jinja2.ext.Extension):
        """``{% generation %} … {% endgeneration %}``, which marks answers for transformers: what is in it is rendered."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        compiled = environment.from_string(DEFAULT_TEMPLATE if template is None else template)
        pieces: list[str] = []
        length = 0
        for piece in compiled.generate(messages=list(messages), add_generation_prompt=add_generation_prompt, **variables):
            length += len(piece)
            if length > MAX_RENDERED_CHARACTERS:
                raise InputError(f"the chat template made more than {MAX_RENDERED_CHARACTERS} characters.")
            pieces.append(piece)
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template does not take these messages: {error.message or type(error).__name__}.") from None
    except (
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        OverflowError,
        ZeroDivisionError,
        RecursionError,
        MemoryError,
    ) as error:
        raise InputError(f"the chat template does not take these messages: {error}.") from None
    return "".join(pieces)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own tojson escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def read_chat_template(directory: Path) -> tuple[str | None, dict[str, Any]]:
    """The template (``chat_template.jinja``, else ``tokenizer_config.json``) and the special tokens it may name.

    None where the model has none. Raises CorruptFileError where a file cannot be read.
    """
    variables: dict[str, Any] = {}
    template: str | None = None
    config_file, template_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    if config_file.is_file():
        try:
            config = json.loads(read_template_file(config_file))
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"{config_file} is not valid JSON: {error}.") from None
        if not isinstance(config, dict):
            raise CorruptFileError(f"{config_file} must hold a JSON object.")
        for name in _SPECIAL_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[name] = token
        found = config.get("chat_template")
        if isinstance(found, list):  # several named templates: "default" is the one for plain chats
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        template = found if isinstance(found, str) else None
    if template_file.is_file():
        template = read_template_file(template_file)
    return template, variables


def read_template_file(file: Path) -> str:
    """A template or configuration as text. Raises CorruptFileError."""
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise CorruptFileError(f"{file} is over {MAX_CONFIG_BYTES} bytes.")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{file} cannot be read as UTF-8 text ({type(error).__name__}).") from None
