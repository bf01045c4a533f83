"""Between measured points: a rate along a line in logs, and measured ÷ planned between whole steps that calibration took.

Rates of parts, measured one by one, miss what parts do to one another: caches that are never warm, an allocator that has to
find room, threads that wait. So a few whole steps are measured as well. A plan for an anchor's own shape should give what was
measured; measured ÷ planned is the anchor's ratio, and other plans are multiplied with the ratios of the anchors next to them,
linear in log width and in log rows, flat beyond the ends. Public decode tables say how much that is worth: rates alone leave
36 to 59% of median error, two measured points 8.8% (the comparison is in ``docs/decisions.md``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from twostroke.core.errors import ConfigError
from twostroke.core.named import letter


def interpolate_log(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at ``x`` by linear interpolation of log y in log x between sorted ``points``; flat beyond the first and the last."""
    ordered = sorted(points)
    if not ordered:
        raise ConfigError("no calibrated points to interpolate between. Run `twostroke calibrate`.")
    if x <= ordered[0][0]:
        return ordered[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(ordered):
        if x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
    return ordered[-1][1]


Ratios = Mapping[tuple[int, int], float]
"""(width, rows) → measured ÷ planned."""


def ratio_at(ratios: Ratios, width: float, rows: float) -> float:
    """The ratio at (``width``, ``rows``): bilinear in the logs between anchors, flat beyond them; 1 without any."""
    if not ratios:
        return 1.0
    columns: dict[int, list[tuple[float, float]]] = {}
    for (w, n), ratio in ratios.items():
        columns.setdefault(w, []).append((float(n), ratio))
    return letter("ratio", interpolate_log([(float(w), interpolate_log(points, rows)) for w, points in columns.items()], width))
