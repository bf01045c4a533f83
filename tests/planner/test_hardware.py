"""Hardware tables are complete and sourced; names are found or refused with a hint; rates interpolate what was measured."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import GFLOP, machine, profile
from twostroke.core.errors import ConfigError
from twostroke.core.matrices import Matrix
from twostroke.core.profile import MatmulPoint, input_gradient, read_fingerprint, save_profile, weight_gradient
from twostroke.core.rates import Ring
from twostroke.planner.hardware import tables
from twostroke.planner.hardware.anchors import interpolate_log
from twostroke.planner.hardware.device import ASSUMED_BANDWIDTH_EFFICIENCY, ASSUMED_LINK_EFFICIENCY, ASSUMED_PRODUCT_EFFICIENCY
from twostroke.planner.hardware.tables import (
    device_price,
    hardware_aliases,
    hardware_from_profile,
    hardware_names,
    load_hardware,
    price,
    prices,
)
from twostroke.planner.training.layout import Layout, group_link
from twostroke.planner.training.passes import product_backward

REQUIRED = {"memory_bytes", "read_bandwidth_bytes_per_s", "watts", "devices_per_node", "network.bytes_per_s", "network.alpha_s"}

PLAUSIBLE = {  # fact: smallest, largest of any machine that these plans are for
    "memory_bytes": (8e9, 2e12),
    "read_bandwidth_bytes_per_s": (4e10, 1e13),
    "watts": (10, 1500),
    "idle_watts": (1, 400),
    "host_watts": (50, 1500),
    "devices_per_node": (1, 10_000),
    "sustained_share.bf16": (0.4, 1.0),
    "sustained_share.fp8": (0.4, 1.0),
    "sustained_share.attention": (0.2, 0.8),
    "link.bytes_per_s": (1e10, 1e12),
    "link.alpha_s": (5e-7, 5e-5),
    "network.bytes_per_s": (1e8, 2e11),
    "network.alpha_s": (1e-6, 1e-4),
    "cache_bytes": (1e6, 2e9),
}


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_of_a_device_has_unit_source_and_date_and_is_plausible(name: str) -> None:
    device = load_hardware(name)
    assert device.basis == "datasheet"
    assert REQUIRED | {"peak_flop_per_s.fp32", "peak_flop_per_s.bf16"} <= set(device.facts)
    assert ("link.bytes_per_s" in device.facts) == ("link.alpha_s" in device.facts) == (device.devices_per_node > 1)
    for path, fact in device.facts.items():
        assert all((fact.unit, fact.source, fact.date)), path
        assert fact.kind == ("assumed" if fact.source.startswith("assumed: ") else "datasheet"), path
        low, high = PLAUSIBLE[path] if not path.startswith("peak_") else (1e11, 2e16)
        assert low <= fact.value <= high, path
    # A fast product rate taken for a slow one or a slipped digit leaves this range of FLOP per byte: 7 (a laptop) to 1,900.
    bandwidth = device.facts["read_bandwidth_bytes_per_s"].value
    for dtype, peak in device.peak_flop_per_s.items():
        assert 1 < peak / bandwidth < 2000, dtype
    assert device.network.bytes_per_s <= device.link.bytes_per_s
    assert device.usd_per_hour.value > 0
    assert 0 < device.idle_watts.value < device.watts.value
    assert device.usd_per_hour.kind in ("listed", "assumed")
    assert device.place in ("desk", "data centre")


@pytest.mark.parametrize("name", hardware_names())
def test_narrow_types_are_no_slower_than_wide_ones_and_none_is_the_sparse_rate(name: str) -> None:
    """Matrix units double their rate at most with each halving of the type, and fp16 and bf16 run alike: a 2:4-sparse figure
    among dense ones, or the fp32 rate in place of bf16's, breaks this. Exceptions are devices that are built otherwise."""
    device = load_hardware(name)
    peak = device.peak_flop_per_s
    assert peak["bf16"] >= peak["fp32"]
    if name != "mi100":  # its bf16 is half of its fp16
        assert peak["fp16"] == pytest.approx(peak["bf16"])
    doubled = 4.001 if name.startswith("rtx-") or device.kind == "cpu" else 2.03  # these add bf16 up in fp32 at half speed
    for wide, narrow in (("bf16", "int8"), ("bf16", "fp8"), ("int8", "int4")):
        if wide in peak and narrow in peak and name not in ("b300-sxm", "gb300", "v100-sxm-32gb", "v100-pcie-32gb"):
            assert 0.99 * peak[wide] <= peak[narrow] <= doubled * peak[wide], (wide, narrow)


