"""Which tokens are learned: token by token, by hand and against transformers' own mask."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_models import CHATML, CHATML_WITH_GENERATION, THINKING, TURNS, make_chat_tokenizer
from tokenizers import Tokenizer, processors

from twostroke.core.errors import InputError
from twostroke.data.answer_spans import ConversationTemplate, assistant_mask
from twostroke.data.conversation_layouts import Conversation
from twostroke.data.tokenizer import load_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


def learned_pieces(tokenizer: Tokenizer, ids: list[int], learned: list[bool]) -> list[str]:
    """The text of each run of learned tokens."""
    runs: list[list[int]] = []
    for i, (token, is_learned) in enumerate(zip(ids, learned, strict=True)):
        if is_learned:
            if i == 0 or not learned[i - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def mask(tokenizer: Tokenizer, template: str | None, turns=TURNS, special: bool = False) -> tuple[list[int], list[bool]]:
    rendered = ConversationTemplate(template, {}, SPECIAL).render(Conversation(tuple(turns)))
    encoding = tokenizer.encode(rendered.text, add_special_tokens=special)
    return encoding.ids, assistant_mask(encoding, rendered.spans)


def test_exactly_the_answers_and_their_end_tokens_are_learned(tokenizer: Tokenizer) -> None:
    ids, learned = mask(tokenizer, CHATML)
    assert learned_pieces(tokenizer, ids, learned) == [
        "A list holds  things,\n\n in order.   <|im_end|>",
        "日本 the façade<|im_end|>",
    ]


def test_token_by_token(tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "the cat"}]
    ids, learned = mask(tokenizer, CHATML, turns)
    by_token = [(tokenizer.decode([i], skip_special_tokens=False), flag) for i, flag in zip(ids, learned, strict=True)]
    prompt, answer = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n", "the cat<|im_end|>"
    assert "".join(text for text, flag in by_token if not flag) == prompt + "\n"  # the last line end is not learned
    assert "".join(text for text, flag in by_token if flag) == answer
    assert by_token[-2:] == [("<|im_end|>", True), ("\n", False)]


def test_as_transformers_marks_them(directory: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|im_end|>")
    wanted = theirs.apply_chat_template(
        TURNS, chat_template=CHATML_WITH_GENERATION, return_assistant_tokens_mask=True, return_dict=True
    )
    ids, learned = mask(tokenizer, CHATML)
    assert (ids, learned) == mask(tokenizer, CHATML_WITH_GENERATION)  # the marks themselves change nothing
    assert ids == list(wanted["input_ids"])
    assert [int(flag) for flag in learned] == list(wanted["assistant_masks"])
    assert 0 < sum(learned) < len(learned)


def test_the_plain_default_template(tokenizer: Tokenizer) -> None:
    ids, learned = mask(tokenizer, None)
    assert learned_pieces(tokenizer, ids, learned) == [" A list holds  things,\n\n in order.   \n", " 日本 the façade\n"]


def test_what_a_post_processor_puts_around_is_not_learned(tokenizer: Tokenizer) -> None:
    wrapped = Tokenizer.from_str(tokenizer.to_str())
    wrapped.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
    )
    ids, learned = mask(wrapped, None, special=True)
    inner_ids, inner = mask(tokenizer, None)
    assert ids[1:-1] == inner_ids
    assert learned == [False, *inner, False]


def test_an_answer_that_will_be_rendered_otherwise_is_counted_and_not_learned(tokenizer: Tokenizer) -> None:
    rendered = ConversationTemplate(THINKING, {}, SPECIAL).render(Conversation(tuple(TURNS)))
    assert rendered.n_unlearned == 1
    assert [rendered.text[b:e] for b, e in rendered.spans] == ["<think>\n\n</think>\n\n日本 the façade<|im_end|>"]


def test_a_template_without_a_generation_prompt_is_refused() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}ANSWER:{% endif %}"
    with pytest.raises(InputError, match="generation prompt is not what stands before an answer"):
        ConversationTemplate(template, {}, SPECIAL).render(Conversation(tuple(TURNS)))
