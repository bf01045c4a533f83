"""What an engine's steps reached of this machine's measured limits, prefill and decode apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from twostroke.core.errors import TwostrokeError
from twostroke.core.schemes import native_product_name, scheme_of
from twostroke.engine import plan as p
from twostroke.engine.core import EngineCore
from twostroke.engine.meters import EngineStats
from twostroke.kernels.native_matrix import NativeMatrix, NativePair
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware


@dataclass(frozen=True)
class PhaseRates:
    """What the steps of one phase achieved. Everything is measured now, except for the two limits, which calibration measured.

    ``read_bytes`` is what the steps had to read: packed weights once a step, and of the cache what each request attends to.
    ``read_limit_bytes_per_s`` is the best rate at which all threads read a buffer of ``bytes_per_step`` again and again.
    ``product_limit_flop_per_s`` is the best rate of a product in the blocks' format, of 4096³ or another calibrated shape;
    attention and head count at it too, although the head may have another format. A limit is None if this machine's profile
    does not have it.
    """

    steps: int
    tokens: int
    seconds: float
    read_bytes: int
    flop: int
    read_limit_bytes_per_s: float | None = None
    product_limit_flop_per_s: float | None = None

    @property
    def bytes_per_step(self) -> float:
        return self.read_bytes / self.steps if self.steps else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes / self.seconds if self.seconds else 0.0

    @property
    def flop_per_s(self) -> float:
        return self.flop / self.seconds if self.seconds else 0.0

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def read_share(self) -> float | None:
        """Share of the bandwidth limit: bytes that had to be read ÷ seconds ÷ the limit."""
        limit = self.read_limit_bytes_per_s
        return self.bytes_per_s / limit if limit else None

    @property
    def flop_share(self) -> float | None:
        """Share of the best product rate."""
        limit = self.product_limit_flop_per_s
        return self.flop_per_s / limit if limit else None


@dataclass(frozen=True)
class Achieved:
    """Both phases of a run. Steps with prefill and decode are in neither of them, but in ``EngineStats.mixed_…``."""

    prefill: PhaseRates
    decode: PhaseRates
    product: str
    """The product that ``product_limit_flop_per_s`` is of, as a profile names it: native_int8, bf16, …"""

    def values(self) -> dict[str, float]:
        """By the ledger's names: ``<phase>_bytes_per_s``, ``…_flop_per_s``, ``…_read_share``, ``…_flop_share``, as far as there
        were such steps and limits are known."""
        found: dict[str, float] = {}
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            if phase.seconds <= 0:
                continue
            found |= {f"{name}_bytes_per_s": phase.bytes_per_s, f"{name}_flop_per_s": phase.flop_per_s}
            for share, value in (("read_share", phase.read_share), ("flop_share", phase.flop_share)):
                if value is not None:
                    found[f"{name}_{share}"] = value
        return found


def achieved(engine: EngineCore, since: EngineStats | None = None, hardware: Hardware | None = None) -> Achieved:
    """Rates of ``engine``'s steps, and their shares of this machine's measured limits, prefill and decode apart.

    ``since`` is stats from before the work in question; by default everything since the start counts. ``hardware`` is a
    calibrated machine, by default this machine's profile; without one the shares are None. A step's time runs from scheduling
    to tokens, so it includes sampling and Python.
    """
    now = engine.stats()
    if hardware is None:
        try:
            hardware = load_hardware("this", "serve")
        except TwostrokeError:  # no profile, or one that cannot be read: then there are no shares
            hardware = None
    limits = hardware if hardware is not None and hardware.basis == "measured" else None
    product = product_of(engine)

    def phase(name: str) -> PhaseRates:
        def grown(field: str) -> float:
            return getattr(now, f"{name}_{field}") - (0 if since is None else getattr(since, f"{name}_{field}"))

        steps, n_bytes = int(grown("steps")), int(grown("bytes"))
        read = limits.bandwidth(n_bytes / steps) if limits is not None and steps else None
        rate = limits.peak_flop_per_s.get(product) if limits is not None else None
        return PhaseRates(steps, int(grown("tokens")), grown("s"), n_bytes, int(grown("flop")), read, rate)

    return Achieved(phase("prefill"), phase("decode"), product)


def product_of(engine: EngineCore) -> str:
    """The product that computes most of the blocks' matrices, by their elements, as a profile names its rates."""
    plan, elements = engine.plan, Counter[str]()
    for op in plan.ops:
        if not isinstance(op, p.BlockProduct):
            continue
        for matrix in (op.matrix.gate, op.matrix.up) if isinstance(op.matrix, NativePair) else (op.matrix,):
            if isinstance(matrix, NativeMatrix):
                elements[native_product_name(matrix.format, matrix.group)] += matrix.n_rows * matrix.n_columns
    if elements:
        return elements.most_common(1)[0][0]
    return scheme_of(plan.weights).torch[-1].removeprefix("packed_")
