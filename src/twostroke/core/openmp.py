"""How OpenMP's idle threads wait, decided before torch is loaded: the runtime reads it once, from the environment."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "300"
"""Turns an idle thread of libgomp spins before it sleeps; its own default is 300,000, some milliseconds.

The engine shares its cores with the HTTP process and with other programs, and a thread that spins keeps the one it waits
for from running. Measured on two cores that others used as well, a 5M-parameter model took 67 ms a token with the default
and 3.7 ms with 300 turns; on quiet cores 1.7 ms with either, and 2.3 ms without any spinning.
"""


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Set ``GOMP_SPINCOUNT`` in ``environment`` unless its owner has chosen how threads wait. Before torch is imported."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
