"""Factors that a machine's own runs taught, where a plan multiplies with them.

`twostroke ledger fit` writes them into the machine's profile (``planner.truth.learning``). A plan of that machine multiplies
the time of each quantity with its factor, once. Another version of the code plans by other formulas, so it uses none of them.
"""

from __future__ import annotations

from dataclasses import replace

from twostroke.core.named import letter
from twostroke.core.rates import Corrections
from twostroke.ledger.code_version import code_version
from twostroke.planner.hardware.device import Hardware


def in_use(stored: Corrections) -> Corrections:
    """``stored`` without its factors if another version of the code learned them."""
    is_ours = not stored.code_version or stored.code_version == code_version()
    return stored if is_ours else replace(stored, learned=())


def learned_factor(hardware: Hardware, quantity: str) -> float:
    """What the time of ``quantity`` is multiplied with; 1 if nothing was learned of it."""
    factor = hardware.corrections.factors.get(quantity)
    return 1.0 if factor is None else letter("learned", factor)


def corrections_notes(hardware: Hardware) -> tuple[str, ...]:
    """What a plan says of them; empty for a machine without."""
    found = hardware.corrections
    if found.learned:
        factors = ", ".join(f"{one.quantity} × {one.factor:.3g}" for one in found.learned)
        return (f"times are corrected by this machine's own runs, fitted {found.fitted_at}: {factors}.",)
    if found.fitted_at:
        return (
            f"corrections of {found.fitted_at} are not used: version {found.code_version} learned them. "
            "`twostroke ledger fit` learns them again.",
        )
    return ()
