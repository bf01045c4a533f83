"""`twostroke doctor`: what it reads here, and what it makes of machines that are not this one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import machines
from twostroke.cli.doctor import facts as reading
from twostroke.cli.doctor.advice import LOW_DISK_BYTES, advise
from twostroke.cli.doctor.facts import Disk, Facts, Profile, read_facts
from twostroke.cli.doctor.text import doctor_text
from twostroke.cli.main import app
from twostroke.core.profile import read_fingerprint, save_profile

SOUND = Facts(
    cpu_model="A Processor", n_cores=8, n_cores_of_machine=8, group_cores=None, features=("avx2",), kernel_target="avx2",
    native_absent_because="", compiler="g++ 12", ram_bytes=2**34, available_bytes=2**33, home=Disk("/h", 10**11, True),
    here=Disk("/w", 10**11, True), python="3.11.7", torch_version="2.13.0+cpu", torch_cuda="", gpus=(), gpu_problem="",
    profiles=(Profile("cpu", ("train", "serve"), "2026-11-01T00:00:00Z", 3.0, "2.13.0+cpu", True, 0.0, 0.0),),
    profile_problem="", other_machine="", busy_cores=0.1,
)  # fmt: skip


def profile(**changes: object) -> Facts:
    return replace(SOUND, profiles=(replace(SOUND.profiles[0], **changes),))  # type: ignore[arg-type]


CASES = {
    "torch is not installed": (replace(SOUND, torch_version=""), "pip install torch"),
    "/h cannot be written": (replace(SOUND, home=Disk("/h", 10**11, False)), "TWOSTROKE_HOME="),
    "/w cannot be written": (replace(SOUND, here=Disk("/w", 10**11, False)), "cd ~"),
    "free on the disk of /w": (replace(SOUND, here=Disk("/w", LOW_DISK_BYTES - 1, True)), "du "),
    "of memory are available": (replace(SOUND, available_bytes=10**9), "ps aux"),
    "turns the native library off": (
        replace(profile(has_native_rates=False), native_absent_because="TWOSTROKE_NATIVE=0 turns native code off."),
        "unset TWOSTROKE_NATIVE",
    ),
    "no native library and no C++ compiler": (
        replace(profile(has_native_rates=False), native_absent_because="x does not exist.", compiler=""),
        "apt-get install g++ && python -m twostroke.kernels.native_library build",
    ),
    "built from other sources": (
        replace(profile(has_native_rates=False), native_absent_because="x was built from other sources. Build it with `…`."),
        "python -m twostroke.kernels.native_library build",
    ),
    "control group allows 2.5 of 8 cores": (replace(SOUND, group_cores=2.5), "OMP_NUM_THREADS=2"),
    "built without CUDA": (replace(SOUND, gpus=("H100",)), "pip install --force-reinstall torch"),
    "cannot use the GPU: driver too old": (
        replace(SOUND, gpus=("H100",), torch_cuda="13.0", gpu_problem="driver too old"),
        "nvidia-smi",
    ),
    "never calibrated": (replace(SOUND, profiles=()), "twostroke calibrate"),
    "another machine's: n_cores 2 → 8": (replace(SOUND, profiles=(), other_machine="n_cores 2 → 8"), "twostroke calibrate"),
    "profile cannot be read": (replace(SOUND, profiles=(), profile_problem="p.json is not valid JSON."), "twostroke calibrate"),
    "measured with torch 2.11.0": (profile(torch_version="2.11.0"), "twostroke calibrate"),
    "measured without the native library": (profile(has_native_rates=False), "twostroke calibrate"),
    "200 days old": (profile(age_days=200.0), "twostroke calibrate"),
    "up to 30% low": (profile(disturbed_share=0.5, low_by_share=0.3), "twostroke calibrate"),
    "Nothing was measured for `serve`": (profile(engines=("train",)), "twostroke calibrate --only serve"),
}
FATAL = ("torch is not installed", "/h cannot be written")


def test_a_sound_machine_misses_nothing() -> None:
    assert advise(SOUND) == []
    assert doctor_text(SOUND, []).endswith("Nothing is missing.")


@pytest.mark.parametrize("problem", CASES)
def test_each_trouble_is_named_with_the_one_command_that_mends_it(problem: str) -> None:
    facts, remedy = CASES[problem]
    (found,) = advise(facts)
    assert problem in found.problem
    assert remedy in found.remedy
    assert "\n" not in found.problem + found.remedy
    assert found.is_fatal == (problem in FATAL)
    text = doctor_text(facts, [found])
    assert found.problem in text
    assert f"$ {found.remedy}" in text


def test_what_forbids_all_work_comes_first() -> None:
    found = advise(replace(SOUND, profiles=(), home=Disk("/h", 10**11, False)))
    assert [item.is_fatal for item in found] == [True, False]


def test_other_programs_are_spoken_of_where_a_calibration_is_advised() -> None:
    busy = replace(SOUND, busy_cores=6.0)
    assert advise(busy) == []
    (old, load) = advise(replace(profile(age_days=200.0), busy_cores=6.0))
    assert "days old" in old.problem
    assert "6.0 of 8 cores" in load.problem


def test_facts_of_this_machine_are_read_without_torch() -> None:
    code = (
        "import sys; from twostroke.cli.doctor.facts import read_facts; print(read_facts()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_s_version_is_the_one_that_torch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PyPI's wheels the metadata leaves the CUDA release out, and profiles have it."""
    file = tmp_path / "version.py"
    file.write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    monkeypatch.setattr(reading.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(reading.util, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "__init__.py")))
    assert reading.torch_build() == ("2.13.0+cu130", "13.0")
    file.write_text("cuda = None\n")
    assert reading.torch_build() == ("2.13.0", "")


