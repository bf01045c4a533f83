"""Hardware tables are complete and sourced; names are found or refused with a hint; rates interpolate what was measured."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import GFLOP, machine, profile
from twostroke.core.errors import ConfigError
from twostroke.core.profile import read_fingerprint, save_profile
from twostroke.planner.hardware import (
    ASSUMED_BANDWIDTH_EFFICIENCY,
    ASSUMED_LINK_EFFICIENCY,
    ASSUMED_PRODUCT_EFFICIENCY,
    hardware_from_profile,
    hardware_names,
    interpolate_log,
    load_hardware,
    price,
    prices,
)


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_of_a_device_has_unit_source_and_date(name: str) -> None:
    device = load_hardware(name)
    assert device.basis == "datasheet"
    wanted = {"memory_bytes", "read_bandwidth_bytes_per_s", "watts", "devices_per_node"}
    wanted |= {"network.bytes_per_s", "network.alpha_s"}
    wanted |= {f"peak_flop_per_s.{dtype}" for dtype in ("fp32", "bf16", "int8")}
    assert wanted <= set(device.facts)
    for fact in device.facts.values():
        assert fact.value > 0
        assert fact.unit
        assert fact.source
        assert fact.date
    # A 16-bit peak below the 32-bit one, or a machine whose products outrun its memory less than once, is a slipped digit.
    assert device.peak("bf16") >= device.peak("fp32")
    assert 10 < device.peak("bf16") / device.bandwidth(2**30) < 2000
    assert device.usd_per_hour.value > 0
    assert device.usd_per_hour.kind in ("listed", "assumed")


def test_ten_devices_are_there() -> None:
    assert len(hardware_names()) >= 10


def test_every_price_has_a_source() -> None:
    for section in ("electricity_usd_per_kwh", "cpu_core_usd_per_hour", "pue"):
        assert price(section).source
    for row in (*prices()["cpu_watts_per_core"], *prices()["device_usd_per_hour"].values()):
        assert row["kind"] in ("listed", "assumed")
        assert row["source"]
    assert set(prices()["device_usd_per_hour"]) <= set(hardware_names())


def test_names_are_found_whatever_their_spelling() -> None:
    assert load_hardware("H100").name == load_hardware("h100_sxm").name == "h100-sxm"


@pytest.mark.parametrize(
    ("name", "hint"), [("h10", "Did you mean 'h100'"), ("abacus", "Known: this, a100-sxm-80gb"), ("", "Known")]
)
def test_an_unknown_name_gets_near_matches_or_the_list(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_hardware(name)


def test_a_machine_that_was_never_calibrated_says_so() -> None:
    with pytest.raises(ConfigError, match="twostroke calibrate"):
        load_hardware("this")


def test_this_is_the_calibrated_profile() -> None:
    save_profile(dataclasses.replace(profile(), fingerprint=read_fingerprint()))
    device = load_hardware("this")
    assert device.basis == "measured"
    assert device.peak("bf16") == 880 * GFLOP
    assert device.watts.kind == device.usd_per_hour.kind == "assumed"


def test_watts_and_price_grow_with_cores() -> None:
    device = machine()
    assert device.watts.value == pytest.approx(2 * 4.2)  # an EPYC's entry
    assert device.usd_per_hour.value == pytest.approx(2 * price("cpu_core_usd_per_hour").value)


def test_bandwidth_is_flat_beyond_what_was_measured_and_between_within() -> None:
    device = machine()
    assert device.bandwidth(1) == pytest.approx(144e9)
    assert device.bandwidth(1e12) == pytest.approx(74e9)
    between = device.bandwidth(math.sqrt(32 * 256) * 2**20)
    assert between == pytest.approx(math.sqrt(144e9 * 74e9))


def test_products_interpolate_in_rows_and_take_the_nearest_class() -> None:
    device = hardware_from_profile(dataclasses.replace(profile(), linear_launch_s=0.0))
    assert device.product_rate("bf16", 4096, 384, 384) == pytest.approx(800 * GFLOP)
    assert device.product_rate("bf16", 4, 384, 384) == pytest.approx(800 * GFLOP * math.sqrt(0.05 * 0.3))
    assert device.product_rate("bf16", 10**6, 400, 400) == pytest.approx(800 * GFLOP)
    assert device.product_rate("fp32", 256, 1000, 1000) == pytest.approx(200 * GFLOP)


def test_near_classes_weigh_more_than_far_ones() -> None:
    slow = dataclasses.replace(profile().matmul[0], scheme="bf16", m=256, n=4096, k=384, flop_per_s=80 * GFLOP)
    fast = dataclasses.replace(slow, n=384, k=384, flop_per_s=800 * GFLOP)
    device = dataclasses.replace(machine(), matmul=(slow, fast))
    near_fast, near_slow = device.product_rate("bf16", 256, 500, 384), device.product_rate("bf16", 256, 3500, 384)
    assert 700 * GFLOP < near_fast < 800 * GFLOP
    assert 80 * GFLOP < near_slow < 90 * GFLOP


def test_the_launch_is_taken_off_measured_products_and_off_no_more() -> None:
    """A point's own time comes back when its launch is added again; of a tiny product something always remains."""
    device = machine({"launch_w8_s": 2e-6})
    point = next(p for p in profile().matmul if (p.scheme, p.m, p.n, p.k) == ("bf16", 16, 384, 1024))
    flops = 2 * 16 * 384 * 1024
    assert device.product_launch_s("bf16") == 3e-6
    assert device.product_launch_s("w8") == 2e-6
    seconds = flops / device.product_rate("bf16", 16, 384, 1024) + device.product_launch_s("bf16")
    assert seconds == pytest.approx(flops / point.flop_per_s)
    tiny = hardware_from_profile(dataclasses.replace(profile(), linear_launch_s=1.0))
    assert 0 < tiny.product_rate("bf16", 1, 384, 384) < 1e15


