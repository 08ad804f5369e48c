"""A response before it is generated: where it is stored, and what it is until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from common.access.caller import Caller
from common.conversation_append import NO_CONVERSATION, Append
from frontend_svc.edge.asgi import Headers
from frontend_svc.generation.api import Detached, ResponseInfo
from frontend_svc.openai.output.json_bytes import compact_json
from frontend_svc.responses.background import first_request, write_request
from frontend_svc.responses.events import ResponsesFormat, WarmupFormat
from frontend_svc.responses.follow import ResponseStreams
from frontend_svc.responses.kept import Turn
from frontend_svc.responses.output import Json
from frontend_svc.responses.response_object import new_response
from frontend_svc.responses.schema import Item, ResponsesRequest
from frontend_svc.responses.store import StoredResponse
from frontend_svc.responses.stored import StoredResponses
from frontend_svc.responses.tools import FunctionNames
from frontend_svc.responses.translation import stored_items


@dataclass(frozen=True)
class ResponseDraft:
    """A request with the conversation before it.

    - earlier: the items of the responses that it continues, or of its conversation, each as JSON.
    - new_items: its own input.
    - turn: of an event of a WebSocket.
    """

    stored: StoredResponses
    streams: ResponseStreams
    request: ResponsesRequest
    caller: Caller
    earlier: tuple[bytes, ...]
    new_items: Sequence[Item]
    turn: Turn | None = None

    @cached_property
    def is_stored(self) -> bool:
        """Whether the response itself is stored."""
        return self.stored.is_available and self.request.store is not False

    @cached_property
    def append(self) -> Append:
        """Where its items go: nowhere without output."""
        if self.turn is not None and not self.turn.generates:
            return NO_CONVERSATION
        return Append(self.request.named_conversation or "", len(self.earlier))

    @property
    def continued(self) -> str | None:
        """Returns `ParsedBody.continued`."""
        if self.request.named_conversation is not None:
            return self.request.named_conversation
        if self.request.previous_response_id is None:
            return "" if self.is_stored or self.turn is not None else None
        return first_request(self.request.previous_response_id, self.earlier)

    def make_format(self, info: ResponseInfo, names: FunctionNames) -> ResponsesFormat:
        """Returns the format of the response, which stores it at its end."""
        request, append = self.request, self.append
        has_conversation = bool(append.conversation_id)
        new_id = self.stored.new_id(info.request_id, must_be_durable=has_conversation)

        async def store(response: Json) -> Json:
            if self.turn is None and not self.is_stored and not has_conversation:
                return response
            written = self._stored(new_id, response)
            if self.turn is not None:
                self.turn.kept.put(self.turn.lane, new_id, written)
            if not self.is_stored and not has_conversation:
                return response
            result = await self.stored.put(new_id, written, append, only_appends=not self.is_stored)
            changes: Json = {"store": result.is_stored}
            if has_conversation and not result.has_appended:
                changes["conversation"] = None
            return response | changes

        response = new_response(request, new_id, info.created, is_stored=self.is_stored)
        response["model"] = info.model  # not an alias, as in a chat
        has_output = self.turn is None or self.turn.generates
        return (ResponsesFormat if has_output else WarmupFormat)(response, store, names)

    async def detach(self, raw: bytes, info: ResponseInfo, headers: Headers) -> Detached:
        """Has the response run in the background; returns it as it is until then, or its events."""
        new_id = self.stored.new_id(info.request_id, must_be_durable=True)
        if streams := self.request.stream is True:
            self.streams.check_room(self.caller.tenant)
        response = new_response(self.request, new_id, info.created, is_stored=True)
        response |= {"model": info.model, "status": "queued"}
        stored = self._stored(new_id, response)
        await self.stored.durable.start(
            new_id,
            stored,
            self.caller,
            write_request(raw, headers),
            info.created,
            self.append,
            streams=streams,
        )
        if not streams:
            return Detached(stored.response)
        return Detached(b"", await self.streams.open(new_id, self.caller.tenant))

    def _stored(self, new_id: str, response: Json) -> StoredResponse:
        items = (*self.earlier, *stored_items(self.new_items, new_id))
        return StoredResponse(compact_json(response), items, self.caller.tenant)
