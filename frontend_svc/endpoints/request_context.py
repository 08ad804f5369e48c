"""One HTTP request: what it is, how far it has come, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.access.caller import Caller
from common.errors import MeshError
from common.request.preprocessed import CompletionUsage, PreprocessedRequest, RequestTracker
from frontend_svc import errors as openai
from frontend_svc.access.quotas import Quota
from frontend_svc.edge.asgi import ClientConnection, Headers, Send
from frontend_svc.endpoints.header_ids import id_headers
from frontend_svc.endpoints.route import Route
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.models.variants import VariantChoice
from frontend_svc.openai.body.nvext import NvextRouter
from frontend_svc.request.outcomes import merge_outcomes
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import RequestOutcome
from frontend_svc.text.api_format import ApiFormat
from frontend_svc.tracing import RequestSpan

MODEL_OWNER = "kvmesh"
OMITTED_TOOLS_HEADER = b"x-kvmesh-omitted-tools"
# Of requests to a configured alias: the model that serves it, and the variant that it replaces.
VARIANT_HEADER, FALLBACK_HEADER = b"x-kvmesh-variant", b"x-kvmesh-fallback-from"


class RequestBody(Protocol):
    """What logs and metrics need of a body."""

    @property
    def model(self) -> str: ...
    @property
    def is_stream(self) -> bool: ...


class ResponsePart(Protocol):
    """What logs need of one request to workers. first_token_at: on the clock of the metrics."""

    @property
    def outcome(self) -> RequestOutcome | None: ...
    @property
    def first_token_at(self) -> float | None: ...


@dataclass(slots=True)
class Progress:
    """How far a request has come."""

    error: MeshError | None = None
    """Why it failed; until its body is read, why it is refused."""

    raw: bytes = b""
    """The body as it was sent."""

    body: RequestBody | None = None
    """The body after it was parsed."""

    uses_alias: bool = False
    """Whether the body names its extensions `kvmesh`."""

    omitted_tools: Sequence[str] = ()
    """Types of the tools of the body that are left out of its prompt."""

    choice: VariantChoice | None = None
    """The model of a request to a configured alias; None: the body names no such alias."""

    meter: RequestMeter | None = None

    request: PreprocessedRequest | None = None
    """The request of the first prompt; None: unknown."""

    base_model: str = ""
    """The model itself, or the base model of an adapter; "" if passed through or not known."""

    adapter: str = ""
    """"" if none."""

    targets: NvextRouter | None = None
    """Latency targets of its client; None: it has none."""

    choices_per_prompt: int = 1

    placements: Sequence[PlacementRequest] = ()
    """Of the responses, in order."""

    responses: Sequence[ResponsePart] = ()
    """One for each choice or input that was sent to workers."""

    status: int = 0
    """HTTP status sent to the client; 0 before it is sent."""

    stream_format: ApiFormat | None = None
    """Of the stream that has begun."""

    response_json: bytes = b""
    """The body sent to the client; b"": none, or a stream."""

    render_stream: Callable[[CompletionUsage], bytes] | None = None
    """Writes the response of a stream, up to now, as one object; None: it is not recorded."""

    is_response_complete: bool = False

    @property
    def outcome(self) -> RequestOutcome | None:
        """The outcome of all choices that have ended; None if there are none."""
        outcomes = [response.outcome for response in self.responses if response.outcome is not None]
        return merge_outcomes(outcomes, self.choices_per_prompt) if outcomes else None


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request to a route."""

    route: Route

    request_id: str
    """Unique, made by the frontend."""

    client_id: bytes
    """The client's x-request-id, or `request_id`."""

    caller: Caller

    quota: Quota | None
    """Of a tenant with limits."""

    header_pairs: Headers
    """The client's headers, with repetitions."""

    headers: Mapping[bytes, bytes]

    started_at_s: float
    """On the clock of the metrics."""

    arrived_at: float
    """On the loop's clock."""

    tracker: RequestTracker
    """Of the first choice."""

    span: RequestSpan
    send: Send
    connection: ClientConnection
    progress: Progress

    is_background: bool = False
    """Whether it runs on idle capacity only, as the lines of batches do."""

    @property
    def own_headers(self) -> Headers:
        """Headers of every response: the ids of the request, what is left of its quota, which tools
        its prompt does not have, and which model serves an alias."""
        headers = id_headers(self.route.errors, self.client_id)
        if omitted := self.progress.omitted_tools:
            headers = (*headers, (OMITTED_TOOLS_HEADER, ", ".join(omitted).encode()))
        if (choice := self.progress.choice) is not None:
            headers = (*headers, (VARIANT_HEADER, choice.model.encode()))
            if choice.is_fallback:
                headers = (*headers, (FALLBACK_HEADER, choice.variant.encode()))
        return headers if self.quota is None else (*headers, *self.quota.headers)

    @property
    def names(self) -> Container[bytes]:
        """The names of its headers, and ALIAS if its body uses it: see `client_param`."""
        return {*self.headers, openai.ALIAS} if self.progress.uses_alias else self.headers

    @property
    def caller_fields(self) -> Mapping[str, str]:
        """Its client, for logs and traces; empty without keys."""
        caller = self.caller
        return {"tenant": caller.tenant, "key_id": caller.key_id} if caller.tenant else {}

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None without one."""
        responses = self.progress.responses
        times = [
            response.first_token_at for response in responses if response.first_token_at is not None
        ]
        return min(times) - self.started_at_s if times else None


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What the log line, the span and the records state about a request."""

    context: HttpRequest
    outcome: RequestOutcome | None
    """Of all choices; None if nothing was sent to workers."""

    error: MeshError | None
    """Of the HTTP request, or else of its outcome."""

    ttft_s: float | None
    """Seconds to the first token; None without one."""

    total_ms: float


def ended_request(context: HttpRequest, now_s: float) -> EndedRequest:
    """Returns how a request ended.

    - now_s: on the clock of `started_at_s`.
    """
    progress = context.progress
    outcome, error = progress.outcome, progress.error
    if error is None and outcome is not None:
        error = outcome.error
    total_ms = round((now_s - context.started_at_s) * 1000, 1)
    return EndedRequest(context, outcome, error, context.ttft_s, total_ms)
