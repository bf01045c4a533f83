"""Devices and prices as they are read: datasheets and prices in TOML, and this machine's calibrated profile."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from twostroke.core.errors import ConfigError, CorruptFileError, NotCalibratedError
from twostroke.core.profile import (
    CALIBRATION_TIME,
    SERVING_DEVICE,
    BandwidthPoint,
    MachineProfile,
    MatmulPoint,
    load_profile,
    read_fingerprint,
    stored_profiles,
    what_changed,
)
from twostroke.core.rates import Contended, Engine, Measurements
from twostroke.planner.hardware.corrections import in_use
from twostroke.planner.hardware.device import Fact, Hardware, Link, NodeLink, Present, Price
from twostroke.planner.hardware.names import count_in, device_meant
from twostroke.planner.hardware.present import as_calibrated, at_present

HARDWARE_DIR = Path(__file__).parent / "devices"

ALIASES_FILE = Path(__file__).parent / "aliases.toml"

PRICES_FILE = Path(__file__).parent / "prices.toml"

HOURS_PER_YEAR = 8766.0
"""365.25 days."""

_PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*")
"""What a device may be called: nothing that could name a file elsewhere."""

ASSUMED_LAUNCH_S = {"gpu": 3e-6, "cpu": 8e-6}
"""Cost of one operation that moves no data, in s. GPU: aiconfigurator's ``mem_empirical_constant_latency``, a captured
graph; CPU: an eager torch operator on a server core."""

ASSUMED_DISK_WRITE_BYTES_PER_S = 1e9
"""One NVMe drive."""

ASSUMED_NETWORK_BYTES_PER_S = 1.25e8
"""1 Gbit/s Ethernet: what a machine that was calibrated is assumed to have towards a second one."""

ASSUMED_NETWORK_ALPHA_S = 3e-5
"""Start of one message over TCP and Ethernet. Vidur's two A100 nodes without InfiniBand: 72 µs for an all-reduce of
2 ranks, which is 2 messages one after another."""

IDLE_SHARE = 0.17
"""Of a device's limit, what it draws ready and without work where its file does not say: an H100's 120 of 700 W."""

LENT = {"macOS": ((36 * 2**30, 3 / 4), (0, 2 / 3)), "AMD": ((0, 3 / 4),)}
"""Of a memory that processor and GPU share, what the GPU may hold: (from so many bytes on, share). macOS's default
(``iogpu.wired_limit_mb`` raises it) as llama.cpp logs ``recommendedMaxWorkingSetSize``: 21.3 of 32 GB, 27 of 36, 48 of 64,
144 of 192. AMD's variable graphics memory: 96 of 128 GB at most."""

SAME_SIZE = 0.08
"""By how much a size in GB may differ from the memory in bytes and mean the same: 80 GB and 80 GiB, what ECC takes."""

LEAST_NET_SHARE = 0.3
"""Of a measured product's time, what is at least left for the product itself when its launch is taken off."""


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CorruptFileError(f"{path.name} of the installed package is not readable: {error}.") from None


@lru_cache(maxsize=1)
def prices() -> dict[str, Any]:
    """``prices.toml`` as it stands."""
    return _read_toml(PRICES_FILE)


def price(section: str) -> Price:
    """The named price, as in ``electricity_usd_per_kwh``."""
    row = prices()[section]
    return Price(float(row["value"]), row["kind"], row["source"], row["date"])


def device_price(section: str, name: str) -> Price | None:
    """The device's row of ``device_usd_per_hour``, ``device_spot_usd_per_hour`` or ``device_purchase_usd``; None without."""
    row = prices()[section].get(name)
    if row is None:
        return None
    source = prices()["sources"][row["source"]]
    return Price(float(row["value"]), source["kind"], source["text"], source["date"])


def hourly_price(name: str, n_cores: int) -> Price:
    """Rent of a device for an hour, or the best there is: its purchase price over years of non-stop use, or its cores'."""
    listed = device_price("device_usd_per_hour", name)
    if listed:
        return listed
    bought, years = device_price("device_purchase_usd", name), price("depreciation_years")
    if bought:
        source = f"nobody rents it out: ${bought.value:,.0f} ({bought.source}) over {years.value:g} years of non-stop use"
        return Price(bought.value / (years.value * HOURS_PER_YEAR), "assumed", source, bought.date)
    core = price("cpu_core_usd_per_hour")
    return Price(core.value * n_cores, core.kind, f"{n_cores} cores, {core.source}", core.date)


