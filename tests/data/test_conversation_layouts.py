from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.core.errors import DataError
from twostroke.data.conversation_layouts import read_conversation


def roles_and_texts(record: dict[str, Any], layout: str) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in read_conversation(record, layout, "here").messages]


SAME = [("system", "S"), ("user", "Q"), ("assistant", "A")]


@pytest.mark.parametrize(
    ("layout", "record"),
    [
        ("messages", {"messages": [{"role": role, "content": text} for role, text in SAME]}),
        ("messages", {"messages": [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in SAME]}),
        ("alpaca", {"system": "S", "instruction": "Q", "input": "", "output": "A"}),
        ("alpaca", {"system": "S", "instruction": "Q", "input": None, "output": "A", "chosen": 3}),
        ("sharegpt", {"system": "S", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}),
        (
            "sharegpt",
            {"conversations": [{"from": f, "value": t} for f, t in zip(("system", "user", "assistant"), "SQA", strict=True)]},
        ),
    ],
)
def test_the_same_conversation_in_every_layout(layout: str, record: dict[str, Any]) -> None:
    assert roles_and_texts(record, layout) == SAME


def test_alpaca_input_and_history() -> None:
    record = {"instruction": "Sort.", "input": "b a", "output": "a b", "history": [["Hi", "Hello"]]}
    wanted = [("user", "Hi"), ("assistant", "Hello"), ("user", "Sort.\n\nb a"), ("assistant", "a b")]
    assert roles_and_texts(record, "alpaca") == wanted


def test_prompt_with_either_name_of_the_answer() -> None:
    for name in ("response", "completion"):
        assert roles_and_texts({"prompt": "Q", name: "A"}, "prompt") == SAME[1:]


def test_tool_calls_are_the_assistants_and_what_they_return_is_not() -> None:
    record = {
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "function_call", "value": '{"name": "add"}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4."},
        ],
        "tools": '[{"name": "add"}]',
    }
    conversation = read_conversation(record, "sharegpt", "here")
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.tools == ({"name": "add"},)


@pytest.mark.parametrize(
    ("layout", "record", "sentence"),
    [
        ("alpaca", {"conversations": []}, r'no text under .instruction.*looks like data.layout="sharegpt"'),
        ("messages", {"instruction": "Q", "output": "A"}, r'no list of objects under .messages.*data.layout="alpaca"'),
        ("sharegpt", {"text": "once"}, r"no list of objects under .conversations.*Keys there: 'text'"),
        ("messages", {"messages": [{"role": "robot", "content": "x"}]}, r"role 'robot' is not known. Use one of system"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "tools": "{"}, "not valid JSON"),
        ("sharegpt", {"conversations": [{"from": "martian", "value": "x"}]}, "from='martian' is not known"),
        ("alpaca", {"instruction": "Q", "output": None}, "no text under 'output'"),
        ("alpaca", {"instruction": "Q", "output": "A", "history": [["alone"]]}, "must be a list of .question, answer."),
    ],
)
def test_what_is_no_conversation_gets_a_sentence_that_names_it(layout: str, record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=f"x.jsonl line 7.*{sentence}"):
        read_conversation(record, layout, "x.jsonl line 7")


@pytest.mark.parametrize(
    ("file", "layout", "n"),
    [
        ("llamafactory_alpaca_en_demo.json", "alpaca", 999),
        ("rasbt_instruction-data.json", "alpaca", 1100),
        ("llamafactory_glaive_toolcall_en_demo.json", "sharegpt", 300),
    ],
)
def test_published_data_sets_are_read_whole(assets: Path, file: str, layout: str, n: int) -> None:
    records = json.loads((assets / "corpora" / "instruction" / file).read_text())
    read = [read_conversation(record, layout, file) for record in records]
    assert len(read) == n
    assert all(conversation.has_answer for conversation in read)
