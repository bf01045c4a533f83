"""Requests: what is accepted, what is refused, and that every refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
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
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
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
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_refused_chat_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.param is not None
    # msgspec names list items `[...]`: it knows that one of them is wrong, not which.
    assert caught.value.param.replace("[...]", "[0]") == param


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
