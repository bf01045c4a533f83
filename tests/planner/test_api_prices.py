"""API prices are the source's, current ones; names are found or refused with near matches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError
from twostroke.planner.money.api_prices import api_models, api_price, nearest_api

TODAY = "2026-11"


def test_prices_are_those_of_the_source(assets: Path) -> None:
    """Every model of the source files that has one price in force: its three numbers, to the cent."""
    checked = 0
    for path in (assets / "prices").glob("llm-prices_*.json"):
        for model in json.loads(path.read_text())["models"]:
            rows = [r for r in model["price_history"] if (r["from_date"] or "") <= TODAY < (r["to_date"] or "9999")]
            if model["id"] not in api_models():
                assert "image" in model["id"]
                continue
            found, row = api_price(model["id"]), rows[0]
            assert len(rows) == 1
            assert (found.input_usd_per_mtok, found.output_usd_per_mtok) == (row["input"], row["output"])
            assert found.cached_usd_per_mtok == row["input_cached"]
            checked += 1
    assert checked == len(api_models()) > 90


def test_a_request_by_hand() -> None:
    gpt5 = api_price("gpt-5")
    assert gpt5.request_usd(1000, 500) == pytest.approx((1000 * 1.25 + 500 * 10) / 1e6)
    assert gpt5.request_usd(1000, 500, cached_share=0.8) == pytest.approx((200 * 1.25 + 800 * 0.125 + 500 * 10) / 1e6)
    uncached = api_price("open-mistral-7b")
    assert uncached.request_usd(100, 0, cached_share=1.0) == uncached.request_usd(100, 0)


def test_every_price_has_vendor_source_and_date() -> None:
    for model in api_models():
        price = api_price(model)
        assert price.vendor
        assert price.source
        assert price.date >= "2025"
        assert 0 < price.input_usd_per_mtok <= price.output_usd_per_mtok < 1000


def test_a_models_own_vendor_is_found_by_its_name() -> None:
    for name, model in (("mistralai--Mistral-7B-v0.1", "open-mistral-7b"), ("Mixtral-8x7B", "open-mixtral-8x7b")):
        found = nearest_api(name)
        assert found is not None
        assert found.model == model
    assert nearest_api("stories260K") is None


def test_an_unknown_model_gets_near_matches() -> None:
    with pytest.raises(ConfigError, match=r"API model 'gpt-5-mni' is not known\. Did you mean 'gpt-5-mini'"):
        api_price("gpt-5-mni")
    with pytest.raises(ConfigError, match="Known: chatgpt-4o-latest, claude-"):
        api_price("zzzzzz")