def test_a_product_takes_no_less_than_reading_its_weights() -> None:
    device = hardware_from_profile(dataclasses.replace(profile(), linear_launch_s=0.0))
    n, k = 2048, 2048
    assert device.product_s("bf16", 1, n, k, working_set_bytes=2**30) >= 2 * n * k / 74e9
    assert device.product_s("bf16", 4096, n, k) == pytest.approx(2 * 4096 * n * k / (800 * GFLOP))


def test_a_type_without_rates_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="bf16, fp32, w8"):
        machine().peak("fp8")


def test_datasheets_are_scaled_by_the_assumed_efficiencies() -> None:
    device = load_hardware("h100")
    assert device.bandwidth(1e12) == pytest.approx(3.35e12 * ASSUMED_BANDWIDTH_EFFICIENCY)
    assert device.product_rate("bf16", 512, 4096, 4096) == pytest.approx(9.89e14 * ASSUMED_PRODUCT_EFFICIENCY)
    # int8 weights with bf16 activations multiply as bf16 does
    assert device.product_rate("w8", 512, 4096, 4096) == device.product_rate("bf16", 512, 4096, 4096)


def test_a_group_uses_the_link_while_it_fits_a_node_and_the_network_beyond() -> None:
    device = load_hardware("h100")
    assert device.link_for(1) is device.link_for(8) is device.link
    assert device.link_for(9) is device.network
    assert device.link.bytes_per_s == 4.5e11  # NVLink 4: 18 links of 25 GB/s each way
    assert device.network_bytes_per_s == device.network.bytes_per_s == 5e10  # 400 Gbit/s
    assert 1e-7 < device.link.alpha_s < device.network.alpha_s < 1e-4
    assert device.link.effective_bytes_per_s == pytest.approx(ASSUMED_LINK_EFFICIENCY * 4.5e11)


def test_calibrated_collectives_are_the_link_of_this_machine() -> None:
    device = machine({"link_alpha_s": 2e-5, "link_bytes_per_s": 3e9, "link_ranks": 2})
    assert device.link.kind == "measured"
    assert device.link.effective_bytes_per_s == device.link.bytes_per_s == 3e9
    assert device.link_for(2) is device.link
    assert machine().link_for(2).kind == "assumed"


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1, 1e12)), min_size=1, max_size=6), st.floats(0.1, 1e12))
def test_interpolation_stays_within_the_points(points: list[tuple[float, float]], x: float) -> None:
    y = interpolate_log(points, x)
    assert min(p[1] for p in points) * (1 - 1e-9) <= y <= max(p[1] for p in points) * (1 + 1e-9)


def test_interpolating_nothing_says_to_calibrate() -> None:
    with pytest.raises(ConfigError, match="calibrate"):
        interpolate_log([], 1.0)
