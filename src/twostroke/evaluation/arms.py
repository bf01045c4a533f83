"""Compares the two arms of an A/B test from a server's usage log: latencies, ratings and machine time, with 95% intervals.

What was drawn by lot are clients, not requests, so intervals resample clients with all that they asked (cluster bootstrap;
Davison & Hinkley 1997, ch. 3.8). Shares have Wilson's interval (JASA 22:209, 1927), and the difference of two Newcombe's
(Statistics in Medicine 17:873, 1998, method 10). A difference is told from noise if its p is below 5% after Holm's correction
for the number of comparisons. All that holds for one look at a test of a size that was decided before: who looks until
something differs finds it.

The time of the machine is shared equally among the requests that are in flight: one gets ∫ dt / n(t) over its life, where n(t)
are the requests of the whole log. So both arms together get the time in which anything was in flight."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import InputError
from twostroke.evaluation.paired import Z

Values = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

DRAWS = 2000
NEWEST = 50_000
"""Answers of an arm that are resampled: 2,000 draws of them take some seconds."""
LEAST_CLIENTS = 10
"""Fewer clients of an arm say nothing of others: no interval is shown."""
LEAST_FOR_P99 = 100
LEVEL = 0.05
_CHUNK_CELLS = 5_000_000


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval, which is missing where too few clients were there."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """One comparison. ``lower_is_better``: None where neither is. ``told``: whether the difference is told from noise."""

    name: str
    unit: Annotated[str, "s, share, tokens or usd"]
    a: Estimate | None
    b: Estimate | None
    difference: Estimate | None = None
    p_value: float | None = None
    told: bool = False
    lower_is_better: bool | None = True

    @property
    def better(self) -> str | None:
        """The arm that is told to be better, "a" or "b"."""
        if not self.told or self.difference is None or self.lower_is_better is None:
            return None
        return "b" if (self.difference.value < 0) is self.lower_is_better else "a"


@dataclass
class Arm:
    """What the log holds of one arm. ``clients`` number the clients of its answers; ``rated`` are 1 for a good rating, else
    0."""

    name: str
    ids: list[str] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    complete: list[bool] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    machine_s: list[float] = field(default_factory=list)
    rated: list[int] = field(default_factory=list)

    @property
    def n_clients(self) -> int:
        return len(set(self.clients))


@dataclass(frozen=True)
class Comparison:
    """Both arms beside each other. ``share``: of clients that were to be in B, as the server had it, and ``share_p`` how
    probable so large a departure from it is by chance. ``notes`` say what to bear in mind."""

    a: Arm
    b: Arm
    rows: list[Row]
    share: float | None
    share_p: float | None
    usd_per_hour: float
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        sides = {
            side: {"name": arm.name, "requests": len(arm.ids), "complete": sum(arm.complete), "clients": arm.n_clients,
                   "ratings": len(arm.rated), "output_tokens": sum(arm.tokens), "machine_s": sum(arm.machine_s)}
            for side, arm in (("a", self.a), ("b", self.b))
        }  # fmt: skip
        rows = [vars(row) | {"better": row.better} for row in self.rows]
        rest = {"share": self.share, "share_p": self.share_p, "usd_per_hour": self.usd_per_hour, "notes": self.notes}
        return {**sides, "rows": rows, **rest}


# -- reading --------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a usage log that are whole. Raises InputError for a file that is none."""
    found, n_bad = [], 0
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    n_bad += bool(line.strip())
                    continue
                if isinstance(record, dict) and "id" in record and "time" in record:
                    found.append(record)
                else:
                    n_bad += 1
    except OSError as error:
        raise InputError(f"usage log {path} cannot be read: {error.strerror}.") from None
    if n_bad > len(found):
        raise InputError(f"{path} is not a usage log: {n_bad} of its lines are not. `serve --usage-log FILE` writes one.")
    return found


