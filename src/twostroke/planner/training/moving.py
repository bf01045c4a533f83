"""Seconds and memory of `twostroke import` and `export`: a model is read from one place and written to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twostroke.core.errors import ConfigError
from twostroke.core.named import letter, named
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.scoring import decoder_token_s
from twostroke.planner.work.params import count_parameters


@dataclass(frozen=True)
class Moving:
    """What is done to a model's numbers, as headers and the writer's own tables say before one is read.

    ``decoded`` and ``encoded`` are numbers by what they are stored as and written as, in calibration's names; ``n_coded``
    matrices are among them. ``checked`` are numbers by the type in which they are looked at for what is not finite.
    ``new_bytes`` is memory that the system has to give for tensors too large for what was freed to be used again
    (``core.heap``); copies of smaller ones cost little and are not priced. ``held_bytes`` is the most that is in memory at
    once beside the program: pages of files that are mapped, the tensor that is made, and the one before it.
    """

    read_bytes: float
    written_bytes: float
    decoded: Mapping[str, float] = field(default_factory=dict)
    encoded: Mapping[str, float] = field(default_factory=dict)
    checked: Mapping[str, float] = field(default_factory=dict)
    new_bytes: float = 0.0
    n_coded: int = 0
    held_bytes: float = 0.0


def moving_s(moving: Moving, hardware: Hardware) -> float:
    """A start, as quantising has it, reading what the system has in memory already, looking at and changing every number, and
    writing to disk. Raises ConfigError where calibration did not measure one of these."""
    rates = hardware.weights
    reading = hardware.disk_cached_read_bytes_per_s or hardware.disk_write_bytes_per_s
    reading_s = letter("read", moving.read_bytes) / letter("reading", reading)
    writing_s = letter("written", moving.written_bytes) / letter("writing", hardware.disk_write_bytes_per_s)
    start_s = hardware.first_uses.quantise_s if hardware.first_uses else 0.0
    numbers_s = _at_rates("decoding", moving.decoded, rates.decoded_per_s, hardware)
    numbers_s += _at_rates("rounding to", moving.encoded, rates.encoded_per_s, hardware)
    numbers_s += _at_rates("looking at", moving.checked, rates.checked_per_s, hardware)
    if moving.n_coded:
        numbers_s += moving.n_coded * (rates.coded_call_s or 0.0)
    if moving.new_bytes:
        if rates.copied_bytes_per_s is None:
            raise _not_measured("copying weights", hardware)
        numbers_s += moving.new_bytes / letter("copying", rates.copied_bytes_per_s)
    seconds = start_s + reading_s + numbers_s + writing_s
    return named("moving_s", seconds, "s", "a start, reading a model, changing its numbers, writing another", "measured")


@dataclass(frozen=True)
class Measuring:
    """A pass of a model over ``n_tokens`` of a text, ``row_tokens`` a row, that tells which of its inputs matter."""

    spec: ModelSpec
    n_tokens: int
    row_tokens: int


def measuring_s(measuring: Measuring, hardware: Hardware) -> float:
    """An eager pass in fp32. Raises ConfigError where training was not measured."""
    token_s = decoder_token_s(measuring.spec, "fp32", hardware, measuring.row_tokens)
    return named("measuring_s", measuring.n_tokens * token_s, "s", "inputs of a text, an eager pass", "measured")


def measuring_bytes(measuring: Measuring) -> float:
    """The model in fp32; what a pass of a few rows holds beside it is small."""
    return 4.0 * count_parameters(measuring.spec).total


def _at_rates(what: str, numbers: Mapping[str, float], rates: Mapping[str, float], hardware: Hardware) -> float:
    seconds = 0.0
    for name, n in numbers.items():
        if name not in rates:
            raise _not_measured(f"{what} {name}", hardware)
        seconds += n / letter(name, rates[name])
    return seconds


def _not_measured(what: str, hardware: Hardware) -> ConfigError:
    return ConfigError(f"{what} was not measured on {hardware.label}. Run `twostroke calibrate`.")
