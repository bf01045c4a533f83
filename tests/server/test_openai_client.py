"""The unmodified OpenAI client against `twostroke serve` and a real, small model."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anthropic
import httpx
import openai
import psutil
import pytest
from serving import serve_command

from real_model import greedy_reference, make_model
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import embeddings_api, messages_api, protocol, responses_api, tokens_api

PROMPT = "def add_argument(self, name):\n    return "
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "assistant:"
)


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    model: Path

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30, **options)  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    model = make_model(directory / "tiny")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with serve_command(model, directory, "--dtype", "fp32") as (process, url):
        yield Server(process, url, model)


def test_a_greedy_completion_is_the_decoders_own(server: Server) -> None:
    tokenizer = load_tokenizer(server.model)
    expected, logprobs = greedy_reference(server.model, tokenizer.encode(PROMPT).ids, 12)
    with server.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
        )
    (choice,) = answer.choices
    assert choice.text == tokenizer.decode(expected)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    # fp32 sums in another order; the model's logits are of order 1.
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_beams_are_those_of_the_engine(server: Server) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=12, use_beam_search=True, n=2, best_of=4, length_penalty=0.5, logprobs=1
    )
    (expected,) = LLM(server.model, dtype="fp32").generate(PROMPT, params)
    with server.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, n=2, best_of=4, logprobs=1,
            extra_body={"use_beam_search": True, "length_penalty": 0.5},
        )  # fmt: skip
        asked = [{"role": "user", "content": PROMPT}]
        talk = client.chat.completions.create(
            model="tiny", messages=asked, max_tokens=9, n=3, extra_body={"use_beam_search": True, "early_stopping": True}
        )  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError, match="known only at its end"):
            client.completions.create(model="tiny", prompt=PROMPT, stream=True, extra_body={"use_beam_search": True})
    assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        assert choice.logprobs is not None
        assert sum(choice.logprobs.token_logprobs or ()) == pytest.approx(output.cumulative_logprob, abs=1e-4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)
    assert len({choice.message.content for choice in talk.choices}) == 3


def test_a_stream_adds_up_to_the_whole_and_reports_usage(server: Server) -> None:
    with server.client() as client:
        request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0.8, "seed": 5}
        whole = client.completions.create(**request)  # type: ignore[call-overload]
        chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert {c.system_fingerprint for c in chunks} == {whole.system_fingerprint}
    assert whole.system_fingerprint.startswith("fp_")


def test_usage_says_how_much_of_a_prompt_was_cached(server: Server) -> None:
    prompt = "def cached_tokens(self):\n    " * 4
    with server.client() as client:
        first, second = (client.completions.create(model="tiny", prompt=prompt, max_tokens=2, n=2).usage for _ in range(2))
        pieces = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
        (streamed,) = [chunk.usage for chunk in pieces if chunk.usage]
    assert first.prompt_tokens_details.cached_tokens < 16
    for usage in (second, streamed):
        assert first.prompt_tokens - 17 <= usage.prompt_tokens_details.cached_tokens < first.prompt_tokens


def test_embeddings_are_those_of_the_engine(server: Server) -> None:
    texts = [PROMPT, "import", PROMPT * 9]
    llm = LLM(server.model, dtype="fp32")
    with server.client() as client:
        for pooling in ("mean", "last"):
            answer = client.embeddings.create(model="tiny", input=texts, extra_body={"pooling": pooling})
            expected = llm.embed(texts, pooling)  # type: ignore[arg-type]
            for item, vector in zip(answer.data, expected, strict=True):
                assert item.embedding == pytest.approx(vector.tolist(), abs=1e-5)
    assert answer.usage.prompt_tokens == sum(len(load_tokenizer(server.model).encode(text).ids) for text in texts)
    all_free(server)


def test_all_forms_of_a_chat_give_one_text(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with server.client() as client:
        chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)  # type: ignore[arg-type]
        response = client.responses.create(model="tiny", input="Hello", max_output_tokens=8, temperature=0)
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    message = httpx.post(f"{server.url}/v1/messages", json=body, trust_env=False, timeout=30).json()
    assert response.output_text == message["content"][0]["text"] == chat.choices[0].message.content
    cached = message["usage"]["cache_read_input_tokens"]
    assert message["usage"]["input_tokens"] + cached == chat.usage.prompt_tokens == response.usage.input_tokens
    assert message["system_fingerprint"] == chat.system_fingerprint


def test_a_chat_is_answered_and_streamed(server: Server) -> None:
    with server.client() as client:
        request = {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            "max_completion_tokens": 8,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        }
        whole = client.chat.completions.create(**request)  # type: ignore[call-overload]
        chunks = list(client.chat.completions.create(**request, stream=True))  # type: ignore[call-overload]
    message = whole.choices[0].message
    assert message.role == chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == message.content
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content] == [
        e.token for e in entries
    ]
    assert all(e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob for e in entries)


def test_the_same_seed_gives_the_same_text_in_any_company(server: Server) -> None:
    async def scenario() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int) -> str:
                answer = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, temperature=1.0, seed=seed)
                return answer.choices[0].text

            alone = await one(3)
            return alone, list(await asyncio.gather(*(one(seed) for seed in range(8))))

    alone, together = asyncio.run(scenario())
    assert together[3] == alone
    assert len(set(together)) > 1


def test_n_answers_of_a_seed_differ_and_come_again(server: Server) -> None:
    with server.client() as client:
        request = {"model": "tiny", "prompt": PROMPT * 3, "max_tokens": 12, "temperature": 1.0, "seed": 11, "n": 6}
        before = server.metric("twostroke_prefix_hit_tokens")
        first, second = (client.completions.create(**request) for _ in range(2))  # type: ignore[call-overload]
        assert server.metric("twostroke_prefix_hit_tokens") - before >= 10 * first.usage.prompt_tokens // 2
        alone = client.completions.create(**request | {"n": 1})  # type: ignore[call-overload]
        chunks = list(client.completions.create(**request, stream=True))  # type: ignore[call-overload]
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 3
    assert alone.choices[0].text == texts[0]
    assert first.usage.prompt_tokens == alone.usage.prompt_tokens
    for i, text in enumerate(texts):
        assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == i) == text


def test_an_echo_scores_the_prompt_as_the_decoder_does(server: Server) -> None:
    tokenizer = load_tokenizer(server.model)
    ids = tokenizer.encode(PROMPT).ids
    expected, logprobs = greedy_reference(server.model, ids[:4], 8)
    with server.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=ids[:4] + expected, max_tokens=0, echo=True, logprobs=1, temperature=0
        )
        text = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, echo=True, logprobs=1, temperature=0)
        plain = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0)
    scores = answer.choices[0].logprobs
    assert scores.token_logprobs[0] is None
    assert len(scores.tokens) == 12
    assert scores.token_logprobs[4:] == pytest.approx(logprobs, abs=1e-4)
    # What lm-eval's local-completions looks at: whether each token of the continuation was the most probable one.
    assert all(p == max(top.values()) for p, top in zip(scores.token_logprobs[4:], scores.top_logprobs[4:], strict=True))
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, 12)
    assert text.choices[0].text == PROMPT + plain.choices[0].text
    assert len(text.choices[0].logprobs.text_offset) == len(ids) + 4


def test_prompt_logprobs_come_with_both_endpoints(server: Server) -> None:
    extra = {"prompt_logprobs": 2}
    with server.client() as client:
        completion = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, n=2, extra_body=extra)
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, extra_body=extra
        )
    ids = load_tokenizer(server.model).encode(PROMPT).ids
    for choice in completion.choices:
        first, *others = choice.model_extra["prompt_logprobs"]
        assert first is None
        assert [str(i) in table for i, table in zip(ids[1:], others, strict=True)] == [True] * (len(ids) - 1)
        assert all(2 <= len(table) <= 3 for table in others)
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


def test_a_timeout_ends_an_answer_with_what_it_has(server: Server) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=450, n=2, extra_body={"ignore_eos": True, "timeout_s": 0.01, "priority": 5}
        )
    assert [choice.finish_reason for choice in answer.choices] == ["timeout"] * 2
    assert answer.usage.completion_tokens < 900
    all_free(server)


def test_async_streams_run_side_by_side(server: Server) -> None:
    async def scenario() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(n: int) -> int:
                stream = await client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": f"{n}"}],
                    max_tokens=n,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                (usage,) = [chunk.usage async for chunk in stream if chunk.usage]
                return usage.completion_tokens

            return list(await asyncio.gather(*(one(n) for n in range(1, 17))))

    assert asyncio.run(scenario()) == list(range(1, 17))


def test_a_stop_string_cuts_the_text_before_it(server: Server) -> None:
    with server.client() as client:
        request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
        text = client.completions.create(**request).choices[0].text  # type: ignore[call-overload]
        stop = text[len(text) // 2 :][:3]
        (choice,) = client.completions.create(**request, stop=[stop]).choices  # type: ignore[call-overload]
    assert choice.finish_reason == "stop"
    assert choice.text == text[: text.index(stop)]


def test_token_ids_are_prompts_too(server: Server) -> None:
    ids = load_tokenizer(server.model).encode(PROMPT).ids
    with server.client() as client:
        by_text, by_ids = (
            client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
            for prompt in (PROMPT, ids)
        )
        several = client.completions.create(model="tiny", prompt=[PROMPT, "import"], max_tokens=8, temperature=0)
    assert by_text == by_ids == several.choices[0].text
    assert [c.index for c in several.choices] == [0, 1]


def test_a_bias_forces_a_token(server: Server) -> None:
    token = load_tokenizer(server.model).encode("import").ids[0]
    with server.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={str(token): 100}, frequency_penalty=0.5
        )
    assert answer.choices[0].text == load_tokenizer(server.model).decode([token]) * 3


def test_errors_arrive_as_the_clients_own_exceptions(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="gpt-9", prompt="x")
        with pytest.raises(openai.BadRequestError, match="best_of=3 is not supported") as caught:
            client.completions.create(model="tiny", prompt="x", best_of=3)
        assert caught.value.param == "best_of"
        with pytest.raises(openai.BadRequestError, match="context") as caught:
            client.completions.create(model="tiny", prompt="word " * 3000)
        assert caught.value.code == "context_length_exceeded"


ABSURD = (None, True, -1, 0, 2**31, 10**40, -0.5, 1e308, "", "x", [], [-1], [2**40], ["a", 1], {}, {"99999999999": 1})


def test_absurd_values_get_a_sentence_and_the_engine_lives(server: Server) -> None:
    before = server.metric("twostroke_engine_restarts")
    hello = {"messages": [{"role": "user", "content": "Hi"}]}
    bodies: dict[str, tuple[dict[str, object], type]] = {
        "/v1/completions": ({"prompt": PROMPT, "max_tokens": 2}, protocol.CompletionRequest),
        "/v1/chat/completions": (hello | {"max_tokens": 2}, protocol.ChatRequest),
        "/v1/score": ({"text": PROMPT}, protocol.ScoreRequest),
        "/tokenize": ({}, tokens_api.TokenizeRequest),
        "/detokenize": ({"tokens": [1]}, tokens_api.DetokenizeRequest),
        "/v1/embeddings": ({"input": PROMPT}, embeddings_api.EmbeddingRequest),
        "/v1/messages": (hello | {"max_tokens": 2}, messages_api.MessagesRequest),
        "/v1/messages/count_tokens": (hello, messages_api.CountRequest),
        "/v1/responses": ({"input": "Hi", "max_output_tokens": 2}, responses_api.ResponsesRequest),
    }
    statuses: set[int] = set()
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as web:
        for route, (body, kind) in bodies.items():
            for name in kind.__struct_fields__:  # type: ignore[attr-defined]
                for value in ABSURD:
                    response = web.post(route, json={"model": "tiny", **body, name: value})
                    statuses.add(response.status_code)
                    assert response.status_code == 200 or 400 <= response.status_code < 500, (name, value, response.text)
                    if response.status_code != 200:
                        sentence = response.json()["error"]["message"]
                        assert sentence.endswith((".", "?"))
                        assert "\n" not in sentence
    assert {200, 400} <= statuses
    assert server.metric("twostroke_engine_restarts") == before
    all_free(server)


MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_an_answer_comes_back_as_history(server: Server) -> None:
    """As OpenAI documents it: the message itself, or what ``model_dump`` makes of it."""
    with server.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, temperature=0)  # type: ignore[arg-type]
        message = answer.choices[0].message
        plain = {"role": "assistant", "content": message.content}
        again = {"role": "user", "content": "And now?"}
        texts = [
            client.chat.completions.create(
                model="tiny",
                messages=[*MESSAGES, history, again],  # type: ignore[list-item]
                max_tokens=4,
                temperature=0,
            )
            .choices[0]
            .message.content
            for history in (plain, message, message.model_dump(), message.to_dict(), plain | {"audio": None, "tool_calls": []})
        ]
        empty = client.chat.completions.create(
            model="tiny",
            messages=[*MESSAGES, {"role": "assistant", "content": None}, again],
            max_tokens=1,  # type: ignore[list-item]
        )
    assert len(set(texts)) == 1
    assert empty.choices


ACCEPTED = {
    "tools that are not to be called": {"tools": [TOOL], "tool_choice": "none"},
    "functions that are not to be called": {"functions": [TOOL["function"]], "function_call": "none"},
    "no tools": {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    "verbosity": {"verbosity": "medium"},
    "reasoning effort": {"reasoning_effort": "high"},
    "text": {"response_format": {"type": "text"}, "modalities": ["text"]},
    "labels": {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": False},
    "service tier": {"service_tier": "auto"},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "names": {"messages": [{"role": "user", "content": "Hello", "name": "ann"}]},
    "stop, seed, penalties": {
        "stop": ["x"],
        "seed": 1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": 1},
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_changes_nothing_or_is_understood_is_accepted(server: Server, name: str) -> None:
    with server.client() as client:
        request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **ACCEPTED[name]}
        assert client.chat.completions.create(**request).choices[0].finish_reason in ("length", "stop")  # type: ignore[call-overload]


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def json_format(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}}


REFUSED = {
    "tools": {"tools": [TOOL], "response_format": {"type": "json_object"}},
    "tools[0].function.parameters": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
        "tool_choice": "required",
    },
    "tool_choice": {"tools": [], "tool_choice": "required"},
    "messages[1].tool_call_id": {"messages": [*MESSAGES, {"role": "tool", "content": "x"}]},
    "messages[1].tool_calls": {"messages": [*MESSAGES, {"role": "user", "content": "", "tool_calls": [CALL]}]},
    "messages[1].tool_calls[0].function": {
        "messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    },
    "messages[1].tool_calls[0].function.arguments": {
        "messages": [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1"}}]},
        ]
    },
    "messages[0].content": {"messages": [{"role": "user", "content": None}]},
    "response_format.json_schema.schema": json_format({"type": "nonsense"}),
    "guided_regex": {"extra_body": {"guided_regex": "a("}},
    "structured_outputs.grammar": {"extra_body": {"structured_outputs": {"grammar": "nonsense"}}},
    "structured_outputs": {"extra_body": {"structured_outputs": {"regex": "a", "json": {}}}},
    "guided_choice": {"extra_body": {"guided_choice": ["a"]}, "response_format": {"type": "json_object"}},
    "min_tokens": {"extra_body": {"min_tokens": 2}, "response_format": {"type": "json_object"}},
    "store": {"store": True},
    "verbosity": {"verbosity": "low"},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "modalities": {"modalities": ["text", "audio"]},
    "audio": {"audio": {"voice": "alloy", "format": "mp3"}},
    "web_search_options": {"web_search_options": {}},
    "service_tier": {"service_tier": "flex"},
    "messages[0].content[0].type": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    },
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_is_not_done_is_refused_by_its_name(server: Server, param: str) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **REFUSED[param]})  # type: ignore[call-overload]
    assert caught.value.param == param


@pytest.mark.parametrize("field", [{"best_of": 3}, {"suffix": "x"}])
def test_what_completions_do_not_do_is_refused_by_its_name(server: Server, field: dict[str, object]) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", **field)  # type: ignore[call-overload]
    assert [caught.value.param] == [*field]


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def is_valid(text: str | None) -> bool:
    found = json.loads(text or "")
    return set(found) == {"kind", "n"} and found["kind"] in ("a", "b") and found["n"] in range(10)


def test_answers_have_the_form_that_was_asked_for(server: Server) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 1.0, "seed": 4, **json_format(SCHEMA)}
    with server.client() as client:
        whole = client.chat.completions.create(**request, n=4)  # type: ignore[call-overload]
        assert all(is_valid(choice.message.content) for choice in whole.choices)
        assert {choice.finish_reason for choice in whole.choices} == {"stop"}
        chunks = list(client.chat.completions.create(**request, stream=True))  # type: ignore[call-overload]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        for extra, pattern in (
            ({"structured_outputs": {"regex": "[a-c]{2}-[0-9]"}}, "[a-c]{2}-[0-9]"),
            ({"guided_regex": "x{3}"}, "xxx"),
            ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
            ({"guided_choice": ["one", "two"]}, "one|two"),
            ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ):
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, seed=1, extra_body=extra)
            assert re.fullmatch(pattern, answer.choices[0].text), (extra, answer.choices[0].text)
        for extra in ({"guided_json": SCHEMA}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}):
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=60, extra_body=extra)
            assert is_valid(answer.choices[0].text)


def tool(name: str, **properties: object) -> dict[str, object]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS = [tool("look", place={"enum": ["here", "there"]}), tool("count", to={"$ref": "#/$defs/d"})]
TOOLS[1]["function"]["parameters"]["$defs"] = {"d": {"type": "integer", "minimum": 1, "maximum": 5}}  # type: ignore[index]


def check_call(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "look":
        assert given in ({"place": "here"}, {"place": "there"})
    else:
        assert (name, [*given], given["to"] in range(1, 6)) == ("count", ["to"], True)


def test_required_tools_are_called_and_their_calls_are_history(server: Server) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 90, "temperature": 1.0, "tools": TOOLS}
    with server.client() as client:
        whole = client.chat.completions.create(**request, tool_choice="required", parallel_tool_calls=False, n=4, seed=1)  # type: ignore[call-overload]
        for choice in whole.choices:
            (call,) = choice.message.tool_calls
            check_call(call.function.name, call.function.arguments)
            assert (choice.finish_reason, choice.message.content, call.type) == ("tool_calls", None, "function")
        assert len({call.id for choice in whole.choices for call in choice.message.tool_calls}) == 4
        named = client.chat.completions.create(**request, tool_choice={"type": "function", "function": {"name": "count"}})  # type: ignore[call-overload]
        (call,) = named.choices[0].message.tool_calls
        check_call(call.function.name, call.function.arguments)
        assert call.function.name == "count"
        message = whole.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "nothing"}
        for history in (message, message.model_dump(), message.to_dict()):
            again = client.chat.completions.create(**request | {"messages": [*MESSAGES, history, result], "max_tokens": 2})  # type: ignore[call-overload]
            assert again.choices[0].finish_reason in ("length", "stop")


def test_a_stream_of_calls_adds_up_to_the_whole(server: Server) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 90, "temperature": 1.0, "seed": 8, "tools": TOOLS}
    with server.client() as client:
        whole = client.chat.completions.create(**request, tool_choice="required")  # type: ignore[call-overload]
        chunks = list(client.chat.completions.create(**request, tool_choice="required", stream=True))  # type: ignore[call-overload]
        with client.chat.completions.stream(**request, tool_choice="required", parallel_tool_calls=False) as stream:  # type: ignore[arg-type]
            final = stream.get_final_completion()
    names, arguments = dict[int, str](), dict[int, str]()
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.function.name is not None:
                assert call.index not in names
                assert call.id
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    calls = whole.choices[0].message.tool_calls
    assert [(names[i], arguments[i]) for i in sorted(names)] == [(c.function.name, c.function.arguments) for c in calls]
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    (call,) = final.choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def test_a_model_may_call_strict_tools_or_not(server: Server) -> None:
    strict = [{"type": "function", "function": each["function"] | {"strict": True}} for each in TOOLS]  # type: ignore[operator]
    with server.client() as client:
        request = {
            "model": "tiny",
            "messages": MESSAGES,
            "max_tokens": 60,
            "temperature": 1.0,
            "seed": 2,
            "n": 4,
            "tools": strict,
        }
        free = client.chat.completions.create(**request)  # type: ignore[call-overload]
        # A bias towards the mark's first character makes a random model begin with it.
        token = load_tokenizer(server.model).encode("<").ids[0]
        led = client.chat.completions.create(**request, logit_bias={str(token): 100})  # type: ignore[call-overload]
    assert {choice.finish_reason for choice in free.choices} <= {"length", "stop", "tool_calls"}
    assert led.choices
    for choice in (*free.choices, *led.choices):
        if choice.finish_reason != "length":
            for call in choice.message.tool_calls or ():
                check_call(call.function.name, call.function.arguments)


def test_messages_and_responses_call_the_same_tools(server: Server) -> None:
    functions = [{"type": "function", **each["function"]} for each in TOOLS]  # type: ignore[dict-item]
    with server.client() as client:
        request = {"model": "tiny", "input": "Hello", "max_output_tokens": 90, "tools": functions, "tool_choice": "required"}
        made = client.responses.create(**request, parallel_tool_calls=False)  # type: ignore[call-overload]
        (call,) = made.output
        check_call(call.name, call.arguments)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "nothing"}
        history = [*MESSAGES, call, output]
        again = client.responses.create(model="tiny", input=history, max_output_tokens=2, tools=functions)  # type: ignore[arg-type]
        assert again.output_text is not None
        form = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}},
                "required": ["a"], "additionalProperties": False}, "strict": True}  # fmt: skip
        answer = client.responses.create(model="tiny", input="Hello", max_output_tokens=40, text={"format": form})  # type: ignore[arg-type]
        written = "".join(answer.output_text.split())  # a random model may go on with white space to the end of its tokens
        assert any(whole.startswith(written) for whole in ('{"a":true}', '{"a":false}'))
    tools = [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}  # type: ignore[index]
        for each in TOOLS
    ]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as claude:
        message = claude.messages.create(
            model="tiny", max_tokens=90, messages=MESSAGES, tools=tools,  # type: ignore[arg-type]
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )  # fmt: skip
        (use,) = message.content
        check_call(use.name, json.dumps(use.input))
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "nothing"}]}
        count = claude.messages.count_tokens(
            model="tiny",
            messages=[*MESSAGES, {"role": "assistant", "content": message.content}, result],
            tools=tools,  # type: ignore[list-item, arg-type]
        )
        assert count.input_tokens > message.usage.input_tokens


def test_routes_that_are_not_there_are_404(server: Server) -> None:
    with server.client() as client:
        calls = [
            lambda: client.responses.retrieve("resp_1"),
            lambda: client.moderations.create(input="x"),
            lambda: client.files.list(),
            lambda: client.images.generate(prompt="x"),
            lambda: client.chat.completions.retrieve("x"),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError, match="no route"):
                call()
        with pytest.raises(openai.APIStatusError):
            client.models.delete("tiny")


def test_the_clients_other_ways_to_read_an_answer_work(server: Server) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    with server.client() as client:
        whole = client.chat.completions.create(**request)  # type: ignore[call-overload]
        raw = client.chat.completions.with_raw_response.create(**request)  # type: ignore[call-overload]
        assert raw.parse().choices[0].message == whole.choices[0].message
        with client.chat.completions.with_streaming_response.create(**request) as response:  # type: ignore[call-overload]
            assert json.loads(response.read())["choices"][0]["message"]["content"] == whole.choices[0].message.content
        text = whole.choices[0].message.content
        # The SDK raises where a stream ends at "length", so this one ends at a stop string.
        stop = text[len(text) // 2 :][:2]
        with client.chat.completions.stream(**request | {"stop": [stop]}) as stream:  # type: ignore[arg-type]
            final = stream.get_final_completion()
        assert final.choices[0].message.content == text[: text.index(stop)]
        assert final.choices[0].finish_reason == "stop"


def test_models_are_listed_and_retrieved(server: Server) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"


def test_a_shared_beginning_is_found_in_the_cache(server: Server) -> None:
    before = server.metric("twostroke_prefix_hit_tokens")
    with server.client() as client:
        for _ in range(2):
            client.completions.create(model="tiny", prompt="class Action(object):\n" * 8, max_tokens=2)
    assert server.metric("twostroke_prefix_hit_tokens") > before


def test_a_client_that_hangs_up_frees_its_pages(server: Server) -> None:
    with server.client() as client:
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=450, n=5, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    all_free(server)


async def hang_up_on_some(server: Server, n: int, at_once: int, seed: int) -> int:
    """Send ``n`` streams, hang up on about a third after the first chunk; how many were hung up on."""
    rng = random.Random(seed)
    plans = [(f"def f{rng.randrange(9)}({rng.random()}):", rng.randrange(1, 40), rng.random() < 0.3) for _ in range(n)]
    places = asyncio.Semaphore(at_once)

    async def one(client: openai.AsyncOpenAI, prompt: str, n_tokens: int, hang_up: bool) -> bool:
        async with places:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=n_tokens, stream=True, extra_body={"ignore_eos": True}
            )
            n_chunks = 0
            async for _ in stream:
                n_chunks += 1
                if hang_up and n_chunks == 1:
                    await stream.close()
                    return True
            return False

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        return sum(await asyncio.gather(*(one(client, *plan) for plan in plans)))


def all_free(server: Server) -> None:
    deadline = time.monotonic() + 60
    names = ("kv_pages_used", "requests_running", "requests_waiting", "http_requests_active")
    while any(server.metric(f"twostroke_{name}") for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_pages_and_places_return_after_clients_have_hung_up(server: Server) -> None:
    assert asyncio.run(hang_up_on_some(server, n=40, at_once=16, seed=1)) > 3
    all_free(server)


@pytest.mark.soak
def test_two_thousand_requests_leak_nothing(server: Server) -> None:
    asyncio.run(hang_up_on_some(server, n=2000, at_once=64, seed=2))
    all_free(server)


def test_a_killed_engine_is_replaced(server: Server) -> None:
    """Last in the file: the server has another engine afterwards."""
    (engine,) = [p for p in psutil.Process(server.process.pid).children() if "engine_process" in " ".join(p.cmdline())]
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while httpx.get(f"{server.url}/ready", trust_env=False).status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while httpx.get(f"{server.url}/ready", trust_env=False).status_code != 200:
        assert time.monotonic() < deadline + 50
        time.sleep(0.1)
    with server.client() as client:
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3).usage is not None