def test_the_stored_profile_is_the_one_that_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(reading, "SAMPLE_S", 0.0)
    assert read_facts().profiles == ()
    made = replace(machines.profile(), measured_at="2020-01-01T00:00:00Z")
    save_profile(replace(made, fingerprint=read_fingerprint()))
    facts = read_facts()
    assert facts.torch_version == torch.__version__
    assert [p.age_days > 1000 for p in facts.profiles] == [True]
    assert any("days old" in item.problem for item in advise(facts))


def test_the_command_prints_text_or_one_document_and_says_whether_work_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    monkeypatch.setattr(reading, "read_facts", lambda: SOUND)
    done = runner.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert document["is_usable"] is True
    assert document["facts"]["cpu_model"] == "A Processor"
    monkeypatch.setattr(reading, "read_facts", lambda: replace(SOUND, torch_version=""))
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "must be mended: torch is not installed." in done.stdout


GROUPS = "sys/fs/cgroup"
VERSION_1 = {"proc/self/cgroup": "4:cpu,cpuacct:/x\n", f"{GROUPS}/cpu/x/cpu.cfs_period_us": "100000\n"}
LIMITS = [
    ({"proc/self/cgroup": "0::/a/b\n", f"{GROUPS}/a/b/cpu.max": "max 100000\n", f"{GROUPS}/a/cpu.max": "150000 100000\n"}, 1.5),
    ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "200000 100000\n"}, 2.0),
    ({"proc/self/cgroup": "0::/\n"}, None),
    (VERSION_1 | {f"{GROUPS}/cpu/x/cpu.cfs_quota_us": "50000\n"}, 0.5),
    (VERSION_1 | {f"{GROUPS}/cpu/x/cpu.cfs_quota_us": "-1\n"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("files", "expected"), LIMITS)
def test_the_tightest_limit_of_the_control_groups_counts(files: dict[str, str], expected: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert reading.group_cores(tmp_path) == expected


def test_busy_processors_are_counted_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 100 5000 0 0 0 0\ncpu0 1\n")
    ticks = reading.os.sysconf("SC_CLK_TCK")
    clock = iter((10.0, 12.0))
    monkeypatch.setattr(reading.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(reading.time, "sleep", lambda s: stat.write_text(f"cpu {100 + 3 * ticks} 0 100 6000 0 0 0 0\ncpu0 1\n"))
    assert reading.busy_cores(stat) == pytest.approx(1.5)
    assert reading.busy_cores(tmp_path / "missing") == 0.0
