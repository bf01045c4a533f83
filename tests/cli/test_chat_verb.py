"""``twostroke chat MODEL``: a model in this process answers a conversation, and Ctrl-C stops an answer alone."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import pytest

from real_model import make_model
from twostroke.cli.chat.conversation import NEXT_SPEAKER, Answer, Conversation, Message, harmless
from twostroke.cli.chat.terminal import Chat, _told
from twostroke.cli.main import main
from twostroke.core.errors import InputError
from twostroke.data.chat import render_chat
from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as ended:
        main(["chat", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(ended.value.code or 0), out, err


def test_a_model_answers_what_was_said_before_as_well(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--temperature", "0", "--max-tokens", "6", "--dtype", "fp32", "--threads", "1")
    code, out, err = piped(monkeypatch, capsys, "def add\nimport\n", str(model), *options, "--json")
    assert code == 0
    assert "without a chat template" in err
    messages = json.loads(out)["messages"]
    llm = LLM(model, dtype="fp32", n_threads=1)
    params = SamplingParams(temperature=0, max_tokens=6, stop=NEXT_SPEAKER)
    for i in (1, 3):
        (reference,) = llm.generate(render_chat(None, messages[:i]), params)
        assert messages[i]["content"] == reference.outputs[0].text
    assert [m["content"] for m in messages[::2]] == ["def add", "import"]


def test_a_conversation_that_outgrows_the_context_is_a_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--temperature", "0", "--max-model-len", "64", "--threads", "1")
    code, out, err = piped(monkeypatch, capsys, "def add\n" + "self " * 80, str(model), *options)
    assert code == 2
    assert out  # the first message was answered
    assert "the model's context is 64. Type /reset to begin anew" in err


class Scripted:
    """Writes numbers without end. With the third, Ctrl-C is pressed."""

    def __init__(self, stops_at_once: bool, pressed: int = 1) -> None:
        self.stops_at_once = stops_at_once
        self._pressed = pressed
        self.closed = False

    def pieces(
        self, messages: Sequence[Message], settings: Mapping[str, int | float], into: Answer
    ) -> Generator[str, None, None]:
        try:
            for i in range(1000):
                if i == 3:
                    for _ in range(self._pressed):
                        os.kill(os.getpid(), signal.SIGINT)
                into.text += f"{i} "
                yield f"{i} "
        finally:
            self.closed = True


@pytest.mark.parametrize(("at_once", "text"), [(True, "0 1 2 "), (False, "0 1 2 3 ")])
def test_ctrl_c_stops_the_answer_and_not_the_program(capsys: pytest.CaptureFixture[str], at_once: bool, text: str) -> None:
    model, before = Scripted(at_once), signal.getsignal(signal.SIGINT)
    chat = Chat(model, Conversation(), prints=True, at_terminal=True)
    for _ in range(2):
        answer = chat.take("count")
        assert answer is not None
        assert (answer.text, answer.finish_reason, model.closed) == (text, None, True)
    assert capsys.readouterr().out == f"{text}\n" * 2
    assert [m["content"] for m in chat.conversation.messages] == ["count", text] * 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_an_answer_that_does_not_stop() -> None:
    chat = Chat(Scripted(False, pressed=2), Conversation(), prints=False, at_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        chat.take("count")
    assert chat.conversation.messages == []


def test_ctrl_c_ends_the_program_that_reads_a_pipe(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
    with pytest.raises(KeyboardInterrupt):
        Chat(Scripted(False), Conversation(), prints=False, at_terminal=False).take("count")


@pytest.mark.parametrize(
    ("name", "word", "sentence"),
    [
        ("temprature", "1", "Did you mean 'temperature'?"),
        ("stop", "x", "cannot be set"),
        ("top_k", "1.5", "must be a whole number."),
        ("top_p", "nan", "must be a number from 0 to 1."),
        ("max_tokens", "0", "must be a whole number from 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_and_the_old_one_stays(name: str, word: str, sentence: str) -> None:
    conversation = Conversation(settings={"top_k": 3})
    with pytest.raises(InputError, match=sentence.replace("?", r"\?")):
        conversation.set(name, word)
    assert conversation.settings == {"top_k": 3}


def test_a_conversation_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    conversation, file = Conversation("s"), tmp_path / "said.json"
    with pytest.raises(InputError, match="nothing was said"):
        conversation.save(file)
    conversation.add("ä", "b\n")
    conversation.save(file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"messages": conversation.with_message("c")[:-1]}]
    with pytest.raises(InputError, match="exists"):
        conversation.save(file)
    with pytest.raises(InputError, match="cannot be written"):
        conversation.save(tmp_path / "no" / "folder")
    with pytest.raises(InputError, match="surrogate"):
        conversation.with_message("\ud800")


def test_what_a_terminal_would_obey_is_replaced() -> None:
    assert harmless("a\x1b[2J\r\x9b1A\x07\tb\né🙂") == "a�[2J��1A�\tb\né🙂"


def test_the_rate_of_a_fast_answer_has_no_exponent() -> None:
    answer = Answer("text", "stop", output_tokens=2001, ttft_s=0.002, elapsed_s=1.002)
    assert _told(answer) == "[2001 tokens, first after 2 ms, then 2k a second]"
