"""Tokens' prices in serving plans: both phases apart, adding up to a request, a vendor's beside them by name."""

from __future__ import annotations

import pytest

from machines import small_llama
from twostroke.core.described import plain
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.text.serving import serving_text, token_lines


@pytest.mark.parametrize("tensor", [1, 2])
def test_both_phases_add_up_to_the_plans_price(tensor: int) -> None:
    plan = plan_serving(
        small_llama(), ServingShape(batch=8, prompt_tokens=64, output_tokens=32, tensor=tensor), load_hardware("h100")
    )
    prices = plan.usd_by_phase
    assert prices.request_usd(64, 32) == pytest.approx(plan.usd_per_mtok * 32 / 1e6)
    assert plain(plan)["token_prices"] == vars(prices)


def test_a_vendors_price_stands_beside_its_own_model_and_no_other() -> None:
    plan = plan_serving(small_llama(), ServingShape(), load_hardware("h100"))
    own, vendor = token_lines(plan, "models/Mistral-7B-v0.3")
    assert "(prefill)" in own
    assert "open-mistral-7b of mistral (listed" in vendor
    assert len(token_lines(plan, "models/stories")) == 1
    assert " ".join(own.split()) in " ".join(serving_text(plan, "x").split())