@pytest.mark.parametrize(
    ("name", "dtype", "tflop_per_s"),
    [  # as the vendors' datasheets print them, dense
        ("h100-sxm", "bf16", 989), ("h200-sxm", "fp8", 1979), ("a100-sxm-80gb", "bf16", 312), ("a100-sxm-80gb", "fp32", 19.5),
        ("rtx-4090", "bf16", 165.2), ("rtx-3090", "bf16", 71), ("rtx-5090", "bf16", 209.5), ("rtx-5090", "fp4", 1676),
        ("mi300x", "bf16", 1307.4), ("mi250x", "int8", 383), ("tpu-v5e", "bf16", 197), ("tpu-v5p", "bf16", 459),
        ("t4", "fp16", 65), ("gaudi3", "bf16", 1835), ("trainium2", "bf16", 667), ("h100-nvl", "bf16", 835),
        ("b300-sxm", "int8", 153.5),
    ],
)  # fmt: skip
def test_peaks_are_the_dense_ones_of_the_datasheets(name: str, dtype: str, tflop_per_s: float) -> None:
    assert load_hardware(name).peak(dtype) == pytest.approx(tflop_per_s * 1e12, rel=0.003)  # three digits are printed


def test_ridge_points_match_published_ones() -> None:
    """FLOP a byte at which products stop being bound by memory: 295 on H100 SXM, 153 on A100 80 GB, 240 on TPU v5e."""
    for name, ridge in (("h100-sxm", 295), ("a100-sxm-80gb", 153), ("tpu-v5e", 240)):
        device = load_hardware(name)
        assert device.peak("bf16") / device.facts["read_bandwidth_bytes_per_s"].value == pytest.approx(ridge, rel=0.01)


def test_forty_devices_are_there_from_datacentre_to_laptop() -> None:
    names = set(hardware_names())
    assert len(names) >= 40
    wanted = (
        "a100-sxm-80gb h100-sxm h200-sxm b200-sxm gb200 l4 l40s t4 a10 rtx-4090 rtx-5090 mi250x mi300x mi325x tpu-v5e tpu-v5p "
        "tpu-v6e gaudi3 inferentia2 trainium2 apple-m4-max xeon-8480 epyc-9654 ryzen-7840u"
    )
    assert set(wanted.split()) <= names


def test_rack_scale_and_pods_are_one_node() -> None:
    assert load_hardware("gb200").link_for(72).bytes_per_s == 9e11
    assert load_hardware("b200").link_for(72).bytes_per_s == 1e11
    assert load_hardware("tpu-v5p").devices_per_node == 8960


def test_aliases_name_devices_and_no_device_twice() -> None:
    names = set(hardware_names())
    assert set(hardware_aliases().values()) <= names
    assert not names & set(hardware_aliases())
    assert "this" not in hardware_aliases()


