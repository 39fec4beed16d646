"""Ray Serve's part in routing: it sends a request where `front.py` wants it, and tells who is there."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .routing import tell  # kept there, as Ray copies this file's variables


class ToReplica(RequestRouter):
    """Sends a request to the replica that its argument `to` names; where that is gone or full, and without
    it, to the one with the shortest queue."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted: Any = None
        if pending_request is not None:
            wanted = pending_request.kwargs.get("to")
            pending_request.routing_context.should_backoff = True  # all are asked, so then it waits
        first = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        return [first, candidate_replicas] if first else [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        tell(replica.replica_id.unique_id for replica in replicas)
