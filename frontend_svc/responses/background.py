"""Responses in the background: the batch service stores them, and has a frontend run each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
import orjson

from common.access.caller import Caller
from frontend_svc.batches.exchange import FindCaller, exchange, streamed_exchange
from frontend_svc.edge.asgi import AsgiApp, Headers
from frontend_svc.errors import http_error
from frontend_svc.generation.api import GenerationApi, ParsedBody, ResponseInfo, off_loop
from frontend_svc.openai.body.headers import HEADER_PREFIX
from frontend_svc.request.conversation import SESSION_HEADERS
from frontend_svc.responses.events import DeltaFormat, ResponsesFormat
from frontend_svc.responses.ids import request_of, response_of_item
from frontend_svc.responses.output import Json
from frontend_svc.responses.response_object import new_response
from frontend_svc.responses.translation import parse_responses, read_items, to_chat
from frontend_svc.text.api_format import ApiFormat
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc

SERVICE_NAME: Final = "kvmesh.frontend.v1.BackgroundResponseService"
RESPONSES_PATH: Final = "/v1/responses"
# Headers that a run has too, beside those of HEADER_PREFIX.
_KEPT_HEADERS: Final = frozenset({*SESSION_HEADERS, b"x-request-id"})

Context = grpc.aio.ServicerContext[Any, Any]


def write_request(raw: bytes, headers: Headers) -> bytes:
    """Returns what a run needs of a request: its body, and the headers that have an effect."""
    kept = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name.startswith(HEADER_PREFIX) or name in _KEPT_HEADERS
    ]
    return b"%b\n%b" % (orjson.dumps(kept), raw)


def read_request(written: bytes) -> tuple[bytes, Headers]:
    """Returns the body and the headers of `write_request`."""
    kept, _, raw = written.partition(b"\n")
    pairs = [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in orjson.loads(kept)
    ]
    return raw, tuple(pairs)


def first_request(response_id: str, items: Iterable[bytes]) -> str:
    """Returns the request that began the conversation of a response. Ids of items name their
    response, unless a client chose them."""
    responses = (response_of_item(orjson.loads(item).get("id") or "") for item in items)
    return request_of(next(filter(None, responses), response_id))


@dataclass(slots=True)
class BackgroundRun:
    """One run of a response, as an API with one request.

    - created: Unix seconds of its object.
    - items: the whole conversation before its output, each item as JSON.
    - streams: whether its output is sent as it is generated.
    - stream: what has been sent; None: nothing.
    """

    response_id: str
    created: int
    items: tuple[bytes, ...]
    streams: bool = False
    stream: DeltaFormat | None = None

    async def parse(self, raw: bytes, caller: Caller) -> ParsedBody:
        request = await off_loop(len(raw), parse_responses, raw)
        size = len(raw) + sum(map(len, self.items))
        chat = await off_loop(size, lambda: to_chat(request, read_items(self.items)))
        chat = chat.model_copy(update={"stream": self.streams})

        async def keep(response: Json) -> Json:
            return response  # The batch service stores it.

        def make_format(info: ResponseInfo) -> ApiFormat:
            response = new_response(request, self.response_id, self.created, is_stored=True)
            response["model"] = info.model
            if not self.streams:
                return ResponsesFormat(response, keep, chat.chat_tools.names)
            self.stream = DeltaFormat(response, keep, chat.chat_tools.names)
            return self.stream

        return ParsedBody(
            chat,
            make_format,
            omitted_tools=chat.chat_tools.omitted,
            continued=request.named_conversation or first_request(self.response_id, self.items),
        )


class BackgroundResponseServicer(frontend_pb2_grpc.BackgroundResponseServiceServicer):
    """Runs responses as requests of their tenants, with their quotas."""

    def __init__(
        self, make_app: Callable[[GenerationApi], AsgiApp], find_caller: FindCaller
    ) -> None:
        """
        - make_app: returns the route of responses with another API.
        """
        self._make_app = make_app
        self._find_caller = find_caller

    async def RunResponse(
        self, request: frontend_pb2.RunResponseRequest, context: Context
    ) -> frontend_pb2.RunResponseResponse:
        run, raw, headers = _run(request, streams=False)
        caller = self._find_caller(request.tenant, request.key_id)
        ended = await exchange(self._make_app(run), RESPONSES_PATH, raw, caller, headers)
        return ended.reply(frontend_pb2.RunResponseResponse)

    async def RunStream(
        self, request: frontend_pb2.RunStreamRequest, context: Context
    ) -> AsyncIterator[frontend_pb2.RunStreamResponse]:
        run, raw, headers = _run(request.run, streams=True)
        caller = self._find_caller(request.run.tenant, request.run.key_id)
        app = self._make_app(run)
        async with streamed_exchange(app, RESPONSES_PATH, raw, caller, headers) as ended:
            async for deltas in ended.parts():
                yield frontend_pb2.RunStreamResponse(deltas=deltas)
        if run.stream is not None:
            if run.stream.failure is not None:
                ended.replace(http_error(run.stream.failure))
            else:
                ended.response += run.stream.ended
        reply = ended.reply(frontend_pb2.RunResponseResponse)
        yield frontend_pb2.RunStreamResponse(ended=reply)


def _run(
    request: frontend_pb2.RunResponseRequest, *, streams: bool
) -> tuple[BackgroundRun, bytes, Headers]:
    """Returns a run, and the body and headers of its request."""
    raw, headers = read_request(request.request)
    items = tuple(request.input_items)
    return BackgroundRun(request.response_id, request.created_at, items, streams), raw, headers
