"""Finds what is missing or doubtful on a machine, with the command that mends it. Reads ``Facts`` alone."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.cli.calibrate_verb import DISTURBED_SHARE
from twostroke.cli.doctor.facts import Disk, Facts, Profile
from twostroke.core.units import GB, format_bytes

MAX_AGE_DAYS = 90
"""Kernels, drivers and libraries change under a profile; three months are some releases of each."""

LOW_DISK_BYTES = 5 * GB
"""A small model needs so much, with its checkpoints, quantised copy and packed weights."""

LOW_MEMORY_BYTES = 2 * GB
"""torch alone takes 0.3; training the demo's model peaks at 0.7, its compiler at 1.2."""

BUSY_SHARE = 0.25
"""If a greater share of the cores is busy for 0.2 s, calibration had better wait."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Advice:
    """One thing to mend. ``is_fatal``: nothing can be trained or served before it is."""

    problem: str
    remedy: str
    is_fatal: bool = False


def advise(facts: Facts) -> list[Advice]:
    """Everything that is missing or doubtful. What prevents all work comes first."""
    found = [*_software(facts), *_space(facts), *_native(facts), *_processors(facts), *_gpu(facts), *_calibration(facts)]
    return sorted(found, key=lambda advice: not advice.is_fatal)


def _software(facts: Facts) -> list[Advice]:
    if facts.torch_version:
        return []
    return [Advice("torch is not installed.", f"pip install torch --index-url {CPU_INDEX}", is_fatal=True)]


def _space(facts: Facts) -> list[Advice]:
    found = []
    if not facts.home.is_writable:
        found.append(Advice(f"{facts.home.path} cannot be written.", "export TWOSTROKE_HOME=FOLDER", is_fatal=True))
    if not facts.here.is_writable:
        found.append(Advice(f"{facts.here.path} cannot be written: runs and models go there by default.", "cd ~"))
    low: dict[int, Disk] = {disk.free_bytes: disk for disk in (facts.here, facts.home) if disk.free_bytes < LOW_DISK_BYTES}
    found += [
        Advice(f"{format_bytes(disk.free_bytes)} are free on the disk of {disk.path}.", f"du -xh --max-depth=2 {disk.path}")
        for disk in low.values()
    ]
    if facts.available_bytes < LOW_MEMORY_BYTES:
        found.append(Advice(f"{format_bytes(facts.available_bytes)} of memory are available.", "ps aux --sort=-rss | head"))
    return found


def _native(facts: Facts) -> list[Advice]:
    reason = facts.native_absent_because
    if not reason:
        return []
    if "TWOSTROKE_NATIVE" in reason:
        return [Advice("TWOSTROKE_NATIVE turns the native library off: torch does its work, slower.", "unset TWOSTROKE_NATIVE")]
    install = "" if facts.compiler else "apt-get install g++ && "
    remedy = f"{install}python -m twostroke.kernels.native_library build"
    if not facts.compiler:
        return [Advice("There is no native library and no C++ compiler: torch does its work, slower.", remedy)]
    return [Advice(f"The native library is not used: {reason.partition(' Build it with')[0]}", remedy)]


def _processors(facts: Facts) -> list[Advice]:
    if facts.group_cores is None or facts.group_cores >= facts.n_cores:
        return []
    n = max(1, int(facts.group_cores))
    return [
        Advice(
            f"The control group allows {facts.group_cores:g} of {facts.n_cores} cores: more threads wait for each other.",
            f"export OMP_NUM_THREADS={n}",
        )
    ]


def _gpu(facts: Facts) -> list[Advice]:
    if not facts.gpus or not facts.torch_version:
        return []
    if not facts.torch_cuda:
        return [Advice("This torch was built without CUDA: training runs on the CPU.", "pip install --force-reinstall torch")]
    if facts.gpu_problem:
        return [Advice(f"torch cannot use the GPU: {facts.gpu_problem}", "nvidia-smi")]
    return []


def needs_calibration(facts: Facts) -> list[str]:
    """Reasons for which this machine has no profile that holds; none if it has one for both engines. A profile that was
    measured beside other programs holds: its intervals are wider."""
    if facts.profile_problem:
        return [f"The machine's profile cannot be read: {facts.profile_problem.partition(' Run `')[0]}"]
    if not facts.profiles:
        reason = f" The stored one is another machine's: {facts.other_machine}." if facts.other_machine else ""
        return [f"This machine was never calibrated: plans for it know only its datasheet.{reason}"]
    return [reason for profile in facts.profiles for reason in _outdated(profile, facts)] + list(_unmeasured(facts).values())


def _calibration(facts: Facts) -> list[Advice]:
    again, unmeasured = "twostroke calibrate", _unmeasured(facts)
    only = {reason: f"{again} --only {engine}" for engine, reason in unmeasured.items()}
    reasons = [*needs_calibration(facts), *filter(None, map(_disturbed, facts.profiles))]
    found = [Advice(reason, only.get(reason, again)) for reason in reasons]
    if found and facts.profiles and facts.busy_cores > BUSY_SHARE * facts.n_cores:
        found.append(
            Advice(
                f"Other programs keep {facts.busy_cores:.1f} of {facts.n_cores} cores busy: calibrate when they have ended.",
                "top -o %CPU",
            )
        )
    return found


def _unmeasured(facts: Facts) -> dict[str, str]:
    """Engine → that none of the profiles has its measurements."""
    missing = {"train", "serve"} - {engine for profile in facts.profiles for engine in profile.engines}
    return {engine: f"Nothing was measured for `{engine}`." for engine in sorted(missing)}


def _outdated(profile: Profile, facts: Facts) -> list[str]:
    """Reasons for which ``profile`` may no longer hold."""
    found = []
    if facts.torch_version and profile.torch_version != facts.torch_version:
        found.append(
            f"The {profile.device} profile was measured with torch {profile.torch_version}; this is {facts.torch_version}."
        )
    if "serve" in profile.engines and profile.has_native_rates != (not facts.native_absent_because):
        then, now = ("with", "without") if profile.has_native_rates else ("without", "with")
        found.append(f"The {profile.device} profile was measured {then} the native library, and this machine runs {now} it.")
    if profile.age_days > MAX_AGE_DAYS:
        found.append(f"The {profile.device} profile is {profile.age_days:.0f} days old.")
    return found


def _disturbed(profile: Profile) -> str:
    """That other programs were busy while ``profile`` was measured; empty if they were not."""
    if profile.disturbed_share <= DISTURBED_SHARE and profile.low_by_share <= 0:
        return ""
    return (
        f"Other programs were busy while the {profile.device} profile was measured: "
        f"rates may read up to {100 * profile.low_by_share:.0f}% low."
    )
