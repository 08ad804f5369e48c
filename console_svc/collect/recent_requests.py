"""The recent requests that frontends keep, sampled or not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import structlog

from common.errors import MeshError, Unimplemented
from common.inspection.recent_requests import read_recent_requests
from common.rpc import channel as rpc
from console_svc.state.requests import RequestRow, Stage
from kvmesh.frontend.v1 import frontend_pb2

TIMEOUT_S = 3.0
# Of one frontend at a time; more ended requests of an interval are not listed.
LIMIT = 512

# A point in time of a request.
_Point = Literal["tokenized_ms", "routed_ms", "prefilled_ms", "first_token_ms", "last_token_ms"]

log = structlog.get_logger()


class RecentRequests:
    """Reads what has ended since the last time, by frontend process."""

    def __init__(self) -> None:
        self._after: dict[int, int] = {}

    async def read(
        self, channel: rpc.MeshChannel, instance_id: int, name: str
    ) -> Sequence[RequestRow]:
        """Returns the requests of a frontend that are new, oldest first; none if it does not
        respond, or is of an earlier version. name: of the frontend."""
        after = self._after.get(instance_id, 0)
        request = frontend_pb2.ListRecentRequestsRequest(after=after, limit=LIMIT)
        try:
            response = await read_recent_requests(channel, request, timeout_s=TIMEOUT_S)
        except Unimplemented:
            return ()
        except MeshError as error:
            log.debug("recent_requests_not_read", frontend=name, error=error.message)
            return ()
        self._after[instance_id] = response.last_sequence
        return [_row(found, name) for found in reversed(response.requests)]

    def forget(self, members: Collection[int]) -> None:
        """Forgets frontends that have left. members: ids of those that have not."""
        self._after = {id_: after for id_, after in self._after.items() if id_ in members}


def _row(found: frontend_pb2.RecentRequest, frontend: str) -> RequestRow:
    client_id = found.client_request_id
    return RequestRow(
        request_id=found.request_id,
        trace_id=found.trace_id,
        received_s=found.received_ms / 1000,
        client_id="" if client_id == found.request_id else client_id,
        frontend=frontend,
        model=found.model,
        endpoint=found.endpoint,
        tenant=found.tenant,
        key_id=found.key_id,
        http_status=found.status or None,
        status=found.failure or found.finish_reason,
        error=found.error,
        is_error=bool(found.failure),
        total_ms=found.total_ms,
        queued_ms=float(found.queue_ms),
        ttft_ms=found.first_token_ms if found.HasField("first_token_ms") else None,
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.output_tokens,
        cached_tokens=found.cached_tokens if found.HasField("cached_tokens") else None,
        predicted_cached_tokens=(
            found.predicted_cached_tokens if found.HasField("predicted_cached_tokens") else None
        ),
        workers=tuple(worker.name or str(worker.worker_id) for worker in found.workers),
        is_split=found.is_pair,
        migrations=found.migrations,
        attempts=found.attempts,
        router=found.router_name or (str(found.router_id) if found.router_id else ""),
        reasons=tuple(found.reasons),
        stages=tuple(_stages(found)),
    )


def _stages(found: frontend_pb2.RecentRequest) -> Iterator[Stage]:
    """Yields the stages between the points in time that the request reached."""
    names = [worker.name or str(worker.worker_id) for worker in found.workers]
    last = "".join(names[-1:])
    first = names[-2] if found.is_pair and len(names) > 1 else last
    router = found.router_name
    ends: list[tuple[str, str, str, _Point]] = [
        ("tokenize", "frontend", "", "tokenized_ms"),
        ("route", "router", router, "routed_ms"),
        ("prefill", "worker", first, "prefilled_ms"),
        ("handoff" if found.is_pair else "first token", "worker", last, "first_token_ms"),
        ("decode", "worker", last, "last_token_ms"),
    ]
    start_ms = 0.0
    for name, service, member, field in ends:
        if not found.HasField(field):
            continue
        end_ms = max(start_ms, getattr(found, field))
        yield Stage(name, service, member, start_ms, end_ms - start_ms)
        start_ms = end_ms
    if found.total_ms > start_ms:
        yield Stage("finish", "frontend", "", start_ms, found.total_ms - start_ms)