def machine_seconds(ended_s: Values, took_s: Values) -> Values:
    """Of each request ∫ dt / n(t) from its beginning to its end."""
    times = np.concatenate([ended_s - took_s, ended_s])
    changes = np.concatenate([np.ones(len(took_s)), -np.ones(len(took_s))])
    order = np.lexsort((-changes, times))  # at one moment beginnings come first, so that no request has an empty life
    at, n = times[order], np.cumsum(changes[order])
    each = np.zeros(len(at))
    each[1:] = np.cumsum(np.diff(at) / np.maximum(n[:-1], 1.0) * (n[:-1] > 0))
    until = np.empty(len(at))
    until[order] = each
    return until[len(took_s) :] - until[: len(took_s)]


def arms_of(lines: Sequence[dict[str, Any]], names: Sequence[str] = ()) -> tuple[Arm, Arm, float | None]:
    """Both arms, and the share of B. ``names``: A's and B's; without them there must be two arms, of which A is the one under
    whose name requests came. Raises InputError."""
    answers = [line for line in lines if "rating" not in line and isinstance(line.get("e2e_s"), int | float)]
    of_test = [line for line in answers if isinstance(line.get("arm"), str)]
    there = Counter(line["arm"] for line in of_test)
    asked = Counter(line["model"] for line in of_test)
    chosen = list(names) or sorted(there, key=lambda name: (-asked[name], name))
    if missing := [name for name in names if name not in there]:
        raise InputError(f"--arm {missing[0]!r} is not in the log. Arms there: {', '.join(there) or 'none'}.")
    if len(chosen) != 2 or chosen[0] == chosen[1]:
        if not there:
            raise InputError(
                "two arms are compared, and the log has none. `serve --ab NAME=SHARE --usage-log FILE` writes them."
            )
        have = f"{len(there)}: {', '.join(there)}"
        raise InputError(f"two arms are compared, and the log has {have}. Name two with --arm, A's first.")
    seconds = machine_seconds(*(np.array([float(line[name]) for line in answers]) for name in ("time", "e2e_s")))
    a, b = arms = Arm(chosen[0]), Arm(chosen[1])
    units: dict[str, int] = {}
    shares = dict[int, float]()
    for line, machine_s in zip(answers, seconds, strict=True):
        arm = next((arm for arm in arms if arm.name == line.get("arm")), None)
        if arm is not None:
            unit = units.setdefault(str(line.get("unit")), len(units))
            _add(arm, line, unit, float(machine_s))
            if isinstance(line.get("share"), int | float):
                shares[unit] = float(line["share"])
    ratings = {(line["id"], line.get("choice")): line for line in lines if isinstance(line.get("rating"), int | float)}
    for line in ratings.values():  # the last of an answer
        for arm in arms:
            if arm.name == line.get("arm"):
                arm.rated.append(int(line["rating"] > 0))
    return a, b, sum(shares.values()) / len(shares) if shares else None


def _add(arm: Arm, line: dict[str, Any], unit: int, machine_s: float) -> None:
    n = sum((line.get("finish_reasons") or {}).values()) or 1
    first, whole, tokens = line.get("ttft_s"), float(line["e2e_s"]), float(line.get("completion_tokens", 0))
    first_s = math.nan if first is None else float(first)
    complete = line.get("outcome") == "complete"
    arm.ids.append(str(line["id"]))
    arm.clients.append(unit)
    arm.complete.append(complete)
    arm.ttft_s.append(first_s if complete else math.nan)
    arm.e2e_s.append(whole if complete else math.nan)
    arm.tpot_s.append((whole - first_s) / (tokens / n - 1) if complete and tokens > n else math.nan)
    arm.tokens.append(tokens)
    arm.machine_s.append(machine_s)


# -- intervals ------------------------------------------------------------------------------------------------------------


def wilson(good: int, n: int) -> tuple[float, float]:
    """The ends of a share's interval."""
    share, square = good / n, Z * Z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = Z * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def share_of(good: int, n: int) -> Estimate:
    return Estimate(good / n, *wilson(good, n))


