"""Seconds of `twostroke import` and `export`: a model is read from one place and written to another."""

from __future__ import annotations

from twostroke.core.named import letter, named
from twostroke.planner.hardware.device import Hardware


def moving_s(read_bytes: float, written_bytes: float, hardware: Hardware) -> float:
    """A start, as quantising has it, reading what the system has in memory already, and writing to disk.

    Looking whether numbers are finite and changing their type is not priced: on two busy cores of a Zen 4 it made copies of
    135M parameters take two to four times as long, and a GGUF file seven times (the interval's upper end).
    """
    reading = hardware.disk_cached_read_bytes_per_s or hardware.disk_write_bytes_per_s
    reading_s = letter("read", read_bytes) / letter("reading", reading)
    writing_s = letter("written", written_bytes) / letter("writing", hardware.disk_write_bytes_per_s)
    start_s = hardware.first_uses.quantise_s if hardware.first_uses else 0.0
    return named("moving_s", start_s + reading_s + writing_s, "s", "a start, reading a model and writing another", "measured")
