"""How many replicas a load needs, for Ray Serve's autoscaler.

    replicas = max( requests under way ÷ target_ongoing , replicas that run · predicted wait ÷ target_wait_s )

Requests under way are Ray's own count, of those that wait at the ingress and those that replicas have. The predicted wait is
what each replica says a request of one token would wait for its first token (``server.wait``; the mean over replicas): few
requests with long prompts are a load that no count shows. Without a request under way no replica is needed. Ray keeps to the
smallest and largest number, and waits before it adds or takes any.
"""

from __future__ import annotations

from typing import Any, Protocol

PREDICTED_WAIT_S = "predicted_wait_s"
"""Name under which replicas say it."""


class Seen(Protocol):
    """What of Ray's ``AutoscalingContext`` is looked at."""

    current_num_replicas: int
    target_num_replicas: int

    @property
    def total_num_requests(self) -> float: ...

    @property
    def aggregated_metrics(self) -> dict[str, dict[Any, float]] | None: ...


class OngoingAndPredicted:
    """The policy. Ray gives it its numbers by name."""

    def __init__(self, target_ongoing: float, target_wait_s: float) -> None:
        self._target_ongoing, self._target_wait_s = target_ongoing, target_wait_s

    def __call__(self, seen: Seen) -> tuple[float, dict[str, Any]]:
        if not seen.total_num_requests:
            return 0.0, {}
        if not seen.current_num_replicas:
            return max(1, seen.target_num_replicas), {}
        waits = [*(seen.aggregated_metrics or {}).get(PREDICTED_WAIT_S, {}).values()]
        wait_s = sum(waits) / len(waits) if waits else 0.0
        by_wait = seen.current_num_replicas * wait_s / self._target_wait_s
        return max(seen.total_num_requests / self._target_ongoing, by_wait), {}
