"""Measures the energy of this machine's devices by their own counters: RAPL of processors and NVML of NVIDIA's GPUs.

A counter counts everything its device does, other programs included. RAPL's wraps around after minutes (65 kJ on servers), so a
thread reads the counters every ``EVERY_S`` and adds up what each has gained.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

POWERCAP = Path("/sys/class/powercap")

EVERY_S = 20.0
"""Seconds between readings: at 1 kW a counter of 65 kJ wraps around after 65."""

NO_COUNTER = "this machine offers no RAPL or NVML counter."


class Counter(NamedTuple):
    """A device's energy counter: ``read`` gives microjoules, which begin at 0 again beyond ``range_uj`` (0: never)."""

    name: str
    read: Callable[[], int]
    range_uj: int = 0

    def gained(self, before: int, now: int) -> int:
        """Microjoules from ``before`` to ``now``, at most one wrap-around between them."""
        return now - before if now >= before else now - before + self.range_uj


def rapl_counters(folder: Path = POWERCAP) -> tuple[list[Counter], str]:
    """A counter of each processor package and of the memory beside it; without any, the reason instead of an empty text.

    Zones inside a package are part of it; "psys" holds the packages once more, and is not read.
    """
    found, refused = [], ""
    for zone in sorted(folder.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text(encoding="utf-8").strip()
            if not name.startswith("package") and name != "dram":
                continue
            file = zone / "energy_uj"
            int(file.read_text(encoding="utf-8"))
            wraps = int((zone / "max_energy_range_uj").read_text(encoding="utf-8"))
        except PermissionError:
            refused = f"{zone}/energy_uj is readable by root alone. Run `sudo chmod a+r` on it, or run as root."
            continue
        except (OSError, ValueError):
            continue
        found.append(Counter(f"{name} {zone.name}", _reader(file), wraps))
    return found, "" if found else refused or NO_COUNTER


def _reader(file: Path) -> Callable[[], int]:
    return lambda: int(file.read_text(encoding="utf-8"))


def nvml_counters(library: str = "libnvidia-ml.so.1") -> tuple[list[Counter], str]:
    """A counter of each NVIDIA GPU, by the driver's own library (``nvmlDeviceGetTotalEnergyConsumption``, Volta and later);
    without any, the reason."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return [], NO_COUNTER
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return [], "NVIDIA's driver did not answer. Look whether `nvidia-smi` works."
    found = []
    for i in range(count.value):
        handle = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(i), ctypes.byref(handle)):
            counter = Counter(f"gpu {i}", _nvml_reader(nvml, handle))
            if counter.read() >= 0:
                found.append(counter)
    return found, "" if found else "this GPU has no counter of energy."


def _nvml_reader(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> Callable[[], int]:
    def read() -> int:
        millijoules = ctypes.c_ulonglong()
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return -1 if failed else 1000 * millijoules.value

    return read


def counters_of(kind: Literal["cpu", "gpu"]) -> tuple[list[Counter], str]:
    """The counters of the devices that do the work; without any, the reason."""
    return nvml_counters() if kind == "gpu" else rapl_counters()


class Meter:
    """The energy of the work inside it, all devices together::

        with Meter(*counters_of("cpu")) as meter:
            ...
        meter.joules, meter.seconds, meter.watts    # joules and watts are None without a counter: ``why`` says it

    May be read while it runs, and run again: what it counts adds up. A counter that fails ends the measurement.
    """

    def __init__(self, counters: Sequence[Counter], why: str = "") -> None:
        self.why = why if not counters else ""
        self.seconds = 0.0
        self._counters = list(counters)
        self._uj = 0
        self._last: list[int] = []
        self._began = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def joules(self) -> float | None:
        """J since it began; None without a counter."""
        self._read()
        return self._uj / 1e6 if self._counters else None

    @property
    def watts(self) -> float | None:
        """Mean W; None without a counter and before any time has passed."""
        joules = self.joules
        seconds = self.seconds + (time.perf_counter() - self._began if self._last else 0.0)
        return None if joules is None or seconds <= 0 else joules / seconds

    def __enter__(self) -> Meter:
        self._began = time.perf_counter()
        self._last = [-1]  # it runs
        if self._counters:
            self._last = self._values()
        if self._counters:
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="energy meter", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._read()
        self.seconds += time.perf_counter() - self._began
        self._last = []

    def _watch(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._read()

    def _values(self) -> list[int]:
        """All counters, or none of them any more where one fails."""
        try:
            return [counter.read() for counter in self._counters]
        except (OSError, ValueError) as error:
            self._counters, self.why = [], f"a counter could not be read: {error}."
            return [-1]

    def _read(self) -> None:
        """Add what every counter has gained since it was last read, while the meter runs."""
        with self._lock:
            if not self._last or not self._counters:
                return
            now = self._values()
            if self._counters:
                self._uj += sum(c.gained(a, b) for c, a, b in zip(self._counters, self._last, now, strict=True))
                self._last = now
