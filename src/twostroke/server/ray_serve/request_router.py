"""Ray Serve's request router for the replicas: a request goes where its first token is predicted to come first.

Ray keeps the replicas' list, queue lengths and retries; what decides is `Question.ranked`, so that replicas behind Ray are
chosen as servers behind ``twostroke route`` are. A call by anything else than the ingress goes to the shortest queue.
Ray copies this module's code into the process that routes: nothing in it may be shared with other modules.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from twostroke.server.ray_serve.passed import Question


class FirstTokenRouter(FIFOMixin, RequestRouter):
    """Ranks of one replica each, the best first: Ray takes the next where a replica has all the requests that it may have."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks again at once while all are full
        asked = pending_request.args[0] if pending_request.args else None
        if not isinstance(asked, Question):
            return [candidate_replicas]
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ready = {name: bool(replica.routing_stats.get("ready", True)) for name, replica in named.items()}
        return [[named[name]] for name in asked.ranked(ready)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        asked = pending_request.args[0] if pending_request.args else None
        if isinstance(asked, Question):
            asked.routed(replica_id.unique_id)
