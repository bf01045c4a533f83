"""Seconds of `twostroke import` and `export`: a model is read from one place and written to another."""

from __future__ import annotations

from twostroke.core.named import letter, named
from twostroke.planner.hardware.device import Hardware


def moving_s(read_bytes: float, written_bytes: float, hardware: Hardware) -> float:
    """Reading what the system has in memory already, and writing to disk. Changing the type of plain numbers is not priced."""
    reading = hardware.disk_cached_read_bytes_per_s or hardware.disk_write_bytes_per_s
    reading_s = letter("read", read_bytes) / letter("reading", reading)
    writing_s = letter("written", written_bytes) / letter("writing", hardware.disk_write_bytes_per_s)
    return named("moving_s", reading_s + writing_s, "s", "reading a model and writing another", "measured")