def test_a_plan_opens_one_device_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing all sixty would take a third of the time that a plan has."""
    opened: list[str] = []
    read = tables._read_toml
    prices()
    monkeypatch.setattr(tables, "_read_toml", lambda path: (opened.append(path.name), read(path))[1])
    load_hardware("h100-sxm")
    assert opened == ["h100-sxm.toml"]
    hardware_aliases.cache_clear()
    load_hardware("h100")
    assert opened == ["h100-sxm.toml", "aliases.toml", "h100-sxm.toml"]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "h200-sxm"), ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA A10", "a10"), ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA RTX A6000", "a6000"), ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
    ],
)  # fmt: skip
def test_an_accelerators_own_name_finds_its_price_and_power(reported: str, name: str) -> None:
    calibrated = dataclasses.replace(profile(), device="cuda")
    found = hardware_from_profile(
        dataclasses.replace(calibrated, fingerprint=dataclasses.replace(calibrated.fingerprint, gpus=(reported, reported)))
    )
    sheet = load_hardware(name)
    assert (found.usd_per_hour, found.watts, found.link) == (sheet.usd_per_hour, sheet.watts, sheet.link)
    assert (found.idle_watts, found.host_watts) == (sheet.idle_watts, sheet.host_watts)
    assert found.devices_per_node == 2


def test_every_price_has_a_source() -> None:
    table = prices()
    for section, row in table.items():
        if isinstance(row, dict) and "value" in row:
            found = price(section)
            assert all((found.source, found.date, found.kind in ("listed", "assumed"))), section
    for row in table["cpu_watts_per_core"]:
        assert row["kind"] in ("listed", "assumed")
        assert row["source"]
    for section in ("device_usd_per_hour", "device_spot_usd_per_hour", "device_purchase_usd"):
        assert set(table[section]) <= set(hardware_names()), section
        for name in table[section]:
            listed = device_price(section, name)
            assert listed is not None
            assert all((listed.value > 0, listed.source, listed.date, listed.kind in ("listed", "assumed")))
    for name, spot in table["device_spot_usd_per_hour"].items():
        assert spot["value"] < table["device_usd_per_hour"][name]["value"]


def test_a_machine_that_nobody_rents_out_costs_its_purchase_over_its_years() -> None:
    usd = load_hardware("apple-m4-max").usd_per_hour
    assert usd.value == pytest.approx(4700 / (4 * 8766))
    assert usd.kind == "assumed"
    assert load_hardware("epyc-9654").usd_per_hour.value == pytest.approx(96 * 0.04)


def test_names_are_found_whatever_their_spelling() -> None:
    assert load_hardware("H100").name == load_hardware("h100_sxm").name == "h100-sxm"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h10", "Did you mean 'h100'"),
        ("rtx-409", "'rtx-4090'"),
        ("H 100 sxm5 80gb", "'h100-"),
        ("tpu", "'tpu-v5e'"),
        ("abacus", "Known: this, a10, a100-pcie-40gb"),
        ("", "Known"),
        ("../prices", "Known"),
    ],
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


def test_gradients_take_the_rates_of_their_layout_where_those_were_measured() -> None:
    """Of fp16 on a CPU; what stands under the type itself is forward's layout, and all layouts' where nothing else stands."""
    forward, inputs, weights = (
        MatmulPoint(layout, 256, 384, 384, rate * GFLOP)
        for layout, rate in (("fp16", 30.0), (input_gradient("fp16"), 3.0), (weight_gradient("fp16"), 6.0))
    )
    device = machine()
    apart = dataclasses.replace(device, matmul=(forward, inputs, weights))
    flops, shape = 2.0 * 256 * 384 * 384, (256, 384, 384)
    assert apart.product_s("fp16", *shape) == pytest.approx(flops / (30 * GFLOP))
    assert apart.input_gradient_s("fp16", *shape) == pytest.approx(flops / (3 * GFLOP))
    assert apart.weight_gradient_s("fp16", *shape) == pytest.approx(flops / (6 * GFLOP))
    assert device.input_gradient_s("bf16", *shape) == device.product_s("bf16", *shape)
    product = Matrix("mlp", "up", 384, 384)
    both = product_backward(product, 256, "fp16", apart).seconds - 2 * apart.linear_launch_s
    assert both == pytest.approx(apart.input_gradient_s("fp16", *shape) + apart.weight_gradient_s("fp16", 384, 384, 256))


def test_near_classes_weigh_more_than_far_ones() -> None:
    slow = dataclasses.replace(profile().matmul[0], scheme="bf16", m=256, n=4096, k=384, flop_per_s=80 * GFLOP)
    fast = dataclasses.replace(slow, n=384, k=384, flop_per_s=800 * GFLOP)
    device = dataclasses.replace(machine(), matmul=(slow, fast))
    near_fast, near_slow = device.product_rate("bf16", 256, 500, 384), device.product_rate("bf16", 256, 3500, 384)
    assert 700 * GFLOP < near_fast < 800 * GFLOP
    assert 80 * GFLOP < near_slow < 90 * GFLOP


def test_the_launch_is_taken_off_measured_products_and_off_no_more() -> None:
    """A point's own time comes back when its launch is added again; of a tiny product something always remains."""
    device = machine(product_launches_s={"w8": 2e-6})
    for scheme, launch_s in (("bf16", 3e-6), ("w8", 2e-6)):
        point = next(p for p in profile().matmul if (p.scheme, p.m, p.n, p.k) == (scheme, 16, 384, 1024))
        flops = 2 * point.m * point.n * point.k
        seconds = flops / device.product_rate(point.scheme, point.m, point.n, point.k) + launch_s
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


def test_a_group_uses_the_link_while_it_fits_a_node_and_the_network_beyond() -> None:
    device = load_hardware("h100")
    assert device.link_for(1) is device.link_for(8) is device.link
    assert device.link_for(9) is device.network
    assert device.link.bytes_per_s == 4.5e11  # NVLink 4: 18 links of 25 GB/s each way
    assert device.network.bytes_per_s == 5e10  # 400 Gbit/s
    assert 1e-7 < device.link.alpha_s < device.network.alpha_s < 1e-4
    assert device.link.effective_bytes_per_s == pytest.approx(ASSUMED_LINK_EFFICIENCY * 4.5e11)


def test_calibrated_collectives_are_the_link_of_this_machine() -> None:
    device = machine(link=Ring(2e-5, 3e9, 2))
    assert device.link.kind == "measured"
    assert device.link.effective_bytes_per_s == device.link.bytes_per_s == 3e9
    assert group_link(Layout(data=2, sharing=2), device, 2) is device.link
    assert group_link(Layout(data=2), device, 2) is device.network, "another processor is another machine"
    assert device.link_for(2) is device.network
    assert machine().link.kind == device.network.kind == "assumed"


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1, 1e12)), min_size=1, max_size=6), st.floats(0.1, 1e12))
def test_interpolation_stays_within_the_points(points: list[tuple[float, float]], x: float) -> None:
    y = interpolate_log(points, x)
    assert min(p[1] for p in points) * (1 - 1e-9) <= y <= max(p[1] for p in points) * (1 + 1e-9)


def test_interpolating_nothing_says_to_calibrate() -> None:
    with pytest.raises(ConfigError, match="calibrate"):
        interpolate_log([], 1.0)
