"""Requests: what is accepted, what is refused, and that every refusal names its field."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.scheduling.constraint import Constraint
from twostroke.server import protocol
from twostroke.server.errors import ApiError


def completion(**fields: Any) -> protocol.CompletionRequest:
    return protocol.parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def chat(**fields: Any) -> protocol.ChatRequest:
    return protocol.parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "p"}], **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_pp": 0.5}, "top_pp"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"priority": -1}, "priority"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 1.0}, "temperature"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a" * 2**18}, "guided_regex"),
        ({"guided_regex": "a+", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a+", "use_beam_search": True}, "use_beam_search"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"stream_options": {"foo": 1}}, "stream_options.foo"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"model": None}, "model"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"user": 5}, "user"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_refused_completion_names_its_field(fields: dict[str, Any], param: str) -> None:
    def use() -> None:
        request = completion(**fields)
        protocol.prompts_of(request)
        request.sampling(max_tokens=5, logprobs=request.logprobs)

    with pytest.raises(ApiError) as caught:
        use()
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.rpartition(".")[2] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0].content[0].type"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": False}, "echo"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"best_of": 1}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "returns": {}}}]}, "tools[0].function.returns"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format.json_schema"),
        ({"tools": {}, "tool_choice": "none"}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"verbosity": "high"}, "verbosity"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}, "messages[0].refusal"),
        ({"messages": [{"role": "assistant", "content": "", "audio": {"id": "x"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": []}]}, "messages[0].function_call"),
        ({"messages": [{"role": "assistant", "content": "", "annotations": ["x"]}]}, "messages[0].annotations"),
    ],
)
def test_a_refused_chat_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields).sampling(max_tokens=5, logprobs=None)
    assert caught.value.status == 400
    assert caught.value.param == param


@pytest.mark.parametrize("name", sorted(protocol.NEUTRAL))
def test_neutral_values_and_null_are_accepted(name: str) -> None:
    parse = completion if name in protocol.COMPLETION_ONLY else chat
    for value in (None, *protocol.NEUTRAL[name]):
        parse(**{name: value})


def test_labels_are_accepted_and_change_nothing() -> None:
    assert chat(user="u", metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k") == chat()


def test_a_long_value_is_not_carried_back_in_the_message() -> None:
    with pytest.raises(ApiError) as caught:
        completion(suffix="secret " * 1000)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        protocol.parse_completion(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_an_answers_empty_parts_are_accepted_in_the_history() -> None:
    empty = {"content": None, "refusal": None, "tool_calls": [], "function_call": None, "annotations": [], "audio": None}
    request = chat(messages=[{"role": "assistant", **empty}, {"role": "user", "content": "p"}])
    assert request.messages[0].for_template() == {"role": "assistant", "content": ""}


def test_tools_that_may_not_be_called_are_as_if_there_were_none() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool], tool_choice="none") == chat(functions=[{"name": "f"}], function_call="none") == chat()


def test_every_spelling_of_a_form_is_the_same_form() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    text = json.dumps(schema, ensure_ascii=False)
    spellings: list[dict[str, Any]] = [
        {"guided_json": schema},
        {"guided_json": text},
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": False}}},
    ]
    for fields in spellings:
        constraint = chat(**fields).sampling(9, None).constraint
        assert constraint is not None
        assert (constraint.kind, json.loads(constraint.text)) == ("json_schema", schema)
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert chat(**fields).sampling(9, None).constraint == Constraint.json_object()
    assert completion(guided_regex="a").sampling(9, None).constraint == Constraint.regex("a")
    assert completion(structured_outputs={"grammar": "g"}).sampling(9, None).constraint == Constraint.grammar("g")
    assert completion(guided_choice=["a", "b"]).sampling(9, None).constraint == Constraint.choice(["a", "b"])
    for none in ({"response_format": {"type": "text"}}, {"guided_json": None}, {"response_format": None}):
        assert chat(**none).sampling(9, None).constraint is None


def test_calls_and_their_results_are_for_the_template() -> None:
    function = {"name": "f", "arguments": {"a": [1, None]}}
    calls = [
        {"id": "1", "type": "function", "function": function | {"arguments": arguments}}
        for arguments in (json.dumps(function["arguments"]), function["arguments"])
    ]
    messages = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "so"}]},
    ]
    first, second = chat(messages=messages).messages
    call = {"id": "1", "type": "function", "function": function}
    assert first.for_template() == {"role": "assistant", "content": "", "tool_calls": [call, call]}
    assert second.for_template() == {"role": "tool", "content": "so", "tool_call_id": "1"}


def test_the_reasoning_effort_is_for_the_template() -> None:
    assert chat(reasoning_effort="low").template_variables == {"reasoning_effort": "low", "enable_thinking": True}
    assert chat(reasoning_effort="none").template_variables == {"reasoning_effort": "none", "enable_thinking": False}
    given = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert given.template_variables["enable_thinking"], "what is said of the template itself goes before"
    assert chat().template_variables == {}


@pytest.mark.parametrize("text", [r"\ud800", r"\ud83d and more", r"\udc00", r"\ud800A"])
@pytest.mark.parametrize("field", ["prompt", "user"])
def test_half_a_surrogate_pair_is_called_what_it_is(field: str, text: str) -> None:
    body = {"prompt": "p"} | {field: "@"}
    with pytest.raises(ApiError, match="half of a surrogate pair") as caught:
        protocol.parse_completion(json.dumps({"model": "m"} | body).replace("@", text).encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    with pytest.raises(ApiError, match="truncated"):
        protocol.parse_completion(b'{"model": "m", "prompt": "p')
    assert completion(prompt="\U0001f600").prompt == "\U0001f600", "a whole pair, which json.dumps writes as two escapes"


N = 1_900_000
BODIES = {
    "long field": {"a" * N: 1},
    "long field in a message": {"messages": [{"role": "user", "content": "x", "b" * N: 1}]},
    "field like a place": {"messages": [{"role": "user", "content": "x", " - at `$.a" * (N // 10): 1}]},
    "long value": {"tools": "c" * N},
    "long bias": {"logit_bias": {"1" * N: 1}},
    "long role": {"messages": [{"role": "d" * N, "content": "x"}]},
    "long model": {"model": ["e" * N]},
}


@pytest.mark.parametrize("name", BODIES)
def test_no_sentence_grows_with_the_body(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**BODIES[name])
    assert len(caught.value.message) < 600
    assert len(caught.value.param or "") < 100


def test_what_is_not_used_is_not_built() -> None:
    """600,000 empty lists are 2 MB of body, 70 MB of memory, and 400 ms of building and of collecting garbage."""
    lists = b"[[]" + b",[]" * (N // 3) + b"]"
    start = b'{"model": "m", "messages": [{"role": "user", "content": "p"}], '
    for field in (b'"metadata": {"a": ' + lists + b"}", b'"tool_choice": "none", "tools": ' + lists):
        tracemalloc.start()
        try:
            assert protocol.parse_chat(start + field + b"}") == chat()
            assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        finally:
            tracemalloc.stop()
    for field in (b'"tools": ', b'"nonsense": ', b'"temperature": '):
        with pytest.raises(ApiError):
            protocol.parse_chat(start + field + lists + b"}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*protocol.CompletionRequest.__struct_fields__, *protocol.ChatRequest.__struct_fields__, *protocol.NEUTRAL})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # clocks: other programs share the cores
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_no_request_raises_anything_but_a_400(fields: dict[str, Any]) -> None:
    statuses = set()
    for parse in (completion, chat):
        try:
            request = parse(**fields)
            if isinstance(request, protocol.CompletionRequest):
                protocol.prompts_of(request)
            request.sampling(5, None)
        except ApiError as error:
            statuses.add(error.status)
    assert statuses <= {400}


def test_sampling_parameters_arrive_unchanged() -> None:
    request = completion(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, stop=["a", "b"], ignore_eos=True, min_tokens=2)
    params = request.sampling(7, 2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 5, 0.1, 3)
    assert (params.stop, params.ignore_eos, params.min_tokens, params.max_tokens, params.logprobs) == (
        ("a", "b"),
        True,
        2,
        7,
        2,
    )


def test_vllms_names_arrive_unchanged() -> None:
    request = completion(
        n=3, top_k=-1, include_stop_str_in_output=True, skip_special_tokens=False, logprobs=2, prompt_logprobs=1, echo=True
    )
    params = request.sampling(7, 2, request.wanted_prompt_logprobs)
    assert (params.n, params.top_k, params.include_stop_str_in_output, params.skip_special_tokens) == (3, 0, True, False)
    assert params.prompt_logprobs == 2  # the more of what echo and prompt_logprobs need
    assert completion(n=2, best_of=2).sampling(1, None).n == 2


def test_a_beam_search_becomes_the_engines_parameters() -> None:
    fields = {"n": 2, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    params = completion(best_of=4, **fields).sampling(5, None)
    assert (params.n, params.beam_width, params.temperature) == (2, 4, 0.0)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")
    assert chat(**fields).sampling(5, None).beam_width == 2
    assert (completion(best_of=4, **fields).places, chat(**fields).places) == (4, 2)
    plain = completion(use_beam_search=False, length_penalty=1.0, early_stopping=False).sampling(5, None)
    assert (plain.use_beam_search, plain.temperature) == (False, 1.0)


def test_nothing_to_write_is_only_asked_for_with_something_to_score() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert completion(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert chat(max_completion_tokens=0, prompt_logprobs=0).asked == 0


def test_penalties_and_biases_arrive_unchanged() -> None:
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"5": 2, "17": -100}}
    params = completion(**fields).sampling(7, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1, 1.2)
    assert params.logit_bias == ((5, 2.0), (17, -100.0))


def test_text_parts_are_joined_and_developer_is_system() -> None:
    request = chat(messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert request.messages[0].for_template() == {"role": "system", "content": "ab"}


@pytest.mark.parametrize("spelling", ["000000005", "05", "00", "-1", "+5", " 5", "5 ", "٥", "1e3", "5.0", "1000000000", ""])
def test_a_token_has_one_spelling_in_logit_bias(spelling: str) -> None:
    """Two of one token would add up beyond the bounds."""
    with pytest.raises(ApiError) as caught:
        completion(logit_bias={"5": 100.0, spelling: 100.0}).sampling(1, None)
    assert caught.value.param == "logit_bias"
