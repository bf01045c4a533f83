"""Profiles of earlier releases (version 1), whose sections were one table of numbers with long names."""

from __future__ import annotations

import re
from typing import Any

_PLACES = {
    "torch_import_s": "process.torch_import_s",
    "baseline_rss_bytes": "process.resident_bytes",
    "device_memory_bytes": "device_memory_bytes",
    "disk_cached_read_bytes_per_s": "disk_cached_read_bytes_per_s",
    "native_training_attention_share": "training.attends_natively",
    "native_working_set_bytes": "native.working_set_bytes",
    r"(block_compile_s|(?:setup|mask|adamw|muon)_\w+_per_s)": r"training.\1",
    r"cross_entropy_(\w+)_logit_per_s": r"training.cross_entropy_logit_per_s.\1",
    r"launch_(\w+)_s": r"product_launches_s.\1",
    r"(\w+_max_(?:macs|scores))": r"crossovers.\1",
    r"(link|network)_(alpha_s|bytes_per_s|ranks)": r"\1.\2",
    r"(disturbed_share|calibration_s)": r"conditions.\1",
    r"low_by_(\w+)_share": r"conditions.low_by_share.\1",
}
"""Pattern of a name → the dotted place of its number now."""

_KIND = r"(?P<dtype>[a-z0-9]+)_(?P<mode>eager|compiled)"
_ROWS = (
    ("training.blocks", rf"(?P<part>attention_|block_|head_norm_){_KIND}_(?P<direction>forward|backward)_(?P<unit>\w+)"),
    ("training.steps", rf"anchor_train_e(?P<width>\d+)_l(?P<n_layers>\d+)_{_KIND}_(?P<part>\w+)"),
    ("native.steps", r"native_(?P<phase>prefill)_e(?P<width>\d+)_l(?P<n_layers>\d+)_t(?P<rows>\d+)_(?P<scheme>\w+)_s"),
    (
        "native.steps",
        r"native_(?P<phase>decode)_e(?P<width>\d+)_l(?P<n_layers>\d+)_b(?P<rows>\d+)_c(?P<context>\d+)_(?P<scheme>\w+)_s",
    ),
    ("native.prices", r"native_(?P<phase>prefill|decode)_(?P<scheme>[a-z0-9]+)_(?P<part>[a-z]+_s)"),
)
"""Section of rows, and the pattern of names that belong to it. ``part`` says which number of a row it is (default: its
seconds); the other groups say which row."""

_COMPLETE = {"training.blocks": "elementwise_bytes_per_s", "training.steps": "first_step_s"}
"""A number without which a row of the section is left out."""


def with_prices_of_phases(record: dict[str, Any]) -> dict[str, Any]:
    """``record`` of version 2. An earlier release priced the units of a native step by scheme: the first's stand for all."""
    native = record.get("native")
    if not isinstance(native, dict) or not any("scheme" in row for row in native.get("prices", ())):
        return record
    rows = {row["phase"]: {key: value for key, value in row.items() if key != "scheme"} for row in reversed(native["prices"])}
    return record | {"native": native | {"prices": [*rows.values()]}}


def as_version_2(record: dict[str, Any]) -> dict[str, Any]:
    """``record`` of version 1 as one of version 2. A name that is not known was of use to no plan, and is left out."""
    new: dict[str, Any] = {key: value for key, value in record.items() if key != "extras"} | {"version": 2}
    rows: dict[str, dict[tuple[tuple[str, str], ...], dict[str, Any]]] = {}
    for name, number in record.get("extras", {}).items():
        for section, pattern in _ROWS:
            if found := re.fullmatch(pattern, name):
                identity = found.groupdict()
                part = _part_of(identity.pop("part", "seconds"), identity.pop("unit", ""))
                if section == "native.steps":
                    identity.setdefault("context", "0")
                rows.setdefault(section, {}).setdefault(tuple(identity.items()), {})[part] = number
                break
        else:
            _put(new, next((re.sub(p, place, name) for p, place in _PLACES.items() if re.fullmatch(p, name)), ""), number)
    for section, by_identity in rows.items():
        needed = _COMPLETE.get(section)
        whole = [_typed(identity) | parts for identity, parts in by_identity.items() if needed is None or needed in parts]
        _put(new, section, whole)
    for ring in ("link", "network"):
        if ring in new:
            new[ring]["ranks"] = int(new[ring]["ranks"])
    if "training" in new:
        new["training"]["attends_natively"] = bool(new["training"].get("attends_natively"))
    return new


def _part_of(part: str, unit: str) -> str:
    return f"elementwise_{unit}" if part == "block_" else part + unit


def _typed(identity: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {key: int(value) if value.isdigit() else value for key, value in identity}


def _put(table: dict[str, Any], place: str, value: Any) -> None:
    if place:
        *sections, name = place.split(".")
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
