"""Calibration measures what the planner reads, in a reduced form here; its numbers are rough, its form is not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.calibration import measure
from twostroke.calibration.bandwidth import WORKING_SETS_BYTES, working_sets
from twostroke.calibration.measure import SMALL, Extent, calibrate, calibrate_engines
from twostroke.calibration.products import FP16_LAYOUTS, make_product, measure_class
from twostroke.calibration.timing import Clock
from twostroke.calibration.transformer import LEAST_SHARE, BlockSize, half_blocks, mixed_type, straight_line
from twostroke.core.errors import ConfigError
from twostroke.core.profile import MachineProfile, MatmulPoint, load_profile, save_profile
from twostroke.core.rates import BlockRates
from twostroke.core.units import MIB
from twostroke.kernels.native_library import library
from twostroke.planner.hardware.tables import hardware_from_profile, load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a busy machine wait for each other's time slices, which takes these tests from seconds to minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numbers_in(value: Any) -> list[float]:
    """Every number that ``value`` holds, flags and what was not measured aside."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers_in(item)]
    return [] if value is None or isinstance(value, str | bool) else [float(value)]


@pytest.fixture(scope="module")
def notes() -> list[tuple[float, str]]:
    return []


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> MachineProfile:
    """Of a machine without the native library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOSTROKE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr("twostroke.calibration.measure.library", lambda: None)
        return calibrate(None, SMALL, device="cpu")


@pytest.fixture(scope="module")
def profile(notes: list[tuple[float, str]], tmp_path_factory: pytest.TempPathFactory) -> MachineProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOSTROKE_HOME", str(tmp_path_factory.mktemp("home")))
        return calibrate(lambda done, note: notes.append((done, note)), SMALL, device="cpu")


def test_every_rate_is_a_positive_finite_number(profile: MachineProfile) -> None:
    numbers = [profile.op_launch_s, profile.linear_launch_s, profile.disk_write_bytes_per_s, *profile.peak_flop_per_s.values()]
    numbers += [p.bytes_per_s for p in profile.read_bandwidth] + [p.flop_per_s for p in profile.matmul]
    shares = (profile.conditions.disturbed_share, *profile.conditions.low_by_share.values())
    numbers += numbers_in([profile.training, profile.native, profile.product_launches_s])
    assert all(0 <= share <= 1 for share in shares)
    assert set(profile.conditions.low_by_share) == {"train", "serve"}
    assert all(math.isfinite(n) and n > 0 for n in numbers)


def test_progress_rises_to_one(profile: MachineProfile, notes: list[tuple[float, str]]) -> None:
    shares = [done for done, _ in notes]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert all(note for _, note in notes)


def test_a_profile_survives_being_stored(profile: MachineProfile) -> None:
    save_profile(profile)
    assert load_profile() == profile


def test_products_cover_schemes_rows_and_classes(profile: MachineProfile) -> None:
    found = {(p.scheme, p.m, p.n, p.k) for p in profile.matmul}
    training = (*SMALL.classes, *SMALL.deep_classes)
    trained = {"fp32", mixed_type("cpu")}
    wanted = {(s, m, n, k) for s in trained for m in SMALL.training_rows for n, k in training}
    native = {(s, m, n, k) for s in SMALL.native_schemes for m in SMALL.native_rows for n, k in SMALL.native_classes}
    quantised = {("w8", m, n, k) for m in SMALL.engine_rows for n, k in SMALL.classes}
    assert wanted | (quantised if library() is None else native) <= found
    assert {name for name in profile.peak_flop_per_s if name in SMALL.training_schemes} == trained


def test_without_native_code_the_engines_torch_products_are_measured(torchs: MachineProfile) -> None:
    found = {(p.scheme, p.m, p.n, p.k) for p in torchs.matmul}
    assert {("w8", m, n, k) for m in SMALL.engine_rows for n, k in SMALL.classes} <= found
    assert not any(p.scheme.startswith("native_") for p in torchs.matmul)
    assert torchs.crossovers.flash_max_scores > 0
    assert not hardware_from_profile(torchs).runs_natively
    plan = plan_serving(
        SMALL.block.spec, ServingShape(scheme="int8", prompt_tokens=8, output_tokens=8), hardware_from_profile(torchs)
    )
    assert 0 < plan.tpot_s < 60
    with pytest.raises(ConfigError, match="is not served by the engine on this machine"):
        plan_serving(
            SMALL.block.spec, ServingShape(scheme="int4", prompt_tokens=8, output_tokens=8), hardware_from_profile(torchs)
        )


def test_plans_stand_on_a_calibrated_profile(profile: MachineProfile) -> None:
    hardware = hardware_from_profile(profile)
    spec = SMALL.block.spec
    for dtype in ("fp32", "bf16"):
        plan = plan_training(spec, TrainingShape(2, 16, dtype=dtype, compile=False), hardware)
        assert 0 < plan.step_time_s < 60
    serving = plan_serving(spec, ServingShape(batch=2, prompt_tokens=8, output_tokens=8), hardware)
    assert 0 < serving.tpot_s < 60


def test_serving_alone_leaves_out_training_and_keeps_what_was_stored(
    profile: MachineProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    fresh = calibrate(None, SMALL, device="cpu", only="serve")
    assert (fresh.training.blocks, fresh.training.adamw_bytes_per_s) == ((), None)
    save_profile(dataclasses.replace(profile, matmul=(*profile.matmul, MatmulPoint("other", 1, 2, 3, 4.0))))
    kept = calibrate(None, SMALL, device="cpu", only="serve")
    assert kept.training == profile.training
    assert MatmulPoint("other", 1, 2, 3, 4.0) in kept.matmul
    assert len({(p.scheme, p.m, p.n, p.k) for p in kept.matmul}) == len(kept.matmul)
    with pytest.raises(ConfigError, match="only='both'"):
        next(calibrate_engines(None, SMALL, device="cpu", only="both"))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use cpu or cuda"):
        calibrate(extent=SMALL, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            calibrate(extent=SMALL, device="cuda")


def test_a_gpu_is_measured_for_training_and_the_cpu_for_serving(
    monkeypatch: pytest.MonkeyPatch, profile: MachineProfile
) -> None:
    """Measured with the device faked: what is asked of ``calibrate``, one device at a time, and in what share of the bar."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked, shares = [], []

    def measured(progress: Any, extent: Extent, device: str, n_ranks: int | None, only: Any, first: bool) -> MachineProfile:
        asked.append((device, only, first, n_ranks))
        progress(0.5, "half")
        return dataclasses.replace(profile, device=device, engines=("train", "serve") if only is None else (only,))

    monkeypatch.setattr(measure, "calibrate", measured)
    both = list(calibrate_engines(lambda done, note: shares.append((done, note)), SMALL))
    assert asked == [("cuda", "train", True, None), ("cpu", "serve", False, 1)]
    assert shares == [(0.25, "cuda: half"), (0.75, "cpu: half")]
    for made in both:
        save_profile(made)
    assert (hardware := load_hardware("this", "serve")).kind == "cpu"
    assert hardware.label.startswith(f"this machine ({profile.fingerprint.cpu_model}")
    assert load_hardware("this", "train").kind == "gpu"
    asked.clear()
    assert [p.engines for p in calibrate_engines(None, SMALL, device="cpu")] == [("train", "serve")]
    assert [p.device for p in calibrate_engines(None, SMALL, only="serve")] == ["cpu"]
    with pytest.raises(ConfigError, match=r"serving does not compute on device='cuda'"):
        calibrate(None, SMALL, "cuda")