def hardware_names() -> list[str]:
    """Every device with a datasheet file, by its name; aliases are accepted too."""
    return sorted(path.stem for path in HARDWARE_DIR.glob("*.toml"))


@lru_cache(maxsize=1)
def hardware_aliases() -> dict[str, str]:
    """Other names → names: one index, so that a plan opens one device's file."""
    return _read_toml(ALIASES_FILE)


def load_hardware(name: str = "this", engine: Engine | None = None, device: str | None = None) -> Hardware:
    """The machine called ``name``: "this" for the calibrated profile of this machine, or a datasheet's name or alias.

    ``engine``: of "this" the device that does that work, training on the GPU where it was measured there, serving on the CPU
    always; ``device`` names training's. Raises ConfigError for a name that is not known (with near matches), and
    NotCalibratedError for work that was never measured on the device that does it.
    """
    if name == "this":
        profile = load_profile(engine, device)
        if profile is None:
            raise NotCalibratedError(_not_calibrated(engine, device))
        return hardware_from_profile(profile, at_present(profile))
    wanted = "-".join(name.lower().replace("_", " ").split())
    path = HARDWARE_DIR / f"{wanted}.toml"
    if _PLAIN_NAME.fullmatch(wanted) and path.exists():
        return _from_datasheet(wanted, _read_toml(path))
    counted, meant = count_in(name), device_meant(name, _all_names())
    if counted is not None and meant is None:
        n, device = counted
        raise ConfigError(
            f"hardware {name!r} names {n} devices, and this option one kind. Use {device!r}, with --tensor {n} or "
            f"--pipeline {n} for serving, --data-parallel {n} for training, --max-devices {n} for a search."
        )
    if meant is None:
        raise ConfigError(f"hardware {name!r} is not known. {_near_matches(wanted)}")
    return _from_datasheet(meant.device, _read_toml(HARDWARE_DIR / f"{meant.device}.toml"), meant.memory_gib)


def _all_names() -> dict[str, str]:
    """Names and aliases → names."""
    return {name: name for name in hardware_names()} | hardware_aliases()


def _near_matches(wanted: str) -> str:
    """Up to five names that look like ``wanted``, or that begin with it; otherwise all of them."""
    names = hardware_names()
    known = {*names, *hardware_aliases()}
    near = difflib.get_close_matches(wanted, known, n=5) or [
        n for n in sorted(known) if len(wanted) > 1 and n.startswith(wanted)
    ]
    if not near:
        return f"Known: this, {', '.join(names)}."
    return f"Did you mean {' or '.join(repr(n) for n in near[:5])}?"


def _facts(table: dict[str, Any]) -> dict[str, Fact]:
    """Every number of a device's file by its dotted name; its source is one of the file's ``[sources]``."""
    sources = table["sources"]
    facts: dict[str, Fact] = {}
    for key, row in table.items():
        if key == "sources" or not isinstance(row, dict):
            continue
        for path, entry in {key: row}.items() if "value" in row else {f"{key}.{inner}": v for inner, v in row.items()}.items():
            source = sources[entry["source"]]
            facts[path] = Fact(float(entry["value"]), entry["unit"], source["text"], source["date"], entry.get("note", ""))
    return facts


