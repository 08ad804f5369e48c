"""The Responses API: continues stored responses, stores new ones, and serves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from common.access.caller import Caller
from common.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from frontend_svc.endpoints.endpoint import EndpointDependencies, PostEndpoint
from frontend_svc.endpoints.plain import PlainRequest, PlainResponse
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.endpoints.route import Route
from frontend_svc.generation.api import ParsedBody, ResponseInfo, off_loop
from frontend_svc.generation.streaming import send_json
from frontend_svc.generation.tokenization import encode_chat
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.openai.body.schema import ChatRequest
from frontend_svc.openai.body.validation_errors import INVALID_VALUE
from frontend_svc.openai.output.json_bytes import compact_json
from frontend_svc.responses.events import ResponsesFormat, WarmupFormat
from frontend_svc.responses.ids import request_of, response_id, response_of_item
from frontend_svc.responses.kept import Turn
from frontend_svc.responses.queries import (
    ItemsQuery,
    ResponseQuery,
    items_page,
    parse_query,
)
from frontend_svc.responses.response_object import new_response
from frontend_svc.responses.schema import Item, ResponsesRequest
from frontend_svc.responses.store import StoredResponse
from frontend_svc.responses.stored import StoredResponses
from frontend_svc.responses.tools import FunctionNames
from frontend_svc.responses.translation import (
    ResponsesChat,
    input_items,
    parse_responses,
    read_items,
    references,
    stored_items,
    to_chat,
    warmup_of,
)
from frontend_svc.text.api_format import ApiFormat

# `code` of the error, in upper case.
PREVIOUS_NOT_FOUND = "PREVIOUS_RESPONSE_NOT_FOUND"
_NO_STORE = "this frontend stores no responses (--response-store-mb)"


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """`POST /v1/responses`. stored: None if this frontend stores no responses."""

    stored: StoredResponses | None

    async def parse(self, raw: bytes, caller: Caller, turn: Turn | None = None) -> ParsedBody:
        """
        - turn: of an event of a WebSocket.
        """
        request = await off_loop(len(raw), parse_responses, raw)
        if request.store and self.stored is None:
            raise Unsupported("store", _NO_STORE)
        tenant = caller.tenant
        earlier = await self._earlier_items(request, tenant, turn)
        new_items = input_items(request, await self._referenced(request, tenant, turn))

        def make_chat() -> ResponsesChat:
            chat = to_chat(request, [*read_items(earlier), *new_items])
            return chat if turn is None or turn.generates else warmup_of(chat)

        chat = await off_loop(len(raw) + sum(map(len, earlier)), make_chat)

        def make_format(info: ResponseInfo) -> ApiFormat:
            names = chat.chat_tools.names
            return self._format(request, info, earlier, new_items, tenant, names, turn)

        return ParsedBody(
            chat,
            make_format,
            omitted_tools=chat.chat_tools.omitted,
            continued=self._first_request(request, earlier, is_kept=turn is not None),
        )

    def _first_request(
        self, request: ResponsesRequest, earlier: tuple[bytes, ...], *, is_kept: bool
    ) -> str | None:
        """Returns `ParsedBody.continued`. Ids of items name their response, unless a client chose
        them.

        - is_kept: whether the response can be continued although it is not stored.
        """
        if request.previous_response_id is None:
            is_stored = self.stored is not None and request.store is not False
            return "" if is_stored or is_kept else None
        responses = (response_of_item(orjson.loads(item)["id"]) for item in earlier)
        return request_of(next(filter(None, responses), request.previous_response_id))

    def _format(
        self,
        request: ResponsesRequest,
        info: ResponseInfo,
        earlier: tuple[bytes, ...],
        new_items: list[Item],
        tenant: str,
        names: FunctionNames,
        turn: Turn | None,
    ) -> ResponsesFormat:
        stored = self.stored if request.store is not False else None
        new_id = response_id(info.request_id, 0 if self.stored is None else self.stored.frontend_id)

        def store(response: bytes) -> None:
            if stored is None and turn is None:
                return
            items = (*earlier, *stored_items(new_items, new_id))
            written = StoredResponse(response, items, tenant)
            if stored is not None:
                stored.put(new_id, written)
            if turn is not None:
                turn.kept.put(turn.lane, new_id, written)

        response = new_response(request, new_id, info.created, is_stored=stored is not None)
        response["model"] = info.model  # not an alias, as in a chat
        has_output = turn is None or turn.generates
        return (ResponsesFormat if has_output else WarmupFormat)(response, store, names)

    async def _earlier_items(
        self, request: ResponsesRequest, tenant: str, turn: Turn | None
    ) -> tuple[bytes, ...]:
        """Returns the conversation up to the previous response, as JSON items."""
        previous_id = request.previous_response_id
        if previous_id is None:
            return ()
        field = "previous_response_id"
        return _conversation(await self._get(previous_id, tenant, field, PREVIOUS_NOT_FOUND, turn))

    async def _referenced(
        self, request: ResponsesRequest, tenant: str, turn: Turn | None
    ) -> Mapping[int, Item]:
        """Returns the stored items to which the input refers, by their index."""
        found: dict[int, Item] = {}
        responses: dict[str, StoredResponse] = {}
        for index, item_id in references(request).items():
            field = f"input[{index}].id"
            of_response = response_of_item(item_id) or item_id
            if of_response not in responses:
                responses[of_response] = await self._get(
                    of_response, tenant, field, INVALID_VALUE, turn
                )
            items = map(orjson.loads, _conversation(responses[of_response]))
            raw = [orjson.dumps(item) for item in items if item["id"] == item_id]
            if not raw:
                text = f"Invalid '{field}': there is no stored item {item_id!r}."
                raise InvalidRequest(text, field, reason=INVALID_VALUE)
            (found[index],) = read_items(raw)
        return found

    async def _get(
        self, stored_id: str, tenant: str, field: str, reason: str, turn: Turn | None
    ) -> StoredResponse:
        if turn is not None and (kept := turn.kept.get(stored_id)) is not None:
            return kept
        if self.stored is None and turn is not None:
            text = (
                f"Invalid '{field}': this connection does not keep {stored_id!r}, and {_NO_STORE}."
            )
            raise InvalidRequest(text, field, reason=reason)
        if self.stored is None:
            raise Unsupported(field, _NO_STORE)
        try:
            return await self.stored.get(stored_id, tenant)
        except NotFound as error:
            text = f"Invalid '{field}': {error.message}."
            raise InvalidRequest(text, field, reason=reason) from None
        except Unavailable as error:
            raise Unavailable(error.message, error.retry_after_s, field=field) from error


def _conversation(stored: StoredResponse) -> tuple[bytes, ...]:
    """Returns the items of a stored response, with its output."""
    output = orjson.loads(stored.response)["output"]
    return (*stored.input_items, *map(compact_json, output))


class InputTokensEndpoint(PostEndpoint[ChatRequest]):
    """`POST /v1/responses/input_tokens`: the number of prompt tokens of a body of
    `/v1/responses`, without a worker."""

    def __init__(self, route: Route, api: ResponsesApi, dependencies: EndpointDependencies) -> None:
        super().__init__(route, dependencies)
        self._api = api

    async def parse(self, context: HttpRequest, raw: bytes) -> ChatRequest:
        parsed = await self._api.parse(raw, context.caller)
        chat = parsed.request
        assert isinstance(chat, ChatRequest), "a body of the Responses API becomes a chat"
        context.progress.body, context.progress.omitted_tools = chat, parsed.omitted_tools
        return chat

    async def serve(self, context: HttpRequest, body: ChatRequest, meter: RequestMeter) -> None:
        model = self._models.get_for(self.served_model(context, body.model), "chat")
        context.progress.base_model = model.base
        token_ids, _ = await encode_chat(body, model)
        count = {"object": "response.input_tokens", "input_tokens": len(token_ids)}
        await send_json(context, orjson.dumps(count))
        meter.mark_ok()


class StoredResponseHandlers:
    """The handlers that read and delete stored responses."""

    def __init__(self, stored: StoredResponses | None) -> None:
        """
        - stored: None if this frontend stores no responses.
        """
        self._stored = stored

    async def get(self, request: PlainRequest) -> PlainResponse:
        parse_query(ResponseQuery, request.query)
        return PlainResponse((await self._get(request)).response)

    async def delete(self, request: PlainRequest) -> PlainResponse:
        deleted_id = request.parameters["id"]
        await self._responses().delete(deleted_id, request.caller.tenant)
        deleted = {"id": deleted_id, "object": "response", "deleted": True}
        return PlainResponse(orjson.dumps(deleted))

    async def list_items(self, request: PlainRequest) -> PlainResponse:
        query = parse_query(ItemsQuery, request.query)
        return PlainResponse(items_page((await self._get(request)).input_items, query))

    async def _get(self, request: PlainRequest) -> StoredResponse:
        return await self._responses().get(request.parameters["id"], request.caller.tenant)

    def _responses(self) -> StoredResponses:
        if self._stored is None:
            raise NotFound(_NO_STORE)
        return self._stored
