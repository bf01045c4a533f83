from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import make_chat_tokenizer

from twostroke.core.errors import ConfigError, DataError
from twostroke.core.recipe import DataRecipe
from twostroke.data.conversations import BEGINS, LEARNED
from twostroke.data.prepare import prepare
from twostroke.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))


def records(n: int) -> list[dict[str, Any]]:
    return [{"instruction": f"what is {i}?", "input": "", "output": f"the {i}"} for i in range(n)]


def recipe(tokenizer: Path, *sources: Path, **changes: Any) -> DataRecipe:
    settings = {"sources": tuple(map(str, sources)), "tokenizer": str(tokenizer), "layout": "alpaca", "held_out_fraction": 0.2}
    return DataRecipe(**settings | changes)


def texts(prepared: Any, split: str) -> list[tuple[str, str]]:
    """(whole, learned) text of each conversation of a split."""
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    tokens, marks = getattr(prepared, f"{split}_tokens")(), getattr(prepared, f"{split}_marks")()
    tokens, marks = np.asarray(tokens[0 : len(tokens)]), np.asarray(marks[0 : len(marks)])
    assert len(tokens) == len(marks)
    found = []
    for begin, end in zip(begins := np.flatnonzero(marks & BEGINS), [*begins[1:], len(marks)], strict=True):
        ids, learned = tokens[begin:end].tolist(), (marks[begin:end] & LEARNED).astype(bool)
        kept = [i for i, flag in zip(ids, learned, strict=True) if flag]
        found.append(tuple(tokenizer.decode(x, skip_special_tokens=False) for x in (ids, kept)))
    return found


def test_every_conversation_is_in_one_part_with_its_answer_marked(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(records(40)))
    prepared = prepare(recipe(tokenizer, tmp_path / "a.json"), tmp_path / "cache")
    train, held = texts(prepared, "train"), texts(prepared, "heldout")
    numbers = sorted(int(learned.removeprefix("the ").removesuffix("<|im_end|>")) for _, learned in train + held)
    assert numbers == list(range(40))
    assert 1 <= len(held) < 20
    for whole, learned in train + held:
        i = learned.removeprefix("the ").removesuffix("<|im_end|>")
        assert whole == f"<|im_start|>user\nwhat is {i}?<|im_end|>\n<|im_start|>assistant\nthe {i}<|im_end|>\n"
    report = prepared.report
    assert report["n_train_learned_tokens"] == int(np.sum(prepared.train_marks()[:] & LEARNED))
    assert report["n_train_answer_bytes"] == sum(len(learned.encode()) for _, learned in train)
    assert prepared.holds_conversations
    prepared.verify()


def test_prepared_once(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(records(9)))
    first = prepare(recipe(tokenizer, tmp_path / "a.json"), tmp_path / "cache")
    again = prepare(recipe(tokenizer, tmp_path / "a.json", too_long="drop"), tmp_path / "cache")
    assert again == first
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (tmp_path / "t.jinja").write_text(template)
    other = prepare(recipe(tokenizer, tmp_path / "a.json", chat_template=str(tmp_path / "t.jinja")), tmp_path / "cache")
    assert other.key != first.key
    # The template ends no message with an end of text, so one is added after the conversation, and learned.
    # The token " the" begins in the prompt's last space; it is learned all the same.
    assert texts(other, "heldout")[0][1].startswith(" the ")
    assert texts(other, "heldout")[0][1].endswith("|<|im_end|>")


@pytest.mark.parametrize("form", ["json", "jsonl", "jsonl.gz"])
def test_every_file_form_gives_the_same(tokenizer: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / f"a.{form}"
    lines = "\n".join(map(json.dumps, records(9))) + "\n\n"
    if form == "json":
        file.write_text(json.dumps(records(9)))
    elif form == "jsonl":
        file.write_text(lines)
    else:
        file.write_bytes(gzip.compress(lines.encode()))
    prepared = prepare(recipe(tokenizer, file), tmp_path / "cache")
    assert prepared.report["n_conversations"] == 9
    assert len(texts(prepared, "train")) + len(texts(prepared, "heldout")) == 9


def test_what_is_left_out_is_counted(tokenizer: Path, tmp_path: Path) -> None:
    more = [{"instruction": "nothing?", "output": "  "}, records(1)[0]]
    (tmp_path / "a.json").write_text(json.dumps(records(9) + more))
    report = prepare(recipe(tokenizer, tmp_path / "a.json"), tmp_path / "cache").report
    assert (report["n_conversations"], report["n_without_answer"], report["n_duplicates"]) == (11, 1, 1)
    assert report["n_train_conversations"] + report["n_heldout_conversations"] == 9


def test_named_held_out_conversations_leave_the_training_part(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(records(9)))
    (tmp_path / "b.json").write_text(json.dumps(records(3)))
    prepared = prepare(recipe(tokenizer, tmp_path / "a.json", held_out=(str(tmp_path / "b.json"),)), tmp_path / "cache")
    assert len(texts(prepared, "heldout")) == 3
    assert len(texts(prepared, "train")) == 6


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", "", "a.json is empty"),
        ("a.json", "[]", "of 0 conversations 0 are left to train on"),
        ("a.jsonl", "", "of 0 conversations 0 are left to train on"),
        ("a.json", json.dumps(records(1)), "of 1 conversations 0 are left to train on and 1 to hold out"),
        ("a.json", json.dumps([{"instruction": "Q", "output": ""}] * 4), r"\(4 have no answer by an assistant"),
        ("a.json", '{"instruction": 1}', "must hold a JSON array"),
        ("a.json", "[3]", "record 1 holds int; a conversation must be a JSON object"),
        ("a.json", "[{]", "is not valid JSON"),
        ("a.jsonl", '{"instruction": "Q", "output": "A"}\n{"x"', "a.jsonl line 2 is not valid JSON"),
        ("a.jsonl", '{"conversations": []}', 'looks like data.layout="sharegpt"'),
        ("a.txt", "once", "is not one of the formats .json, .jsonl"),
    ],
)
def test_bad_files_get_a_sentence_and_leave_nothing(
    tokenizer: Path, tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=sentence):
        prepare(recipe(tokenizer, tmp_path / name), tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_template_that_is_not_there(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(records(9)))
    with pytest.raises(ConfigError, match=r"chat_template=.*does not exist"):
        prepare(recipe(tokenizer, tmp_path / "a.json", chat_template=str(tmp_path / "none.jinja")), tmp_path / "cache")


def test_a_model_without_a_template_takes_the_plain_default(tmp_path: Path) -> None:
    directory = make_chat_tokenizer(tmp_path / "plain", template=None)
    (tmp_path / "a.json").write_text(json.dumps(records(9)))
    prepared = prepare(recipe(directory, tmp_path / "a.json"), tmp_path / "cache")
    whole, learned = texts(prepared, "heldout")[0]
    assert whole.startswith("User: what is ")
    assert whole.endswith(f"Assistant:{learned}")
    assert learned.endswith("\n<|im_end|>")  # an end of text is put behind it
    assert prepared.report["template"] == "plain default"


def test_half_of_a_surrogate_pair_is_replaced(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '[{"instruction": "\\ud800?", "output": "the \\udc00 dog"}, {"instruction": "b", "output": "c"}]'
    )
    prepared = prepare(recipe(tokenizer, tmp_path / "a.json"), tmp_path / "cache")
    learned = {learned for _, learned in texts(prepared, "train") + texts(prepared, "heldout")}
    assert learned == {"the \ufffd dog<|im_end|>", "c<|im_end|>"}
