"""Energy is what the counters gain while the work lasts, also when they wrap around; without one a sentence says so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from twostroke.ledger import meter
from twostroke.ledger.meter import NO_COUNTER, Counter, Meter, nvml_counters, rapl_counters


def zone(folder: Path, place: str, name: str, uj: int, wraps: int = 65_532_610_987) -> Path:
    """A powercap zone as Linux shows it."""
    (folder / place).mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", str(uj)), ("max_energy_range_uj", str(wraps))):
        (folder / place / file).write_text(f"{text}\n")
    return folder / place / "energy_uj"


def test_packages_and_the_memory_beside_them_are_counted_once(tmp_path: Path) -> None:
    """Cores are part of their package, psys holds packages once more."""
    files = [
        zone(tmp_path, "intel-rapl:0", "package-0", 0), zone(tmp_path, "intel-rapl:0:0", "core", 0),
        zone(tmp_path, "intel-rapl:0:1", "dram", 0), zone(tmp_path, "intel-rapl:1", "package-1", 0),
        zone(tmp_path, "intel-rapl:2", "psys", 0),
    ]  # fmt: skip
    counters, why = rapl_counters(tmp_path)
    assert why == ""
    with Meter(counters) as metered:
        for file in files:
            file.write_text("2000000\n")
    assert metered.joules == pytest.approx(3 * 2.0)


def test_a_counter_that_wraps_around_goes_on_counting(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 999_000, wraps=1_000_000)
    with Meter(*rapl_counters(tmp_path)) as metered:
        file.write_text("4000\n")
        assert metered.joules == pytest.approx(0.005)
        file.write_text("3000\n")  # nearly once around
        assert metered.joules == pytest.approx(0.005 + 0.999)
    assert Counter("x", lambda: 0, 10).gained(3, 3) == 0


def test_a_long_run_is_read_before_a_counter_can_wrap_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "EVERY_S", 0.01)
    file = zone(tmp_path, "intel-rapl:0", "package-0", 0, wraps=100)
    counters, _ = rapl_counters(tmp_path)
    with Meter(counters) as metered:
        for uj in (60, 20, 80, 40):  # 60, 60, 60, 60: twice around and more
            (tmp_path / "next").write_text(f"{uj}\n")
            (tmp_path / "next").replace(file)  # at once: the meter may look in between
            deadline = time.monotonic() + 10
            while metered._last != [uj] and time.monotonic() < deadline:
                time.sleep(0.005)
    assert metered.joules == pytest.approx(240e-6)


def test_only_what_happens_inside_counts_and_windows_add_up(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    metered = Meter(*rapl_counters(tmp_path))
    for uj in (1_000_000, 6_000_000):
        with metered:
            file.write_text(f"{uj}\n")
        file.write_text(f"{uj + 3_000_000}\n")  # between windows
    assert metered.joules == pytest.approx(1.0 + 2.0)
    assert metered.watts == pytest.approx(3.0 / metered.seconds)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    assert rapl_counters(tmp_path) == ([], NO_COUNTER)
    assert nvml_counters("libno-such-driver.so.1") == ([], NO_COUNTER)
    with Meter(*rapl_counters(tmp_path)) as metered:
        pass
    assert metered.joules is metered.watts is None
    assert metered.why == NO_COUNTER
    assert metered.seconds > 0


def test_a_counter_that_only_root_may_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    plain = Path.read_text

    def guarded(self: Path, *args: object, **kwargs: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return plain(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", guarded)
    counters, why = rapl_counters(tmp_path)
    assert counters == []
    assert "readable by root alone" in why
    assert "chmod a+r" in why


def test_a_counter_that_fails_midway_gives_no_number(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    with Meter(*rapl_counters(tmp_path)) as metered:
        file.unlink()
    assert metered.joules is None
    assert "could not be read" in metered.why
