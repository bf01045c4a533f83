"""``config.json`` ↔ ``ModelSpec`` for each supported family.

Standard library only, so that the planner reads any supported configuration without torch. One file a group of relatives;
how a family names its weights is in ``twostroke.model.families``.
"""

from __future__ import annotations

from twostroke.core.families.files import read_config, read_spec
from twostroke.core.families.registry import (
    FAMILIES,
    PLANNED_FAMILIES,
    REFUSED,
    Family,
    all_families,
    config_from_spec,
    spec_from_config,
)

__all__ = [
    "FAMILIES",
    "PLANNED_FAMILIES",
    "REFUSED",
    "Family",
    "all_families",
    "config_from_spec",
    "read_config",
    "read_spec",
    "spec_from_config",
]
