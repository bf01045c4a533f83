"""Machine profiles survive the disk, and belong to one machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

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
        extras={"attention_flop_per_s": 1e11},
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


@pytest.mark.parametrize(("device", "serves"), [("cpu", True), ("cuda", False)])
def test_a_profile_of_an_earlier_release_is_read_for_what_its_device_does(device: str, serves: bool) -> None:
    """Those had no ``engines``, and one file a machine, whichever device it was measured on."""
    old = dataclasses.replace(profile_for(read_fingerprint()), device=device)
    record = old.to_dict()
    del record["engines"]
    path = profile_path(old.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    found = load_profile("train")
    assert found is not None
    assert found.device == device
    assert (load_profile("serve") is not None) == serves


def test_engines_that_are_not_known_are_left_out() -> None:
    record = profile_for(read_fingerprint()).to_dict() | {"engines": ["serve", "paint"]}
    assert MachineProfile.from_dict(record).engines == ("serve",)
