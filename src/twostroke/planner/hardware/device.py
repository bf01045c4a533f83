"""A machine as the planner sees it: memory, bandwidth by working set, product rates by type and shape, launch costs, price.

Two sources: ``devices/*.toml`` (vendors' numbers, marked *datasheet*, with assumed efficiencies) and this machine's
calibrated profile (marked *measured*).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Literal

from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import ConfigError
from twostroke.core.named import Mark, largest, letter, named, records
from twostroke.core.profile import BandwidthPoint, MatmulPoint, input_gradient, weight_gradient
from twostroke.core.rates import Measurements, NativePass, NativeRates
from twostroke.planner.hardware.anchors import interpolate_log

Kind = Literal["measured", "predicted", "datasheet", "assumed"]

ASSUMED_PRODUCT_EFFICIENCY = 0.7
"""Share of a datasheet's peak that large products reach, where nothing was measured. Anchors: fixed 0.7/0.9 efficiencies
leave 53% median error on public decode points, so a datasheet plan is an order of magnitude, not a promise."""

ASSUMED_BANDWIDTH_EFFICIENCY = 0.8
"""Share of a datasheet's memory bandwidth that streaming reads reach (aiconfigurator's ``mem_bw_empirical_scaling_factor``)."""

ASSUMED_ATTENTION_EFFICIENCY = 0.4
"""Share of peak that flash attention reaches over a step (FlashAttention-2, arXiv 2307.08691: 50–73% forward)."""

ASSUMED_LINK_EFFICIENCY = 0.7
"""Share of a datasheet's link rate that a ring keeps up. Vidur's measured all-reduces of 60 MB among 8 devices give 177 of
300 GB/s on A100 and 360 of 450 GB/s on H100; calculon takes 0.65 for NVLink."""

DATASHEET_NOTE = "from a datasheet with assumed efficiencies: expect the right order, not the right digit."


@dataclass(frozen=True)
class Price:
    """A price, a power or a share that was taken as given, with where it comes from."""

    value: Annotated[float, "in the unit that the key's name says; watts in W"]
    kind: Annotated[str, "listed, datasheet, assumed or given"]
    source: Annotated[str, "who says so"]
    date: Annotated[str, "when"]

    def named(self, symbol: str, unit: str) -> float:
        """The value, in an explanation as ``symbol`` with its source."""
        if not records():
            return self.value
        mark: Mark = "given" if self.kind == "listed" else self.kind  # type: ignore[assignment]
        return named(symbol, self.value, unit, f"{self.source}; {self.date}", mark, "money")


@dataclass(frozen=True)
class Fact:
    """One number of a hardware file, as `--json` shows it."""

    value: Annotated[float, "in its unit"]
    unit: Annotated[str, "as in bytes, bytes/s, FLOP/s, W, s"]
    source: Annotated[str, "datasheet, document or assumption"]
    date: Annotated[str, "when"]
    note: Annotated[str, "what it is exactly; may be empty"] = ""

    @property
    def kind(self) -> Annotated[Literal["datasheet", "assumed"], "datasheet or assumed"]:
        return "assumed" if self.source.startswith("assumed") else "datasheet"


SLOT_BYTES_PER_S = 64e9
"""One direction of a PCIe 5.0 ×16 slot (32 GT/s · 16 lanes ÷ 8): what every server has."""


@dataclass(frozen=True)
class Link:
    """A way from one device to others: a message of S bytes takes alpha_s + S / bytes_per_s.

    ``bytes_per_s`` is one direction of one device, as the datasheet or the measurement has it; ``kind`` is the rate's.
    ``source`` names the rate's and alpha's.
    """

    alpha_s: Annotated[float, "s", "a message takes before its first byte"]
    bytes_per_s: Annotated[float, "bytes/s"]
    kind: Annotated[Literal["measured", "datasheet", "assumed"], "measured, datasheet or assumed"]
    source: Annotated[str, "who says so"]

    @property
    def effective_bytes_per_s(self) -> float:
        """The rate that collectives reach: a measured one as it is, any other times ``ASSUMED_LINK_EFFICIENCY``."""
        return self.bytes_per_s if self.kind == "measured" else self.bytes_per_s * ASSUMED_LINK_EFFICIENCY

    @property
    def is_fast(self) -> bool:
        """Whether more was bought than what every server has: a switch or a mesh between the devices of a node, over which
        engines have all-reduces of their own."""
        return False


class NodeLink(Link):
    """A link between devices of one node."""

    @property
    def is_fast(self) -> bool:
        return self.bytes_per_s > SLOT_BYTES_PER_S


@dataclass(frozen=True)
class Present:
    """What else runs on a calibrated machine while its plan is made."""

    processors_used: Annotated[float, "processors that other programs use, as a mean of the last moments"] = 0.0
    processors_taken: Annotated[int, "of these, how many no thread should count on"] = 0
    taken_at_calibration: Annotated[int, "the same while it was calibrated"] = 0


class RateTable:
    """FLOP/s of (m, k) × (k, n) between measured points: within each class (n, k) log-rate is interpolated in log m; classes
    are then averaged with weights 1/d⁴, d the distance in (log n, log k). A plan of one engine asks some hundreds of times for
    a few dozen products, so each is kept."""

    def __init__(self, points: Iterable[MatmulPoint | NativePass]) -> None:
        lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for p in points:
            lines.setdefault((p.n, p.k), []).append((p.m, p.flop_per_s))
        self._lines = {shape: sorted(line) for shape, line in lines.items()}
        self._found: dict[tuple[int, int, int], float] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def at(self, m: int, n: int, k: int) -> float:
        """Raises ZeroDivisionError of a table without points."""
        found = self._found.get((m, n, k))
        if found is None:
            found = self._found[m, n, k] = self._interpolated(m, n, k)
        return found

    def _interpolated(self, m: int, n: int, k: int) -> float:
        total = weights = 0.0
        for (class_n, class_k), line in self._lines.items():
            distance = math.log(n / class_n) ** 2 + math.log(k / class_k) ** 2
            log_rate = math.log(interpolate_log(line, m))
            if distance < 1e-9:
                return math.exp(log_rate)
            weight = 1 / distance**2
            total += weight * log_rate
            weights += weight
        return math.exp(total / weights)


@lru_cache(maxsize=256)
def _rates_of(hardware: Hardware, scheme: str) -> RateTable:
    return RateTable(p for p in hardware.matmul if p.scheme == scheme)


@dataclass(frozen=True, eq=False)  # by identity, so that what is derived from one can be cached
class Hardware(Measurements):
    """What a plan needs to know of one machine (or one accelerator). Rates are for the whole device."""

    name: Annotated[str, "as --hardware takes it"]
    label: Annotated[str, "for people"]
    kind: Annotated[Literal["cpu", "gpu"], "cpu or gpu (any accelerator)"]
    basis: Annotated[Kind, "measured: calibrated; datasheet: vendors' numbers"]
    n_cores: int
    memory_bytes: Annotated[float, "bytes", "of one device"]
    read_bandwidth: tuple[BandwidthPoint, ...]
    matmul: tuple[MatmulPoint, ...]
    peak_flop_per_s: Annotated[dict[str, float], "FLOP/s", "by type"]
    op_launch_s: float
    linear_launch_s: float
    disk_write_bytes_per_s: float
    link: Annotated[Link, "to another device of the same node"]
    network: Annotated[Link, "to another node"]
    devices_per_node: Annotated[int, "devices that `link` joins"]
    watts: Annotated[Price, "most that one device draws, W"]
    idle_watts: Annotated[Price, "what it draws ready and without work, W"]
    usd_per_hour: Annotated[Price, "rent of one device, $ an hour"]
    place: Annotated[Literal["desk", "data centre"], "where such devices stand: data centre, desk …"] = "desk"
    host_watts: Annotated[Price | None, "most that a device's share of its server draws beside it, W; null: not known"] = None
    sustained: Annotated[
        dict[str, float], "share of the peak that training's large products sustain, by type, and attention"
    ] = field(default_factory=dict)
    lent_share: Annotated[float, "share of a memory shared with the processor that the system lends the GPU; 1: its own"] = 1.0
    present: Annotated[Present, "what else runs there now"] = field(default_factory=Present)
    facts: Annotated[dict[str, Fact], "every number of the device's file; empty for a calibrated machine"] = field(
        default_factory=dict
    )

    @property
    def accelerator(self) -> str | None:
        """Maker and name of a datasheet's GPU or other accelerator; None for a CPU, and for a GPU that was calibrated here,
        which torch drives."""
        return self.label if self.kind == "gpu" and self.basis == "datasheet" else None

    @property
    def is_calibrated_cpu(self) -> bool:
        """Whether our own engine serves here: it computes on the CPU, at rates that were measured."""
        return self.basis == "measured" and self.kind == "cpu"

    def link_for(self, n_devices: int) -> Link:
        """The slowest link that a group of ``n_devices`` must use: ``link`` while they fit one node, ``network`` beyond."""
        return self.link if n_devices <= self.devices_per_node else self.network

    def bandwidth(self, working_set_bytes: float) -> float:
        """Read rate in bytes/s of a loop over ``working_set_bytes``: measured points, linear between them in log–log, flat
        beyond the ends. A datasheet has one point, scaled by ``ASSUMED_BANDWIDTH_EFFICIENCY``."""
        points = [(p.working_set_bytes, p.bytes_per_s) for p in self.read_bandwidth]
        rate = interpolate_log(points, working_set_bytes)
        return letter("β", rate) if self.basis == "measured" else letter("β", rate) * ASSUMED_BANDWIDTH_EFFICIENCY

    def peak(self, dtype: str) -> float:
        """FLOP/s of the 4096³ product of ``dtype`` (measured) or of the datasheet: the denominator of MFU.
        Raises ConfigError where it is not known."""
        try:
            return letter("π", self.peak_flop_per_s[dtype])
        except KeyError:
            raise ConfigError(
                f"{self.label} has no product rate for {dtype!r}. It has: {', '.join(sorted(self.peak_flop_per_s))}."
                + (" Run `twostroke calibrate` again." if self.is_calibrated_cpu else "")
            ) from None

    def product_rate(self, scheme: str, m: int, n: int, k: int) -> float:
        """FLOP/s of an (m, k) × (k, n) product while its operands are in cache or m is large.

        Measured machines: ``RateTable``. Datasheets: peak times an assumed efficiency.
        """
        rates = _rates_of(self, scheme)
        if not rates:
            if self.basis == "measured":
                return self.peak(scheme)
            return self.peak(scheme) * ASSUMED_PRODUCT_EFFICIENCY
        return letter("R", rates.at(m, n, k))

    def product_s(self, scheme: str, m: int, n: int, k: int, working_set_bytes: float | None = None) -> float:
        """Seconds of one product, launch excluded: max(2·m·n·k / rate, weight bytes / bandwidth at the working set).

        ``working_set_bytes`` is everything that is read between two uses of this matrix (a whole model in a decode step):
        it decides whether the weights come from cache or memory. Default: the matrix alone.
        """
        return self._laid_out_s(scheme, scheme, m, n, k, working_set_bytes)

    def input_gradient_s(self, scheme: str, m: int, n: int, k: int) -> float:
        """As ``product_s``, of a matrix that lies as forward reads it: at rates of its own where calibration measured them."""
        return self._laid_out_s(scheme, input_gradient(scheme), m, n, k)

    def weight_gradient_s(self, scheme: str, m: int, n: int, k: int) -> float:
        """As ``product_s``, of two operands with their rows, ``k`` of them, first."""
        return self._laid_out_s(scheme, weight_gradient(scheme), m, n, k)

    def _laid_out_s(self, scheme: str, layout: str, m: int, n: int, k: int, working_set_bytes: float | None = None) -> float:
        """At the rates of ``layout`` where it has some, else at those of ``scheme``."""
        weight_bytes = n * k * letter("w", bytes_of(scheme))
        reading = weight_bytes / self.bandwidth(max(weight_bytes, working_set_bytes or 0))
        measured = layout if layout != scheme and _rates_of(self, layout) else scheme
        return largest(2 * m * n * k / self.product_rate(measured, m, n, k), reading)

    @property
    def runs_natively(self) -> bool:
        """Whether products and steps of the native engine were measured here."""
        return self.native is not None

    @property
    def serves_by_torch(self) -> bool:
        """Whether our engine computes with torch here: a calibrated CPU without the native library."""
        return self.is_calibrated_cpu and self.native is None

    @property
    def native_rates(self) -> NativeRates:
        """Of the native engine. Raises ConfigError where they were not measured."""
        if self.native is None:
            raise ConfigError(f"{self.label} has no rates of the native engine. Run `twostroke calibrate`.")
        return self.native

    def has_scheme(self, scheme: str) -> bool:
        return any(p.scheme == scheme for p in self.matmul) or (self.basis != "measured")
