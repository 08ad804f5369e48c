"""Serves the last requests of this process to operators."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

import grpc.aio

from common.errors import InvalidRequest
from common.wire.preprocessed import dataclass_to_proto
from frontend_svc.recent_requests.record import RecentQuery
from frontend_svc.recent_requests.ring import RecentRequests
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc

SERVICE_NAME = "kvmesh.frontend.v1.RecentRequestService"
LIMIT_DEFAULT = 256
LIMIT_MAX = 1024
# Records that become messages in one turn of the event loop: about half a millisecond.
_SLICE = 32

Context = grpc.aio.ServicerContext[Any, Any]


class RecentRequestServicer(frontend_pb2_grpc.RecentRequestServiceServicer):
    """The service of `frontend.proto`."""

    def __init__(self, requests: RecentRequests) -> None:
        self._requests = requests

    async def ListRecentRequests(
        self, request: frontend_pb2.ListRecentRequestsRequest, context: Context
    ) -> frontend_pb2.ListRecentRequestsResponse:
        if request.limit > LIMIT_MAX:
            raise InvalidRequest(f"limit must be at most {LIMIT_MAX}, not {request.limit}", "limit")
        query = RecentQuery(
            request.after, request.id, request.model, request.tenant, request.failed
        )
        response = frontend_pb2.ListRecentRequestsResponse(
            last_sequence=self._requests.last_sequence
        )
        found = islice(self._requests.find(query), request.limit or LIMIT_DEFAULT)
        for number, record in enumerate(found, 1):
            dataclass_to_proto(record, response.requests.add())
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        return response
