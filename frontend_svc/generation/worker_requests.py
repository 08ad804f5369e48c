"""The requests to workers that one HTTP request makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from common.errors import MeshError
from frontend_svc.endpoints.endpoint import EndpointDependencies
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.errors import error_type
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.request.buffer import Reader, ResponseBuffer
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import RequestPlan


@contextmanager
def open_requests(
    dependencies: EndpointDependencies,
    context: HttpRequest,
    plans: Sequence[tuple[RequestPlan, PlacementRequest]],
    meter: RequestMeter,
) -> Iterator[list[tuple[RequestHandle, ResponseBuffer]]]:
    """Runs requests, whose responses the progress has, while their client is connected; leaving
    ends what still runs."""
    reader, backlog = Reader(), dependencies.gateway.backlog
    handles: list[RequestHandle] = []

    def fail(index: int, error: MeshError, reason: str) -> None:
        handles[index].fail(error, reason)

    def first_token(index: int) -> None:
        handles[index].first_token()

    context.progress.placements = [placement for _, placement in plans]
    context.progress.responses = buffers = [
        ResponseBuffer(
            meter,
            dependencies.state.clock,
            partial(fail, index),
            reader=reader,
            backlog=backlog,
            first_token=partial(first_token, index),
        )
        for index in range(len(plans))
    ]
    for (plan, placement), response in zip(plans, buffers, strict=True):
        if plan.request.output_options.prompt_logprobs is not None:
            response.prompt_logprobs = []
        handles.append(dependencies.gateway.open(plan, placement, response))

    def client_gone() -> None:
        if not all(handle.machine.is_finished for handle in handles):
            meter.mark_disconnected()
            for handle in handles:
                handle.abort()

    with context.connection.watched(client_gone):
        try:
            yield list(zip(handles, buffers, strict=True))
        finally:
            for handle, buffer in zip(handles, buffers, strict=True):
                handle.abort()
                buffer.discard()
            handles.clear()  # `fail` holds them, and they hold the buffers, which hold `fail`
            reader.close()


def count_outcome(
    dependencies: EndpointDependencies, context: HttpRequest, meter: RequestMeter
) -> None:
    """Reports the ended requests, and marks the meter with their common outcome."""
    for response in context.progress.responses:
        if response.outcome is not None:
            dependencies.on_request_end(response.outcome)
    outcome = context.progress.outcome
    assert outcome is not None, "the response waits for the outcome"
    details = outcome.usage.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        meter.cached(details.cached_tokens)
    if outcome.error is None:
        meter.mark_ok()
    else:
        meter.mark_failed(error_type(outcome.error))