def share_difference(good_a: int, n_a: int, good_b: int, n_b: int) -> tuple[Estimate, float]:
    """b − a with Newcombe's interval, and p of the pooled score test."""
    a, b, (low_a, high_a), (low_b, high_b) = good_a / n_a, good_b / n_b, wilson(good_a, n_a), wilson(good_b, n_b)
    low, high = b - a - math.hypot(b - low_b, high_a - a), b - a + math.hypot(high_b - b, a - low_a)
    pooled = (good_a + good_b) / (n_a + n_b)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n_a + 1 / n_b))
    return Estimate(b - a, low, high), 1.0 if error == 0 else math.erfc(abs(b - a) / error / math.sqrt(2))


class Draws:
    """Clients of one arm, drawn ``DRAWS`` times with replacement: the same draws for every comparison."""

    def __init__(self, arm: Arm, seed: int) -> None:
        _, places = np.unique(np.array(arm.clients[-NEWEST:], dtype=np.int64), return_inverse=True)
        self._places: Places = places
        n = int(places.max()) + 1 if len(places) else 0
        self.enough = n >= LEAST_CLIENTS
        self._weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS) if self.enough else None

    def _chunks(self, places: Places) -> Any:
        """The weights of answers, some draws at a time."""
        assert self._weights is not None
        rows = max(1, _CHUNK_CELLS // max(1, len(places)))
        for at in range(0, DRAWS, rows):
            yield self._weights[at : at + rows][:, places].astype(np.float64)

    def quantiles(self, values: Values, q: float) -> Values:
        """The ``q``-quantile of what is there of ``values``, in each draw in which anything is."""
        there = ~np.isnan(values)
        order = np.argsort(values[there], kind="stable")
        ordered, places = values[there][order], self._places[there][order]
        found = []
        for weights in self._chunks(places):
            sums = np.cumsum(weights, axis=1)
            sums = sums[sums[:, -1] > 0]
            found.append(ordered[np.argmax(sums >= q * sums[:, -1:], axis=1)])
        return np.concatenate(found)

    def ratios(self, above: Values, below: Values) -> Values:
        """Σ above ÷ Σ below in each draw."""
        found = []
        for weights in self._chunks(self._places):
            sums = weights @ below
            found.append((weights @ above)[sums > 0] / sums[sums > 0])
        return np.concatenate(found)


def quantile(values: Values, q: float) -> float:
    """The smallest value that at least the share ``q`` is not above."""
    return float(np.quantile(values[~np.isnan(values)], q, method="inverted_cdf"))


def _between(value: float, draws: Values | None) -> Estimate:
    if draws is None or not len(draws):
        return Estimate(value)
    return Estimate(value, *(float(each) for each in np.quantile(draws, (LEVEL / 2, 1 - LEVEL / 2))))


def _compared(
    name: str, unit: str, values: tuple[float, float], draws: tuple[Values | None, Values | None], lower: bool | None
) -> Row:
    a, b = (_between(value, found) for value, found in zip(values, draws, strict=True))
    if draws[0] is None or draws[1] is None:
        return Row(name, unit, a, b, Estimate(b.value - a.value), lower_is_better=lower)
    n = min(len(draws[0]), len(draws[1]))
    apart = draws[1][:n] - draws[0][:n]
    least = min(int((apart <= 0).sum()), int((apart >= 0).sum()))
    p_value = min(1.0, 2 * (least + 1) / (n + 1))
    return Row(name, unit, a, b, _between(b.value - a.value, apart), p_value, lower_is_better=lower)


def holm(rows: Sequence[Row]) -> list[Row]:
    """``rows``, with what is told from noise at ``LEVEL`` over all of them (Holm, Scandinavian Journal of Statistics 6:65)."""
    tested = sorted((row.p_value, i) for i, row in enumerate(rows) if row.p_value is not None)
    told = set[int]()
    for k, (p_value, i) in enumerate(tested):
        if p_value > LEVEL / (len(tested) - k):
            break
        told.add(i)
    return [Row(**(vars(row) | {"told": i in told})) for i, row in enumerate(rows)]


# -- the comparison -------------------------------------------------------------------------------------------------------

LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))


