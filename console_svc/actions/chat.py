"""The playground's chats, through the HTTP API of a frontend."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from common.errors import InvalidRequest, MeshError, PermissionDenied, Unauthenticated, Unavailable
from common.inspection.gateway import GatewayError, chat_chunks, new_http_client
from common.runtime.config import ServiceConfig
from console_svc.state.actions import ChatDelta, ChatRequest

# A longer response ends with an error.
RESPONSE_TIMEOUT_S: Final = 300.0
# What a response states about its own request, if the key has the scope `explain`.
_EXPLAIN: Final = {"extra_fields": ["worker_id", "timing"]}
_ID: Final = re.compile(r"[0-9a-f]{32}")
_FORBIDDEN: Final = 403


async def stream_chat(
    config: ServiceConfig, url: str, request: ChatRequest
) -> AsyncGenerator[ChatDelta, None]:
    """Yields the events of a chat. url: of the frontend's API. Raises MeshError."""
    body = _body(request)
    started_at = time.monotonic()
    async with new_http_client(request.api_key or None, config, url) as http:
        for fields in ({"nvext": _EXPLAIN}, {}):
            try:
                chunks = chat_chunks(http, url, {**body, **fields}, RESPONSE_TIMEOUT_S)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        yield _delta(chunk, (time.monotonic() - started_at) * 1000)
                return
            except GatewayError as error:
                if not (fields and error.status == _FORBIDDEN and "MISSING_SCOPE" in str(error)):
                    raise _mesh_error(error) from error


def _body(request: ChatRequest) -> dict[str, object]:
    body: dict[str, object] = {
        "model": request.model,
        "messages": [dict(message) for message in request.messages],
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
    return body


# Any: JSON.
def _delta(chunk: Mapping[str, Any], at_ms: float) -> ChatDelta:
    choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
    delta = choice.get("delta") or {}
    found = _ID.search(str(chunk.get("id", "")))
    return ChatDelta(
        at_ms=at_ms,
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or "",
        tool_calls=tuple(delta.get("tool_calls") or ()),
        finish_reason=choice.get("finish_reason") or "",
        usage=chunk.get("usage"),
        request_id="" if found is None else found[0],
        placement=chunk.get("nvext") or {},
    )


def _mesh_error(error: GatewayError) -> MeshError:
    match error.status:
        case 401:
            return Unauthenticated(str(error))
        case 403:
            return PermissionDenied(str(error))
        case status if 400 <= status < 500:
            return InvalidRequest(str(error))
        case _:
            return Unavailable(str(error))
