"""A run in the ledger: predicted, frozen, run, measured, by every command in the same way.

::

    with recording("bench", subject, inputs, plan, log) as run:
        ...
        with run.meter:
            ...                 # what the predicted energy is of
        run.measure(values)

Money follows from the measured time or rate and the price; energy from them and the mean power that the machine's counters show
while ``meter`` runs. Where it has no counter, the run says so. The work goes on without a prediction or without a ledger; a
line says why one is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from twostroke.core.contention import low_by, waited_s
from twostroke.core.errors import TwostrokeError
from twostroke.core.profile import read_fingerprint
from twostroke.ledger.meter import Meter, counters_of
from twostroke.ledger.scoring import unmeasured
from twostroke.ledger.store import Kind, Ledger
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.money.cost import bill
from twostroke.planner.truth.intervals import predict_with_intervals
from twostroke.planner.truth.restated import CORRECTIONS, WAITED

Say = Callable[[str], None]

ENERGY = ("energy_kwh", "energy_per_mtok_kwh")
"""Names of energy: a run says of them why they were not measured."""


@dataclass(frozen=True)
class Planned:
    """What is expected of a run: values by the ledger's names, the machine that they are for, what of the plan joins the run's
    inputs, and on how many such machines or devices it runs: below 1 the part of one that it shares with other runs."""

    values: Mapping[str, Any] = field(default_factory=dict)
    hardware: Hardware | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    n_devices: float = 1


def freeze(kind: Kind, subject: str, inputs: Mapping[str, Any], planned: Planned, ledger: Ledger | None = None) -> str:
    """The id of a run whose prediction, with its intervals, is in the ledger now. Raises TwostrokeError or OSError where the
    ledger cannot be written."""
    frozen = predict_with_intervals(
        planned.values, planned.hardware, "train" if kind in ("train", "sweep") else "serve", ledger
    )
    return (ledger or Ledger()).freeze(kind, subject, {**inputs, **planned.inputs, **_machine(planned.hardware)}, frozen)


def _machine(hardware: Hardware | None) -> dict[str, Any]:
    """What a run's inputs say of the machine that it was planned for."""
    if hardware is None:
        return {}
    factors = hardware.corrections.factors
    return {"device": hardware.label, **({CORRECTIONS: factors} if factors else {})}


class Recording:
    """The entry of one run. ``run_id`` is None where the ledger could not be written, ``prediction`` empty without one.

    As a context it is measured as failed where an error passes before anything was measured.
    """

    def __init__(self, run_id: str | None, planned: Planned, say: Say, ledger: Ledger | None = None) -> None:
        self.run_id, self.planned, self.ledger = run_id, planned, ledger
        self._say = say
        self._measured: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._is_measured = False
        self._began_s, self._waited_s = time.monotonic(), waited_s()
        self.meter = Meter(*counters_of("cpu" if planned.hardware is None else planned.hardware.kind))

    @property
    def prediction(self) -> Mapping[str, Any]:
        return self.planned.values

    def measure(
        self,
        values: Mapping[str, Any],
        status: str = "finished",
        why: Mapping[str, str] | None = None,
        notes: str | None = None,
    ) -> None:
        """Add ``values`` to what was measured, and the energy and money that follow from them. With ``why``, reasons by name,
        each number that was predicted and has not been measured by now gets its reason: the one there, or the ledger's own.
        Energy always gets one."""
        self._is_measured = True
        values = {**self.spent(values), **values}
        self._measured |= values.keys()
        reasons = unmeasured(self.prediction, self._measured, {**dict.fromkeys(ENERGY, self.meter.why), **(why or {})})
        self._reasons |= {name: reason for name, reason in reasons.items() if why is not None or name in ENERGY}
        missing = {name: reason for name, reason in self._reasons.items() if name not in self._measured}
        values = {**values, "not_measured": missing} if missing or why is not None else values
        if self.run_id is None:
            return
        try:
            (self.ledger or Ledger()).measure(self.run_id, {**values, **self._waited()}, status, notes)
        except (TwostrokeError, OSError) as error:
            self._say(f"the ledger could not be written: {error}")

    def spent(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Measured energy and money that follow from measured ``values``; nothing without a machine whose price is known."""
        hardware, n, watts = self.planned.hardware, self.planned.n_devices, self.meter.watts
        own_watts = None if watts is None else min(1.0, n) * watts  # a counter reads the runs beside it too
        return {} if hardware is None else bill(values, hardware, own_watts, n)

    def _waited(self) -> dict[str, float]:
        """The share of the run, so far, that its threads lost by waiting for a processor; nothing of a run that was not
        planned, or where the system does not tell."""
        now = waited_s()
        if now is None or self._waited_s is None or not self.planned.values:
            return {}
        elapsed = time.monotonic() - self._began_s
        return {WAITED: low_by(now - self._waited_s, elapsed, read_fingerprint().n_cores)}

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self._is_measured:
            self.measure({}, "failed")


def recording(kind: Kind, subject: str, inputs: Mapping[str, Any], plan: Callable[[], Planned] | None, say: Say) -> Recording:
    """A run that is in the ledger with what ``plan`` expects of it. ``say`` gets a line for what could not be done."""
    planned = Planned()
    try:
        planned = Planned() if plan is None else plan()
    except TwostrokeError as error:
        say(f"no prediction: {error}")
    if planned.hardware is not None:  # at the limit of power, where the plan does not know better
        n, limit = planned.n_devices, planned.hardware.watts.value
        planned = replace(planned, values={**bill(planned.values, planned.hardware, n * limit, n), **planned.values})
    try:
        return Recording(freeze(kind, subject, inputs, planned), planned, say)
    except (TwostrokeError, OSError) as error:
        say(f"the ledger could not be written: {error}")
        return Recording(None, planned, say)
