"""Money and energy are their formulas, by hand and against published figures; every price is named; bad input is a sentence."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import machine, small_llama
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.planner.hardware.tables import hardware_names, load_hardware
from twostroke.planner.money.cost import (
    ProjectInputs,
    TokenPrices,
    bought_rate,
    co2_kg,
    cost_of,
    crossover_tokens,
    energy_kwh,
    on_demand_rate,
    project_cost,
    pue_of,
    rate_of,
    rent_usd,
    spot_rate,
    storage_usd,
    token_prices,
    usd_per_million_tokens,
)
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape


def test_formulas_by_hand() -> None:
    assert energy_kwh(3600, 700, 1.2) == pytest.approx(0.84)
    assert rent_usd(1800, 3.0) == pytest.approx(1.5)
    assert usd_per_million_tokens(1000, 3.6) == pytest.approx(1.0)
    assert usd_per_million_tokens(1000, 3.6, utilisation=0.5) == pytest.approx(2.0)
    assert storage_usd(2e12, 3) == pytest.approx(2000 * 3 * 0.023)


def test_crossover_is_where_both_have_cost_the_same() -> None:
    tokens = crossover_tokens(10.0, 0.5)
    assert tokens / 1e6 * 0.5 == pytest.approx(10.0)


def test_cost_names_price_and_watts() -> None:
    cost = cost_of(3600, machine())
    record = plain(cost)
    assert record["usd"] == pytest.approx(cost.usd_per_hour.value)
    assert record["energy_usd"] == pytest.approx(record["energy_kwh"] * cost.electricity.value)
    for key in ("watts", "usd_per_hour", "electricity_usd_per_kwh", "pue", "grid_kg_co2_per_kwh"):
        assert record[key]["source"]
        assert record[key]["kind"]


# -- published figures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu_hours", "tonnes"), [(184_320, 31.22), (368_640, 62.44), (1_720_320, 291.42)])
def test_co2_of_llama_2_as_its_model_card_has_it(gpu_hours: float, tonnes: float) -> None:
    """7B, 13B and 70B on A100s of 400 W. The card's PUE and grid are not printed; one product of the two, 0.4235, explains all
    three rows to the fourth digit."""
    assert co2_kg(energy_kwh(gpu_hours * 3600, 400, 1.0), 0.4235) / 1000 == pytest.approx(tonnes, rel=1e-3)


def test_deepseek_v3_costs_what_its_report_says() -> None:
    """2.788 M H800-hours at 2 $ are 5.576 M$ (arXiv 2412.19437, table 1)."""
    assert rent_usd(2.788e6 * 3600, 2.0) == pytest.approx(5.576e6)


def test_training_70b_costs_millions_as_claimed() -> None:
    """Llama-2-70B's 1.72 M A100-hours at today's rent: within the 2 to 10 M$ that articles repeat."""
    assert 2e6 < cost_of(1_720_320 * 3600, load_hardware("a100")).usd < 10e6


def test_a_published_purchase_is_nearly_its_published_total() -> None:
    """aiinframap.com, 1,024 B200s over five years at 70% use: 40.96 M$ and 3.01 M$ of power at PUE 1.2 and 0.08 $/kWh."""
    hours = 5 * 8760 * 0.7
    power = 1024 * energy_kwh(hours * 3600, 1000, 1.2) * 0.08
    assert power == pytest.approx(3.01e6, rel=0.01)  # it prints three digits
    device = bought_rate(load_hardware("b200"), years=5, utilisation=0.7).parts["device"]
    assert 1024 * device * 5 * 8766 * 0.7 == pytest.approx(40.96e6)


# -- terms -----------------------------------------------------------------------------------------------------------------


def test_spot_is_the_listed_price_and_what_interruptions_lose() -> None:
    rate = spot_rate(load_hardware("h100"))
    lost = 0.05 * 1500 / 3600
    assert rate.usd_per_hour.value == pytest.approx(1.25 / (1 - lost))
    assert rate.usd_per_hour.kind == "listed"
    guessed = spot_rate(load_hardware("l4"))
    assert guessed.usd_per_hour.value == pytest.approx(0.35 / (1 - lost))
    assert guessed.usd_per_hour.kind == "assumed"


def test_buying_by_hand() -> None:
    """H100: 30,000 $ and 30% for its server over 4 years of 8,766 h at 60%; 0.7 kW · PUE 1.58 · 0.15 $/kWh."""
    rate = bought_rate(load_hardware("h100"))
    worked = 4 * 8766 * 0.6
    assert rate.parts["device"] == pytest.approx(30_000 / worked)
    assert rate.parts["server and network"] == pytest.approx(9_000 / worked)
    assert rate.parts["electricity"] == pytest.approx(0.7 * 1.58 * 0.15)
    assert rate.usd_per_hour.value == pytest.approx(39_000 / worked + 0.1659)


def test_a_whole_machine_has_no_server_added_and_stands_on_a_desk() -> None:
    mac = load_hardware("m4-max")
    assert bought_rate(mac).parts["server and network"] == 0
    assert pue_of(mac).value == 1.0
    assert pue_of(load_hardware("h100")).value == 1.58


@pytest.mark.parametrize("name", hardware_names())
def test_every_device_has_all_three_terms_and_their_parts_add_up(name: str) -> None:
    device = load_hardware(name)
    for terms in ("on demand", "spot", "bought"):
        rate = rate_of(device, terms)  # type: ignore[arg-type]
        assert rate.usd_per_hour.value == pytest.approx(sum(rate.parts.values()))
        assert rate.usd_per_hour.value > 0
        assert rate.usd_per_hour.source
    assert spot_rate(device).usd_per_hour.value < on_demand_rate(device).usd_per_hour.value


def test_devices_multiply_money_and_energy_and_not_time() -> None:
    one, eight = cost_of(100, load_hardware("h100")), cost_of(100, load_hardware("h100"), n_devices=8)
    assert eight.seconds == one.seconds
    for name in ("usd", "energy_kwh", "energy_usd", "co2_kg"):
        assert getattr(eight, name) == pytest.approx(8 * getattr(one, name))


def test_cost_follows_the_terms() -> None:
    h100 = load_hardware("h100")
    assert cost_of(3600, h100, rate=spot_rate(h100)).usd == pytest.approx(spot_rate(h100).usd_per_hour.value)
    assert cost_of(3600, h100, rate=spot_rate(h100)).terms == "spot"


# -- a project and its tokens ---------------------------------------------------------------------------------------------


def test_a_project_shows_every_forgotten_cost_and_adds_them() -> None:
    bare = project_cost(1000.0, ProjectInputs())
    assert bare.usd == 1000.0
    assert len(bare.items) == 8  # all shown, zero or not
    inputs = ProjectInputs(
        data_acquisition_usd=10, data_cleaning_usd=20, people_months=2, repeated_runs=3, evaluation_usd=5,
        stored_gb=1000, storage_months=10, egress_gb=100,
    )  # fmt: skip
    full = project_cost(1000.0, inputs)
    assert full.usd == pytest.approx(1000 + 3000 + 10 + 20 + 2 * 15_000 + 5 + 230 + 9)
    assert plain(full)["inputs"]["repeated_runs"] == 3


def test_input_and_output_tokens_add_up_to_the_plans_price() -> None:
    """A request's prefill and decode at their own prices cost what the serving plan asks for its output tokens."""
    plan = plan_serving(small_llama(), ServingShape(batch=8, prompt_tokens=64, output_tokens=32), machine())
    rent = plan.hardware.usd_per_hour.value
    prices = token_prices(plan.prefill_tok_per_s, plan.decode_tok_per_s, rent)
    assert prices.request_usd(64, 32) == pytest.approx(plan.usd_per_mtok * 32 / 1e6)
    assert prices.output_usd_per_mtok > prices.input_usd_per_mtok  # decode reads the weights for each token


