"""The generation APIs: how a body is read and how its response is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeAlias, TypeVar

from common.access.caller import Caller
from common.request.preprocessed import PreprocessedRequest
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.parsing import INLINE_BODY_BYTES, parse_chat, parse_completion
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.openai.body.tool_calls import ToolPlan
from frontend_svc.openai.output.completion_format import CompletionFormat
from frontend_svc.openai.output.sse import ChunkKind, UsageSoFar
from frontend_svc.text.api_format import ApiFormat

P = ParamSpec("P")
R = TypeVar("R")


async def off_loop(body_bytes: int, parse: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a parser of a body of `body_bytes`: in a thread if it could block the event loop."""
    if body_bytes <= INLINE_BODY_BYTES:
        return parse(*args, **kwargs)
    return await asyncio.to_thread(parse, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """What a format needs of a response."""

    request_id: str
    """32 hex digits, unique."""

    header_id: str
    """The id in the header of the response."""

    model: str

    created: int
    """Unix seconds."""

    choices: int
    """Number of choices."""

    prompt_tokens: int
    """Tokens of all prompts."""

    token_counts: list[int] | None = None
    """Output tokens of each choice up to now, which the choices set; None: nothing reads them."""


@dataclass(frozen=True, slots=True)
class Detached:
    """What the client of a response that runs later receives: a body, or events."""

    body: bytes
    events: AsyncIterator[bytes] | None = None


# Stores a request with its headers.
Detach: TypeAlias = Callable[[ResponseInfo, Sequence[tuple[bytes, bytes]]], Awaitable[Detached]]


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body as the request it stands for. make_format: called once, after all checks."""

    request: ChatRequest | CompletionRequest
    make_format: Callable[[ResponseInfo], ApiFormat]

    omitted_tools: Sequence[str] = ()
    """Types of the tools that are left out because no server here runs them."""

    continued: str | None = None
    """The request of the first response of a stored conversation; "": this one begins it; None:
    nothing is continued or stored."""

    detach: Detach | None = None
    """Has the response run later, without this request; None: this request runs it."""


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """A body after all checks and tokenization."""

    body: ChatRequest | CompletionRequest
    """With the defaults of its model."""

    model: ServedModel
    plan: ToolPlan | None

    requests: Sequence[PreprocessedRequest]
    """One for each prompt."""

    prompt_text: str | None
    """Of the first prompt; None: it was given as token ids."""

    prompt_tokens: int


class GenerationApi(Protocol):
    """One API with responses from a model."""

    async def parse(self, raw: bytes, caller: Caller) -> ParsedBody:
        """Raises MeshError with the field of the client's body."""
        ...


def _usage_so_far(info: ResponseInfo) -> UsageSoFar | None:
    counts = info.token_counts
    return None if counts is None else UsageSoFar(info.prompt_tokens, counts)


@dataclass(frozen=True, slots=True)
class CompletionApi:
    """Chat completions, or completions. table: the engines that serve it."""

    table: Table
    kind: ChunkKind
    id_prefix: str
    parse_body: Callable[[bytes], ChatRequest | CompletionRequest]

    async def parse(self, raw: bytes, caller: Caller) -> ParsedBody:
        request = await off_loop(len(raw), self.parse_body, raw)

        def make_format(info: ResponseInfo) -> ApiFormat:
            return CompletionFormat(
                self.kind,
                f"{self.id_prefix}-{info.request_id}",
                info.model,
                info.created,
                choices=info.choices,
                include_usage=request.include_usage,
                usage_so_far=_usage_so_far(info),
            )

        return ParsedBody(request, make_format)


CHAT_COMPLETIONS = CompletionApi("chat", ChunkKind.CHAT, "chatcmpl", parse_chat)
COMPLETIONS = CompletionApi("completions", ChunkKind.COMPLETION, "cmpl", parse_completion)
