"""Machine profiles survive the disk, and belong to one machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from twostroke.core.crossovers import Crossovers
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.profile import (
    BandwidthPoint,
    Fingerprint,
    MachineProfile,
    MatmulPoint,
    load_profile,
    profile_path,
    read_fingerprint,
    read_profile,
    save_profile,
    what_changed,
)
from twostroke.core.rates import (
    BlockRates,
    Conditions,
    NativeRates,
    NativeStep,
    Process,
    Ring,
    StepPrices,
    TrainingRates,
    TrainingStep,
)


def profile_for(fingerprint: Fingerprint) -> MachineProfile:
    return MachineProfile(
        fingerprint=fingerprint,
        measured_at="2026-01-01T00:00:00Z",
        device="cpu",
        n_threads=2,
        torch_version="2.13.0",
        read_bandwidth=(BandwidthPoint(2**25, 1e11), BandwidthPoint(2**30, 5e10)),
        matmul=(MatmulPoint("bf16", 1, 4096, 4096, 3e10),),
        peak_flop_per_s={"bf16": 9e11},
        op_launch_s=2e-6,
        linear_launch_s=6e-6,
        disk_write_bytes_per_s=1e9,
        training=TrainingRates(
            attends_natively=True,
            blocks=(BlockRates("bf16", "eager", "forward", 1e11, 2e9),),
            cross_entropy_logit_per_s={"eager": 1e8},
        ),
        native=NativeRates(128e6, (NativeStep("prefill", 256, 8, 16, 0, "int8", 0.01),), (StepPrices("decode", key_s=1e-11),)),
        network=Ring(1e-5, 1e9, 4),
    )


def test_a_profile_survives_the_disk() -> None:
    assert load_profile() is None
    profile = profile_for(read_fingerprint())
    assert save_profile(profile) == profile_path(profile.fingerprint)
    assert load_profile() == profile


def test_another_machine_is_not_found_under_this_ones_key() -> None:
    here = read_fingerprint()
    save_profile(profile_for(dataclasses.replace(here, cpu_model="another")))
    assert load_profile() is None


def test_a_changed_machine_is_told_what_changed() -> None:
    here = read_fingerprint()
    assert what_changed(here) is None
    before = dataclasses.replace(here, n_cores=here.n_cores + 2, isa=())
    save_profile(profile_for(before))
    told = what_changed(here)
    assert told is not None
    assert f"n_cores {here.n_cores + 2} → {here.n_cores}" in told
    assert "cpu_model" not in told
    profile_path(before).write_text("{")  # a damaged one is no ground to say anything
    assert what_changed(here) is None


def test_fingerprint_forgives_a_few_reserved_megabytes() -> None:
    here = read_fingerprint()
    gib = 2**30
    base = dataclasses.replace(here, ram_bytes=16 * gib)
    assert base.key == dataclasses.replace(base, ram_bytes=16 * gib - 50 * 2**20).key
    assert base.key != dataclasses.replace(base, ram_bytes=32 * gib).key


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "fingerprint": 3}'])
def test_a_broken_profile_says_how_to_make_a_new_one(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(CorruptFileError, match="twostroke calibrate"):
        read_profile(file)


def test_a_profile_of_another_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('{"version": 99}')
    with pytest.raises(ConfigError, match="version=99"):
        read_profile(file)
    with pytest.raises(ConfigError, match="does not exist"):
        read_profile(tmp_path / "absent.json")


def gpu_profile_for(fingerprint: Fingerprint) -> MachineProfile:
    return dataclasses.replace(profile_for(fingerprint), device="cuda", engines=("train",))


def test_each_engine_gets_the_profile_of_the_device_that_it_computes_on() -> None:
    cpu = dataclasses.replace(profile_for(read_fingerprint()), engines=("serve",))
    gpu = gpu_profile_for(cpu.fingerprint)
    assert save_profile(cpu) != save_profile(gpu)
    assert load_profile("serve") == cpu
    assert load_profile("train") == load_profile("train", "cuda") == gpu
    assert load_profile("train", "cpu") is None
    save_profile(dataclasses.replace(cpu, engines=("train", "serve")))
    assert load_profile("train") == gpu


ALWAYS = {f.name for f in dataclasses.fields(MachineProfile) if f.default is f.default_factory}
"""Fields of a profile without which there never was one."""


@pytest.mark.parametrize(("device", "serves"), [("cpu", True), ("cuda", False)])
def test_a_profile_of_an_earlier_release_is_read_for_what_its_device_does(device: str, serves: bool) -> None:
    """Those had no ``engines``, and one file a machine, whichever device it was measured on."""
    old = dataclasses.replace(profile_for(read_fingerprint()), device=device)
    record = {k: v for k, v in plain(old).items() if k in ALWAYS} | {"extras": {}, "version": 1}
    path = profile_path(old.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    found = load_profile("train")
    assert found is not None
    assert found.device == device
    assert (load_profile("serve") is not None) == serves


def test_numbers_of_an_earlier_release_are_read_into_their_sections() -> None:
    """One table had them all, under long names."""
    steps = {f"anchor_train_e256_l2_bf16_compiled_{part}_s": 1.0 for part in ("forward", "backward", "optimizer", "first_step")}
    old = {
        "torch_import_s": 1.5,
        "baseline_rss_bytes": 2e8,
        "native_training_attention_share": 1.0,
        "native_working_set_bytes": 1e8,
        "native_prefill_e256_l8_t16_int8_s": 0.01,
        "native_decode_e256_l8_b1_c128_int8_s": 0.02,
        "native_decode_int8_key_s": 3e-11,
        **steps,
        "anchor_train_e256_l2_bf16_compiled_peak_bytes": 5e8,
        "anchor_train_e256_l6_bf16_compiled_forward_s": 1.0,
        "attention_bf16_eager_forward_flop_per_s": 1e11,
        "block_bf16_eager_forward_bytes_per_s": 2e9,
        "head_norm_bf16_eager_forward_element_per_s": 3e8,
        "cross_entropy_eager_logit_per_s": 4e7,
        "setup_forward_bytes_per_s": 5e9,
        "launch_packed_bf16_s": 4e-6,
        "int8_weight_only_max_macs": 2e6,
        "link_alpha_s": 1e-5,
        "link_bytes_per_s": 1e9,
        "link_ranks": 2.0,
        "low_by_serve_share": 0.2,
        "disturbed_share": 0.3,
        "anchor_decode_e256_bf16_b8_s": 0.005,
        "decode_many_int8_step_s": 1e-4,
        "decode_many_int8_layer_s": 1e-5,
        "decode_many_int8_key_per_s": 1e9,
        "prefill_attention_fp32_t128_flop_per_s": 1e10,
        "layer_operations_fp32_element_per_s": 1e9,
        "toolchain_start_s": 17.0,
    }
    record = {k: v for k, v in plain(profile_for(read_fingerprint())).items() if k in ALWAYS} | {"extras": old, "version": 1}
    read = MachineProfile.from_dict(record)
    assert read.process == Process(1.5, 2e8)
    assert read.native == NativeRates(
        1e8,
        (NativeStep("prefill", 256, 8, 16, 0, "int8", 0.01), NativeStep("decode", 256, 8, 1, 128, "int8", 0.02)),
        (StepPrices("decode", key_s=3e-11),),
    )
    assert read.training == TrainingRates(
        attends_natively=True,
        blocks=(BlockRates("bf16", "eager", "forward", 1e11, 2e9, 3e8),),
        steps=(TrainingStep(256, 2, "bf16", "compiled", 1.0, 1.0, 1.0, 1.0, 5e8),),
        cross_entropy_logit_per_s={"eager": 4e7},
        setup_forward_bytes_per_s=5e9,
    )
    assert (read.link, read.product_launches_s) == (Ring(1e-5, 1e9, 2), {"packed_bf16": 4e-6})
    assert read.crossovers == Crossovers(int8_weight_only_max_macs=2e6)
    assert read.conditions == Conditions(0.3, {"serve": 0.2})
    assert MachineProfile.from_dict(json.loads(json.dumps(plain(read)))) == read


def test_rates_of_torch_steps_in_an_earlier_profile_are_left_out() -> None:
    record = plain(profile_for(read_fingerprint()))
    assert MachineProfile.from_dict(record | {"torch_runner": {"steps": []}}) == MachineProfile.from_dict(record)


def test_a_key_of_no_section_is_refused_by_its_place() -> None:
    record = plain(profile_for(read_fingerprint()))
    record["training"]["adamw_byte_per_s"] = 1.0
    with pytest.raises(CorruptFileError, match=r"training\.adamw_byte_per_s is not known.*twostroke calibrate"):
        MachineProfile.from_dict(record)


def test_engines_that_are_not_known_are_left_out() -> None:
    record = plain(profile_for(read_fingerprint())) | {"engines": ["serve", "paint"]}
    assert MachineProfile.from_dict(record).engines == ("serve",)
