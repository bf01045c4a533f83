"""Tools, reasoning and forms in messages, responses and chats: an engine that writes what it is told, and the unmodified
clients, sync and async."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served, echo_server, named_events, until

from twostroke.data.tokenizer import load_tokenizer
from twostroke.server.reasoning import FORMATS, ReasoningFormat, ReasoningReader, reasoning_of

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
ANTHROPIC_TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
OPENAI_TOOL: Any = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": False}
USER: Any = {"role": "user", "content": "x"}
HERE = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
THERE = HERE.replace("here", "é")
BOTH = f"I look.\n{HERE}\n{THERE}"
THOUGHT = "<think>\nHm, </thin\n</think>\n\n"


@pytest.fixture(scope="module")
def told(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Callable[[str], None]]]:
    """A server, and a function that tells its engine what to write."""
    folder = tmp_path_factory.mktemp("told")
    model, script = folder / "model", folder / "script"
    shutil.copytree(echo_model, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    tokenizer = load_tokenizer(model)

    def say(text: str) -> None:
        script.write_text(json.dumps(tokenizer.encode(text, add_special_tokens=False).ids))

    with echo_server(model, folder, ["--engine=--say", f"--engine={script}"]) as served:
        yield served, say


@pytest.fixture
def url(told: tuple[Served, Any]) -> str:
    return told[0].url


@pytest.fixture
def say(told: tuple[Served, Callable[[str], None]]) -> Callable[[str], None]:
    return told[1]


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def without_ids(found: Any) -> Any:
    """Ids of answers, items and calls are every answer's own."""
    if isinstance(found, dict):
        return {name: without_ids(value) for name, value in found.items() if name not in ("id", "call_id", "created_at")}
    return [without_ids(value) for value in found] if isinstance(found, list) else found


def tokens_of(url: str, text: str) -> int:
    return int(httpx.post(f"{url}/tokenize", json={"prompt": text}, trust_env=False, timeout=60).json()["count"])


# Messages.