def _from_datasheet(name: str, table: dict[str, Any], memory_gib: int = 0) -> Hardware:
    """``memory_gib``: a size that was named, 0 for the file's own. Raises ConfigError for one that it is not sold with."""
    facts = _facts(table)
    memory_bytes, label = facts["memory_bytes"].value, table["label"]
    if memory_gib and not math.isclose(memory_gib * 2.0**30, memory_bytes, rel_tol=SAME_SIZE):
        sizes = table.get("memory_gib", [round(memory_bytes / 2**30)])
        if memory_gib not in sizes:
            raise ConfigError(f"{label} is not sold with {memory_gib} GB. It has {' or '.join(map(str, sizes))}.")
        memory_bytes, label = memory_gib * 2.0**30, re.sub(r"\d+ GB$", f"{memory_gib} GB", label)
    kind = table["kind"]
    cores = int(table.get("n_cores", 1))
    peaks = {key.partition(".")[2]: f.value for key, f in facts.items() if key.startswith("peak_flop_per_s.")}
    # Matrix units take both 16-bit types at one rate, unless the file says otherwise.
    peaks.setdefault("fp16", peaks["bf16"])
    watts, host = _watts(facts["watts"]), facts.get("host_watts")
    network = _link(facts, "network")
    return Hardware(
        name=name,
        label=label,
        kind=kind,
        basis="datasheet",
        n_cores=cores,
        memory_bytes=memory_bytes,
        lent_share=next((share for least, share in LENT[table["lent_by"]] if memory_bytes >= least), 1.0)
        if "lent_by" in table
        else 1.0,
        read_bandwidth=(BandwidthPoint(int(memory_bytes), facts["read_bandwidth_bytes_per_s"].value),),
        matmul=(),
        peak_flop_per_s=peaks,
        op_launch_s=ASSUMED_LAUNCH_S[kind],
        linear_launch_s=ASSUMED_LAUNCH_S[kind],
        disk_write_bytes_per_s=ASSUMED_DISK_WRITE_BYTES_PER_S,
        link=_link(facts, "link", NodeLink) if "link.bytes_per_s" in facts else network,
        network=network,
        devices_per_node=int(facts["devices_per_node"].value),
        watts=watts,
        idle_watts=_watts(facts["idle_watts"]) if "idle_watts" in facts else idle_watts(watts),
        usd_per_hour=hourly_price(name, cores),
        place=table["place"],
        host_watts=_watts(host) if host else None,
        sustained={key.partition(".")[2]: f.value for key, f in facts.items() if key.startswith("sustained_share.")},
        facts=facts,
    )


def _watts(fact: Fact) -> Price:
    """A power of a device's file; what it is exactly stands with its source."""
    return Price(fact.value, fact.kind, ": ".join(filter(None, (fact.source, fact.note))), fact.date)


def idle_watts(limit: Price) -> Price:
    """``IDLE_SHARE`` of the limit."""
    return Price(IDLE_SHARE * limit.value, "assumed", f"{IDLE_SHARE:g} of the limit, as of an H100", "2026")


def _link(facts: dict[str, Fact], name: str, kind: type[Link] = Link) -> Link:
    """``<name>.bytes_per_s`` and ``<name>.alpha_s`` of a device's file."""
    rate, alpha = facts[f"{name}.bytes_per_s"], facts[f"{name}.alpha_s"]
    return kind(alpha.value, rate.value, rate.kind, f"{rate.source}; alpha: {alpha.source}")


_CHANGED = ("corrections", "first_uses", "http")
"""Sections of a profile that its hardware has otherwise."""


