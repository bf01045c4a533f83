"""What `twostroke ledger fit` may correct, and a run's prediction as it would be under other corrections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.rates import Engine
from twostroke.ledger.attribution import IDENTITIES, Identity
from twostroke.ledger.scoring import number_of, numbers_of

if TYPE_CHECKING:
    from twostroke.ledger.store import Run

CORRECTIONS = "corrections"
"""Where a run's inputs say which factors were in use when it was planned."""

WAITED = "waited_share"
"""Where a run's measurement says which share of it its threads lost by waiting for a processor."""


@dataclass(frozen=True)
class Quantity:
    """A time of a calibrated machine that its runs may correct. ``ledger_names`` are the predicted numbers that it multiplies;
    the first is the one that runs teach it by."""

    name: str
    phase: Engine
    ledger_names: tuple[str, ...]
    what: str


QUANTITIES = (
    Quantity("forward", "train", ("forward_s",), "forward pass of training"),
    Quantity("backward", "train", ("backward_s",), "backward pass"),
    Quantity("update", "train", ("optimizer_s",), "optimizer's update"),
    Quantity("data", "train", ("data_s",), "taking a batch"),
    Quantity("train_startup", "train", ("startup_s",), "importing torch and compiling"),
    Quantity("prefill", "serve", ("prefill_tok_per_s", "prefill_s", "ttft_s"), "computing a prompt"),
    Quantity("decode", "serve", ("decode_tok_per_s", "decode_step_s", "tpot_s"), "decode step"),
    Quantity("serve_startup", "serve", ("startup_s",), "importing torch and reading the weights"),
)

TOTALS: dict[Engine, dict[str, tuple[str, ...]]] = {
    "train": {"step_time_s": ("forward", "backward", "update", "data")},
    "serve": {"ttft_s": ("prefill",), "tpot_s": ("decode",), "e2e_s": ("prefill", "decode")},
}
"""What people read, and the quantities that it is made of."""

_FOLLOWING = {
    "step_time_s": ("train_tok_per_s", "mfu", "computing_s"),
    "train_time_s": ("energy_kwh", "cost_usd"),
    "e2e_s": ("output_tok_per_s", "energy_per_mtok_kwh", "cost_per_mtok_usd"),
}
"""Numbers that a total's time decides."""


def phase_of(run: Run) -> Engine:
    return "train" if run.kind == "train" else "serve"


def is_rate(name: str) -> bool:
    """Whether the number ``name`` falls as its time grows."""
    return name == "mfu" or name.endswith("_per_s")


def factors_of(run: Run) -> dict[str, float]:
    """The factors that were in use when ``run`` was planned."""
    found = run.inputs.get(CORRECTIONS)
    pairs = found.items() if isinstance(found, Mapping) else ()
    return {name: factor for name, value in pairs if (factor := number_of(value)) is not None and factor > 0}


def restated(run: Run, now: Mapping[str, float]) -> dict[str, float]:
    """The predicted numbers of ``run`` as a plan with the factors ``now`` has them: a quantity's times are multiplied by its
    factor now ÷ its factor then, a total by the mean of its parts' changes, weighted by their predicted shares."""
    then, phase = factors_of(run), phase_of(run)
    change: dict[str, float] = {}
    for quantity in QUANTITIES:
        if quantity.phase == phase:
            change |= dict.fromkeys(quantity.ledger_names, now.get(quantity.name, 1.0) / then.get(quantity.name, 1.0))
    predicted = numbers_of(run.prediction)
    for identity in IDENTITIES:
        if identity.total in ("step_time_s", "train_time_s", "e2e_s"):
            change[identity.total] = _change_of_total(identity, run, predicted, change)
    for total, names in _FOLLOWING.items():
        change |= dict.fromkeys(names, change[total])
    return {name: value * change.get(name, 1.0) ** (-1 if is_rate(name) else 1) for name, value in predicted.items()}


def _change_of_total(identity: Identity, run: Run, predicted: Mapping[str, float], change: Mapping[str, float]) -> float:
    """Σ c·part·change ÷ Σ c·part; 1 if a coefficient is not known or no part was predicted."""
    shares = [(coefficient(run.inputs), name) for name, coefficient in identity.parts if name in predicted]
    if any(c is None for c, _ in shares):
        return 1.0
    weights = {name: (c or 0.0) * predicted[name] for c, name in shares}
    whole = math.fsum(weights.values())
    return math.fsum(w * change.get(name, 1.0) for name, w in weights.items()) / whole if whole > 0 else 1.0
