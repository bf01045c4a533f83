"""What else runs on this machine while a plan of it is made, and what that does to the plan's times.

The inference engine leaves a processor that another program takes to that program (``core.contention``): its steps run on as
many threads as processors are left, at rates that calibration measured. Training keeps its threads, since a step's last bits
depend on their number, and takes as many times as long as calibration found beside a program that takes one processor.
"""

from __future__ import annotations

import os
from dataclasses import replace

from twostroke.core.contention import TAKEN_SHARE, recently, whole
from twostroke.core.named import letter
from twostroke.core.profile import MachineProfile
from twostroke.planner.hardware.device import Hardware, Present

AS_CALIBRATED = "TWOSTROKE_AS_CALIBRATED"
"""Environment variable that, set to anything but 0, plans for the machine as it was calibrated, whatever runs on it now."""

ASSUMED_SLOWDOWN = 1.5
"""Where it was not measured: 1.2 to 1.7 on two processors of a Zen 4, compiled or not."""

SHARED = 2.0
"""What a thread takes longer on a processor that it shares with one other: the system gives each half of its time."""

LEAST_USE = 0.15
"""Share of a processor below which other programs are not worth a line."""


def as_calibrated(profile: MachineProfile) -> Present:
    """What ran there meanwhile."""
    used = profile.conditions.others_used
    taken = _taken(used, profile.fingerprint.n_cores)
    return Present(used, taken, taken)


def at_present(profile: MachineProfile) -> Present:
    """What runs on this machine, whose ``profile`` it is, at this moment. It looks for ``contention.LOOK_S`` at most."""
    then = as_calibrated(profile)
    if os.environ.get(AS_CALIBRATED, "0") != "0" or profile.device != "cpu":
        return then
    used = recently().used
    return Present(used, _taken(used, profile.fingerprint.n_cores), then.taken_at_calibration)


def as_it_was(hardware: Hardware) -> Hardware:
    """``hardware`` beside what ran there when it was calibrated, whatever runs there now."""
    then = hardware.present.taken_at_calibration
    return replace(hardware, present=Present(0.0, then, then))


def _taken(used: float, n_processors: int) -> int:
    return min(whole(used), n_processors - 1)


def threads_left(hardware: Hardware, n_threads: int) -> int:
    """Of ``n_threads`` of the inference engine, those that have a processor."""
    return max(1, min(n_threads, hardware.n_cores - hardware.present.processors_taken))


def training_slowdown(hardware: Hardware, kind: str) -> float:
    """How many times as long a training step of ``kind`` ("compiled", "eager", "adapters") takes as when it was calibrated,
    because other programs have taken processors or left them."""
    present = hardware.present
    if hardware.kind != "cpu" or present.processors_taken == present.taken_at_calibration:
        return 1.0
    now, then = (_slowdown(hardware, kind, n) for n in (present.processors_taken, present.taken_at_calibration))
    return letter("contended", now / then)


def _slowdown(hardware: Hardware, kind: str, taken: int) -> float:
    """Against an idle machine: as measured with one processor taken. A thread that shares its processor has half of it, and
    OpenMP divides work evenly, so that more such threads take no longer than one."""
    return 1.0 if not taken else hardware.contended.training.get(kind, ASSUMED_SLOWDOWN)


def unsure_factor(hardware: Hardware, phase: str) -> float:
    """How many times as long a time of ``phase`` ("train", "serve") may come out as planned because of other programs. A step
    of the inference engine is shorter than a time slice, and may find its processor shared until the system parts them. A part
    of a processor, too little to count it as taken, may become a whole one. Training beside a whole one was measured."""
    present, n = hardware.present, hardware.n_cores
    if phase == "serve" and hardware.kind == "cpu" and present.processors_taken > present.taken_at_calibration:
        return SHARED
    rest = present.processors_used - present.processors_taken
    if hardware.kind != "cpu" or n < 2 or not LEAST_USE <= rest < TAKEN_SHARE or present.processors_taken >= n - 1:
        return 1.0
    more = replace(hardware, present=replace(present, processors_taken=present.processors_taken + 1))
    return max(1.0, training_slowdown(more, "compiled") / training_slowdown(hardware, "compiled"))


def present_notes(hardware: Hardware) -> tuple[str, ...]:
    """What a plan says of it; empty where nothing else runs."""
    present = hardware.present
    if hardware.basis != "measured" or present.processors_used < LEAST_USE:
        return ()
    then = "" if not present.taken_at_calibration else f" ({present.taken_at_calibration} taken when it was calibrated)"
    busy = f"this machine now: {present.processors_used:.1f} of {hardware.n_cores} processors busy with other programs{then}"
    if present.processors_taken:
        return (f"{busy}; the plan counts on {hardware.n_cores - present.processors_taken}.",)
    return (f"{busy}; times may come out longer.",)
