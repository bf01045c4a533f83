"""Layouts count devices, refuse what cannot be cut by naming what can, and know which groups leave a node."""

from __future__ import annotations

import pytest

from machines import small_llama
from twostroke.core.errors import ConfigError
from twostroke.core.spec import MoeSpec
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.sharding import stages


def test_devices_are_the_product_of_the_three_cuts() -> None:
    assert SINGLE.n_devices == 1
    assert Layout(data=128, tensor=8, pipeline=16).n_devices == 16_384  # Llama 3 405B


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"data": 0}, "data=0"),
        ({"tensor": -2}, "tensor=-2"),
        ({"pipeline": 1.5}, "pipeline=1.5"),
        ({"expert": True}, "expert=True"),
        ({"zero": 4, "data": 2}, "zero=4"),
        ({"zero": 3}, "data=1"),
        ({"interleave": 2}, "pipeline=1"),
        ({"data": 4, "expert": 3}, "Use 1, 2 or 4"),
        ({"data": 4, "copies": 2}, "need zero=2 or 3"),
        ({"data": 4, "zero": 3, "copies": 4}, "with ranks left to share each"),
        ({"data": 8, "expert": 8, "zero": 3, "copies": 2}, "must divide the 1 devices that hold the same experts"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Layout(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(tensor=3), r"tensor=3 must divide n_heads=4. Use 1, 2 or 4"),
        (Layout(pipeline=9), r"pipeline=9 makes more chunks than n_layers=6, embedding and head. Use at most 8"),
        (Layout(pipeline=3, interleave=3), r"pipeline=3 · interleave=3 makes more chunks than n_layers=6"),
        (Layout(data=2, expert=2), "dense"),
    ],
)
def test_a_model_that_cannot_be_cut_so_names_what_can(layout: Layout, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        layout.check(small_llama())


def test_key_value_heads_may_be_shared_but_not_split_unevenly() -> None:
    Layout(tensor=4).check(small_llama(n_kv_heads=1))
    Layout(tensor=4).check(small_llama(n_kv_heads=2))
    with pytest.raises(ConfigError, match="n_kv_heads=6"):
        Layout(tensor=4).check(small_llama(n_heads=12, n_kv_heads=6))


def test_126_layers_on_16_stages_as_llama_3_has_them() -> None:
    """Its first and last chunk have a layer less beside embedding and head (arXiv 2407.21783, 3.3.2)."""
    layout = Layout(pipeline=16, interleave=8)
    layout.check(small_llama(n_layers=126))
    assert max(stage.n_layers for stage in stages(126, layout.pipeline, layout.interleave)) == 8


def test_an_expert_is_cut_only_where_experts_leave_devices_for_it() -> None:
    spec = small_llama(moe=MoeSpec(n_experts=8, top_k=2, d_expert=3, n_shared_experts=1, d_shared=64))
    Layout(tensor=4, expert=4).check(spec)
    with pytest.raises(ConfigError, match=r"tensor=4 must divide moe.d_expert=3. Use 1 or 2"):
        Layout(tensor=4, expert=2).check(spec)
    with pytest.raises(ConfigError, match="shared experts' width=2"):
        Layout(tensor=4).check(small_llama(moe=MoeSpec(8, 2, 64, n_shared_experts=1, d_shared=2)))
    with pytest.raises(ConfigError, match="n_experts=8"):
        Layout(data=3, expert=3).check(spec)