def hardware_from_profile(profile: MachineProfile, present: Present | None = None) -> Hardware:
    """``profile`` with the prices and watts that are assumed for such a machine. ``present``: what else runs there; None: what
    ran when it was calibrated."""
    present = present or as_calibrated(profile)
    contended = profile.contended if present.processors_taken > present.taken_at_calibration else Contended()
    f = profile.fingerprint
    core_price = price("cpu_core_usd_per_hour")
    usd = Price(core_price.value * f.n_cores, core_price.kind, f"{f.n_cores} cores: {core_price.source}", core_price.date)
    row = next(r for r in prices()["cpu_watts_per_core"] if r["match"].lower() in f.cpu_model.lower())
    watts = Price(float(row["value"]) * f.n_cores, row["kind"], f"{f.n_cores} cores as of {row['source']}", row["date"])
    idle, host = idle_watts(watts), None
    memory = float(f.ram_bytes)
    network = Link(
        ASSUMED_NETWORK_ALPHA_S, ASSUMED_NETWORK_BYTES_PER_S, "assumed", "1 Gbit/s Ethernet; alpha: tens of µs over TCP"
    )
    link, per_node = network, 1
    place: Literal["desk", "data centre"] = "desk"
    if profile.device == "cuda":
        memory = profile.device_memory_bytes or memory
        sheet = _datasheet_of_gpu(f.gpus)
        if sheet is not None:
            usd, watts, idle, host = sheet.usd_per_hour, sheet.watts, sheet.idle_watts, sheet.host_watts
            link, network, per_node, place = sheet.link, sheet.network, max(1, len(f.gpus)), sheet.place
    if profile.link is not None:
        ring = profile.link
        link = NodeLink(ring.alpha_s, ring.bytes_per_s, "measured", "calibrated collectives between ranks of this machine")
        if profile.device == "cuda":  # ranks on a CPU share it (``Layout.sharing``); another CPU is another machine
            per_node = max(per_node, ring.ranks)
    if profile.network is not None:
        ring = profile.network
        network = Link(ring.alpha_s, ring.bytes_per_s, "measured", "calibrated collectives between machines")
    return Hardware(
        name="this",
        label=_label_of(profile),
        kind="gpu" if profile.device == "cuda" else "cpu",
        basis="measured",
        n_cores=f.n_cores,
        memory_bytes=memory,
        read_bandwidth=profile.read_bandwidth,
        matmul=tuple(_without_launch(p, profile) for p in profile.matmul),
        peak_flop_per_s=dict(profile.peak_flop_per_s),
        op_launch_s=profile.op_launch_s,
        linear_launch_s=profile.linear_launch_s,
        disk_write_bytes_per_s=profile.disk_write_bytes_per_s,
        link=link,
        network=network,
        devices_per_node=per_node,
        watts=watts,
        idle_watts=idle,
        usd_per_hour=usd,
        place=place,
        host_watts=host,
        present=present,
        **{one.name: getattr(profile, one.name) for one in fields(Measurements) if one.name not in _CHANGED},
        corrections=in_use(profile.corrections),
        first_uses=contended.first_uses or profile.first_uses,
        http=contended.http or profile.http,
    )


def _label_of(profile: MachineProfile) -> str:
    """The device that was measured, which a machine with a GPU has two of."""
    f = profile.fingerprint
    if profile.device == SERVING_DEVICE:
        return f"this machine ({f.cpu_model}, {profile.n_threads} threads)"
    return f"this machine ({', '.join(f.gpus) or profile.device})"


def _without_launch(point: MatmulPoint, profile: MachineProfile) -> MatmulPoint:
    """``point`` with the launch taken off its time: plans add it per product, and a small one is not a slow one."""
    if point.scheme.startswith("native_"):  # measured inside one call, which starts nothing
        return point
    flops = 2.0 * point.m * point.n * point.k
    seconds = flops / point.flop_per_s
    launch_s = profile.product_launches_s.get(point.scheme, profile.linear_launch_s)
    return replace(point, flop_per_s=flops / max(seconds - launch_s, LEAST_NET_SHARE * seconds))


def _datasheet_of_gpu(gpus: Sequence[str]) -> Hardware | None:
    """The datasheet of the first accelerator that is known by its own name, as ``nvidia-smi`` writes it; None without."""
    for gpu in gpus:
        meant = device_meant(gpu, _all_names())
        if meant is not None:
            return load_hardware(meant.device)
    return None


WORK_OF = {"train": "training", "serve": "serving"}


def _not_calibrated(engine: Engine | None, device: str | None) -> str:
    """What was measured of this machine and what is missing, with the remedy."""
    stored = stored_profiles()
    if stored and engine is not None:
        where = device or (SERVING_DEVICE if engine == "serve" else "the device that trains")
        measured = ", ".join(f"{WORK_OF[e]} on {p.device}" for p in stored for e in p.engines)
        why = f"this machine's profile has no measurement of {WORK_OF[engine]} on {where}, only of {measured}"
    else:
        changes = what_changed(read_fingerprint())
        why = f"the stored profile is of another machine ({changes})" if changes else "this machine has no profile yet"
    return f"{why}. Run `twostroke calibrate` once ({CALIBRATION_TIME})."