def test_work_that_was_never_measured_on_its_device_is_refused_by_a_sentence(profile: MachineProfile) -> None:
    save_profile(dataclasses.replace(profile, device="cuda", engines=("train",)))
    with pytest.raises(
        ConfigError, match=r"no measurement of serving on cpu, only of training on cuda\. Run `twostroke calibrate"
    ):
        load_hardware("this", "serve")
    with pytest.raises(ConfigError, match="no measurement of training on cpu"):
        load_hardware("this", "train", "cpu")


def test_working_sets_stay_within_an_eighth_of_memory() -> None:
    assert working_sets(2**36) == list(WORKING_SETS_BYTES)
    assert max(working_sets(2**33)) == 2**30
    assert working_sets(1) == [WORKING_SETS_BYTES[0]]
    assert max(working_sets(2**36, 64 * MIB)) == 64 * MIB


def test_an_unknown_kernel_is_left_out_and_not_an_error() -> None:
    assert make_product("w8", 3, 5, 7, "cpu") is None  # its vectors would read beyond such a short row


def test_fp16_is_measured_in_each_layout_and_computes_that_product() -> None:
    for layout in FP16_LAYOUTS:
        for n, k in ((384, 384), (384, 8192)):
            run = make_product(layout, 3, n, k, "cpu")
            assert run is not None
            product = run()
            assert isinstance(product, torch.Tensor)
            assert product.shape == (3, n)
            assert product.dtype == torch.float16
            assert float(product[0, 0]) == 0.25 * k


