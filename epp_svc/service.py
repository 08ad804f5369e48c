"""Serves ext_proc: one stream for each HTTP request of a gateway."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field

import structlog

from common.errors import InternalError, MeshError, Overloaded
from epp_svc.config import EppConfig
from epp_svc.core.exchange import Exchange
from epp_svc.core.hints import read_hints
from epp_svc.core.messages import (
    Answer,
    FreeBooking,
    MoveBooking,
    PrefillDone,
    Refuse,
    RequestHeaders,
    Step,
)
from epp_svc.metrics import Metrics
from epp_svc.placing import Booked, Placing
from epp_svc.prompts import ReadBody, read_body
from epp_svc.wire import read_part, write_answer
from frontend_svc.request.conversation import SESSION_HEADER, conversation_name
from kvmesh.extproc.v1 import extproc_pb2 as pb

PATH, CLIENT_ID = ":path", "x-request-id"
# Of texts of clients in the log.
LOGGED_CHARS_MAX = 128

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Request:
    """One HTTP request, until the end of its stream."""

    exchange: Exchange
    id: str
    began_at: float
    """Of a monotonic clock, seconds."""

    booked: Booked | None = None
    refusal: Refuse | None = None
    error: MeshError | None = None
    pick_s: float | None = None
    """Between the end of the request and the pick."""

    moved_to: str = ""
    is_freed: bool = False
    """Whether the response was complete, or the stream has ended."""

    has_ended_early: bool = field(default=False)
    """Whether the stream ended before the response."""


class Picker:
    """The streams of one process. open_requests: their number."""

    def __init__(self, placing: Placing, metrics: Metrics, config: EppConfig) -> None:
        self._placing = placing
        self._metrics = metrics
        self._config = config
        self.open_requests = 0

    async def process(
        self, messages: AsyncIterable[pb.ProcessingRequest], _: object
    ) -> AsyncIterator[pb.ProcessingResponse]:
        """Answers the parts of one request. However the stream ends, its booking is freed."""
        exchange = Exchange(self._config.body_limit_mb << 20)
        request = _Request(exchange, os.urandom(16).hex(), time.monotonic())
        self.open_requests += 1
        try:
            async for message in messages:
                part = read_part(message)
                steps = exchange.receive(part)
                if isinstance(part, RequestHeaders) and self._is_full:
                    text = f"too many concurrent requests: {self._config.requests_max}"
                    request.error = Overloaded(1.0, text)
                    steps = exchange.refused(request.error)
                elif exchange.is_pick_due:
                    steps = [*steps, *await self._pick(request)]
                for answer in self._apply(request, steps):
                    yield write_answer(answer)
                if exchange.is_refused:
                    return
        finally:
            self.open_requests -= 1
            was_booked = request.booked is not None and not request.is_freed
            self._apply(request, exchange.end())
            request.has_ended_early = was_booked
            if exchange.head.headers:
                self._report(request)

    @property
    def _is_full(self) -> bool:
        return self.open_requests > self._config.requests_max

    async def _pick(self, request: _Request) -> Sequence[Step]:
        """Returns the steps after the placement of a complete request."""
        exchange, config, head = request.exchange, self._config, request.exchange.head
        began_at = time.monotonic()
        try:
            hints = read_hints(head.headers, config.priorities)
            body = await read_body(exchange.body, head.headers.get(PATH, ""))
            limit_s = config.shed_after_s if hints.is_sheddable else config.pick_timeout_s
            booked = await self._placing.place(
                request.id,
                body,
                hints,
                head.subset,
                limit_s,
                _conversation(head, body),
                head.headers.get(SESSION_HEADER.decode(), "").encode(),
            )
        except MeshError as error:
            request.error = error
            return exchange.refused(error)
        except Exception as error:  # A panic of the tokenizer library is no Exception.
            log.exception("pick_failed", request_id=request.id)
            request.error = InternalError(f"see the picker's log: {type(error).__name__}")
            return exchange.refused(request.error)
        finally:
            request.pick_s = time.monotonic() - began_at
        request.booked = booked
        return exchange.picked(booked.pick)

    def _apply(self, request: _Request, steps: Sequence[Step]) -> Sequence[Answer]:
        """Carries out the changes of the booking; returns the answers."""
        answers: list[Answer] = []
        for step in steps:
            match step:
                case PrefillDone():
                    assert request.booked is not None, "the exchange is booked"
                    self._placing.prefill_done(request.booked)
                case MoveBooking(endpoint):
                    assert request.booked is not None, "the exchange is booked"
                    request.moved_to = endpoint
                    self._placing.move(request.booked, endpoint)
                case FreeBooking():
                    assert request.booked is not None, "the exchange is booked"
                    request.is_freed = True
                    self._placing.free(request.booked)
                case Refuse():
                    request.refusal = step
                    answers.append(step)
                case _:
                    answers.append(step)
        return answers

    def _report(self, request: _Request) -> None:
        """Counts the request, and writes its log line."""
        outcome = _outcome(request)
        self._metrics.ended(outcome, request.pick_s)
        head = request.exchange.head.headers
        fields: dict[str, object] = {
            "request_id": request.id,
            "outcome": outcome,
            "total_ms": round((time.monotonic() - request.began_at) * 1000, 1),
        }
        if request.pick_s is not None:
            fields["pick_ms"] = round(request.pick_s * 1000, 2)
        if CLIENT_ID in head:
            fields["client_request_id"] = head[CLIENT_ID][:LOGGED_CHARS_MAX]
        if (booked := request.booked) is not None:
            self._metrics.placed(booked, has_moved=bool(request.moved_to))
            fields |= _booked_fields(booked)
        if request.moved_to:
            fields["served"] = request.moved_to[:LOGGED_CHARS_MAX]
        if request.refusal is not None:
            fields["status"] = request.refusal.status
        if (error := request.error) is not None:
            fields |= {"failure": error.reason, "error": error.message}
        log.info("pick", **fields)


def _conversation(head: RequestHeaders, body: ReadBody) -> bytes:
    """Returns the client's name of its conversation; b"" without one."""
    headers = {name.encode(): value.encode() for name, value in head.headers.items()}
    cache_key = None if body.value is None else body.value.get("prompt_cache_key")
    return conversation_name(headers, cache_key if isinstance(cache_key, str) else None)


def _outcome(request: _Request) -> str:
    """Returns what became of a request: one of `metrics.OUTCOMES`."""
    if request.refusal is not None:
        status = request.refusal.status
        return {429: "shed", 503: "unavailable", 500: "internal"}.get(status, "refused")
    if request.booked is None:
        return "reset"
    return "reset" if request.has_ended_early else "complete"


def _booked_fields(booked: Booked) -> dict[str, object]:
    decision = booked.decision
    fields: dict[str, object] = {
        "model": booked.model,
        "endpoints": list(booked.pick.endpoints),
        "worker": str(decision.worker.worker_id),
        "prompt_tokens": booked.prompt.total,
        "predicted_cached_tokens": decision.predicted_cached_tokens,
        "routing": list(decision.reasons),
    }
    if (choice := booked.choice) is not None:
        fields["alias"] = choice.alias
    if decision.queued_ms:
        fields["queued_ms"] = decision.queued_ms
    if booked.prompt.unread:
        fields["unread"] = booked.prompt.unread
    if decision.is_unrouted:
        fields["unrouted"] = True
    return fields
