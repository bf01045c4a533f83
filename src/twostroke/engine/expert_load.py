"""How often each expert of a mixture was chosen, and how many different ones a step read."""

from __future__ import annotations

import numpy as np

from twostroke.core.spec import ModelSpec


class ExpertLoad:
    """``counts`` (layers, experts) are the rows that chose each expert since the start, ``touched`` the experts that the last
    step read, over all layers. Runners fill both."""

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.moe is not None
        self.counts = np.zeros((spec.n_layers, spec.moe.n_experts), np.int64)
        self.touched = np.zeros(1, np.int64)
        self._in_one_row = spec.moe.top_k * sum(map(spec.has_experts, range(spec.n_layers)))

    def more_than_one_row(self) -> int:
        """Experts that the last step read beyond those of a single row."""
        return max(0, int(self.touched[0]) - self._in_one_row)

    def ratio(self) -> float:
        """The largest load of an expert over its layer's mean load, in the worst layer; 0 before the first step."""
        used = self.counts[self.counts.any(axis=1)]
        return float((used.max(axis=1) / used.mean(axis=1)).max()) if len(used) else 0.0
