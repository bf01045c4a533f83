from __future__ import annotations

from typing import Any

import pytest

from twostroke.core.errors import InputError
from twostroke.scheduling.sampling_params import MAX_LOGPROBS, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -1e-9),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("seed", 2**64),
        ("logprobs", MAX_LOGPROBS + 1),
        ("ignore_eos", 1),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", range(1025)),
        ("stop", ["x"] * 17),
        ("stop", ""),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="min_tokens=5 must be at most max_tokens=4") as refused:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert refused.value.field == "min_tokens"


@pytest.mark.parametrize("stop", ["", ("a", ""), ["x"] * 17, "y" * 1025])
def test_stop_strings_are_bounded_and_not_empty(stop: Any) -> None:
    with pytest.raises(InputError, match="stop"):
        SamplingParams(stop=stop)


def test_one_stop_string_and_a_list_of_them_mean_the_same() -> None:
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)  # type: ignore[arg-type]
