"""Calls in an answer's text: every format, whatever else stands there, and however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.server.tool_calls import FORMATS, ID_CHARACTERS, CallReader, format_of

FORM = {form.name: form for form in FORMATS}
Read = tuple[str, list[tuple[str, str]]]


def read(form: str, pieces: list[str]) -> Read:
    """Content, and (name, arguments) of each call."""
    reader = CallReader(FORM[form])
    content, calls, ids = "", dict[int, list[str]](), set[str]()
    for found in [*map(reader.add, pieces), reader.finish()]:
        content += found.content
        for call in found.calls:
            assert (call.name is not None) == (call.index not in calls), "a name is sent once, and first"
            if call.name is not None:
                assert call.id is not None
                assert len(call.id) == ID_CHARACTERS
                ids.add(call.id)
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    assert sorted(calls) == list(range(reader.n_calls))
    assert len(ids) == len(calls)
    return content, [(name, arguments) for name, arguments in calls.values()]


ARGUMENTS = '{"a": "}\\"<tool_call>", "b": [1, {"c": 2}]}'
HERMES = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXTS: list[tuple[str, str, Read]] = [
    ("hermes", f"I look.\n{HERMES}\n", ("I look.", [("f", ARGUMENTS)])),
    (
        "hermes",
        HERMES + '\n<tool_call>{"arguments": {"x":1}, "name": "g"}</tool_call>',
        ("", [("f", ARGUMENTS), ("g", '{"x":1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> Done.', (" Done.", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} <tool_call>', (" <tool_call>", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut o', ("", [("f", '{"a": "cut o')])),
    ("hermes", '<tool_call>{"name": "f", "argum', ('<tool_call>{"name": "f", "argum', [])),
    ("hermes", "a <tool <tool_call>x</tool_call> b \n", ("a <tool <tool_call>x</tool_call> b \n", [])),
    ("hermes", '<tool_call>{"n<tool_call>{"name": "f", "arguments": null}</tool_call>', ('<tool_call>{"n', [("f", "null")])),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": []}}]',
        ("", [("f", "{}"), ("g", '{"a": []}')]),
    ),
    ("mistral", 'Hi [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}]', ("Hi", [("f", "{}")])),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', ('[TOOL_CALLS]f{"a": 1}', [])),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        ("", [("f", "{}"), ("g", "{}")]),
    ),
    ("llama", '{"name": "Alice", "age": 3}', ('{"name": "Alice", "age": 3}', [])),
    ("llama", 'So: {"name": "f", "parameters": {}}', ('So: {"name": "f", "parameters": {}}', [])),
]


@pytest.mark.parametrize(("form", "text", "expected"), TEXTS)
def test_calls_and_content_are_told_apart(form: str, text: str, expected: Read) -> None:
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected


WORDS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '{"name": "f", ',
        '"arguments": ',
        '"parameters": ',
        '"name"',
        '{"a": "\\"}"}',
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        ":",
        '"',
        "\\",
        " ",
        "\n",
        "<",
        "text",
        "1",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORM)), st.lists(WORDS, max_size=14), st.data())
def test_the_cuts_of_a_text_change_nothing(form: str, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == read(form, [text])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FORM)),
    st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.none()), min_size=1, max_size=3),
)
def test_what_a_template_writes_is_read_back(form: str, arguments: list[dict[str, str | None]]) -> None:
    row = FORM[form]
    written = [json.dumps({"name": f"f{i}", row.arguments: each}, ensure_ascii=False) for i, each in enumerate(arguments)]
    text = f"[TOOL_CALLS][{', '.join(written)}]" if row.in_list else "; ".join(written)
    if row.after:
        text = "\n".join(f"{row.before}\n{each}\n{row.after}" for each in written)
    content, calls = read(form, [text])
    assert content == ""
    assert [(name, json.loads(raw)) for name, raw in calls] == [(f"f{i}", each) for i, each in enumerate(arguments)]


def test_a_template_tells_the_format() -> None:
    assert format_of("{% if tools %}<tool_call>{% endif %}") is FORM["hermes"]
    assert format_of("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]") is FORM["mistral"]
    assert format_of("{% if tools is not none %}<|python_tag|>{% endif %}") is FORM["llama"]
    assert format_of("<tool_call>{{ messages }}") is format_of("{{ tools }}") is format_of(None) is None
