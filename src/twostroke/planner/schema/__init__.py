"""The documents that ``twostroke plan … --json`` prints, described key by key: ``docs/plan-schema.md`` for people, and as JSON
Schema for programs."""

from __future__ import annotations

PLAN_SCHEMA = "twostroke.plan/1"
"""Every plan document carries it under "schema". The number rises when a key is removed or changes its meaning; keys may be
added under the same number."""