def test_a_message_calls_tools_and_reads_what_they_gave(claude: anthropic.Anthropic, say: Any, url: str) -> None:
    request: dict[str, Any] = {"model": "echo", "max_tokens": 200, "messages": [USER], "tools": [ANTHROPIC_TOOL]}
    say(BOTH)
    whole = claude.messages.create(**request)
    text, here, there = whole.content
    assert (text.text, here.name, here.input, there.input) == ("I look.", "look", {"place": "here"}, {"place": "é"})
    assert (whole.stop_reason, here.id != there.id) == ("tool_use", True)
    finals: list[Any] = []

    def pieces() -> int:
        with claude.messages.stream(**request) as stream:
            seen = [event for event in stream if event.type == "input_json"]
            finals.append(stream.get_final_message())
        return len(seen)

    until(lambda: pieces() > 4)  # arguments are streamed as they are written. A server that is held up sends several at once
    final = finals[-1]
    assert without_ids(final.model_dump(exclude={"content": {"__all__": {"parsed_output"}}})) == without_ids(whole.model_dump())
    say("It is here.")
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": here.id, "content": [{"type": "text", "text": "warm"}]},
        {"type": "tool_result", "tool_use_id": there.id, "content": "dark", "is_error": True},
        {"type": "text", "text": "So?"},
    ]
    history = [USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    again = claude.messages.create(**request | {"messages": history})
    assert ([block.text for block in again.content], again.stop_reason) == (["It is here."], "end_turn")
    arguments = [json.dumps({"name": "look", "arguments": call.input}, ensure_ascii=False) for call in (here, there)]
    calls = "".join(f"<tool_call>{each}</tool_call>" for each in arguments)
    shown = f"[look]<user>x<assistant>I look.{calls}<tool>warm<tool>Error: dark<user>So?<assistant><think></think>"
    assert again.usage.input_tokens == tokens_of(url, shown)
    count = claude.messages.count_tokens(model="echo", messages=history, tools=[ANTHROPIC_TOOL])
    assert count.input_tokens == again.usage.input_tokens


def test_the_async_anthropic_client_gets_the_same(url: str, say: Any) -> None:
    async def scenario() -> None:
        request: dict[str, Any] = {"model": "echo", "max_tokens": 200, "messages": [USER], "tools": [ANTHROPIC_TOOL]}
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as claude:
            whole = await claude.messages.create(**request, tool_choice={"type": "any", "disable_parallel_tool_use": True})
            assert [block.type for block in whole.content] == ["tool_use"]
            async with claude.messages.stream(**request) as stream:
                final = await stream.get_final_message()
            assert final.content[0].input == whole.content[0].input == {"place": "here"}

    say(HERE)
    asyncio.run(scenario())


def test_a_call_that_was_cut_off_is_no_input(claude: anthropic.Anthropic, say: Any) -> None:
    request: dict[str, Any] = {"model": "echo", "max_tokens": 200, "messages": [USER], "tools": [ANTHROPIC_TOOL]}
    say(BOTH[: BOTH.index("é")])
    whole = claude.messages.create(**request)
    assert [block.type for block in whole.content] == ["text", "tool_use"]
    say(HERE)
    cut = claude.messages.create(**request | {"max_tokens": 50})
    assert (cut.stop_reason, [block.type for block in cut.content]) == ("max_tokens", ["text"])
    events = list(claude.messages.create(**request | {"max_tokens": 50}, stream=True))
    assert [e.content_block.type for e in events if e.type == "content_block_start"] == ["tool_use"]
    assert [e.delta.stop_reason for e in events if e.type == "message_delta"] == ["max_tokens"]


def test_a_message_thinks_where_it_is_asked_to(claude: anthropic.Anthropic, say: Any, url: str) -> None:
    request: dict[str, Any] = {"model": "echo", "max_tokens": 200, "messages": [USER], "tools": [ANTHROPIC_TOOL]}
    thinking = request | {"thinking": {"type": "enabled", "budget_tokens": 100}}
    say(THOUGHT + BOTH)
    whole = claude.messages.create(**thinking)
    thought, text, here, _ = whole.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Hm, </thin", "I look.")
    assert whole.usage.input_tokens == tokens_of(url, "[look]<user>x<assistant>")
    with claude.messages.stream(**thinking) as stream:
        final = stream.get_final_message()
    assert [without_ids(block.model_dump(exclude={"parsed_output"})) for block in final.content] == [
        without_ids(block.model_dump()) for block in whole.content
    ]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": here.id, "content": ""}]}
    history = [USER, {"role": "assistant", "content": [thought, here]}, result]
    shown = '[look]<user>x<assistant>(Hm, </thin)<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call><tool>'
    assert claude.messages.count_tokens(model="echo", messages=history, tools=[ANTHROPIC_TOOL]).input_tokens == tokens_of(
        url, f"{shown}<assistant><think></think>"
    )
    with pytest.raises(anthropic.BadRequestError, match=r"thinking.budget_tokens=200 must be less than max_tokens=200"):
        claude.messages.create(**request, thinking={"type": "enabled", "budget_tokens": 200})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tool_choice": {"type": "tool", "name": "dig"}}, "tool_choice names 'dig', which is not among the tools."),
        ({"tools": [ANTHROPIC_TOOL, ANTHROPIC_TOOL]}, "tools[1].name 'look' is given twice."),
        ({"tools": [{"name": "a", "input_schema": [1]}]}, "tools[0].input_schema must be a JSON schema, an object."),
        ({"tools": [{"name": "a", "input_schema": {"type": "x"}, "strict": True}]}, "tools[0].input_schema: "),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is not valid"),
        ({"tools": [ANTHROPIC_TOOL | {"defer_loading": True}]}, "tools[0].defer_loading is not valid"),
        ({"tool_choice": {"type": "none", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use is not a known"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "form is given cannot call tools."),
    ],
)  # fmt: skip
def test_bad_tools_of_a_message_are_named_as_anthropic_names_them(url: str, change: dict[str, Any], says: str) -> None:
    body = {"model": "echo", "max_tokens": 9, "messages": [USER], "tools": [ANTHROPIC_TOOL]} | change
    answer = httpx.post(f"{url}/v1/messages", json=body, trust_env=False, timeout=60)
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert says in answer.json()["error"]["message"]


# Responses.


def read(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a stream's events make up, item by item."""
    items: list[dict[str, Any]] = []
    text = ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert (event["output_index"], event["item"]["status"]) == (len(items), "in_progress")
            text = ""
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith((".done",)) and kind.split(".")[0] in ("function_call_arguments", "output_text", "reasoning_text"):
            assert event.get("text", event.get("arguments")) == text
        elif kind == "output_item.done":
            items.append(event["item"])
    assert events[-1]["response"]["output"] == items
    return items


def test_a_response_calls_functions_and_reads_what_they_gave(client: openai.OpenAI, say: Any, url: str) -> None:
    request: dict[str, Any] = {"model": "echo", "max_output_tokens": 200, "input": "x", "tools": [OPENAI_TOOL]}
    say(THOUGHT + BOTH)
    whole = client.responses.create(**request)
    thought, text, here, there = whole.output
    assert thought.content[0].text == "Hm, </thin"
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == tokens_of(url, "Hm, </thin")
    assert (whole.output_text, text.type, whole.status) == ("I look.", "message", "completed")
    assert [(c.type, c.name, json.loads(c.arguments)["place"]) for c in (here, there)] == [
        ("function_call", "look", "here"), ("function_call", "look", "é"),
    ]  # fmt: skip
    assert (len({item.id for item in whole.output}), whole.tools[0].name, whole.tool_choice) == (4, "look", "auto")
    events = named_events(httpx.post(f"{url}/v1/responses", json=request | {"stream": True}, trust_env=False, timeout=60).text)
    assert without_ids(read(events)) == without_ids(whole.to_dict()["output"])
    with client.responses.stream(**request) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                assert event.snapshot.startswith('{"place": "'[: len(event.snapshot)])
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    say("It is here.")
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "warm"} for call in (here, there)]
    again = client.responses.create(**request | {"input": [USER, *whole.output, *outputs]})
    calls = "".join(f'<tool_call>{{"name": "look", "arguments": {{"place": "{p}"}}}}</tool_call>' for p in ("here", "é"))
    shown = f"[look]<user>x<assistant>(Hm, </thin)I look.{calls}<tool>warm<tool>warm<assistant>"
    assert again.usage is not None
    assert (again.output_text, again.usage.input_tokens) == ("It is here.", tokens_of(url, shown))


def test_the_async_openai_client_gets_the_same(url: str, say: Any) -> None:
    async def scenario() -> None:
        request: dict[str, Any] = {"model": "echo", "max_output_tokens": 200, "input": "x", "tools": [OPENAI_TOOL]}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            whole = await client.responses.create(**request, tool_choice={"type": "function", "name": "look"})
            async with client.responses.stream(**request, parallel_tool_calls=False) as stream:
                final = await stream.get_final_response()
            assert [item.arguments for item in whole.output] == [item.arguments for item in final.output]  # type: ignore[union-attr]
            assert final.parallel_tool_calls is False

    say(HERE)
    asyncio.run(scenario())


def test_a_response_that_is_cut_off_says_where(client: openai.OpenAI, say: Any, url: str) -> None:
    say(BOTH)
    request: dict[str, Any] = {"model": "echo", "max_output_tokens": 60, "input": "x", "tools": [OPENAI_TOOL]}
    whole = client.responses.create(**request)
    assert [item.status for item in whole.output] == ["completed", "incomplete"]  # type: ignore[union-attr]
    events = named_events(httpx.post(f"{url}/v1/responses", json=request | {"stream": True}, trust_env=False, timeout=60).text)
    assert without_ids(read(events)) == without_ids(whole.to_dict()["output"])
    assert events[-1]["type"] == "response.incomplete"


def test_a_response_has_a_form_and_log_probabilities(client: openai.OpenAI, say: Any, url: str) -> None:
    say('{"place": "here"}')
    form: Any = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    whole = client.responses.create(
        model="echo", input="x", text={"format": form}, include=["message.output_text.logprobs"], top_logprobs=2
    )
    text = whole.output[0].content[0]  # type: ignore[union-attr]
    assert json.loads(whole.output_text) == {"place": "here"}
    assert "".join(entry.token for entry in text.logprobs) == whole.output_text  # type: ignore[union-attr]
    assert {len(entry.top_logprobs) for entry in text.logprobs} == {2}  # type: ignore[union-attr]
    assert whole.text is not None
    assert whole.text.format.to_dict() == form  # type: ignore[union-attr]
    body = {
        "model": "echo", "input": "x", "text": {"format": {"type": "json_object"}}, "stream": True, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    events = named_events(httpx.post(f"{url}/v1/responses", json=body, trust_env=False, timeout=60).text)
    gained = [entry for e in events if e["type"] == "response.output_text.delta" for entry in e["logprobs"]]
    (item,) = read(events)
    assert gained == item["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in gained) == whole.output_text
    again = client.responses.create(model="echo", input=[USER, *whole.output, USER])  # type: ignore[list-item]
    assert again.output_text == whole.output_text


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"tool_choice": {"type": "function", "name": "dig"}}, "tool_choice", "names 'dig', which is not among the tools."),
        ({"tools": [OPENAI_TOOL, OPENAI_TOOL]}, "tools[1].name", "tools[1].name 'look' is given twice."),
        ({"tools": [OPENAI_TOOL | {"parameters": [1]}]}, "tools[0].parameters", "must be a JSON schema, an object."),
        (
            {"tools": [OPENAI_TOOL | {"parameters": {"type": "x"}, "strict": True}]},
            "tools[0].parameters", "tools[0].parameters: ",
        ),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type", "is not valid"),
        ({"text": {"format": {"type": "json_object"}}}, "tools", "an answer whose form is given cannot call tools."),
    ],
)  # fmt: skip
def test_bad_tools_of_a_response_are_named_as_openai_names_them(
    url: str, change: dict[str, Any], param: str, says: str
) -> None:
    body = {"model": "echo", "input": "x", "tools": [OPENAI_TOOL]} | change
    answer = httpx.post(f"{url}/v1/responses", json=body, trust_env=False, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


# Reasoning.


def test_a_chats_reasoning_stands_apart(client: openai.OpenAI, say: Any, url: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    request: dict[str, Any] = {"model": "echo", "messages": [USER], "max_tokens": 200, "tools": [tool]}
    say(THOUGHT + BOTH)
    message = client.chat.completions.create(**request).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm, </thin", "I look.")  # type: ignore[attr-defined]
    assert [json.loads(call.function.arguments)["place"] for call in message.tool_calls or ()] == ["here", "é"]  # type: ignore[union-attr]
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, </thin"
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    say("Hm.</think> No.")
    body = {"model": "echo", "messages": [USER, {"role": "assistant", "content": "y", "reasoning_content": "z"}, USER]}
    for extra, end in (
        ({}, ""), ({"reasoning_effort": "none"}, "<think></think>"), ({"reasoning_effort": "low"}, ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>"),
    ):  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=body | extra, trust_env=False, timeout=60).json()
        assert answer["usage"]["prompt_tokens"] == tokens_of(url, f"<user>x<assistant>(z)y<user>x<assistant>{end}")
        assert answer["choices"][0]["message"]["content"] == "Hm.</think> No.", "without its beginning it is no reasoning"
    answer = httpx.post(f"{url}/v1/chat/completions", json=body | {"chat_template_kwargs": {"x": 1}}, trust_env=False)
    assert answer.json()["error"]["param"] == "chat_template_kwargs.x"


TEXTS = st.text(st.sampled_from("<think>/\n x"), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    before=TEXTS, inside=TEXTS, behind=TEXTS, opened=st.booleans(), ends=st.booleans(), seed=st.randoms(use_true_random=False)
)
def test_reasoning_is_the_same_however_the_text_is_cut(
    before: str, inside: str, behind: str, opened: bool, ends: bool, seed: Any
) -> None:
    form = ReasoningFormat("<think>", "</think>", opened)
    text = before + ("" if opened else "<think>") + inside + ("</think>" if ends else "") + behind

    def parts(pieces: list[str]) -> tuple[str, str]:
        reader = ReasoningReader(form)
        found = [*map(reader.add, pieces), reader.finish()]
        return "".join(r for r, _ in found), "".join(t for _, t in found)

    whole = parts([text])
    assert parts(list(text)) == whole
    cuts = sorted(seed.randrange(len(text) + 1) for _ in range(3))
    assert parts([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    written = text.lstrip(" \n")
    if opened or written.startswith("<think>"):
        reasoning, mark, rest = written.removeprefix("" if opened else "<think>").partition("</think>")
        assert whole == (reasoning.strip(" \n"), rest.lstrip(" \n"))
        assert mark or not rest
    else:
        assert whole == ("", text)


def test_a_template_tells_how_reasoning_is_written() -> None:
    assert reasoning_of(TEMPLATE) == FORMATS[0]
    assert reasoning_of("{{ m }}[THINK]x[/THINK]") == FORMATS[1]
    assert reasoning_of(None) is reasoning_of("{{ m }}</think>") is None
