"""``MachineProfile``: what calibration measured on one machine, and the fingerprint that says which machine that was."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from twostroke.core.aside import write_text
from twostroke.core.described import plain
from twostroke.core.documents import read_object
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.paths import profiles_dir
from twostroke.core.profile_v1 import as_version_2, with_prices_of_phases
from twostroke.core.rates import Engine, Measurements, Ring
from twostroke.core.tables import build

PROFILE_VERSION = 2

CALIBRATION_TIME = "7 to 14 minutes"
"""What ``calibrate`` takes on two cores: 6.6 minutes on a Zen 5, 8.2 on a Zen 4, and 12.4 and 13.5 on a Zen 3, which
has no instructions for products in 16 and 8 bits and repeats them as often. There ``--only serve`` took 7.5."""

_LEFT_OUT = ("fingerprint_key", "torch_runner")
"""Keys that no plan reads: one that is made of others, and rates that an earlier release measured."""

ENGINES: tuple[Engine, ...] = ("train", "serve")
"""What a profile may have measured. Training computes on the GPU where torch sees one, the inference engine on the CPU."""

SERVING_DEVICE = "cpu"
"""Where ``serve``, ``generate`` and ``bench`` compute: the native library and the torch interpreter both run on the CPU."""

ISA_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
_AGAIN = " Run `twostroke calibrate`."


@dataclass(frozen=True)
class Fingerprint:
    """What must be the same for a profile to hold: processor, cores this process may use, memory, accelerators."""

    cpu_model: str
    n_cores: int
    ram_bytes: int
    isa: tuple[str, ...]
    gpus: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Twelve hex digits of the SHA-256 of all fields; memory rounded to GiB, since kernels reserve a varying part."""
        rounded = asdict(self) | {"ram_bytes": round(self.ram_bytes / 2**30)}
        return hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()[:12]


def read_fingerprint() -> Fingerprint:
    """Fingerprint of the machine this process runs on. Reads /proc where there is one; imports nothing."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = []
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = info.read_text().splitlines()
        gpus += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return Fingerprint(model, cores, ram, tuple(f for f in ISA_FLAGS if f in flags), tuple(gpus))


@dataclass(frozen=True)
class BandwidthPoint:
    """Best read rate of ``n_threads`` threads that walk over ``working_set_bytes`` again and again."""

    working_set_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class MatmulPoint:
    """Rate of one (m, k) × (k, n) product: 2·m·n·k / s. ``scheme`` is how weights and activations are held, as in
    ``fp32``, ``bf16``, ``w8`` (int8 weights, bf16 activations), ``w8a8``."""

    scheme: str
    m: int
    n: int
    k: int
    flop_per_s: float


def input_gradient(scheme: str) -> str:
    """The ``scheme`` of points whose right operand lies row by row, (m, k) and (k, n), where they are measured apart."""
    return f"{scheme}_input_gradient"


def weight_gradient(scheme: str) -> str:
    """The same where both operands lie with their long side first, (k, m) and (k, n)."""
    return f"{scheme}_weight_gradient"


@dataclass(frozen=True)
class MachineProfile(Measurements):
    """Everything that was measured on one device of a machine, for the ``engines`` that compute there. All rates are for
    ``n_threads`` threads together. A machine whose training runs on a GPU has two: that device's, and its CPU's for serving."""

    fingerprint: Fingerprint
    measured_at: str  # ISO 8601, UTC
    device: str  # "cpu" or "cuda"
    n_threads: int
    torch_version: str
    read_bandwidth: tuple[BandwidthPoint, ...]
    matmul: tuple[MatmulPoint, ...]
    peak_flop_per_s: dict[str, float]  # the 4096³ product by scheme: the denominator of MFU
    op_launch_s: float  # one eager elementwise operation on a tiny tensor
    linear_launch_s: float  # one eager F.linear on a tiny tensor
    disk_write_bytes_per_s: float
    device_memory_bytes: float | None = None  # of a GPU
    link: Ring | None = None  # between ranks of this machine
    network: Ring | None = None  # between ranks of several
    engines: tuple[Engine, ...] = ENGINES  # whose steps were measured on ``device``
    version: int = PROFILE_VERSION

    @property
    def fingerprint_key(self) -> Annotated[str, "what the ledger calls this machine"]:
        return self.fingerprint.key

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> MachineProfile:
        """Raises CorruptFileError where a field is missing or of the wrong kind, ConfigError for another version. A record
        without ``engines`` was written before they were kept apart: on a GPU it holds nothing that serving computes with."""
        version = record.get("version")
        if version not in (1, PROFILE_VERSION):
            raise ConfigError(f"machine profile version={version!r}; this release reads 1 and {PROFILE_VERSION}.{_AGAIN}")
        try:
            found = with_prices_of_phases(as_version_2(record) if version == 1 else record)
            values = {key: value for key, value in found.items() if key not in _LEFT_OUT}
            measured = values.get("engines", ENGINES if values["device"] == SERVING_DEVICE else ("train",))
            values["engines"] = tuple(engine for engine in ENGINES if engine in measured)
            return build(cls, values, "machine profile")
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFileError(f"machine profile is not readable ({error}).{_AGAIN}") from None


def profile_path(fingerprint: Fingerprint, device: str = SERVING_DEVICE) -> Path:
    """``<fingerprint>.json`` of the CPU, ``<fingerprint>-cuda.json`` of a GPU."""
    suffix = "" if device == SERVING_DEVICE else f"-{device}"
    return profiles_dir() / f"{fingerprint.key}{suffix}.json"


def save_profile(profile: MachineProfile) -> Path:
    """Write ``profile`` beside its siblings and return the path; the file appears whole or not at all."""
    path = profile_path(profile.fingerprint, profile.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(plain(profile), indent=1))
    return path


def what_changed(now: Fingerprint) -> str | None:
    """Where this machine has no profile of its own but its folder holds another's: in what the newest of those differs, as in
    "n_cores 2 → 4". None where there is none to compare with."""
    stored = sorted(profiles_dir().glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for file in stored:
        try:
            profile = MachineProfile.from_dict(read_object(file))
        except (ConfigError, CorruptFileError):
            continue
        before, after = asdict(profile.fingerprint), asdict(now)
        changes = [f"{name} {_short(before[name])} → {_short(after[name])}" for name in after if before[name] != after[name]]
        return "; ".join(changes) or None
    return None


def _short(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def stored_profiles() -> list[MachineProfile]:
    """What was measured of this machine: its CPU's profile, its GPU's, or both. Raises as ``read_profile``."""
    fingerprint = read_fingerprint()
    return [read_profile(p) for device in ("cpu", "cuda") if (p := profile_path(fingerprint, device)).is_file()]


def load_profile(engine: Engine | None = None, device: str | None = None) -> MachineProfile | None:
    """This machine's profile; with ``engine``, the one in which its steps were measured: a GPU's before the CPU's for training,
    or that of ``device``. None where there is no such measurement. Raises as ``read_profile``."""
    found = stored_profiles()
    if engine == "train":
        found.reverse()
    fitting = (p for p in found if engine in (None, *p.engines) and device in (None, p.device))
    return next(fitting, None)


def read_profile(path: Path) -> MachineProfile:
    """The profile at ``path``. Raises ConfigError if it is missing or of another version, CorruptFileError for
    anything else."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist. Run `twostroke calibrate` to make a machine profile.")
    try:
        return MachineProfile.from_dict(read_object(path))
    except CorruptFileError as error:
        raise CorruptFileError(f"{str(error).removesuffix(_AGAIN)}{_AGAIN}") from None
