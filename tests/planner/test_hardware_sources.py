"""Numbers that name a file of the assets as their source are that file's; what was measured there supports what is assumed."""

from __future__ import annotations

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

from twostroke.planner.hardware.device import ASSUMED_LINK_EFFICIENCY, Hardware
from twostroke.planner.hardware.tables import ASSUMED_NETWORK_ALPHA_S, HARDWARE_DIR, device_price, hardware_names, load_hardware

DEVICES = [load_hardware(name) for name in hardware_names()]


def cited(source: str) -> list[tuple[Hardware, str, float, str]]:
    """(device, fact, value, cited file) of every fact whose source matches ``source``; its group is the file."""
    found = []
    for device in DEVICES:
        for path, fact in device.facts.items():
            match = re.match(source, fact.source)
            if match:
                found.append((device, path, fact.value, match.group(1)))
    return found


def test_numbers_of_aiconfigurator_are_in_the_file_that_is_cited(assets: Path) -> None:
    facts = cited(r"ai-dynamo/aiconfigurator systems/(\w+\.yaml)")
    assert len(facts) > 100
    for device, path, value, name in facts:
        text = (assets / "hardware/aiconfigurator" / name).read_text(encoding="utf-8")
        numbers = [float(n) for n in re.findall(r"^\s*\w+: (\d+(?:\.\d+)?)\s*(?:#.*)?$", text, re.MULTILINE)]
        # four digits are kept of rates that the file scales to an observed clock
        assert any(value == pytest.approx(n, rel=5e-4) for n in numbers), (device.name, path, value)


def test_numbers_of_llm_analysis_are_in_the_file_that_is_cited(assets: Path) -> None:
    facts = cited(r"cli99/llm-analysis gpu_configs/([\w-]+\.json)")
    assert len(facts) > 30
    for device, path, value, name in facts:
        row = json.loads((assets / "hardware/llm-analysis_gpu_configs" / name).read_text(encoding="utf-8"))
        scale = {"memory_bytes": 2**30, "read_bandwidth_bytes_per_s": 1e9, "link.bytes_per_s": 1e9}.get(path, 1e12)
        numbers = [float(v) * scale for v in row.values() if isinstance(v, (int, float))]
        assert any(value == pytest.approx(n, rel=1e-6) for n in numbers), (device.name, path, value)


def test_watts_of_processors_are_codecarbons(assets: Path) -> None:
    with (assets / "hardware/codecarbon_cpu_power.csv").open(encoding="utf-8") as file:
        rows = [(row["Name"], row["TDP"]) for row in csv.DictReader(file)]
    number = re.compile(r"\d+(\.\d+)?")  # one row of the file has two decimal points
    watts = {name.lower().replace(" ", "-"): float(tdp) for name, tdp in rows if number.fullmatch(tdp)}
    checked = 0
    for device in DEVICES:
        fact = device.facts["watts"]
        if "codecarbon" in fact.source:
            words = set(device.name.split("-")) - {"xeon", "epyc", "ryzen", "core"}
            fitting = {value for name, value in watts.items() if words <= set(re.split(r"[-+]", name))}
            assert fact.value in fitting, device.name
            checked += 1
    assert checked >= 10


def test_rents_of_nebius_runpod_and_lambda_are_those_of_the_catalogues(assets: Path) -> None:
    with (assets / "prices/nebius_gpu_v7_extract.csv").open(encoding="utf-8") as file:
        nebius = {row["InstanceType"]: row for row in csv.DictReader(file)}
    for name, instance in (
        ("h100-sxm", "gpu-h100-sxm_1gpu-16vcpu-200gb"), ("h200-sxm", "gpu-h200-sxm_1gpu-16vcpu-200gb"),
        ("l40s", "gpu-l40s-a_1gpu-8vcpu-32gb"), ("b200-sxm", "gpu-b200-sxm_8gpu-160vcpu-1792gb"),
    ):  # fmt: skip
        row = nebius[instance]
        rent, spot = device_price("device_usd_per_hour", name), device_price("device_spot_usd_per_hour", name)
        assert rent is not None
        assert rent.value == pytest.approx(float(row["Price"]) / int(row["AcceleratorCount"]))
        if row["SpotPrice"]:
            assert spot is not None
            assert spot.value == pytest.approx(float(row["SpotPrice"]))
    with (assets / "prices/skypilot_v5_2023-07_lambda_vms.csv").open(encoding="utf-8") as file:
        lambdas = {row["InstanceType"]: float(row["Price"]) / float(row["AcceleratorCount"]) for row in csv.DictReader(file)}
    for name, instance in (("a10", "gpu_1x_a10"), ("h100-pcie", "gpu_1x_h100_pcie"), ("v100-sxm-32gb", "gpu_8x_v100")):
        rent = device_price("device_usd_per_hour", name)
        assert rent is not None
        assert rent.value == pytest.approx(lambdas[instance])


def all_reduces(path: Path, ranks: int, per_node: int) -> list[tuple[int, float]]:
    """(bytes, median s) of Vidur's all-reduces among ``ranks`` devices, ``per_node`` to a node, small first."""
    with path.open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if (int(r["num_workers"]), int(r["devices_per_node"])) == (ranks, per_node)]
    return sorted((int(r["size"]), float(r["time_stats.all_reduce.median"]) / 1e3) for r in rows)


@pytest.mark.parametrize(("name", "file"), [("a100-sxm-80gb", "a100_dgx"), ("h100-sxm", "h100_dgx")])
def test_alpha_and_the_share_of_nvlink_are_what_vidur_measured(assets: Path, name: str, file: str) -> None:
    """A ring of n takes 2(n−1) messages, and sends 2(n−1)/n of its bytes."""
    points = all_reduces(assets / "profiles/vidur" / f"network_{file}_all_reduce.csv", 8, 8)
    small = statistics.median(s for _, s in points[:20])
    link = load_hardware(name).link
    assert link.alpha_s == pytest.approx(small / 14, rel=0.03)  # two digits are stated
    large = [(2 * 7 / 8 * size) / (s - small) for size, s in points if size > 5e7]
    reached = statistics.median(large) / link.bytes_per_s
    assert 0.55 < reached < 0.85
    assert abs(reached - ASSUMED_LINK_EFFICIENCY) < 0.15


def test_a_message_over_ethernet_takes_what_vidur_measured_between_two_nodes(assets: Path) -> None:
    points = all_reduces(assets / "profiles/vidur/network_a100_dgx_all_reduce.csv", 2, 1)
    small = statistics.median(s for _, s in points[:20])
    assert pytest.approx(small / 2, rel=0.25) == ASSUMED_NETWORK_ALPHA_S  # one digit is stated


def test_every_source_of_a_device_file_is_used() -> None:
    for path in HARDWARE_DIR.glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        for key in re.findall(r"^([\w-]+) = \{ text", text, re.MULTILINE):
            assert f'source = "{key}"' in text, (path.name, key)
