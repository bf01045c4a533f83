"""The documents that ``twostroke plan … --json`` prints. Their keys are described where the plans are; ``docs/plan_schema.py``
makes ``docs/plan-schema.md`` and JSON Schema of it."""

from __future__ import annotations

from typing import Any, Literal

from twostroke.core.described import plain

PLAN_SCHEMA = "twostroke.plan/1"
"""Every plan document carries it under "schema". The number rises when a key is removed or changes its meaning; keys may be
added under the same number."""

Kind = Literal["train", "serve", "compare", "crossover", "search"]


def plan_document(kind: Kind, plan: Any) -> dict[str, Any]:
    """``plan`` as plain data, with what kind of document it is."""
    return {"schema": PLAN_SCHEMA, "kind": kind, **plain(plan)}
