"""The generation APIs: how a body is read and how its response is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from frontend_svc.access.caller import Caller
from frontend_svc.errors import HttpError, http_error
from frontend_svc.metrics.families import Endpoint
from frontend_svc.models.model_watch import Table
from frontend_svc.openai.body.parsing import INLINE_BODY_BYTES, parse_chat, parse_completion
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.openai.output.completion_format import CompletionFormat
from frontend_svc.openai.output.sse import ChunkKind
from frontend_svc.text.response_format import ResponseFormat

P = ParamSpec("P")
R = TypeVar("R")


async def off_loop(body_bytes: int, parse: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a parser of a body of `body_bytes`: in a thread if it could block the event loop."""
    if body_bytes <= INLINE_BODY_BYTES:
        return parse(*args, **kwargs)
    return await asyncio.to_thread(parse, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """What a format needs of a response. request_id: 32 hex digits, unique. created: Unix seconds.
    choices: how many. prompt_tokens: of all prompts."""

    request_id: str
    model: str
    created: int
    choices: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body as the request it stands for. make_format: called once, after all checks."""

    request: ChatRequest | CompletionRequest
    make_format: Callable[[ResponseInfo], ResponseFormat]


class GenerationApi(Protocol):
    """One API with responses from a model. table: the engines that serve it. passes_through:
    whether bodies for pass-through models go to their worker unparsed."""

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def table(self) -> Table: ...

    @property
    def passes_through(self) -> bool: ...

    async def parse(self, raw: bytes, caller: Caller) -> ParsedBody:
        """Raises MeshError with the field of the client's body."""
        ...

    def http_error(
        self, error: BaseException, request_id: str, headers: Container[bytes]
    ) -> HttpError:
        """The response for an error before the first byte. request_id: of the response's header.
        headers: names of the request's."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionApi:
    """Chat completions, or completions."""

    endpoint: Endpoint
    table: Table
    kind: ChunkKind
    id_prefix: str
    parse_body: Callable[[bytes], ChatRequest | CompletionRequest]
    passes_through: bool = True

    async def parse(self, raw: bytes, caller: Caller) -> ParsedBody:
        request = await off_loop(len(raw), self.parse_body, raw)

        def make_format(info: ResponseInfo) -> ResponseFormat:
            return CompletionFormat(
                self.kind,
                f"{self.id_prefix}-{info.request_id}",
                info.model,
                info.created,
                choices=info.choices,
                include_usage=request.include_usage,
            )

        return ParsedBody(request, make_format)

    def http_error(
        self, error: BaseException, request_id: str, headers: Container[bytes]
    ) -> HttpError:
        return http_error(error, headers)


CHAT_COMPLETIONS = CompletionApi(
    Endpoint.CHAT_COMPLETIONS, "chat", ChunkKind.CHAT, "chatcmpl", parse_chat
)
COMPLETIONS = CompletionApi(
    Endpoint.COMPLETIONS, "completions", ChunkKind.COMPLETION, "cmpl", parse_completion
)
