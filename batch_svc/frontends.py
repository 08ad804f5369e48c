"""The frontends, which run lines as requests on idle capacity, and responses in the background."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from batch_svc.core.batch import Owner
from batch_svc.core.responses import ResponseRun
from batch_svc.core.results import Reply
from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.rpc import channel as rpc
from common.rpc.status import has_no_response
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc

# The status of a line whose frontend raised an error instead of a response; others: it is lost.
_STATUSES: Final[Mapping[type[MeshError], int]] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    PermissionDenied: 403,
    DeadlineExceeded: 504,
}
_LOST: Final = 503
_RETRY_AFTER_S: Final = 0.5
# A frontend that gave no response gets no call for so long, if there is another one.
_SILENT_S: Final = 5.0

_RUN_LINE: Final = "RunLine"
_RUN_RESPONSE: Final = "RunResponse"
_RUN_STREAM: Final = "RunStream"


@dataclass(slots=True, eq=False)
class _Frontend:
    channel: rpc.MeshChannel
    lines: frontend_pb2_grpc.BatchLineServiceStub
    responses: frontend_pb2_grpc.BackgroundResponseServiceStub

    def method(self, name: str) -> Any:  # Any: a method of a stub.
        return getattr(self.lines if name == _RUN_LINE else self.responses, name)


class Frontends:
    """The frontends that discovery shows. timeout_s: of one line or response."""

    def __init__(self, security: rpc.Security, timeout_s: float) -> None:
        self._security = security
        self._timeout_s = timeout_s
        self._instances: dict[int, Instance] = {}
        self._opened: dict[int, _Frontend] = {}
        self._in_flight: Counter[int] = Counter()
        self._without: set[tuple[int, str]] = set()
        """Frontends of an older version, with a method that they do not have."""

        self._silent_until: dict[int, float] = {}
        """Frontends that gave no response."""

    def on_snapshot(self, snapshot: Snapshot, changes: SnapshotDiff) -> None:
        self._instances = {instance.id: instance for instance in snapshot.of("frontend")}
        self._without = {one for one in self._without if one[0] in self._instances}
        silent = self._silent_until.items()
        self._silent_until = {one: end for one, end in silent if one in self._instances}

    async def close(self) -> None:
        opened, self._opened = self._opened, {}
        for frontend in opened.values():
            await frontend.channel.close()

    async def run(self, owner: Owner, url: str, body: bytes, request_id: str) -> Reply:
        """Returns the response to a line; a 503 if no frontend responds, so that it is sent
        again."""
        message = frontend_pb2.RunLineRequest(
            tenant=owner.tenant, key_id=owner.key_id, url=url, body=body, request_id=request_id
        )
        return await self._call(_RUN_LINE, message)

    async def run_response(self, run: ResponseRun) -> Reply:
        """Returns a response in the background, as `run`."""
        return await self._call(_RUN_RESPONSE, _message(run))

    async def run_stream(self, run: ResponseRun, on_output: Callable[[bytes], None]) -> Reply:
        """Returns a response as `run_response`.

        - on_output: takes deltas of its output as they arrive.
        """
        message = frontend_pb2.RunStreamRequest(run=_message(run))

        async def call(method: Any, message: Any) -> Any:
            ended: frontend_pb2.RunResponseResponse | None = None
            async for part in rpc.unary_stream(method, message, timeout_s=self._timeout_s):
                if part.WhichOneof("part") == "ended":
                    ended = part.ended
                else:
                    on_output(part.deltas)
            if ended is None:
                raise Unavailable("the frontend ended the call without a response", _RETRY_AFTER_S)
            return ended

        return await self._call(_RUN_STREAM, message, call)

    async def _unary(self, method: Any, message: Any) -> Any:
        return await rpc.unary(method, message, timeout_s=self._timeout_s)

    # Any: the request of a method, and its response.
    async def _call(
        self, name: str, message: Any, call: Callable[[Any, Any], Awaitable[Any]] | None = None
    ) -> Reply:
        """
        - call: takes the method and its request, returns its response; None: it is a unary one.
        """
        await self._close_departed()
        # Ends: each round leaves out a frontend without the method.
        while (frontend_id := self._choose(name)) is not None:
            try:
                return await self._call_one(frontend_id, name, message, call or self._unary)
            except Unimplemented:
                self._without.add((frontend_id, name))
        if not self._instances:
            return _failure(_LOST, "no frontend is there")
        return _failure(_LOST, f"all frontends are of an older version, without {name}")

    def _choose(self, name: str) -> int | None:
        """Returns the frontend with the fewest calls, of those that have a method; one that gave no
        response last."""
        now = asyncio.get_running_loop().time()
        return min(
            (one for one in self._instances if (one, name) not in self._without),
            key=lambda one: (self._silent_until.get(one, now) > now, self._in_flight[one]),
            default=None,
        )

    # Any: as above.
    async def _call_one(
        self, frontend_id: int, name: str, message: Any, call: Callable[[Any, Any], Awaitable[Any]]
    ) -> Reply:
        """Raises Unimplemented."""
        frontend = self._open(self._instances[frontend_id])
        self._in_flight[frontend_id] += 1
        try:
            response: Any = await call(frontend.method(name), message)
        except Unimplemented:
            raise
        except MeshError as error:
            if has_no_response(error):
                now = asyncio.get_running_loop().time()
                self._silent_until[frontend_id] = now + _SILENT_S
            status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 0)
            return _failure(status or _LOST, error.message)
        finally:
            self._in_flight[frontend_id] -= 1
        has_pause = response.HasField("retry_after_s")
        return Reply(
            response.status,
            response.body,
            response.request_id,
            response.retry_after_s if has_pause else None,
        )

    def _open(self, instance: Instance) -> _Frontend:
        frontend = self._opened.get(instance.id)
        if frontend is None:
            channel = rpc.channel(instance.address, role="frontend", security=self._security)
            frontend = self._opened[instance.id] = _Frontend(
                channel,
                frontend_pb2_grpc.BatchLineServiceStub(channel),
                frontend_pb2_grpc.BackgroundResponseServiceStub(channel),
            )
        return frontend

    async def _close_departed(self) -> None:
        """Closes the channels of frontends that have left, once their lines have ended."""
        for frontend_id in [*self._opened.keys() - self._instances.keys()]:
            if not self._in_flight[frontend_id]:
                del self._in_flight[frontend_id]
                await self._opened.pop(frontend_id).channel.close()


def _message(run: ResponseRun) -> frontend_pb2.RunResponseRequest:
    owner, row = run.owner, run.row
    return frontend_pb2.RunResponseRequest(
        tenant=owner.tenant,
        key_id=owner.key_id,
        response_id=row.id,
        created_at=run.created_at,
        request=run.request,
        input_items=row.input_items,
    )


def _failure(status: int, message: str) -> Reply:
    """Returns the response to a line that has none of its own."""
    body = orjson.dumps({"error": {"message": message, "type": "server_error"}})
    return Reply(status, body, "", _RETRY_AFTER_S if status == _LOST else None)
