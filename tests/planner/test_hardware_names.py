"""A device is found however people and drivers write it; what means no device, several, or another chip is refused."""

from __future__ import annotations

import pytest

from twostroke.core.errors import ConfigError
from twostroke.planner.hardware.names import count_in
from twostroke.planner.hardware.tables import hardware_names, load_hardware


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "rtx-4090"), ("rtx 4090", "rtx-4090"), ("RTX4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4080 super", "rtx-4080-super"), ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"), ("3080 ti", "rtx-3080-ti"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti-16gb"), ("7900 XTX", "rx-7900-xtx"),
        ("AMD Radeon RX 9070 XT", "rx-9070-xt"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("h100 sxm", "h100-sxm"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"), ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"), ("a100 40gb", "a100-sxm-40gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("NVIDIA RTX A6000", "a6000"), ("Tesla T4", "t4"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"), ("NVIDIA GB10", "gb10"),
        ("AMD Instinct MI300X", "mi300x"), ("Intel(R) Arc(TM) B580 Graphics", "arc-b580"),
        ("AMD Ryzen AI Max+ 395", "ryzen-ai-max-395"),
        ("Apple M2 Ultra", "apple-m2-ultra"), ("m4 max", "apple-m4-max"), ("M4 Pro", "apple-m4-pro"),
    ],
)  # fmt: skip
def test_a_device_is_found_by_what_people_and_drivers_call_it(text: str, name: str) -> None:
    assert load_hardware(text).name == name


@pytest.mark.parametrize("name", hardware_names())
def test_every_device_is_found_by_its_own_name_written_apart(name: str) -> None:
    assert load_hardware(name.replace("-", " ").upper()).name == name


@pytest.mark.parametrize(
    "text", ["NVIDIA GeForce RTX 4090 Laptop GPU", "rtx 4070 super ti max", "nvidia", "16gb", "rtx", "m4 max pro", "x8"]
)
def test_another_chip_or_no_chip_is_not_taken_for_one(text: str) -> None:
    with pytest.raises(ConfigError, match="is not known"):
        load_hardware(text)


@pytest.mark.parametrize(("text", "device"), [("8xH100", "H100"), ("2 x rtx 3090", "rtx 3090"), ("h100 x8", "h100")])
def test_several_devices_are_told_the_options_that_count_them(text: str, device: str) -> None:
    counted = count_in(text)
    assert counted is not None
    assert counted[1] == device
    with pytest.raises(ConfigError, match=rf"names {counted[0]} devices.*Use '{device}', with --tensor {counted[0]}"):
        load_hardware(text)
    assert count_in("rx 7900 xtx") is None


def test_a_macs_memory_is_one_that_it_is_sold_with() -> None:
    small, large = load_hardware("m4-max-64gb"), load_hardware("m4-max")
    assert small.memory_bytes == 64 * 2**30
    assert (small.label, large.label) == ("Apple M4 Max, 40-core GPU, 64 GB", "Apple M4 Max, 40-core GPU, 128 GB")
    assert small.name == large.name
    assert small.peak_flop_per_s == large.peak_flop_per_s
    with pytest.raises(ConfigError, match=r"is not sold with 100 GB\. It has 48 or 64 or 128"):
        load_hardware("M4 Max 100GB")
    with pytest.raises(ConfigError, match="is not sold with 12 GB"):
        load_hardware("rtx 3080 12gb")
    assert load_hardware("NVIDIA H100 80GB HBM3").memory_bytes == load_hardware("h100").memory_bytes


def test_macos_lends_the_gpu_two_thirds_of_a_small_memory_and_three_quarters_of_a_large_one() -> None:
    for text, lent_gib in (("m1 pro 32gb", 64 / 3), ("m3-pro", 27), ("m4-max-64gb", 48), ("m2-ultra", 144)):
        mac = load_hardware(text)
        assert mac.lent_share * mac.memory_bytes / 2**30 == pytest.approx(lent_gib)
    assert load_hardware("rtx-4090").lent_share == 1.0