def test_fp16_blocks_are_bf16_ones_with_attention_of_their_own() -> None:
    bf16 = [BlockRates("bf16", "eager", direction, 1.0, 2e9, 3e8) for direction in ("forward", "backward")]
    fp32 = [dataclasses.replace(block, dtype="fp32") for block in bf16]
    found = list(half_blocks(Clock(effort=0.01), BlockSize(heads=1, short=16), [*bf16, *fp32]))
    assert [dataclasses.replace(block, dtype="bf16", attention_flop_per_s=1.0) for block in found] == bf16
    assert all(block.dtype == "fp16" and 1e6 < block.attention_flop_per_s < 1e13 for block in found)


def test_a_class_ends_before_a_run_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.calibration.products.LONGEST_S", 0.0)
    points = list(measure_class(Clock(effort=0.01), "fp32", 64, 64, (1, 16, 256)))
    assert [p.m for p in points] == [1]


@pytest.mark.alone
def test_the_clock_takes_the_shortest_run() -> None:
    waits = iter([0.0, 0.02, 0.002, 0.02, 0.02, 0.02])

    def run() -> None:
        import time

        time.sleep(next(waits, 0.02))

    assert 0.002 <= Clock(effort=1.0).best_s(run, seconds=0.0, least=5) < 0.02


@pytest.mark.parametrize(("at_long", "slope"), [(2.0, 1 / 512), (1.5, 0.5 / 512)])
def test_a_straight_line_goes_through_both_points(at_long: float, slope: float) -> None:
    # the first case is all slope, which is held at 95% of what was measured
    rest, found = straight_line(512, 1024, 1.0, at_long)
    assert rest + 512 * found == pytest.approx(1.0)
    assert found == pytest.approx(min(slope, (1 - LEAST_SHARE) / 512))


@pytest.mark.parametrize("at_long", [0.5, 1.0, 10.0])
def test_noise_never_makes_a_part_vanish(at_long: float) -> None:
    rest, slope = straight_line(512, 1024, 1.0, at_long)
    assert rest >= LEAST_SHARE * (1 - 1e-9)
    assert slope * 512 >= LEAST_SHARE * (1 - 1e-9)


def test_the_default_extent_is_the_whole_table() -> None:
    extent = Extent()
    assert extent.engine_rows[0] == 1
    assert extent.training_rows[-1] == 4096
    assert {"fp32", "bf16"} == set(extent.training_schemes)
    assert {"w8", "w8a8"} == set(extent.engine_schemes)
    assert extent.block == BlockSize()
    assert dataclasses.replace(extent, effort=0.5).effort == 0.5
