"""Streams of responses in the background: each follows what the batch service has stored.

A stream is no part of the run: a client may disconnect and follow again, at any frontend, and many
may follow one response.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final

from common.errors import InvalidRequest, Overloaded, Unavailable
from frontend_svc.openai.output.sse import KEEP_ALIVE
from frontend_svc.responses.durable import StreamedOutput
from frontend_svc.responses.stored import StoredResponses
from frontend_svc.responses.stream_events import RUN_NUMBERS, StreamEvents, run_of_event

# `code` of the error, in upper case.
STREAM_RESTARTED: Final = "STREAM_RESTARTED"
# Streams of this process, and of one tenant.
STREAMS_MAX: Final = 512
TENANT_STREAMS_MAX: Final = 256
# A stream waits so long for a batch service that does not respond.
LOST_S: Final = 60.0
_RETRY_S: Final = 0.5


class ResponseStreams:
    """The streams of one frontend process. is_draining: whether it is about to end."""

    def __init__(self, stored: StoredResponses, is_draining: Callable[[], bool]) -> None:
        self._stored = stored
        self._is_draining = is_draining
        self._tenants: Counter[str] = Counter()

    async def open(
        self, response_id: str, tenant: str, after: int | None = None
    ) -> AsyncIterator[bytes]:
        """Returns the events of a response, which raise the MeshError that ends them. Raises
        NotFound, Overloaded above a limit, Unavailable, and InvalidRequest if its output is not
        stored as it is generated, or if `after` is of a lost run.

        - after: number of the last event that the client has; None: it has none.
        """
        found = await self._stored.read_stream(response_id, tenant)
        if after is not None and run_of_event(after) != found.run:
            first = found.run * RUN_NUMBERS
            text = (
                f"'starting_after' must be within {first}..{first + RUN_NUMBERS - 1}: the run with "
                f"event {after} was lost, and the next one differs; read the stream from its start."
            )
            raise InvalidRequest(text, "starting_after", reason=STREAM_RESTARTED)
        self.check_room(tenant)
        return self._events(response_id, tenant, found, after)

    def check_room(self, tenant: str) -> None:
        """Raises Overloaded if there are too many streams."""
        if self._tenants[tenant] >= TENANT_STREAMS_MAX:
            text = f"too many streams of this tenant: {TENANT_STREAMS_MAX}/{TENANT_STREAMS_MAX}"
            raise Overloaded(5.0, text, reason="TENANT_STREAMS")
        if self._tenants.total() >= STREAMS_MAX:
            raise Overloaded(5.0, f"too many streams: {STREAMS_MAX}/{STREAMS_MAX}")

    async def _events(
        self, response_id: str, tenant: str, found: StreamedOutput, after: int | None
    ) -> AsyncIterator[bytes]:
        self._tenants[tenant] += 1
        try:
            events = StreamEvents(found.response, found.run, after)
            run, parts = found.run, 0
            data = events.begin()
            while True:
                data += b"".join(map(events.output, found.parts))
                parts += len(found.parts)
                if found.has_ended:
                    yield data + events.end(found.response)
                    return
                data += events.progress(found.response)
                yield data or KEEP_ALIVE
                data = b""
                found = await self._next(response_id, tenant, run, parts)
                if found.run != run:
                    text = "the run was lost, and the next one differs: read the stream again"
                    raise InvalidRequest(text, "starting_after", reason=STREAM_RESTARTED)
        finally:
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]

    async def _next(self, response_id: str, tenant: str, run: int, parts: int) -> StreamedOutput:
        """Returns more output, or the same state after some seconds. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LOST_S
        while True:
            if self._is_draining():
                text = "this frontend is shutting down: follow the response at another one"
                raise Unavailable(text, 1.0)
            try:
                return await self._stored.read_stream(response_id, tenant, run, parts, waits=True)
            except Unavailable:
                if loop.time() >= until:
                    raise
            await asyncio.sleep(_RETRY_S)