def test_a_request_by_hand() -> None:
    assert TokenPrices(0.5, 2.0).request_usd(1000, 500) == pytest.approx(0.0015)


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("utilisation", [0.0, -0.1, 1.01, 60.0, math.nan])
def test_an_impossible_utilisation_is_a_sentence(utilisation: float) -> None:
    for ask in (lambda: usd_per_million_tokens(1.0, 1.0, utilisation), lambda: bought_rate(machine(), utilisation=utilisation)):
        with pytest.raises(ConfigError, match=r"utilisation=.* must be a share above 0 and at most 1"):
            ask()


def test_negative_amounts_are_sentences() -> None:
    with pytest.raises(ConfigError, match=r"data_cleaning_usd=-1 must be a finite number that is not negative"):
        ProjectInputs(data_cleaning_usd=-1)
    with pytest.raises(ConfigError, match="seconds=-1"):
        cost_of(-1, machine())
    with pytest.raises(ConfigError, match="n_devices=0 must be a finite number above 0"):
        cost_of(1, machine(), n_devices=0)
    with pytest.raises(ConfigError, match="years=0 of depreciation"):
        bought_rate(machine(), years=0)


@given(st.floats(0, 1e9), st.floats(1, 2000), st.floats(1, 3))
def test_energy_is_linear_in_time(seconds: float, watts: float, pue: float) -> None:
    assert energy_kwh(2 * seconds, watts, pue) == pytest.approx(2 * energy_kwh(seconds, watts, pue))