def compare_arms(lines: Sequence[dict[str, Any]], usd_per_hour: float, names: Sequence[str] = ()) -> Comparison:
    """The comparison of what a usage log holds. Raises InputError if it does not hold two arms."""
    a, b, share = arms_of(lines, names)
    draws = Draws(a, 1), Draws(b, 2)
    enough = all(each.enough for each in draws)
    rows: list[Row] = []
    for words, field_name in LATENCIES:
        found = tuple(np.array(getattr(arm, field_name)[-NEWEST:]) for arm in (a, b))
        n = min(int((~np.isnan(values)).sum()) for values in found)
        for q, which in ((0.5, "median"), (0.99, "p99")):
            if n >= (1 if q < 0.9 else LEAST_FOR_P99):
                of = [one.quantiles(values, q) if enough else None for one, values in zip(draws, found, strict=True)]
                middle = quantile(found[0], q), quantile(found[1], q)
                rows.append(_compared(f"{words} {which}", "s", middle, (of[0], of[1]), True))
    tokens, seconds = ([np.array(getattr(arm, name)[-NEWEST:]) for arm in (a, b)] for name in ("tokens", "machine_s"))
    ones = [np.ones(len(each)) for each in tokens]
    rows.append(_ratio_row("output tokens a request", "tokens", tokens, ones, draws, None))
    usd = [each * usd_per_hour / 3600 * 1e6 for each in seconds]
    if all(each.sum() for each in tokens):
        rows.append(_ratio_row("cost of a million output tokens", "usd", usd, tokens, draws, True))
    rows.append(_share_row("good ratings", a.rated, b.rated, False))
    rows.append(_share_row("requests cut short", [not done for done in a.complete], [not done for done in b.complete], True))
    rows = [row for row in rows if row.a is not None or row.b is not None]
    share_p = None if share is None else _share_p(a.n_clients, b.n_clients, share)
    return Comparison(a, b, holm(rows), share, share_p, usd_per_hour, _notes(a, b, enough, share, share_p))


def _ratio_row(
    name: str, unit: str, above: list[Values], below: list[Values], draws: tuple[Draws, Draws], lower: bool | None
) -> Row:
    of = [one.ratios(up, down) if one.enough else None for one, up, down in zip(draws, above, below, strict=True)]
    values = [float(up.sum() / down.sum()) for up, down in zip(above, below, strict=True)]
    return _compared(name, unit, (values[0], values[1]), (of[0], of[1]), lower)


def _share_row(name: str, a: Sequence[int], b: Sequence[int], lower: bool) -> Row:
    if not a or not b:
        one, other = (share_of(sum(each), len(each)) if each else None for each in (a, b))
        return Row(name, "share", one, other, lower_is_better=lower)
    difference, p_value = share_difference(sum(a), len(a), sum(b), len(b))
    return Row(name, "share", share_of(sum(a), len(a)), share_of(sum(b), len(b)), difference, p_value, lower_is_better=lower)


def _share_p(n_a: int, n_b: int, share: float) -> float:
    """Two-sided p of so many clients in B by the normal distribution."""
    n = n_a + n_b
    return math.erfc(abs(n_b - n * share) / math.sqrt(n * share * (1 - share)) / math.sqrt(2)) if 0 < share < 1 else 1.0


def _notes(a: Arm, b: Arm, enough: bool, share: float | None, share_p: float | None) -> list[str]:
    notes = []
    if not enough:
        fewer = min((a, b), key=lambda arm: arm.n_clients)
        of = f"{fewer.n_clients} client{'' if fewer.n_clients == 1 else 's'}"
        notes.append(
            f"{fewer.name} answered {of}. Fewer than {LEAST_CLIENTS} in an arm say nothing of others: latencies and cost have "
            "no intervals."
        )
    if share is not None and share_p is not None and share_p < 0.001:
        notes.append(
            f"{b.name} has {b.n_clients} of {a.n_clients + b.n_clients} clients, and was to have {100 * share:.3g}%: chance "
            f"departs so far with p = {share_p:.2g}. Something loses clients of one arm, so nothing here is to be relied on."
        )
    if max(len(a.ids), len(b.ids)) > NEWEST:
        notes.append(f"Latencies and cost are of the newest {NEWEST} requests of an arm.")
    return notes
