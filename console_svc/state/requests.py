"""Recent requests, their spans, and why their workers were chosen (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the time of a request, as its frontend measured it."""

    name: str
    """`tokenize`, `route` (with the queue of the router), `prefill`, `handoff`, `first token`,
    `decode`, `finish`."""

    service: str
    member: str
    """Name of the process; "": the frontend."""

    start_ms: float
    """Since the request was received."""

    duration_ms: float


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A recent request, from the spans of its trace or from the record of its frontend. None or
    "": unknown."""

    request_id: str
    trace_id: str = ""
    """"": it has no spans here, because it was not sampled."""

    received_s: float = 0.0
    """Unix seconds."""

    client_id: str = ""
    """`x-request-id` of the client."""

    frontend: str = ""
    model: str = ""
    endpoint: str = ""
    tenant: str = ""
    key_id: str = ""
    http_status: int | None = None
    status: str = ""
    """Finish reason, or the reason of the failure."""

    error: str = ""
    """Message of the failure."""

    is_error: bool = False
    total_ms: float | None = None
    queued_ms: float | None = None
    """In the admission queue of a router."""

    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Actual cache hit."""

    predicted_cached_tokens: int | None = None
    """Cache hit that the router expected."""

    workers: tuple[str, ...] = ()
    """Names in the order of the legs; with prefill first."""

    is_split: bool = False
    """A prefill and a decode worker served it."""

    migrations: int = 0
    attempts: int = 0
    """With those that failed."""

    router: str = ""
    """Name of the router that placed it; "": none did."""

    reasons: tuple[str, ...] = ()
    """Why this worker, most important first."""

    stages: tuple[Stage, ...] = ()

    @property
    def has_trace(self) -> bool:
        return bool(self.trace_id)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span of a trace, in the order of a tree: each parent before its children."""

    span_id: str
    parent_id: str
    """"": the root, or its parent is missing."""

    depth: int
    service: str
    """`frontend`, `router`, `worker`."""

    member: str
    """Stable name of the instance, or its id."""

    name: str
    start_ms: float
    """Since the start of the trace."""

    duration_ms: float
    links: tuple[str, ...] = ()
    """Span ids that it follows: decode is linked to prefill."""

    attributes: Mapping[str, str] = field(default_factory=dict)
    events: tuple[tuple[float, str], ...] = ()
    """Time in milliseconds since the start of the trace, and name."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class SpanLink:
    """An arrow of the waterfall. from_id: prefill, to_id: decode. Both are spans of the trace."""

    from_id: str
    to_id: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one request."""

    trace_id: str
    request_id: str
    started_s: float
    """Unix seconds."""

    duration_ms: float
    spans: tuple[TraceSpan, ...]
    links: tuple[SpanLink, ...] = ()
    dropped_spans: int = 0
    """Beyond the limit of a trace."""

    is_stages: bool = False
    """Not spans: stages of a request that was not sampled, computed from its record."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker (or rank) that a router compared."""

    leg: str
    """`prefill`, `decode` or "" (one worker for both)."""

    worker: str
    worker_id: str
    dp_rank: int
    is_chosen: bool
    cost: float | None
    """None: excluded."""

    excluded_reason: str
    overlap_blocks: int
    active_requests: int
    prefill_tokens: int
    decode_blocks: int
    index_state: str
    index_reason: str
    report_age_ms: int | None
    terms: Mapping[str, float] = field(default_factory=dict)
    """The parts of the cost by name."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a router chose the worker of a request."""

    request_id: str
    router: str
    selector: str
    age_s: float
    worker: str
    prefill: str
    """"": not split."""

    reasons: tuple[str, ...]
    predicted_cached_tokens: int
    actual_cached_tokens: int | None
    """None: the request has not ended, or its record is not here."""

    overlap_blocks: int
    queued_ms: int
    candidates: tuple[Candidate, ...]
