"""An endpoint that takes a JSON body: reads it, counts the request and reports errors."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Generic, TypeVar

import structlog

from common.access.caller import ANONYMOUS
from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    RequestCancelled,
    Unavailable,
    Unsupported,
)
from common.kv.hashing import PrefixHasher
from common.request.placement import Query
from common.request.preprocessed import (
    PreprocessedRequest,
    RequestTracker,
)
from frontend_svc.access.keys import admit, quota_of
from frontend_svc.config import FrontendConfig
from frontend_svc.edge.asgi import (
    BACKGROUND,
    CONNECTION,
    Receive,
    Scope,
    Send,
    last_part,
)
from frontend_svc.edge.error_response import send_error
from frontend_svc.endpoints.header_ids import header_id
from frontend_svc.endpoints.latency_targets import target_outcomes
from frontend_svc.endpoints.request_context import HttpRequest, Progress, ended_request
from frontend_svc.endpoints.request_log import log_request, span_attributes
from frontend_svc.endpoints.request_records import RequestRecords
from frontend_svc.endpoints.request_usage import usage_counts, usage_key
from frontend_svc.endpoints.route import Route
from frontend_svc.errors import (
    BODY_TOO_LARGE,
    error_event,
    error_type,
    refusal_code,
)
from frontend_svc.metrics.families import BATCH_ENDPOINT, DeploymentState, RequestMeter
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.models.variants import VariantChoice, choose, sticky_key
from frontend_svc.openai.body.nvext import Nvext
from frontend_svc.openai.body.parsing import named_model
from frontend_svc.openai.body.preprocessing import strict_priority
from frontend_svc.request.conversation import SESSION_HEADER, affinity_key
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.placement_request import PlacementRequest, new_placement
from frontend_svc.request.types import RequestOutcome, RequestPlan
from frontend_svc.tracing import start_request_span
from frontend_svc.usage.ledger import UsageLedger

# Of `requests_max`: at most so many requests wait for a configured model that is not served.
WAITING_SHARE_MAX = 0.25
# In the queues of engines: behind every priority that clients may send.
BACKGROUND_PRIORITY = -(2**31)
# Time a client may take to send its body.
BODY_TIMEOUT_S = 60.0

P = TypeVar("P")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EndpointDependencies:
    """What the endpoints of one API share. on_request_end: called once for each request that was
    sent to workers."""

    gateway: Gateway
    models: ModelCatalog
    state: DeploymentState
    config: FrontendConfig
    records: RequestRecords
    usage: UsageLedger
    on_request_end: Callable[[RequestOutcome], None]


class PostEndpoint(ABC, Generic[P]):
    """The ASGI application of one endpoint. A subclass reads bodies (P) and serves them."""

    def __init__(self, route: Route, dependencies: EndpointDependencies) -> None:
        self.route = route
        self._dependencies = dependencies
        self._gateway = dependencies.gateway
        self._models = dependencies.models
        self._state = dependencies.state
        self._config = dependencies.config
        self._records = dependencies.records
        self._usage = dependencies.usage
        self._rng = Random()
        self._active_requests = 0

    @abstractmethod
    async def parse(self, context: HttpRequest, raw: bytes) -> P:
        """Reads a body, and sets that of the progress. Raises MeshError with the field of the
        body."""

    @abstractmethod
    async def serve(self, context: HttpRequest, body: P, meter: RequestMeter) -> None:
        """Sends the response, and marks the meter. Raises the MeshError of a failed request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Its end is in the metrics, the log, the span and the records once,
        whatever it is."""
        context = self._make_context(scope, send)
        self._active_requests += 1
        try:
            body, meter = await self._begin(context, receive)
            await self.serve(context, body, meter)
        except MeshError as error:
            await self._fail(context, error)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the tokenizer library is no Exception
            log.exception("request_failed", request_id=context.request_id)
            await self._fail(context, InternalError("see the frontend's log"))
        finally:
            self._active_requests -= 1
            self._end(context)
            # Without cycles of references, all of the request is freed at once.
            del scope["state"][CONNECTION]

    def _make_context(self, scope: Scope, send: Send) -> HttpRequest:
        progress = Progress()
        caller, quota = ANONYMOUS, None
        try:
            caller = admit(scope, self.route.permission)
            quota = quota_of(scope, caller)
        except MeshError as error:
            progress.error = error
        header_pairs = tuple(scope["headers"])
        headers = dict(header_pairs)
        request_id = os.urandom(16).hex()
        client_id = headers.get(b"x-request-id", b"")
        traceparent = headers.get(b"traceparent", b"").decode("latin-1")
        config = self._config
        own_ratio = None if config.trust_traceparent else config.trace_sample_ratio
        return HttpRequest(
            route=self.route,
            request_id=request_id,
            client_id=header_id(client_id, request_id),
            caller=caller,
            quota=quota,
            header_pairs=header_pairs,
            headers=headers,
            started_at_s=self._state.clock(),
            arrived_at=asyncio.get_running_loop().time(),
            tracker=RequestTracker(received_ms=time.time() * 1000, received_s=time.monotonic()),
            span=start_request_span(scope["path"], traceparent, own_ratio),
            send=send,
            connection=scope["state"][CONNECTION],
            progress=progress,
            is_background=BACKGROUND in scope["state"],
        )

    async def _begin(self, context: HttpRequest, receive: Receive) -> tuple[P, RequestMeter]:
        """Reads the body and begins to count the request, also one that it refuses: the body names
        the model of the labels."""
        progress = context.progress
        try:
            self._check_limits(context)
            progress.raw = await self._receive_body(context, receive)
            body = await self.parse(context, progress.raw)
        except TimeoutError:
            message = f"The body was not complete within {BODY_TIMEOUT_S:g} s."
            raise DeadlineExceeded(message) from None
        finally:
            parsed = progress.body
            name = named_model(progress.raw) if parsed is None else parsed.model
            is_stream = parsed is not None and parsed.is_stream
            label = BATCH_ENDPOINT if context.is_background else self.route.label
            trace_id = context.span.trace_id
            meter = progress.meter = self._state.begin(name, label, is_stream, trace_id)
        return body, meter

    def _check_limits(self, context: HttpRequest) -> None:
        """Raises the error of the key, and Overloaded above a limit of the tenant or of this
        endpoint."""
        if context.progress.error is not None:
            raise context.progress.error
        if context.quota is not None:
            context.quota.begin()
        if self._active_requests > (limit := self._config.requests_max):
            raise Overloaded(1.0, f"too many concurrent requests: {limit}/{limit}")

    def _end(self, context: HttpRequest) -> None:
        """Closes what counts the request, and writes its log line, span and records."""
        progress = context.progress
        ended = ended_request(context, self._state.clock())
        counts = usage_counts(ended)
        if context.quota is not None:
            context.quota.close(counts.tokens)
        if counts.requests:
            self._usage.add(usage_key(ended), counts)
        if progress.meter is not None:
            for target, outcome in target_outcomes(ended):
                progress.meter.target_ended(target, outcome)
            progress.meter.close()
        context.span.end(partial(span_attributes, ended), ended.error)
        log_request(ended)
        self._records.request_ended(ended)
        if progress.error is not None:
            progress.error.__traceback__ = None

    async def _receive_body(self, context: HttpRequest, receive: Receive) -> bytes:
        limit = self._config.body_limit_mb << 20
        content_length = context.headers.get(b"content-length", b"0")
        if content_length.isdigit() and int(content_length) > limit:
            raise self._too_large()
        # A timer costs more than the read of a body that is complete.
        if context.connection.has_body:
            return await self._receive_parts(receive, limit)
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await self._receive_parts(receive, limit)

    async def _receive_parts(self, receive: Receive, limit: int) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestCancelled("The client disconnected before its body was complete.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise self._too_large()
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self) -> InvalidRequest:
        text = f"The body is larger than {self._config.body_limit_mb} MB."
        return InvalidRequest(text, reason=BODY_TOO_LARGE)

    def served_model(self, context: HttpRequest, name: str, conversation: bytes = b"") -> str:
        """Returns the model of a request: of a configured alias, one of its variants, else the name
        itself. Raises Unavailable if no worker has ever served the variant.

        - conversation: see `conversation_name`.
        """
        alias = self._models.weighted_aliases.get(name)
        if alias is None:
            return name
        session = context.headers.get(SESSION_HEADER, b"") or conversation
        key = sticky_key(alias, session, context.caller.tenant)
        chosen = choose(name, alias, key, self._models.is_served, self._rng)
        context.progress.choice = chosen
        self._state.frontend.alias_requests(name, chosen.model, _reason(chosen)).inc()
        self._models.check_choice(chosen)
        return chosen.model

    def make_plan(
        self, context: HttpRequest, request: PreprocessedRequest, choice: int = 0
    ) -> RequestPlan:
        return RequestPlan(
            request_id=f"{context.request_id}-{choice}" if choice else context.request_id,
            request=request,
            deadline=context.arrived_at + self._config.request_timeout_s,
            engine_traits=partial(self._models.engine_traits, request.model),
            attempts_max=self._config.attempts_max,
            accept_timeout_s=self._config.accept_timeout_s,
            traceparent=context.span.traceparent,
            trace_id=context.span.trace_id,
            priority=_engine_priority(context, request),
        )

    def make_placement(
        self,
        context: HttpRequest,
        model: str,
        request: PreprocessedRequest,
        nvext: Nvext | None,
        hasher: PrefixHasher | None = None,
        conversation: bytes = b"",
    ) -> PlacementRequest:
        """Returns the request for the placement of a prompt. model: the name that routers see.
        hasher: of the prompt; None: it gets no hashes. conversation: see `conversation_name`."""
        targets = context.progress.targets = None if nvext is None else nvext.router
        query = Query(
            model,
            len(request.token_ids),
            routing=request.routing,
            strict_priority=strict_priority(nvext),
            tenant=context.caller.tenant,
            tenant_weight=context.caller.limits.weight,
            is_background=context.is_background,
            affinity_key=affinity_key(context.caller.tenant, request.model, conversation),
            ttft_target_ms=None if targets is None else targets.ttft_target,
            itl_target_ms=None if targets is None else targets.itl_target,
        )
        prompt, _ = request.routing_tokens()
        arrived_at = asyncio.get_running_loop().time()
        return new_placement(query, prompt, hasher, arrived_at, context.span.traceparent)

    async def await_model(
        self, context: HttpRequest, name: str, table: Table, error: Unavailable
    ) -> ServedModel:
        """Returns a configured model as soon as a worker serves it. Raises Unavailable after
        `worker_wait_s`, within `request_timeout_s`; at once if the model is not configured, if its
        card cannot be used, or if too many requests wait.

        - error: why the model is not served now.
        """
        models, config, loop = self._models, self._config, asyncio.get_running_loop()
        watched = context.connection.watched
        if len(models.waits) >= max(1, int(config.requests_max * WAITING_SHARE_MAX)):
            raise error
        until = context.arrived_at + min(config.worker_wait_s, config.request_timeout_s)
        while models.may_appear(name) and loop.time() < until:
            try:
                await models.waits.next_change(models.resolve(name), until, watched)
            except RequestCancelled:
                if context.progress.meter is not None:
                    context.progress.meter.mark_disconnected()
                raise
            try:
                return models.get_for(name, table)
            except Unavailable as latest:
                error = latest
            except Unsupported:  # Its worker takes bodies that pass through; this one was parsed.
                break
        raise error

    async def _fail(self, context: HttpRequest, error: MeshError) -> None:
        context.progress.error = error
        if (meter := context.progress.meter) is not None:
            meter.mark_failed(error_type(error), refusal_code(error))
        await self._send_error(context, error)

    async def _send_error(self, context: HttpRequest, error: MeshError) -> None:
        """Sends an error as an HTTP response, or as the last event if the stream has begun."""
        progress = context.progress
        if progress.is_response_complete:
            return
        if progress.status:
            stream_format = progress.stream_format
            events = error_event(error) if stream_format is None else stream_format.error(error)
            await context.send(last_part(events))
            return
        client_id = context.client_id.decode("latin-1")
        response = self.route.errors.http_error(error, client_id, context.names)
        progress.status, progress.response_json = response.status, response.body
        await send_error(context.send, response, context.own_headers)


def _engine_priority(context: HttpRequest, request: PreprocessedRequest) -> int | None:
    """Returns the place of a request in the queue of its engine; None: the usual one."""
    if context.is_background:
        return BACKGROUND_PRIORITY
    return request.routing.priority if request.routing is not None else None


def _reason(choice: VariantChoice) -> str:
    """Returns why a model serves a request to an alias, for metrics."""
    return "fallback" if choice.is_fallback else "weight"
