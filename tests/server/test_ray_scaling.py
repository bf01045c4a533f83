"""Replicas for a load: by requests under way or by the predicted wait, whichever needs more, and none for nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from twostroke.server.ray_serve.scaling import PREDICTED_WAIT_S, OngoingAndPredicted


@dataclass
class Seen:
    current_num_replicas: int
    total_num_requests: float
    waits: list[float] = field(default_factory=list)
    target_num_replicas: int = 0

    @property
    def aggregated_metrics(self) -> dict[str, dict[int, float]] | None:
        return {PREDICTED_WAIT_S: dict(enumerate(self.waits))} if self.waits else None


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (Seen(0, 0), 0),
        (Seen(2, 0, [0.5, 0.5]), 0),  # a wait for nothing keeps no replica
        (Seen(0, 3), 1),
        (Seen(0, 3, target_num_replicas=2), 2),
        (Seen(1, 8, [0.1]), 2),
        (Seen(1, 1, [3.0]), 3),  # one request with a long prompt
        (Seen(2, 4, [0.0, 3.0]), 3),  # the mean over replicas is what a request more would meet
        (Seen(2, 4), 1),  # nothing is predicted on a machine that was not calibrated
    ],
)
def test_replicas_follow_requests_and_predicted_waits(seen: Seen, wanted: float) -> None:
    assert OngoingAndPredicted(target_ongoing=4.0, target_wait_s=1.0)(seen) == (wanted, {})
