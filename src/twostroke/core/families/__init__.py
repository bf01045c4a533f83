"""``config.json`` ↔ ``ModelSpec`` for each supported family, and the names of its weights.

Standard library only, so that the planner reads any supported configuration without torch. One file a group of relatives; a
family is one row of ``registry``.
"""

from __future__ import annotations

from twostroke.core.families.files import read_config, read_spec
from twostroke.core.families.hub import Named, named_model
from twostroke.core.families.registry import (
    FAMILIES,
    PLANNED_FAMILIES,
    REFUSED,
    Family,
    all_families,
    config_from_spec,
    layout,
    spec_from_config,
    weight_names,
)

__all__ = [
    "FAMILIES",
    "PLANNED_FAMILIES",
    "REFUSED",
    "Family",
    "Named",
    "all_families",
    "config_from_spec",
    "layout",
    "named_model",
    "read_config",
    "read_spec",
    "spec_from_config",
    "weight_names",
]
