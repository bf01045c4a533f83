"""ModelSpec refuses impossible shapes and answers for its windows."""

from __future__ import annotations

import dataclasses

import pytest

from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec

SPEC = ModelSpec(
    family="llama", vocab_size=97, n_layers=4, d_model=48, n_heads=6, n_kv_heads=2, head_dim=8, d_ff=64, max_positions=128
)


def test_derived_sizes() -> None:
    assert SPEC.queries_per_kv_head == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_kv_heads": 4}, r"n_kv_heads=4 must divide n_heads=6\. Use one of 1, 2, 3, 6\."),
        ({"n_heads": 2**31 - 1}, r"n_kv_heads=2 must divide n_heads=2147483647\. Use one of 1, 2147483647\."),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"n_layers": 0}, "n_layers=0"),
        ({"vocab_size": -5}, "vocab_size=-5"),
        ({"d_model": 4.0}, r"d_model=4\.0"),
        ({"d_ff": True}, "d_ff=True"),
        ({"dropout": 1.0}, "dropout"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_an_impossible_shape_is_a_sentence(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SPEC.with_(**changes)


def test_unknown_field_is_named() -> None:
    with pytest.raises(ConfigError, match="n_expert"):
        SPEC.with_(n_expert=3)


def test_window_of_layer_follows_the_list_of_windowed_layers() -> None:
    everywhere = SPEC.with_(sliding_window=16)
    assert [everywhere.window_of_layer(i) for i in range(4)] == [16] * 4
    some = SPEC.with_(sliding_window=16, sliding_window_layers=(1, 3))
    assert [some.window_of_layer(i) for i in range(4)] == [None, 16, None, 16]
    assert SPEC.window_of_layer(0) is None


def test_a_spec_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.n_layers = 3  # type: ignore[misc]
