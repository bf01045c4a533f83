"""Reads the facts of a machine: processor, memory, disk, compiler, native library, torch, GPU, profiles, other programs.

That takes a fraction of a second. torch is not imported, because its files tell its version and build. Only if the machine
shows a GPU and torch has CUDA, a child process asks torch whether the two fit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path

from twostroke.core.errors import TwostrokeError
from twostroke.core.paths import home
from twostroke.core.profile import MachineProfile, read_fingerprint, stored_profiles, what_changed
from twostroke.core.rates import Engine

SAMPLE_S = 0.2
"""Seconds for which the processors are watched. The one-minute load still shows what ended half a minute ago."""

ASK_TORCH = "import torch; print(torch.cuda.is_available()); torch.zeros(1, device='cuda')"
TORCH_PATIENCE_S = 60


@dataclass(frozen=True)
class Disk:
    """A folder to which files go, and the free bytes there. ``is_writable``: whether this user may create files in it."""

    path: str
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True)
class Profile:
    """The properties of a stored calibration that decide whether it still holds."""

    device: str
    engines: tuple[Engine, ...]
    measured_at: str
    age_days: float
    torch_version: str
    has_native_rates: bool
    disturbed_share: float
    low_by_share: float

    @classmethod
    def of(cls, profile: MachineProfile, now: datetime) -> Profile:
        age = now - datetime.fromisoformat(profile.measured_at)
        return cls(
            device=profile.device,
            engines=profile.engines,
            measured_at=profile.measured_at,
            age_days=age.total_seconds() / 86400,
            torch_version=profile.torch_version,
            has_native_rates=profile.native is not None,
            disturbed_share=profile.conditions.disturbed_share,
            low_by_share=profile.conditions.most_low_by_share,
        )


@dataclass(frozen=True)
class Facts:
    """All facts, as plain values, so that a test can make any machine. An empty string or None means that it is absent."""

    cpu_model: str
    n_cores: int  # that this process may use
    n_cores_of_machine: int
    group_cores: float | None  # what the control group lets it use at once
    features: tuple[str, ...]
    kernel_target: str
    native_absent_because: str
    compiler: str
    ram_bytes: int
    available_bytes: int
    home: Disk
    here: Disk
    python: str
    torch_version: str
    torch_cuda: str  # the CUDA release that torch was built with
    gpus: tuple[str, ...]
    gpu_problem: str  # why torch cannot use them, in its own words
    profiles: tuple[Profile, ...]
    profile_problem: str
    other_machine: str  # how the newest profile's machine differs, if this one has no profile
    busy_cores: float


def read_facts() -> Facts:
    """Facts of the machine and environment that this process runs in."""
    from twostroke.engine.memory import available_bytes
    from twostroke.kernels.native_library import features, target, why_absent

    busy = busy_cores()
    fingerprint = read_fingerprint()
    version, cuda = torch_build()
    profiles, problem = read_profiles()
    return Facts(
        cpu_model=fingerprint.cpu_model,
        n_cores=fingerprint.n_cores,
        n_cores_of_machine=os.cpu_count() or fingerprint.n_cores,
        group_cores=group_cores(),
        features=features() or fingerprint.isa,
        kernel_target=target(),
        native_absent_because=why_absent(),
        compiler=find_compiler(),
        ram_bytes=fingerprint.ram_bytes,
        available_bytes=available_bytes(),
        home=read_disk(home()),
        here=read_disk(Path.cwd()),
        python=".".join(map(str, sys.version_info[:3])),
        torch_version=version,
        torch_cuda=cuda,
        gpus=fingerprint.gpus,
        gpu_problem=ask_torch() if fingerprint.gpus and cuda else "",
        profiles=profiles,
        profile_problem=problem,
        other_machine="" if profiles or problem else what_changed(fingerprint) or "",
        busy_cores=busy,
    )


def busy_cores(stat: Path = Path("/proc/stat"), seconds: float = SAMPLE_S) -> float:
    """Cores that all programs together kept busy for ``seconds``; 0 if the system does not tell."""

    def spent() -> float:
        user, nice, system, _idle, _waiting, interrupts, soft = map(int, stat.read_text().split("\n", 1)[0].split()[1:8])
        return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")

    try:
        before, begin = spent(), time.monotonic()
        time.sleep(seconds)
        return max(0.0, spent() - before) / (time.monotonic() - begin)
    except (OSError, ValueError):
        return 0.0


def group_cores(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control groups of this process allow, the least over its ancestors; None: no limit."""
    limits = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, names, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" if not names else root / "sys/fs/cgroup/cpu"
        if names and "cpu" not in names.split(","):
            continue
        for folder in (path.strip("/"), *map(str, Path(path.strip("/")).parents)):
            limit = _quota(base / folder)
            if limit is not None:
                limits.append(limit)
    return min(limits, default=None)


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def find_compiler() -> str:
    """First line of the version that the native library's compiler prints; empty without a compiler."""
    from twostroke.kernels.native.build import BuildError, compiler

    try:
        done = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (BuildError, OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def read_disk(folder: Path) -> Disk:
    """Free bytes where ``folder`` is or will be."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return Disk(str(folder), shutil.disk_usage(there).free, there.is_dir() and os.access(there, os.W_OK | os.X_OK))


def torch_build() -> tuple[str, str]:
    """torch's version, as ``torch.__version__`` has it, and the CUDA release that it was built with, from its files; empty
    strings if they do not tell. Of PyPI's wheels the metadata says 2.13.0 and torch 2.13.0+cu130, which profiles keep."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "", ""
    found = util.find_spec("torch")
    if found is None or not found.origin:
        return "", ""
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return version, ""
    said = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, flags=re.MULTILINE))
    return said.get("__version__", version), said.get("cuda", "")


def ask_torch() -> str:
    """The last line of torch's error when it is asked to use a GPU; empty if that works."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_PATIENCE_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def read_profiles() -> tuple[tuple[Profile, ...], str]:
    """This machine's calibrations, and the reason if they cannot be read, else an empty string."""
    try:
        return tuple(Profile.of(profile, datetime.now(UTC)) for profile in stored_profiles()), ""
    except (TwostrokeError, ValueError, TypeError) as error:
        return (), str(error)
