"""The Responses API: continues stored responses, stores new ones, and serves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import orjson

from common.access.caller import Caller
from common.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from frontend_svc.batches.conversations import Conversations
from frontend_svc.endpoints.endpoint import EndpointDependencies, PostEndpoint
from frontend_svc.endpoints.plain import PlainRequest, PlainResponse
from frontend_svc.endpoints.query import parse_query
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.endpoints.route import Route
from frontend_svc.generation.api import ParsedBody, ResponseInfo, off_loop
from frontend_svc.generation.streaming import send_json
from frontend_svc.generation.tokenization import encode_chat
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.openai.body.schema import ChatRequest
from frontend_svc.openai.body.validation_errors import INVALID_VALUE
from frontend_svc.openai.output.json_bytes import compact_json
from frontend_svc.responses.draft import ResponseDraft
from frontend_svc.responses.follow import ResponseStreams
from frontend_svc.responses.ids import is_durable, response_of_item
from frontend_svc.responses.kept import Turn
from frontend_svc.responses.queries import (
    ItemsQuery,
    ResponseQuery,
    items_page,
)
from frontend_svc.responses.schema import Item, ResponsesRequest
from frontend_svc.responses.store import StoredResponse
from frontend_svc.responses.stored import StoredResponses
from frontend_svc.responses.translation import (
    ResponsesChat,
    check_item_ids,
    input_items,
    parse_responses,
    read_items,
    references,
    to_chat,
    warmup_of,
)
from frontend_svc.text.api_format import ApiFormat

# `code` of the error, in upper case.
PREVIOUS_NOT_FOUND = "PREVIOUS_RESPONSE_NOT_FOUND"
# States of a response that another one may continue.
CONTINUABLE = ("completed", "incomplete")
_NO_STORE = "this frontend stores no responses (--response-store-mb), and no batch service is there"


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """`POST /v1/responses`."""

    stored: StoredResponses
    streams: ResponseStreams
    conversations: Conversations

    async def parse(self, raw: bytes, caller: Caller, turn: Turn | None = None) -> ParsedBody:
        """
        - turn: of an event of a WebSocket.
        """
        request = await off_loop(len(raw), parse_responses, raw)
        if request.store and not self.stored.is_available:
            raise Unsupported("store", _NO_STORE)
        if request.background:
            self.stored.require_durable("background", "runs and stores such responses")
        tenant = caller.tenant
        earlier = await self._earlier_items(request, tenant, turn)
        referenced = await self._referenced(request, tenant, earlier, turn)
        new_items = input_items(request, referenced)
        if request.named_conversation is not None:
            check_item_ids(new_items, "input")

        def make_chat() -> ResponsesChat:
            chat = to_chat(request, [*read_items(earlier), *new_items])
            return chat if turn is None or turn.generates else warmup_of(chat)

        chat = await off_loop(len(raw) + sum(map(len, earlier)), make_chat)
        draft = ResponseDraft(self.stored, self.streams, request, caller, earlier, new_items, turn)

        def make_format(info: ResponseInfo) -> ApiFormat:
            return draft.make_format(info, chat.chat_tools.names)

        return ParsedBody(
            chat,
            make_format,
            omitted_tools=chat.chat_tools.omitted,
            continued=draft.continued,
            detach=partial(draft.detach, raw) if request.background else None,
        )

    async def _earlier_items(
        self, request: ResponsesRequest, tenant: str, turn: Turn | None
    ) -> tuple[bytes, ...]:
        """Returns the conversation up to the previous response, or the named one, as JSON
        items."""
        if (conversation_id := request.named_conversation) is not None:
            return await self._named_items(conversation_id, tenant)
        previous_id = request.previous_response_id
        if previous_id is None:
            return ()
        field = "previous_response_id"
        previous = await self._get(previous_id, tenant, field, PREVIOUS_NOT_FOUND, turn)
        status = orjson.loads(previous.response)["status"]
        if status not in CONTINUABLE:
            text = f"Invalid 'previous_response_id': the response {previous_id!r} is {status}."
            raise InvalidRequest(text, field, reason=INVALID_VALUE)
        return _conversation(previous)

    async def _named_items(self, conversation_id: str, tenant: str) -> tuple[bytes, ...]:
        self.stored.require_durable("conversation", "stores conversations")
        try:
            return await self.conversations.read(tenant, conversation_id)
        except NotFound as error:
            raise NotFound(error.message, field="conversation") from None

    async def _referenced(
        self,
        request: ResponsesRequest,
        tenant: str,
        earlier: Iterable[bytes],
        turn: Turn | None,
    ) -> Mapping[int, Item]:
        """Returns the stored items to which the input refers, by their index.

        - earlier: the conversation before the input.
        """
        found: dict[int, Item] = {}
        items_of: dict[str, Mapping[str, bytes]] = {}
        wanted = references(request)
        if not wanted:
            return found
        known = _items_by_id(earlier)
        for index, item_id in wanted.items():
            field = f"input[{index}].id"
            if item_id in known:
                (found[index],) = read_items([known[item_id]])
                continue
            of_response = response_of_item(item_id) or item_id
            if of_response not in items_of:
                response = await self._get(of_response, tenant, field, INVALID_VALUE, turn)
                items_of[of_response] = await off_loop(
                    len(response.response) + sum(map(len, response.input_items)),
                    _items_of,
                    response,
                )
            raw = items_of[of_response].get(item_id)
            if raw is None:
                text = f"Invalid '{field}': there is no stored item {item_id!r}."
                raise InvalidRequest(text, field, reason=INVALID_VALUE)
            (found[index],) = read_items([raw])
        return found

    async def _get(
        self, stored_id: str, tenant: str, field: str, reason: str, turn: Turn | None
    ) -> StoredResponse:
        if turn is not None and (kept := turn.kept.get(stored_id)) is not None:
            return kept
        if not self.stored.is_available and not is_durable(stored_id):
            if turn is None:
                raise Unsupported(field, _NO_STORE)
            text = (
                f"Invalid '{field}': this connection does not keep {stored_id!r}, and {_NO_STORE}."
            )
            raise InvalidRequest(text, field, reason=reason)
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


def _items_of(stored: StoredResponse) -> Mapping[str, bytes]:
    """Returns the same by their ids."""
    return _items_by_id(_conversation(stored))


def _items_by_id(items: Iterable[bytes]) -> Mapping[str, bytes]:
    return {orjson.loads(item).get("id"): item for item in items}


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

    def __init__(self, stored: StoredResponses, streams: ResponseStreams) -> None:
        self._stored = stored
        self._streams = streams

    async def get(self, request: PlainRequest) -> PlainResponse:
        query = parse_query(ResponseQuery, request.query)
        if query.stream:
            events = await self._streams.open(
                request.parameters["id"], request.caller.tenant, query.starting_after
            )
            return PlainResponse(b"", events=events)
        if query.starting_after is not None:
            text = "'starting_after' is only allowed when 'stream' is true."
            raise InvalidRequest(text, "starting_after", reason=INVALID_VALUE)
        return PlainResponse((await self._get(request)).response)

    async def delete(self, request: PlainRequest) -> PlainResponse:
        deleted_id = request.parameters["id"]
        await self._stored.delete(deleted_id, request.caller.tenant)
        deleted = {"id": deleted_id, "object": "response", "deleted": True}
        return PlainResponse(orjson.dumps(deleted))

    async def cancel(self, request: PlainRequest) -> PlainResponse:
        return PlainResponse(
            await self._stored.cancel(request.parameters["id"], request.caller.tenant)
        )

    async def list_items(self, request: PlainRequest) -> PlainResponse:
        query = parse_query(ItemsQuery, request.query)
        return PlainResponse(items_page((await self._get(request)).input_items, query))

    async def _get(self, request: PlainRequest) -> StoredResponse:
        return await self._stored.get(request.parameters["id"], request.caller.tenant)
